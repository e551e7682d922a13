//! `docs/nightly.md`.

use std::fmt::Write;

use crate::part::PARTS;
use crate::results::{MOST_RERUNS, Results, Row, Verdict};

const HEAD: &str = "\
# The nightly run

`make nightly` runs every test of the repository, one part after the other, and writes this document from `docs/nightly.json`; nobody
edits either. `make nightly ONLY=\"fuzz upgrade\"` runs some parts, `make nightly MINUTES=30` fuzzes longer. Benchmarks are no part of it:
`make bench-report` renders their results into `docs/benchmarks.md`.

Each row is a part's latest result, of the commit it names. Skipped tests and reruns are listed below the table with their reasons.
";

/// The whole document.
pub fn document(results: &Results) -> String {
    let mut out = format!("{HEAD}\n{}\n\n{}", latest(results), rows(results));
    for (title, lines) in [
        ("Skipped", skips(results)),
        ("Run again", reruns(results)),
        ("Not run by their part", ignored(results)),
    ] {
        if !lines.is_empty() {
            let _ = write!(out, "\n## {title}\n\n{lines}");
        }
    }
    out
}

/// A sentence on the latest run.
fn latest(results: &Results) -> String {
    let Some(run) = &results.run else {
        return "No run yet.".into();
    };
    let parts = match run.parts.len() {
        n if n == PARTS.len() => "all parts".into(),
        n => format!("{n} of {} parts", PARTS.len()),
    };
    let problems = results.problems();
    let outcome = match problems.is_empty() {
        true => "good".into(),
        false => format!("**not good**: {}", problems.join("; ")),
    };
    format!(
        "The latest run: {}, commit `{}`, {parts}, {} reruns ({MOST_RERUNS} at most are allowed): {outcome}.",
        run.date,
        run.commit,
        results.reruns()
    )
}

/// The table: a row for each part, in their order.
pub fn rows(results: &Results) -> String {
    let mut out = String::from(
        "| part | tests | result | passed | failed | skipped | reruns | minutes | commit | date |\n\
         |---|---|---|---:|---:|---:|---:|---:|---|---|\n",
    );
    for part in PARTS {
        let Some(row) = results.parts.get(part.name) else {
            let _ = writeln!(
                out,
                "| {} | {} | never run | | | | | | | |",
                part.name, part.about
            );
            continue;
        };
        let result = match results.is_of_run(part.name) {
            true => verdict(row.verdict).into(),
            false => format!("not in this run; last: {}", verdict(row.verdict)),
        };
        // Where nothing is counted, the result is all there is.
        let (passed, failed) = match &row.counts {
            Some(counts) => (counts.passed.to_string(), counts.failed.to_string()),
            None => Default::default(),
        };
        let _ = writeln!(
            out,
            "| {} | {} | {result} | {passed} | {failed} | {} | {} | {} | `{}` | {} |",
            part.name,
            part.about,
            skipped(row),
            row.reruns.len(),
            row.minutes,
            row.commit,
            row.date
        );
    }
    out
}

pub fn verdict(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Pass => "pass",
        Verdict::Skipped => "skipped",
        Verdict::Fail => "**FAIL**",
        Verdict::TimedOut => "**FAIL**: out of time",
    }
}

fn skipped(row: &Row) -> u64 {
    row.skips.len() as u64 + row.counts.map_or(0, |counts| counts.excepted)
}

/// A list of every skip with its reason; for the foreign suites, where their reasons are.
fn skips(results: &Results) -> String {
    let mut out = String::new();
    for part in PARTS {
        let Some(row) = results.parts.get(part.name) else {
            continue;
        };
        for skip in &row.skips {
            let _ = writeln!(
                out,
                "- {}: `{}`: {} ({})",
                part.name, skip.test, skip.reason, skip.why
            );
        }
        let excepted = row.counts.map_or(0, |counts| counts.excepted);
        if let (1.., Some(reasons)) = (excepted, part.reasons) {
            let _ = writeln!(
                out,
                "- {}: {excepted} tests that runc passes and a microVM does not, each with its reason in [{reasons}]({reasons})",
                part.name
            );
        }
    }
    out
}

fn reruns(results: &Results) -> String {
    let mut out = String::new();
    for part in PARTS {
        for rerun in results
            .parts
            .get(part.name)
            .into_iter()
            .flat_map(|row| &row.reruns)
        {
            let _ = writeln!(out, "- {}: {rerun}", part.name);
        }
    }
    out
}

/// Tests marked `#[ignore]` that a part left out: another part runs them.
fn ignored(results: &Results) -> String {
    let mut out = String::new();
    for part in PARTS {
        let counts = results.parts.get(part.name).and_then(|row| row.counts);
        if let Some(ignored) = counts.map(|counts| counts.ignored).filter(|n| *n > 0) {
            let _ = writeln!(out, "- {}: {ignored} tests marked `#[ignore]`", part.name);
        }
    }
    if !out.is_empty() {
        out += "\nThe parts `e2e` (the VMM's `linux`), `interop`, `push` and `e2b` run such tests. The others are not tests of their own: tests run \
                them in a process apart.\n";
    }
    out
}

#[cfg(test)]
#[path = "table_test.rs"]
mod tests;
