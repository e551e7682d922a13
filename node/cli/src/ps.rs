//! `thaw ps`: lists the run directory, so it needs no thawd, and shows the sandboxes of thawd and of every `thaw run`.

use std::collections::BTreeMap;

use clap::Args;
use serde_json::{Value, json};
use thaw_daemon::api::logs::format_moment;
use thaw_pools::cgroup::Hierarchy;
use thaw_protocol::api::{EXITED, FAILED, HealthStatus, PublishedPort, Sandbox};
use thaw_sandbox::config::Config;
use thaw_sandbox::container::LifeNote;
use thaw_sandbox::error::Error;
use thaw_sandbox::paths::Paths;
use thaw_sandbox::state::ended::{Retention, ended_at, now};
use thaw_sandbox::state::{Living, Paused, PausedSandboxes, Record, RunDirectory, Unreadable, vsock_socket};

use crate::format::Format;
use crate::table::{Table, printable};
use crate::ui::{Mode, Ui};

mod filter;

use filter::Filter;

#[derive(Debug, Args)]
#[command(after_help = "\
Filters: id=BEGINNING, name=PART, label=KEY[=VALUE], status=starting|running|restarting|paused|exited|failed|unreadable, exited=STATUS,
ancestor=IMAGE, publish=PORT, health=starting|healthy|unhealthy|none. Values of the same key are alternatives, except labels.
Fields of templates: .ID .Name .Image .Command .State .Status .CreatedAt .RunningFor .Ports .Labels .CPUs .Memory

Examples:
  thaw rm $(thaw ps -q)
  thaw ps -a --filter status=exited
  thaw ps --format 'table {{.Name}}\\t{{.Ports}}'")]
pub struct PsArguments {
    /// List ended sandboxes too, with how and when they ended
    #[arg(short, long)]
    pub all: bool,
    /// List only sandboxes to which this applies; may be repeated
    #[arg(short, long, value_name = "KEY=VALUE")]
    pub filter: Vec<Filter>,
    /// `json`: an object per line; or a Go template with {{.Field}} and {{json .Field}}, with `table ` before it for columns
    #[arg(long, value_name = "FORMAT")]
    pub format: Option<Format>,
}

/// The fields of templates.
const FIELDS: [&str; 13] = [
    "ID",
    "Name",
    "Names",
    "Image",
    "Command",
    "State",
    "Status",
    "CreatedAt",
    "RunningFor",
    "Ports",
    "Labels",
    "CPUs",
    "Memory",
];

/// The state of a sandbox whose memory is released.
const PAUSED: &str = "paused";
/// The states for which alone a table has no column.
const PLAIN: [&str; 2] = ["running", "starting"];

/// Lists running sandboxes; with `all`, ended ones too; with `--quiet`, only ids.
pub(super) fn ps(arguments: &PsArguments, ui: &Ui) -> Result<u8, Error> {
    if let Some(format) = &arguments.format {
        format.check(&FIELDS)?;
    }
    let paths = Paths::from_env();
    let run = RunDirectory::open(&paths.run)?;
    run.clean(&Hierarchy::detect());
    let with_ended = arguments.all || filter::names_ended(&arguments.filter);
    let (rows, descriptions) = chosen(&run, &paths, with_ended, &arguments.filter)?;
    let with_state = with_ended || rows.iter().any(|row| !PLAIN.contains(&row.status.as_str()));
    match (&arguments.format, ui.mode()) {
        (Some(format), _) => {
            let fields: Vec<Value> = rows.iter().map(Row::fields).collect();
            format.print(&fields, || table(&rows, with_state).print())?;
        }
        (None, Mode::Json) => super::print(&json!(descriptions).to_string()),
        (None, Mode::Quiet) => rows.iter().for_each(|row| super::print(&row.id)),
        _ => table(&rows, with_state).print(),
    }
    Ok(0)
}

/// The sandboxes that the filters admit: their columns and descriptions.
fn chosen(
    run: &RunDirectory,
    paths: &Paths,
    with_ended: bool,
    filters: &[Filter],
) -> Result<(Vec<Row>, Vec<Value>), Error> {
    // The cleaning has logged why records could not be read.
    let (running, unreadable) = (run.running(), run.unreadable());
    // One that is being resumed is both.
    let paused = PausedSandboxes::under(&paths.data).list().into_iter();
    let is_resumed = |paused: &Paused| running.iter().any(|r| r.id == paused.record().id);
    let paused: Vec<Paused> = paused.filter(|paused| !is_resumed(paused)).collect();
    let ended = match with_ended {
        true => listed(run.ended(), Retention::of(&Config::from_env()?.sandbox)),
        false => Vec::new(),
    };
    let now = now();
    let running = running.iter().map(|r| (Row::of(run, r, now), describe(run, r)));
    let paused = paused.iter().map(Paused::record);
    let paused = paused.map(|r| (Row::of_paused(run, r, now), describe_paused(run, r)));
    let unreadable = unreadable
        .iter()
        .map(|u| (Row::of_unreadable(u), describe_unreadable(u)));
    let ended = ended.iter().map(|e| (Row::of_failed(e, now), describe_failed(e)));
    let all = running.chain(paused).chain(unreadable).chain(ended);
    Ok(all.filter(|(row, _)| filter::admit(filters, row)).unzip())
}

fn describe_unreadable(unreadable: &Unreadable) -> Value {
    json!({
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

/// The columns of one sandbox, and what filters look at.
#[derive(Default)]
struct Row {
    id: String,
    name: Option<String>,
    /// One word.
    state: String,
    /// With how and when it ended.
    status: String,
    /// Seconds since the Unix epoch.
    created: u64,
    age: String,
    cpus: String,
    memory: String,
    image: String,
    published: Vec<PublishedPort>,
    command: String,
    labels: BTreeMap<String, String>,
    exit_code: Option<i32>,
    health: Option<HealthStatus>,
}

impl Row {
    fn of(run: &RunDirectory, record: &Record, now: u64) -> Row {
        let network = record.network.as_ref();
        let life = LifeNote::read(&run.directory(&record.id));
        Row {
            id: record.id.clone(),
            name: record.name.clone(),
            state: state(record, &life).into(),
            status: status(record, &life),
            created: record.created,
            age: age(now.saturating_sub(record.created)),
            cpus: record.vcpus.to_string(),
            memory: mebibytes(record.memory_mib),
            image: record.image.clone(),
            published: network.map(|n| n.published.clone()).unwrap_or_default(),
            command: record.command.join(" "),
            labels: record.terms.labels.clone(),
            exit_code: None,
            health: life.health,
        }
    }

    fn of_paused(run: &RunDirectory, record: &Record, now: u64) -> Row {
        Row {
            state: PAUSED.into(),
            status: format!("{PAUSED} (memory released)"),
            ..Row::of(run, record, now)
        }
    }

    fn of_unreadable(unreadable: &Unreadable) -> Row {
        let unknown = || "-".to_owned();
        Row {
            id: unreadable.id.clone(),
            state: "unreadable".into(),
            status: "unreadable".into(),
            age: unknown(),
            cpus: unknown(),
            memory: unknown(),
            image: "(record unreadable)".into(),
            command: unknown(),
            ..Row::default()
        }
    }

    fn of_failed(failed: &Sandbox, now: u64) -> Row {
        let ago = age(now.saturating_sub(ended_at(failed)));
        let status = match (&failed.failure, failed.exit_code) {
            (Some(failure), _) => format!("{FAILED} {ago} ago: {}", failure.reason),
            (None, Some(status)) => format!("{EXITED} ({status}) {ago} ago"),
            (None, None) => format!("{} {ago} ago", failed.state),
        };
        Row {
            id: failed.id.clone(),
            name: failed.name.clone(),
            state: match failed.failure {
                Some(_) => FAILED.into(),
                None => failed.state.clone(),
            },
            status,
            created: failed.created,
            age: age(now.saturating_sub(failed.created)),
            cpus: failed.cpus.to_string(),
            memory: mebibytes(failed.memory_mib),
            image: failed.image.clone(),
            published: Vec::new(),
            command: failed.command.join(" "),
            labels: failed.labels.clone(),
            exit_code: failed.exit_code,
            health: None,
        }
    }

    /// The fields of templates, with docker's names.
    fn fields(&self) -> Value {
        let labels: Vec<String> = self
            .labels
            .iter()
            .map(|(key, value)| format!("{key}={value}"))
            .collect();
        json!({
            "ID": self.id,
            "Name": self.name,
            "Names": self.name,
            "Image": self.image,
            "Command": self.command,
            "State": self.state,
            "Status": self.status,
            "CreatedAt": format_moment(self.created.saturating_mul(1_000_000_000)),
            "RunningFor": format!("{} ago", self.age),
            "Ports": match self.published.is_empty() {
                true => String::new(),
                false => ports(&self.published),
            },
            "Labels": labels.join(","),
            "CPUs": self.cpus,
            "Memory": self.memory,
        })
    }
}

fn table(rows: &[Row], with_state: bool) -> Table {
    let mut head = vec!["ID", "NAME", "AGE", "CPUS", "MEMORY", "IMAGE", "PORTS", "COMMAND"];
    if with_state {
        head.insert(2, "STATE");
    }
    let mut table = Table::new(&head);
    for row in rows {
        let mut cells = vec![
            row.id.clone(),
            row.name.clone().unwrap_or_else(|| "-".into()),
            row.age.clone(),
            row.cpus.clone(),
            row.memory.clone(),
            printable(&row.image),
            ports(&row.published),
            printable(&row.command),
        ];
        if with_state {
            cells.insert(2, printable(&row.status));
        }
        table.row(cells);
    }
    table
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

fn state(record: &Record, life: &LifeNote) -> &'static str {
    match (record.ready, life.restarting) {
        (true, Some(_)) => "restarting",
        (true, None) => "running",
        (false, _) => "starting",
    }
}

/// The state, with the last exit status during a restart, and with how often the policy has started the program again.
fn status(record: &Record, life: &LifeNote) -> String {
    let mut status = state(record, life).to_owned();
    if let Some(last) = life.restarting {
        status.push_str(&format!(" ({last})"));
    }
    if let (Some(health), None) = (life.health, life.restarting) {
        status.push_str(&format!(" ({})", health.name()));
    }
    match life.restarts {
        0 => {}
        1 => status.push_str(", 1 restart"),
        many => status.push_str(&format!(", {many} restarts")),
    }
    status
}

fn describe_failed(failed: &Sandbox) -> Value {
    json!({
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

pub(super) fn describe(run: &RunDirectory, record: &Record) -> Value {
    let life = LifeNote::read(&run.directory(&record.id));
    json!({
        "id": record.id,
        "tenant": record.terms.tenant,
        "name": record.name,
        "state": state(record, &life),
        "restarts": life.restarts,
        "health": life.health,
        "image": record.image,
        "command": record.command,
        "created": record.created,
        "cpus": record.vcpus,
        "memory_mib": record.memory_mib,
        "vmm_pid": record.vmm.map(|v| v.pid),
        "tethered": record.tethered,
        "vsock": vsock_socket(&run.directory(&record.id)).display().to_string(),
        "published": record.network.as_ref().map(|n| &n.published),
        "labels": record.terms.labels,
    })
}

fn describe_paused(run: &RunDirectory, record: &Record) -> Value {
    let mut described = describe(run, record);
    described["state"] = PAUSED.into();
    described["memory_released"] = true.into();
    described["vmm_pid"] = Value::Null;
    described["vsock"] = "".into();
    described
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
            status: "running".into(),
            published: vec![published],
            ..Row::of_failed(&failed, 100)
        };
        let rows = [running, Row::of_failed(&failed, 100)];
        let lines = table(&rows, true).lines(None);
        assert!(lines[1].contains("  running  "), "{}", lines[1]);
        assert!(lines[1].contains("0.0.0.0:49153->80/tcp"), "{}", lines[1]);
        assert!(lines[2].contains("failed 1 min ago: unknown"), "{}", lines[2]);
        let lines = table(&rows[..1], false).lines(None);
        assert!(!lines.concat().contains("running"));
    }

    #[test]
    fn every_field_of_templates_is_known() {
        let fields = Row::default().fields();
        let names: Vec<&str> = fields.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(names.len(), FIELDS.len());
        assert!(names.iter().all(|name| FIELDS.contains(name)), "{names:?}");
    }
}
