//! `make nightly`: runs every part of [`part::PARTS`], or those that are named, one after the other. Invariant: `docs/nightly.md` is
//! what [`table::document`] renders of `docs/nightly.json`, which keeps the latest result of each part with its commit; both are
//! written after every part, so that a run that is ended early has not run in vain.

mod counts;
mod part;
mod results;
mod table;

use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::Instant;

use part::{PARTS, Part};
use results::{Results, Row, Verdict};

const KEPT: &str = "docs/nightly.json";
const DOCUMENT: &str = "docs/nightly.md";
/// The exit code of a part that cannot run on this host at all, and has said so to `tests/record`.
const SKIPPED: i32 = 77;
/// `timeout`'s exit code when it ended the command.
const TIMED_OUT: i32 = 124;

fn main() -> ExitCode {
    let names: Vec<String> = std::env::args().skip(1).collect();
    match chosen(&names).and_then(|parts| run(&parts)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(why) => {
            eprintln!("nightly: {why}");
            ExitCode::from(2)
        }
    }
}

/// The parts of these names in their own order; all without a name.
fn chosen(names: &[String]) -> Result<Vec<&'static Part>, String> {
    if let Some(unknown) = names.iter().find(|name| part::named(name).is_none()) {
        let known: Vec<_> = PARTS.iter().map(|part| part.name).collect();
        return Err(format!(
            "there is no part {unknown}; there are {}",
            known.join(", ")
        ));
    }
    let is_chosen = |part: &&Part| names.is_empty() || names.iter().any(|name| name == part.name);
    Ok(PARTS.iter().filter(is_chosen).collect())
}

/// Runs the parts; false if the run is not good.
fn run(parts: &[&Part]) -> Result<bool, String> {
    let mut results = Results::read(Path::new(KEPT))?;
    let commit = said(&mut Command::new("tests/commit"))?;
    results.begin(&commit, &today()?);
    // Absolute: it reaches programs that run elsewhere.
    let place = std::env::current_dir()
        .map_err(|e| format!("the working directory: {e}"))?
        .join("target/nightly");
    for part in parts {
        eprintln!("nightly: {}: {}", part.name, part.command);
        let row = run_part(part, &commit, &place.join(part.name), Stdio::inherit())?;
        eprintln!("nightly: {}: {}", part.name, table::verdict(row.verdict));
        results.add(part.name, row);
        write(&results)?;
    }
    print!("{}", table::rows(&results));
    let problems = results.problems();
    for problem in &problems {
        println!("nightly: {problem}");
    }
    println!("reruns: {}", results.reruns());
    Ok(problems.is_empty())
}

/// Runs one part's command. Its output goes to `shown` and is kept in `directory`, with its record.
fn run_part(part: &Part, commit: &str, directory: &Path, shown: Stdio) -> Result<Row, String> {
    let (log, record) = (directory.join("log"), directory.join("record"));
    empty(directory)?;
    let date = today()?;
    let began = Instant::now();
    let status = Command::new("bash")
        .args([
            "-c",
            "set -o pipefail; timeout -k 60 \"$1\" bash -c \"$2\" 2>&1 | tee \"$3\"",
            "nightly",
        ])
        .args([&format!("{}m", part.minutes), part.command])
        .arg(&log)
        .stdout(shown)
        .env("THAW_CI", "1")
        .env("THAW_RECORD", &record)
        // One for the whole run: its own results make the tree dirty.
        .env("THAW_COMMIT", commit)
        // Those of the make that started this would reach the parts' own.
        .env_remove("MAKEFLAGS")
        .env_remove("MAKELEVEL")
        .status()
        .map_err(|e| format!("bash: {e}"))?;
    let output = std::fs::read(&log).map_err(|e| format!("{}: {e}", log.display()))?;
    let (skips, reruns) = results::recorded(&record).map_err(|e| format!("{}: {e}", record.display()))?;
    Ok(Row {
        verdict: match status.code() {
            Some(0) => Verdict::Pass,
            Some(SKIPPED) => Verdict::Skipped,
            Some(TIMED_OUT) => Verdict::TimedOut,
            _ => Verdict::Fail,
        },
        counts: counts::of(&String::from_utf8_lossy(&output)),
        skips,
        reruns,
        minutes: began.elapsed().as_secs().div_ceil(60),
        commit: commit.into(),
        date,
    })
}

fn empty(directory: &Path) -> Result<(), String> {
    match std::fs::remove_dir_all(directory) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            return Err(format!("{}: {e}", directory.display()));
        }
        _ => {}
    }
    std::fs::create_dir_all(directory).map_err(|e| format!("{}: {e}", directory.display()))
}

/// Today, UTC.
fn today() -> Result<String, String> {
    said(Command::new("date").args(["-u", "+%F"]))
}

/// What a command that succeeds prints.
fn said(command: &mut Command) -> Result<String, String> {
    let output = command.output().map_err(|e| format!("{command:?}: {e}"))?;
    if !output.status.success() {
        return Err(format!("{command:?}: {}", output.status));
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_string())
}

fn write(results: &Results) -> Result<(), String> {
    let kept = serde_json::to_string_pretty(results).map_err(|e| format!("{KEPT}: {e}"))?;
    std::fs::write(KEPT, kept + "\n").map_err(|e| format!("{KEPT}: {e}"))?;
    std::fs::write(DOCUMENT, table::document(results)).map_err(|e| format!("{DOCUMENT}: {e}"))
}

#[cfg(test)]
#[path = "main_test.rs"]
mod tests;
