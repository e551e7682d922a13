//! How a test says that it cannot run on this host. Invariant: no test is skipped in silence. [`skip`] prints a line that libtest
//! does not capture, appends one to the run's record, and where `THAW_CI` is set it fails the test unless `tests/skips` lists it.

mod list;

use std::fmt::Display;
use std::io::Write;
use std::path::{Path, PathBuf};

/// The list of the skips that CI accepts.
const LIST: &str = include_str!("../../skips");

/// Ends a test, or the rest of it, that this host cannot run: `return skip("no /dev/kvm")`. Call it in the test's own thread,
/// whose name is the test's.
///
/// # Panics
///
/// If `THAW_CI` is set and `tests/skips` does not list this test with this reason.
pub fn skip(reason: impl Display) {
    // A record has one line for each skip.
    let reason = reason.to_string().replace(['\n', '\t'], " ");
    let test = test(
        &std::env::current_exe().unwrap_or_default(),
        std::thread::current().name(),
    );
    // Not eprintln: libtest shows what that prints of failed tests only.
    let _ = writeln!(std::io::stderr(), "skipped: {test}: {reason}");
    let listed = list::parse(LIST);
    let accepted = list::accepted(&listed, &test, &reason);
    if let Some(file) = record() {
        let why = accepted.map_or("NOT LISTED", |listed| listed.why);
        append(&file, &format!("{test}\t{reason}\t{why}\n"));
    }
    assert!(
        std::env::var_os("THAW_CI").is_none() || accepted.is_some(),
        "{test} is skipped in CI: {reason}. Mend the host, or list the skip with a reason in tests/skips"
    );
}

/// Runs `body`, a part of a test, in a thread that ends with it and has the test's name, so that it can [`skip`]. For what
/// changes its thread for good: its namespaces.
pub fn beside<T: Send>(body: impl FnOnce() -> T + Send) -> T {
    let mut builder = std::thread::Builder::new();
    if let Some(test) = std::thread::current().name() {
        builder = builder.name(test.into());
    }
    std::thread::scope(|scope| {
        let thread = builder
            .spawn_scoped(scope, body)
            .expect("a thread can be started");
        thread
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// `PROGRAM::TEST`, of a test program that cargo built as `PROGRAM-HASH`.
fn test(program: &Path, thread: Option<&str>) -> String {
    let program = program.file_name().unwrap_or_default().to_string_lossy();
    let program = match program.rsplit_once('-') {
        Some((name, _hash)) => name,
        None => &program,
    };
    format!("{program}::{}", thread.unwrap_or("unnamed thread"))
}

/// The file of the run's skips, in the directory that `THAW_RECORD` names.
fn record() -> Option<PathBuf> {
    std::env::var_os("THAW_RECORD").map(|directory| PathBuf::from(directory).join("skips"))
}

/// Appends a line in one write, so that lines of processes that run at once stay whole.
fn append(file: &Path, line: &str) {
    let mut options = std::fs::File::options();
    let written = std::fs::create_dir_all(file.parent().unwrap_or(Path::new("")))
        .and_then(|()| options.append(true).create(true).open(file))
        .and_then(|mut file| file.write_all(line.as_bytes()));
    if let Err(error) = written {
        panic!(
            "the skip of a test cannot be recorded in {}: {error}",
            file.display()
        );
    }
}

#[cfg(test)]
#[path = "skip_test.rs"]
mod tests;
