//! The results that `docs/nightly.json` keeps: the latest of each part, of whichever run.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::counts::Counts;

/// More reruns than these, over all parts of a run, fail it. `tests/record` has the same number.
pub const MOST_RERUNS: usize = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    Pass,
    Fail,
    /// All of it was, with a reason that `tests/skips` lists.
    Skipped,
    /// It was ended after its part's minutes.
    TimedOut,
}

/// A test that was skipped, as `tests/skip` and `tests/record` record it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Skip {
    pub test: String,
    /// What the test said.
    pub reason: String,
    /// Why `tests/skips` accepts it.
    pub why: String,
}

/// A part's result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Row {
    pub verdict: Verdict,
    /// `None` where the part does not count tests.
    pub counts: Option<Counts>,
    pub skips: Vec<Skip>,
    /// What was run again, each with its symptom.
    pub reruns: Vec<String>,
    pub minutes: u64,
    pub commit: String,
    /// Of the part's start, UTC, `2026-11-24`.
    pub date: String,
}

/// The latest run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    pub commit: String,
    pub date: String,
    /// Those it has ended.
    pub parts: Vec<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Results {
    /// `None` before the first.
    pub run: Option<Run>,
    pub parts: BTreeMap<String, Row>,
}

impl Results {
    /// Those kept in `path`; none where there is no such file.
    pub fn read(path: &Path) -> Result<Results, String> {
        match std::fs::read(path) {
            Ok(text) => serde_json::from_slice(&text).map_err(|e| format!("{}: {e}", path.display())),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(Results::default()),
            Err(e) => Err(format!("{}: {e}", path.display())),
        }
    }

    /// Begins a run.
    pub fn begin(&mut self, commit: &str, date: &str) {
        self.run = Some(Run {
            commit: commit.into(),
            date: date.into(),
            parts: Vec::new(),
        });
    }

    /// Adds a part's result to the run that was begun, in place of its older one.
    pub fn add(&mut self, part: &str, row: Row) {
        if let Some(run) = &mut self.run {
            run.parts.push(part.into());
        }
        self.parts.insert(part.into(), row);
    }

    /// Whether the latest run ran this part.
    pub fn is_of_run(&self, part: &str) -> bool {
        self.run
            .as_ref()
            .is_some_and(|run| run.parts.iter().any(|p| p == part))
    }

    fn of_run(&self) -> impl Iterator<Item = (&String, &Row)> {
        self.parts.iter().filter(|(part, _)| self.is_of_run(part))
    }

    /// How many tests and programs the latest run ran again.
    pub fn reruns(&self) -> usize {
        self.of_run().map(|(_, row)| row.reruns.len()).sum()
    }

    /// What is wrong with the latest run; empty if it was good.
    pub fn problems(&self) -> Vec<String> {
        let is_bad = |row: &Row| !matches!(row.verdict, Verdict::Pass | Verdict::Skipped);
        let bad = self.of_run().filter(|(_, row)| is_bad(row));
        let mut problems: Vec<_> = bad.map(|(part, _)| format!("{part} failed")).collect();
        if self.reruns() > MOST_RERUNS {
            problems.push(format!(
                "{} reruns, {MOST_RERUNS} at most are allowed",
                self.reruns()
            ));
        }
        problems
    }
}

/// The skips and reruns in the directory that a part's `THAW_RECORD` named. Labs bring theirs back in directories of their own.
pub fn recorded(directory: &Path) -> std::io::Result<(Vec<Skip>, Vec<String>)> {
    let mut places = vec![directory.to_owned()];
    if directory.exists() {
        for entry in std::fs::read_dir(directory)? {
            let path = entry?.path();
            if path.is_dir() {
                places.push(path);
            }
        }
    }
    let (mut skips, mut reruns) = (Vec::new(), Vec::new());
    for place in places {
        for line in lines(&place.join("skips"))? {
            let mut words = line.splitn(3, '\t').map(String::from);
            let mut word = || words.next().unwrap_or_default();
            skips.push(Skip {
                test: word(),
                reason: word(),
                why: word(),
            });
        }
        for line in lines(&place.join("reruns"))? {
            reruns.push(line.replacen('\t', ": ", 1));
        }
    }
    // A test that was run again may have been skipped twice.
    skips.sort();
    skips.dedup();
    Ok((skips, reruns))
}

fn lines(path: &Path) -> std::io::Result<Vec<String>> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(text.lines().map(String::from).collect()),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(e) => Err(e),
    }
}

#[cfg(test)]
#[path = "results_test.rs"]
mod tests;
