//! The handlers for a sandbox's logs: the lines that its container's own process wrote. What commands in the sandbox write goes to those
//! who run them.
//!
//! Invariant: no more is in memory than the journal keeps, which is bounded.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde::Serialize;
use thaw_sandbox::agent_client::Output;

use super::extract::{Addressed, Query};
use super::failure::Failure;
use super::service::Service;
use crate::api::logs::{LogReader, Selection, parse_moment};
use crate::api::problem::{ApiCode, Refusal};
use crate::api::scope::Wanted;

/// Most lines of an answer, also unless the caller says.
const MOST_LINES: u64 = 1000;
const MILLISECOND_NS: u64 = 1_000_000;

/// A line in the form of the first version of the API.
#[derive(Clone, Debug, Serialize)]
pub struct Line {
    timestamp: String,
    line: String,
}

/// A line in the form of the second.
#[derive(Clone, Debug, Serialize)]
pub struct Entry {
    timestamp: String,
    message: String,
    level: &'static str,
    fields: BTreeMap<String, String>,
}

/// The logs in the form of the first version.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FirstLogs {
    logs: Vec<Line>,
    log_entries: Vec<Entry>,
}

/// The logs in the form of the second.
#[derive(Debug, Serialize)]
pub struct Logs {
    logs: Vec<Entry>,
}

/// `GET /sandboxes/{id}/logs`: the first lines from `start` on, in milliseconds since the Unix epoch.
pub async fn first(
    State(service): State<Arc<Service>>,
    Addressed(wanted): Addressed,
    query: Query,
) -> Result<Json<FirstLogs>, Failure> {
    query.only(&["start", "limit"])?;
    let mut entries = lines(&service, &wanted, query.number("start")?.unwrap_or(0)).await?;
    entries.truncate(limit(&query)?);
    let line = |entry: &Entry| Line {
        timestamp: entry.timestamp.clone(),
        line: entry.message.clone(),
    };
    Ok(Json(FirstLogs {
        logs: entries.iter().map(line).collect(),
        log_entries: entries,
    }))
}

/// `GET /v2/sandboxes/{id}/logs`: the lines from `cursor` on, or those before it, the last first.
pub async fn second(
    State(service): State<Arc<Service>>,
    Addressed(wanted): Addressed,
    query: Query,
) -> Result<Json<Logs>, Failure> {
    query.only(&["cursor", "limit", "direction", "level", "search"])?;
    let (cursor, most) = (query.number("cursor")?, limit(&query)?);
    let is_forward = query.is_forward()?;
    let least = query.text("level").unwrap_or("debug");
    let Some(least) = LEVELS.iter().position(|level| *level == least) else {
        return Err(Failure::Bad(format!("level is one of {}", LEVELS.join(", "))));
    };
    let search = query.text("search").unwrap_or_default();
    let from = cursor.filter(|_| is_forward).unwrap_or(0);
    let mut entries = lines(&service, &wanted, from).await?;
    let before = cursor
        .filter(|_| !is_forward)
        .map(|cursor| cursor.saturating_mul(MILLISECOND_NS));
    entries.retain(|entry| {
        let is_before = |before| parse_moment(&entry.timestamp).is_none_or(|at| at < before);
        LEVELS.iter().position(|level| *level == entry.level) >= Some(least)
            && entry.message.contains(search)
            && before.is_none_or(is_before)
    });
    if !is_forward {
        entries.reverse();
    }
    entries.truncate(most);
    Ok(Json(Logs { logs: entries }))
}

/// The levels, the least first. A line of stdout has the second, one of stderr the last.
const LEVELS: [&str; 4] = ["debug", "info", "warn", "error"];

fn limit(query: &Query) -> Result<usize, Failure> {
    let limit = query.number("limit")?.unwrap_or(MOST_LINES);
    Ok(limit.min(MOST_LINES) as usize)
}

/// The lines from a time on, in milliseconds since the Unix epoch.
async fn lines(service: &Service, wanted: &Wanted, from: u64) -> Result<Vec<Entry>, Failure> {
    service.living(wanted)?;
    let journal = match service.daemon.journal(wanted).await {
        Ok(journal) => journal,
        // A sandbox whose container another program started has no lines here.
        Err(Refusal::Api(ApiCode::NoLogs, _)) => return Ok(Vec::new()),
        Err(refusal) => return Err(refusal.into()),
    };
    let broken = |e| Refusal::new(ApiCode::Broken, format!("cannot read the output: {e}"));
    let selection = Selection {
        since: from.saturating_mul(MILLISECOND_NS),
        timestamps: true,
        ..Selection::default()
    };
    let mut reader = LogReader::open(journal, selection, service.daemon.closing())
        .await
        .map_err(broken)?;
    let (mut entries, mut open) = (Vec::new(), [Vec::new(), Vec::new()]);
    while let Some(pieces) = reader.next().await {
        for (output, data) in pieces.map_err(broken)? {
            for part in data.split_inclusive(|b| *b == b'\n') {
                let line = &mut open[output as usize];
                line.extend_from_slice(part);
                if part.ends_with(b"\n") {
                    entries.extend(entry(output, &std::mem::take(line)));
                }
            }
        }
    }
    let [out, err] = open;
    entries.extend(
        entry(Output::Stdout, &out)
            .into_iter()
            .chain(entry(Output::Stderr, &err)),
    );
    Ok(entries)
}

/// A line with its time of arrival before it.
fn entry(output: Output, line: &[u8]) -> Option<Entry> {
    let text = String::from_utf8_lossy(line);
    let (timestamp, message) = text.trim_end_matches('\n').split_once(' ')?;
    Some(Entry {
        timestamp: timestamp.to_owned(),
        message: message.to_owned(),
        level: match output {
            Output::Stdout => LEVELS[1],
            Output::Stderr => LEVELS[3],
        },
        fields: BTreeMap::new(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_has_its_time_and_its_level() {
        let line = b"2026-11-26T14:00:00.000000001Z a b\n";
        let read = entry(Output::Stderr, line).unwrap();
        assert_eq!((read.message.as_str(), read.level), ("a b", "error"));
        assert_eq!(read.timestamp, "2026-11-26T14:00:00.000000001Z");
        assert!(entry(Output::Stdout, b"").is_none());
    }
}
