//! `thaw stats`: `thaw top` with docker's flags and columns.

use std::collections::BTreeSet;
use std::io::IsTerminal;
use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};
use thaw_sandbox::error::Error;
use thaw_sandbox::human_bytes::HumanBytes;
use thaw_sandbox::paths::Paths;
use thaw_sandbox::state::RunDirectory;

use super::Global;
use super::format::Format;
use super::table::Table;
use super::top::{Row, Shown, View, draw, refresh, write_out};
use crate::stdio::terminal;

/// Time between refreshes, as docker's.
const INTERVAL: Duration = Duration::from_secs(1);

#[derive(Debug, Args)]
#[command(after_help = "\
CPU % is of one CPU, of the whole microVM. MEMORY is what the host spends on it. NET I/O and BLOCK I/O are totals; `thaw top`
shows rates, and has pools.
Fields of templates: .ID .Container .Name .CPUPerc .MemUsage .MemPerc .NetIO .BlockIO

Examples:
  thaw stats --no-stream
  thaw stats --no-stream --format '{{.Name}} {{.MemUsage}}' web")]
pub struct StatsArguments {
    /// Show one interval of a second and exit
    #[arg(long)]
    pub no_stream: bool,
    /// `json`: an object per line; or a Go template with {{.Field}} and {{json .Field}}, with `table ` before it for columns
    #[arg(long, value_name = "FORMAT")]
    pub format: Option<Format>,
    /// Only these sandboxes: ids, names, or beginnings of ids [default: all]
    #[arg(value_name = "SANDBOX")]
    pub sandboxes: Vec<String>,
}

/// The fields of templates.
const FIELDS: [&str; 8] = [
    "ID",
    "Container",
    "Name",
    "CPUPerc",
    "MemUsage",
    "MemPerc",
    "NetIO",
    "BlockIO",
];

pub(super) async fn stats(arguments: &StatsArguments, global: &Global) -> Result<u8, Error> {
    let format = match (&arguments.format, global.json) {
        (Some(format), _) => format.clone(),
        (None, true) => Format::Json,
        (None, false) => Format::Table,
    };
    format.check(&FIELDS)?;
    let live = !arguments.no_stream && format == Format::Table && std::io::stdout().is_terminal();
    let view = View {
        interval: INTERVAL,
        once: arguments.no_stream,
        live,
        ids: chosen(&arguments.sandboxes)?,
    };
    refresh(&view, |shown| {
        if live {
            let columns = terminal::size().map(|(_, columns)| usize::from(columns));
            return Ok(draw(&table(shown).lines(columns)));
        }
        let fields: Vec<Value> = shown.sandboxes.iter().map(fields).collect();
        format.print(&fields, || table(shown).print())?;
        // A line cannot tell that its reader is gone; nothing can.
        Ok(write_out(""))
    })
    .await
}

fn chosen(wanted: &[String]) -> Result<Option<BTreeSet<String>>, Error> {
    if wanted.is_empty() {
        return Ok(None);
    }
    let run = RunDirectory::open(&Paths::from_env().run)?;
    let ids = wanted
        .iter()
        .map(|wanted| run.find(wanted).map(|record| record.id));
    ids.collect::<Result<_, _>>().map(Some)
}

fn fields(row: &Row) -> Value {
    let (sandbox, usage) = (&row.sandbox, &row.sandbox.usage);
    let limit = u64::from(sandbox.memory_mib) << 20;
    let bytes = |n: Option<u64>| n.map_or("-".into(), |n| HumanBytes(n).to_string());
    let both = |a, b| format!("{} / {}", bytes(a), bytes(b));
    let percent = |n: Option<f64>| n.map_or("-".into(), |n| format!("{n:.2}%"));
    let part = usage.memory_bytes.filter(|_| limit > 0);
    json!({
        "ID": sandbox.id,
        "Container": sandbox.id,
        "Name": sandbox.name,
        "CPUPerc": percent(row.cpu_percent),
        "MemUsage": both(usage.memory_bytes, Some(limit)),
        "MemPerc": percent(part.map(|bytes| bytes as f64 * 100.0 / limit as f64)),
        "NetIO": both(usage.received_bytes, usage.sent_bytes),
        "BlockIO": both(usage.read_bytes, usage.written_bytes),
    })
}

fn table(shown: &Shown) -> Table {
    let mut table = Table::new(&[
        "ID",
        "NAME",
        "CPU %",
        "MEMORY / LIMIT",
        "MEM %",
        "NET I/O",
        "BLOCK I/O",
    ]);
    for row in &shown.sandboxes {
        let fields = fields(row);
        let of = |name: &str| fields[name].as_str().unwrap_or("-").to_owned();
        let cells = ["ID", "Name", "CPUPerc", "MemUsage", "MemPerc", "NetIO", "BlockIO"].map(of);
        table.row(cells);
    }
    table
}
