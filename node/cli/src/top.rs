//! `thaw top`: the resource usage of running sandboxes, refreshed at an interval. thawd reports the usage of its sandboxes. The usage of a
//! sandbox that a `thaw run` owns is read here; it is found as by `thaw ps`.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{IsTerminal, Write};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::Args;
use serde::Serialize;
use serde_json::json;
use thaw_daemon::api::client::Client;
use thaw_pools::cgroup::Hierarchy;
use thaw_protocol::api::{NodeUsage, PoolUsage, SandboxUsage, Usage};
use thaw_sandbox::error::Error;
use thaw_sandbox::human_bytes::HumanBytes;
use thaw_sandbox::paths::Paths;
use thaw_sandbox::state::{Record, RunDirectory};
use thaw_sandbox::usage;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::MissedTickBehavior;

use super::ps::age;
use super::table::printable;
use crate::stdio::terminal;

#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  thaw top --once --json | jq '.sandboxes[] | select(.cpu_percent > 50) | .id'"
)]
pub struct TopArguments {
    /// Seconds between refreshes
    #[arg(short, long, value_name = "SECONDS", default_value = "2", value_parser = parse_interval)]
    pub interval: Duration,
    /// Show one interval and exit
    #[arg(long)]
    pub once: bool,
}

/// Escape sequences: the alternate screen without a cursor, and back.
const ENTER: &str = "\x1b[?1049h\x1b[?25l";
const LEAVE: &str = "\x1b[?25h\x1b[?1049l";

/// A sandbox and its usage within an interval.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Row {
    #[serde(flatten)]
    pub sandbox: SandboxUsage,
    /// Percent of one CPU; a sandbox with several can have more than 100.
    pub cpu_percent: Option<f64>,
    read_bytes_per_s: Option<f64>,
    written_bytes_per_s: Option<f64>,
    received_bytes_per_s: Option<f64>,
    sent_bytes_per_s: Option<f64>,
}

/// The contents of one refresh.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Shown {
    pools: Vec<PoolUsage>,
    /// Ordered by CPU usage, highest first.
    pub sandboxes: Vec<Row>,
}

/// The terminal's alternate screen, until this is dropped.
struct Screen;

impl Screen {
    fn enter() -> Screen {
        write_out(ENTER);
        Screen
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        write_out(LEAVE);
    }
}

/// Writes to stdout. A closed stdout is no error, and nothing more is written to it.
pub(super) fn write_out(text: &str) -> bool {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).is_ok()
}

/// Parses a number of seconds, which may have a fraction.
pub(super) fn parse_interval(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "a number of seconds")?;
    match (0.1..=3600.0).contains(&seconds) {
        true => Ok(Duration::from_secs_f64(seconds)),
        false => Err("0.1 to 3600".into()),
    }
}

pub(super) async fn top(arguments: &TopArguments, json: bool) -> Result<u8, Error> {
    let live = !arguments.once && !json && std::io::stdout().is_terminal();
    let view = View {
        interval: arguments.interval,
        once: arguments.once,
        live,
        ids: None,
    };
    refresh(&view, |shown| {
        let reads = match (live, json) {
            (true, _) => draw(&table(shown, seconds_now())),
            (false, true) => write_out(&format!("{}\n", json!(shown))),
            (false, false) => write_out(&(table(shown, seconds_now()).join("\n") + "\n")),
        };
        Ok(reads)
    })
    .await
}

/// What is looked at, and how often.
pub(super) struct View {
    pub interval: Duration,
    pub once: bool,
    /// On the terminal's alternate screen, at once.
    pub live: bool,
    /// Only these sandboxes.
    pub ids: Option<BTreeSet<String>>,
}

/// Shows the usage at each interval, until a signal or until `show` returns false, because its reader is gone.
pub(super) async fn refresh(
    view: &View,
    mut show: impl FnMut(&Shown) -> Result<bool, Error>,
) -> Result<u8, Error> {
    let caught = |kind| signal(kind).map_err(|e| Error::system("cannot catch a signal", &e));
    let (mut interrupted, mut terminated) =
        (caught(SignalKind::interrupt())?, caught(SignalKind::terminate())?);
    let look_at = async || {
        let mut node = look().await?;
        if let Some(ids) = &view.ids {
            node.sandboxes.retain(|sandbox| ids.contains(&sandbox.id));
        }
        Ok::<_, Error>(node)
    };
    let mut before = look_at().await?;
    let _screen = view.live.then(Screen::enter);
    let mut ticks = tokio::time::interval(view.interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // The first tick is immediate.
    ticks.tick().await;
    if view.live {
        show(&shown(&BTreeMap::new(), &before))?;
    }
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            _ = interrupted.recv() => return Ok(0),
            _ = terminated.recv() => return Ok(0),
        }
        let now = look_at().await?;
        let shown = shown(&usages(&before), &now);
        before = now;
        if !show(&shown)? || view.once {
            return Ok(0);
        }
    }
}

/// The current usage of all sandboxes.
pub(super) async fn look() -> Result<NodeUsage, Error> {
    let paths = Paths::from_env();
    let mut node = match Client::connect(&paths.daemon_socket()) {
        Some(client) => client.usage().await?,
        None => NodeUsage {
            pools: Vec::new(),
            sandboxes: Vec::new(),
        },
    };
    let (run, cgroups) = (RunDirectory::open(&paths.run)?, Hierarchy::detect());
    let told: BTreeSet<&str> = node.sandboxes.iter().map(|s| s.id.as_str()).collect();
    let records = run.running().into_iter();
    let others: Vec<_> = records
        .filter(|record| !told.contains(record.id.as_str()))
        .map(|record| of_record(&record, &cgroups))
        .collect();
    node.sandboxes.extend(others);
    Ok(node)
}

fn of_record(record: &Record, cgroups: &Hierarchy) -> SandboxUsage {
    SandboxUsage {
        id: record.id.clone(),
        name: record.name.clone(),
        image: record.image.clone(),
        state: if record.ready { "running" } else { "starting" }.into(),
        created: record.created,
        cpus: record.vcpus,
        memory_mib: record.memory_mib,
        usage: usage(record, cgroups),
    }
}

fn usages(node: &NodeUsage) -> BTreeMap<String, Usage> {
    let sandboxes = node.sandboxes.iter();
    sandboxes.map(|s| (s.id.clone(), s.usage)).collect()
}

fn shown(before: &BTreeMap<String, Usage>, now: &NodeUsage) -> Shown {
    let row = |sandbox: &SandboxUsage| {
        let (before, now) = (before.get(&sandbox.id), &sandbox.usage);
        let rate = |of: fn(&Usage) -> Option<u64>| {
            let (before, now) = (before?, now);
            let elapsed = now.at_ns.checked_sub(before.at_ns).filter(|ns| *ns > 0)?;
            Some(of(now)?.saturating_sub(of(before)?) as f64 / elapsed as f64)
        };
        Row {
            cpu_percent: rate(|u| u.cpu_ns).map(|r| r * 100.0),
            read_bytes_per_s: rate(|u| u.read_bytes).map(|r| r * 1e9),
            written_bytes_per_s: rate(|u| u.written_bytes).map(|r| r * 1e9),
            received_bytes_per_s: rate(|u| u.received_bytes).map(|r| r * 1e9),
            sent_bytes_per_s: rate(|u| u.sent_bytes).map(|r| r * 1e9),
            sandbox: sandbox.clone(),
        }
    };
    let mut sandboxes: Vec<Row> = now.sandboxes.iter().map(row).collect();
    let busy = |row: &Row| row.cpu_percent.unwrap_or(0.0);
    sandboxes.sort_by(|a, b| {
        let by_cpu = busy(b).total_cmp(&busy(a));
        by_cpu.then_with(|| a.sandbox.id.cmp(&b.sandbox.id))
    });
    Shown {
        pools: now.pools.clone(),
        sandboxes,
    }
}

/// Draws as many lines as fit, over the earlier contents.
pub(super) fn draw(lines: &[String]) -> bool {
    let (rows, columns) = terminal::size().unwrap_or((24, 80));
    let lines = lines.iter().take(usize::from(rows)).map(|line| {
        let fits: String = line.chars().take(usize::from(columns)).collect();
        format!("{fits}\x1b[K")
    });
    let lines: Vec<String> = lines.collect();
    write_out(&format!("\x1b[H{}\x1b[J", lines.join("\r\n")))
}

/// The pools, the total, and a line for each sandbox.
fn table(shown: &Shown, now: u64) -> Vec<String> {
    let mut lines = Vec::new();
    let pools: Vec<String> = shown.pools.iter().map(pool).collect();
    if !pools.is_empty() {
        lines.push(format!("pools: {}", pools.join("  ")));
    }
    let memory: u64 = shown
        .sandboxes
        .iter()
        .filter_map(|r| r.sandbox.usage.memory_bytes)
        .sum();
    let busy = shown.sandboxes.iter().filter_map(|r| r.cpu_percent);
    // An empty sum of fractions is negative zero.
    let cpu = busy.fold(0.0, |sum, cpu| sum + cpu);
    let count = shown.sandboxes.len();
    lines.push(format!(
        "{count} sandboxes, {cpu:.1}% CPU, {} of memory",
        HumanBytes(memory)
    ));
    lines.push(format!(
        "{:<12}  {:<16}  {:<8}  {:>7}  {:>11}  {:>8}  {:>11}  {:>11}  {:>11}  {:>11}  {:>11}  {:<8}  IMAGE",
        "ID",
        "NAME",
        "STATE",
        "CPU %",
        "MEMORY",
        "OF",
        "READ/S",
        "WRITTEN/S",
        "RECEIVED/S",
        "SENT/S",
        "FETCHED",
        "AGE"
    ));
    lines.extend(shown.sandboxes.iter().map(|row| line(row, now)));
    lines
}

fn pool(pool: &PoolUsage) -> String {
    let (name, ready, high) = (printable(&pool.pool), pool.ready, pool.high);
    match pool.claims {
        0 => format!("{name} {ready}/{high}"),
        claims => format!(
            "{name} {ready}/{high} ({:.0}% hits)",
            pool.hits as f64 * 100.0 / claims as f64
        ),
    }
}

fn line(row: &Row, now: u64) -> String {
    let (sandbox, usage) = (&row.sandbox, &row.sandbox.usage);
    let absent = || "-".to_owned();
    let bytes = |n: Option<u64>| n.map_or_else(absent, |n| HumanBytes(n).to_string());
    let rate = |n: Option<f64>| bytes(n.map(|n| n as u64));
    let cpu = row.cpu_percent.map_or_else(absent, |cpu| format!("{cpu:.1}"));
    let of = format!("{} MiB", sandbox.memory_mib);
    format!(
        "{:<12}  {:<16}  {:<8}  {cpu:>7}  {:>11}  {of:>8}  {:>11}  {:>11}  {:>11}  {:>11}  {:>11}  {:<8}  {}",
        printable(&sandbox.id),
        printable(sandbox.name.as_deref().unwrap_or("-")),
        printable(&sandbox.state),
        bytes(usage.memory_bytes),
        rate(row.read_bytes_per_s),
        rate(row.written_bytes_per_s),
        rate(row.received_bytes_per_s),
        rate(row.sent_bytes_per_s),
        bytes(usage.fetched_bytes),
        age(now.saturating_sub(sandbox.created)),
        printable(&sandbox.image),
    )
}

fn seconds_now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| d.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sandbox(id: &str, at_ns: u64, cpu_ns: u64, read: Option<u64>) -> SandboxUsage {
        SandboxUsage {
            id: id.into(),
            name: Some("we\x1bb".into()),
            image: "busybox".into(),
            state: "running".into(),
            created: 100,
            cpus: 2,
            memory_mib: 512,
            usage: Usage {
                at_ns,
                cpu_ns: Some(cpu_ns),
                memory_bytes: Some(3 << 20),
                read_bytes: read,
                ..Usage::default()
            },
        }
    }

    fn node(sandboxes: Vec<SandboxUsage>) -> NodeUsage {
        let pool = PoolUsage {
            pool: "shell".into(),
            ready: 3,
            high: 4,
            claims: 8,
            hits: 6,
        };
        NodeUsage {
            pools: vec![pool],
            sandboxes,
        }
    }

    #[test]
    fn rates_are_of_what_was_taken_between_two_looks() {
        let before = node(vec![
            sandbox("a", 1_000, 500, Some(10)),
            sandbox("b", 1_000, 0, None),
        ]);
        let now = node(vec![
            sandbox("a", 3_000, 1_500, Some(30)),
            sandbox("b", 3_000, 4_000, None),
            sandbox("c", 3_000, 9_000, None),
        ]);
        let shown = shown(&usages(&before), &now);
        let rows: Vec<_> = shown
            .sandboxes
            .iter()
            .map(|r| (r.sandbox.id.as_str(), r.cpu_percent, r.read_bytes_per_s))
            .collect();
        assert_eq!(
            rows,
            [
                ("b", Some(200.0), None),
                ("a", Some(50.0), Some(10_000_000.0)),
                ("c", None, None),
            ]
        );
        let json = json!(shown);
        assert_eq!(json["sandboxes"][0]["id"], "b");
        assert_eq!(json["sandboxes"][0]["usage"]["memory_bytes"], 3 << 20);
        assert_eq!(json["pools"][0]["ready"], 3);
    }

    #[test]
    fn a_clock_that_stands_or_a_counter_that_falls_is_no_rate() {
        let before = node(vec![sandbox("a", 5, 500, None), sandbox("b", 5, 500, None)]);
        let now = node(vec![sandbox("a", 5, 600, None), sandbox("b", 6, 400, None)]);
        let shown = shown(&usages(&before), &now);
        assert_eq!(shown.sandboxes[0].cpu_percent, None);
        assert_eq!(shown.sandboxes[1].cpu_percent, Some(0.0));
    }

    #[test]
    fn the_table_has_a_line_each_and_nothing_that_moves_the_cursor() {
        let shown = shown(&BTreeMap::new(), &node(vec![sandbox("a", 1, 1, Some(1))]));
        let lines = table(&shown, 190);
        assert_eq!(lines[0], "pools: shell 3/4 (75% hits)");
        assert_eq!(lines[1], "1 sandboxes, 0.0% CPU, 3.00 MiB of memory");
        assert_eq!(lines.len(), 4);
        for expected in ["we?b", "running", "3.00 MiB", "512 MiB", "1 min", "busybox"] {
            assert!(lines[3].contains(expected), "{}", lines[3]);
        }
        assert!(lines.iter().all(|l| !l.chars().any(char::is_control)));
    }

    #[test]
    fn intervals_are_seconds() {
        assert_eq!(parse_interval("0.5"), Ok(Duration::from_millis(500)));
        for bad in ["0", "-1", "nan", "inf", "1e9", "x", ""] {
            assert!(parse_interval(bad).is_err(), "{bad}");
        }
    }
}
