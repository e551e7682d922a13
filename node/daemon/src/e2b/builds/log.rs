//! The log of a build: what its steps write, and what the build does.
//!
//! Invariant: at most [`MAX_ENTRIES`] entries and [`MAX_BYTES`] of text are kept, the first of them, so that an entry keeps its number; of
//! the rest the last [`TAIL`] lines of the current step are kept for the reason of a failure.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use thaw_sandbox::agent_client::Output;
use thaw_sys::lock::Lock;

use super::super::moment;

/// Most entries.
pub const MAX_ENTRIES: usize = 10_000;
/// Most bytes of their text.
pub const MAX_BYTES: usize = 2 << 20;
/// Most bytes of the file of a log: text may need six times its bytes in JSON, and each entry has a time and a step.
pub const MAX_FILE: u64 = (6 * MAX_BYTES + 256 * MAX_ENTRIES) as u64;
/// Longest message and longest line, bytes. The rest of a longer one is cut off.
const MAX_LINE: usize = 4096;
/// Most lines of a step that the reason of its failure has.
const TAIL: usize = 20;
/// What begins a log.
const BASE: &str = "base";

/// How important an entry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    Debug,
    Info,
    Warn,
    Error,
}

impl Level {
    /// A level by its name.
    pub fn parse(name: &str) -> Option<Level> {
        let all = [
            ("debug", Level::Debug),
            ("info", Level::Info),
            ("warn", Level::Warn),
            ("error", Level::Error),
        ];
        all.into_iter()
            .find(|(of, _)| *of == name)
            .map(|(_, level)| level)
    }
}

/// An entry, as clients get it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    pub timestamp: String,
    pub message: String,
    pub level: Level,
    pub step: String,
}

impl Entry {
    /// Entries as lines of JSON.
    pub fn lines(entries: &[Entry]) -> Vec<u8> {
        let mut text = Vec::new();
        for line in entries.iter().filter_map(|entry| serde_json::to_vec(entry).ok()) {
            text.extend(line);
            text.push(b'\n');
        }
        text
    }

    /// The entries of a text of lines. Lines that are none are left out.
    pub fn read(text: &[u8]) -> Vec<Entry> {
        let lines = text.split(|byte| *byte == b'\n');
        lines
            .filter_map(|line| serde_json::from_slice(line).ok())
            .collect()
    }
}

/// The log of a build that is not over.
#[derive(Debug)]
pub struct BuildLog(Mutex<Kept>);

#[derive(Debug)]
struct Kept {
    entries: Vec<Entry>,
    bytes: usize,
    is_full: bool,
    step: String,
    tail: VecDeque<String>,
}

impl Default for BuildLog {
    fn default() -> BuildLog {
        BuildLog(Mutex::new(Kept {
            entries: Vec::new(),
            bytes: 0,
            is_full: false,
            step: BASE.into(),
            tail: VecDeque::new(),
        }))
    }
}

impl BuildLog {
    /// Begins a step.
    pub fn begin(&self, step: impl Into<String>, what: &str) {
        let mut kept = self.0.locked();
        kept.step = step.into();
        kept.tail.clear();
        kept.add(Level::Info, what.to_owned());
    }

    /// The step that runs.
    pub fn step(&self) -> String {
        self.0.locked().step.clone()
    }

    /// Adds an entry.
    pub fn add(&self, level: Level, message: impl Into<String>) {
        self.0.locked().add(level, message.into());
    }

    /// All entries so far.
    pub fn entries(&self) -> Vec<Entry> {
        self.0.locked().entries.clone()
    }

    /// The last line of the current step's output, if there is one.
    pub fn last_line(&self) -> Option<String> {
        let kept = self.0.locked();
        kept.tail
            .iter()
            .rev()
            .find(|line| !line.trim().is_empty())
            .cloned()
    }

    fn line(&self, level: Level, line: String) {
        let mut kept = self.0.locked();
        if kept.tail.len() == TAIL {
            kept.tail.pop_front();
        }
        kept.tail.push_back(line.clone());
        kept.add(level, line);
    }
}

impl Kept {
    fn add(&mut self, level: Level, mut message: String) {
        if self.is_full {
            return;
        }
        cut(&mut message);
        let at = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let entry = |message, level| Entry {
            timestamp: moment::of_nanoseconds(u64::try_from(at.as_nanos()).unwrap_or(u64::MAX)),
            message,
            level,
            step: self.step.clone(),
        };
        self.is_full = self.bytes + message.len() > MAX_BYTES || self.entries.len() + 1 == MAX_ENTRIES;
        let entry = match self.is_full {
            true => entry(
                "the log is full: what comes later is not kept".into(),
                Level::Warn,
            ),
            false => entry(message, level),
        };
        self.bytes += entry.message.len();
        self.entries.push(entry);
    }
}

/// Cuts off what is longer than [`MAX_LINE`].
fn cut(text: &mut String) {
    let mut end = MAX_LINE.min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.truncate(end);
}

/// Takes the output of a command apart into the lines of a log.
#[derive(Debug)]
pub struct Lines<'a> {
    log: &'a BuildLog,
    open: [Vec<u8>; 2],
}

impl Lines<'_> {
    /// The lines go into this log.
    pub fn into_log(log: &BuildLog) -> Lines<'_> {
        Lines {
            log,
            open: Default::default(),
        }
    }

    /// The next output.
    pub fn push(&mut self, output: Output, data: &[u8]) {
        for part in data.split_inclusive(|byte| *byte == b'\n') {
            let open = &mut self.open[output as usize];
            let room = MAX_LINE.saturating_sub(open.len());
            open.extend(part.iter().filter(|byte| **byte != b'\n').take(room));
            if part.ends_with(b"\n") {
                self.end(output);
            }
        }
    }

    fn end(&mut self, output: Output) {
        let line = std::mem::take(&mut self.open[output as usize]);
        let level = match output {
            Output::Stdout => Level::Info,
            Output::Stderr => Level::Warn,
        };
        let mut line = String::from_utf8_lossy(&line).trim_end_matches('\r').to_owned();
        cut(&mut line);
        self.log.line(level, line);
    }
}

impl Drop for Lines<'_> {
    fn drop(&mut self) {
        for output in [Output::Stdout, Output::Stderr] {
            if !self.open[output as usize].is_empty() {
                self.end(output);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(log: &BuildLog) -> Vec<String> {
        log.entries().into_iter().map(|entry| entry.message).collect()
    }

    #[test]
    fn output_becomes_lines_with_level_and_step() {
        let log = BuildLog::default();
        log.begin("2", "RUN x");
        let mut lines = Lines::into_log(&log);
        lines.push(Output::Stdout, b"one\ntw");
        lines.push(Output::Stderr, b"bad \xff\r\n\n");
        lines.push(Output::Stdout, b"o\nend");
        drop(lines);
        assert_eq!(messages(&log), ["RUN x", "one", "bad \u{fffd}", "", "two", "end"]);
        let entries = log.entries();
        assert_eq!((entries[2].level, entries[2].step.as_str()), (Level::Warn, "2"));
        assert_eq!(
            (log.last_line().as_deref(), log.step().as_str()),
            (Some("end"), "2")
        );
        assert_eq!(Entry::read(&Entry::lines(&entries)), entries);
        assert_eq!(Level::parse("warn"), Some(Level::Warn));
        assert_eq!(Level::parse("loud"), None);
    }

    #[test]
    fn endless_output_does_not_fill_memory() {
        let log = BuildLog::default();
        let mut lines = Lines::into_log(&log);
        lines.push(Output::Stdout, &vec![b'x'; 1 << 20]);
        assert!(lines.open.iter().all(|open| open.len() <= MAX_LINE));
        for n in 0..2 * MAX_ENTRIES {
            lines.push(Output::Stdout, format!("{n}\n").as_bytes());
        }
        drop(lines);
        log.add(Level::Info, "late");
        let entries = log.entries();
        assert_eq!(
            (entries.len(), log.last_line()),
            (MAX_ENTRIES, Some("19999".into()))
        );
        assert!(entries.last().unwrap().message.contains("full"));
        assert!(entries.iter().all(|entry| entry.message.len() <= MAX_LINE));
        let long = BuildLog::default();
        long.begin("1", &"é".repeat(MAX_LINE));
        assert_eq!(long.entries()[0].message.len(), MAX_LINE);
        for _ in 0..=MAX_BYTES / MAX_LINE {
            long.add(Level::Info, "\u{1}".repeat(MAX_LINE));
        }
        let text = Entry::lines(&long.entries());
        assert!(text.len() as u64 <= MAX_FILE && long.entries().len() < MAX_ENTRIES);
    }
}
