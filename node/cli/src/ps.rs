//! `thaw ps`: lists the run directory, so it needs no thawd, and shows the sandboxes of thawd and of every `thaw run`.

use thaw_pools::cgroup::Hierarchy;
use thaw_protocol::api::{EXITED, FAILED, PublishedPort, Sandbox};
use thaw_sandbox::config::Config;
use thaw_sandbox::error::Error;
use thaw_sandbox::paths::Paths;
use thaw_sandbox::state::ended::{Retention, ended_at, now};
use thaw_sandbox::state::{Living, Record, RunDirectory, Unreadable, vsock_socket};

use crate::ui::{Mode, Ui};

/// Lists running sandboxes; with `all`, failed ones too; with `--quiet`, only ids.
pub(super) fn ps(all: bool, ui: &Ui) -> Result<u8, Error> {
    let run = RunDirectory::open(&Paths::from_env().run)?;
    run.clean(&Hierarchy::detect());
    // The cleaning has logged why records could not be read.
    let (running, unreadable) = (run.running(), run.unreadable());
    let failed = match all {
        true => listed(run.ended(), Retention::of(&Config::from_env()?.sandbox)),
        false => Vec::new(),
    };
    match ui.mode() {
        Mode::Json => {
            let running = running.iter().map(|r| describe(&run, r));
            let running = running.chain(unreadable.iter().map(describe_unreadable));
            let all: Vec<_> = running.chain(failed.iter().map(describe_failed)).collect();
            super::print(&serde_json::json!(all).to_string());
        }
        Mode::Quiet => {
            let ids = running.iter().map(|r| &r.id);
            let ids = ids.chain(unreadable.iter().map(|u| &u.id));
            ids.chain(failed.iter().map(|f| &f.id))
                .for_each(|id| super::print(id));
        }
        _ => {
            let now = now();
            let rows = running.iter().map(|r| Row::of(r, now));
            let rows = rows.chain(unreadable.iter().map(Row::of_unreadable));
            let rows: Vec<Row> = rows
                .chain(failed.iter().map(|f| Row::of_failed(f, now)))
                .collect();
            table(&rows, all).iter().for_each(|line| super::print(line));
        }
    }
    Ok(0)
}

fn describe_unreadable(unreadable: &Unreadable) -> serde_json::Value {
    serde_json::json!({
        "id": unreadable.id,
        "state": "unreadable",
        "reason": format!("its record cannot be read: {}", unreadable.why),
        "vmm_pid": match unreadable.living {
            Living::Vmm(vmm) => Some(vmm.pid),
            Living::Nothing | Living::Listening => None,
        },
    })
}

/// The failed sandboxes whose retention is not over. thawd, which may not be running, removes the others.
fn listed(failed: Vec<Sandbox>, retention: Retention) -> Vec<Sandbox> {
    let known: Vec<&Sandbox> = failed.iter().collect();
    let overdue: Vec<String> = retention
        .overdue(&known, now())
        .into_iter()
        .map(str::to_owned)
        .collect();
    failed.into_iter().filter(|f| !overdue.contains(&f.id)).collect()
}

/// The columns of one sandbox.
struct Row {
    id: String,
    name: Option<String>,
    state: String,
    age: String,
    cpus: String,
    memory: String,
    image: String,
    ports: String,
    command: String,
}

impl Row {
    fn of(record: &Record, now: u64) -> Row {
        let published = record.network.as_ref().map_or(&[][..], |n| &n.published);
        Row {
            id: record.id.clone(),
            name: record.name.clone(),
            state: state(record).into(),
            age: age(now.saturating_sub(record.created)),
            cpus: record.vcpus.to_string(),
            memory: mebibytes(record.memory_mib),
            image: record.image.clone(),
            ports: ports(published),
            command: record.command.join(" "),
        }
    }

    fn of_unreadable(unreadable: &Unreadable) -> Row {
        let unknown = || "-".to_owned();
        Row {
            id: unreadable.id.clone(),
            name: None,
            state: "unreadable".into(),
            age: unknown(),
            cpus: unknown(),
            memory: unknown(),
            image: "(record unreadable)".into(),
            ports: unknown(),
            command: unknown(),
        }
    }

    fn of_failed(failed: &Sandbox, now: u64) -> Row {
        let ago = age(now.saturating_sub(ended_at(failed)));
        let state = match (&failed.failure, failed.exit_code) {
            (Some(failure), _) => format!("{FAILED} {ago} ago: {}", failure.reason),
            (None, Some(status)) => format!("{EXITED} ({status}) {ago} ago"),
            (None, None) => format!("{} {ago} ago", failed.state),
        };
        Row {
            id: failed.id.clone(),
            name: failed.name.clone(),
            state,
            age: age(now.saturating_sub(failed.created)),
            cpus: failed.cpus.to_string(),
            memory: mebibytes(failed.memory_mib),
            image: failed.image.clone(),
            ports: ports(&[]),
            command: failed.command.join(" "),
        }
    }
}

/// A line of headings and a line for each sandbox, with columns as wide as their widest entry.
fn table(rows: &[Row], with_state: bool) -> Vec<String> {
    let width = |heading: &str, least: usize, of: &dyn Fn(&Row) -> usize| {
        rows.iter().map(of).fold(least.max(heading.len()), usize::max)
    };
    let states = width("STATE", 0, &|row| row.state.chars().count());
    let ports = width("PORTS", 0, &|row| row.ports.len());
    let state = |text: &str| match with_state {
        true => format!("{text:<states$}  "),
        false => String::new(),
    };
    let headings = format!(
        "{:<12}  {:<16}  {}{:<8}  {:>4}  {:>9}  {:<32}  {:<ports$}  COMMAND",
        "ID",
        "NAME",
        state("STATE"),
        "AGE",
        "CPUS",
        "MEMORY",
        "IMAGE",
        "PORTS"
    );
    let line = |row: &Row| {
        format!(
            "{:<12}  {:<16}  {}{:<8}  {:>4}  {:>9}  {:<32}  {:<ports$}  {}",
            row.id,
            row.name.as_deref().unwrap_or("-"),
            state(&row.state),
            row.age,
            row.cpus,
            row.memory,
            printable(&row.image),
            row.ports,
            printable(&row.command),
        )
    };
    std::iter::once(headings).chain(rows.iter().map(line)).collect()
}

fn mebibytes(mebibytes: u32) -> String {
    format!("{mebibytes} MiB")
}

/// Published ports: each port of the host and the guest's.
pub(super) fn ports(published: &[PublishedPort]) -> String {
    let each = published.iter().map(|p| {
        let address = p.address.as_deref().unwrap_or("0.0.0.0");
        format!("{address}:{}->{}/{}", p.host, p.guest, p.protocol)
    });
    match published {
        [] => "-".into(),
        _ => each.collect::<Vec<_>>().join(","),
    }
}

fn state(record: &Record) -> &'static str {
    match record.ready {
        true => "running",
        false => "starting",
    }
}

fn describe_failed(failed: &Sandbox) -> serde_json::Value {
    serde_json::json!({
        "id": failed.id,
        "tenant": failed.tenant,
        "name": failed.name,
        "state": failed.state,
        "image": failed.image,
        "command": failed.command,
        "created": failed.created,
        "cpus": failed.cpus,
        "memory_mib": failed.memory_mib,
        "exit_code": failed.exit_code,
        "ended": failed.ended_at(),
        "failure": failed.failure,
    })
}

fn describe(run: &RunDirectory, record: &Record) -> serde_json::Value {
    serde_json::json!({
        "id": record.id,
        "tenant": record.terms.tenant,
        "name": record.name,
        "state": state(record),
        "image": record.image,
        "command": record.command,
        "created": record.created,
        "cpus": record.vcpus,
        "memory_mib": record.memory_mib,
        "vmm_pid": record.vmm.map(|v| v.pid),
        "tethered": record.tethered,
        "vsock": vsock_socket(&run.directory(&record.id)).display().to_string(),
        "published": record.network.as_ref().map(|n| &n.published),
    })
}

pub(super) fn printable(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_control() { '?' } else { c })
        .collect()
}

pub(super) fn age(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min", seconds / 60),
        3600..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} d", seconds / 86400),
    }
}

#[cfg(test)]
mod tests {
    use thaw_protocol::api::SandboxFailure;
    use thaw_sandbox::failure::Evidence;

    use super::*;

    #[test]
    fn ages_are_short() {
        assert_eq!(
            [5, 90, 7200, 700_000].map(super::age),
            ["5 s", "1 min", "2 h", "8 d"]
        );
    }

    #[test]
    fn a_table_has_states_and_chosen_ports() {
        let published = PublishedPort {
            host: 49153,
            guest: 80,
            protocol: "tcp".into(),
            ..PublishedPort::default()
        };
        let failure = SandboxFailure {
            at: 40,
            ..Evidence::default().failure()
        };
        let failed = Sandbox {
            id: "bb".into(),
            created: 10,
            failure: Some(failure),
            ..Sandbox::default()
        };
        let running = Row {
            id: "aa".into(),
            state: "running".into(),
            ports: ports(&[published]),
            ..Row::of_failed(&failed, 100)
        };
        let rows = [running, Row::of_failed(&failed, 100)];
        let lines = table(&rows, true);
        assert!(lines[1].contains("  running  "), "{}", lines[1]);
        assert!(lines[1].contains("0.0.0.0:49153->80/tcp"), "{}", lines[1]);
        assert!(lines[2].contains("failed 1 min ago: unknown"), "{}", lines[2]);
        assert!(!table(&rows[..1], false).concat().contains("running"));
    }
}
