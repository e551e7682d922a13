//! `make bench-host`: many VMMs killed at once, on this machine's own KVM, and what that leaves of the host.

use std::io;
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use thaw_bench::host::{filters, health};
use thaw_bench::thaw::clone::Template;
use thaw_bench::thaw::storm;
use thaw_bench::{Report, table};

/// VMMs killed at once, in the order they are tried: the host must be well after each before the next.
const CROWDS: [usize; 4] = [100, 200, 500, 1000];
/// How often each crowd is killed.
const ROUNDS: usize = 5;
/// Starts that are timed before each kill and after it.
const STARTS: usize = 20;
/// Guest memory, MiB.
const MEMORY: u32 = 128;

const USAGE: &str = "usage: bench-host [--most N]   (kills crowds of at most N VMMs at once; 1000)";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let most = match &arguments[..] {
        [] => Ok(usize::MAX),
        [option, number] if option == "--most" => number.parse().map_err(|e| format!("--most {number}: {e}")),
        _ => Err(USAGE.to_string()),
    };
    match most.and_then(measure) {
        Ok(report) => {
            print!("{}", table::terminal(&report));
            ExitCode::SUCCESS
        }
        Err(why) => {
            eprintln!("bench-host: {why}");
            ExitCode::FAILURE
        }
    }
}

fn measure(most: usize) -> Result<Report, String> {
    let directory = tempfile::tempdir().map_err(|e| format!("no temporary directory: {e}"))?;
    let mut report = Report::new("host");
    own_filters(&mut report, directory.path()).map_err(|e| format!("seccomp programs: {e}"))?;
    let template =
        Template::build(MEMORY, false, directory.path()).map_err(|e| format!("the template: {e}"))?;
    health::recovered().map_err(|e| format!("before any crowd: {e}"))?;
    let crowds: Vec<usize> = CROWDS.into_iter().filter(|count| *count <= most).collect();
    for count in &crowds {
        for round in 1..=ROUNDS {
            kill_storm(&mut report, &template, *count)
                .map_err(|e| format!("{count} killed at once, round {round}: {e}"))?;
            eprintln!("bench-host: {count} killed at once: {round} of {ROUNDS}");
        }
    }
    if let Some(largest) = crowds.last() {
        let name = |when| start_name(*largest, when);
        report.ratio(
            "start_after_kill_storm_over_before",
            &name("after"),
            &name("before"),
        )?;
        report.note(format!(
            "`start_after_kill_storm_over_before` is of {largest} VMMs at once."
        ));
    }
    report
        .write(Path::new("target/bench"))
        .map_err(|e| format!("cannot write target/bench: {e}"))?;
    Ok(report)
}

fn own_filters(report: &mut Report, directory: &Path) -> io::Result<()> {
    let mut largest = 0;
    for vcpus in [1, 4] {
        let installed = filters::installed(directory, vcpus)?;
        report.sample(
            &format!("seccomp programs of a VMM, {vcpus} vCPUs"),
            "programs",
            installed as f64,
        );
        largest = largest.max(installed);
    }
    report.ratios.insert("own_filters_per_vmm".into(), largest as f64);
    Ok(())
}

fn start_name(count: usize, when: &str) -> String {
    format!("start, {when} {count} were killed")
}

/// Times starts, kills `count` parked VMMs at once, waits until the host is well, and times starts again.
fn kill_storm(report: &mut Report, template: &Template, count: usize) -> io::Result<()> {
    let mut starts = |when: &str| -> io::Result<()> {
        for _ in 0..STARTS {
            report.sample(&start_name(count, when), "µs", template.from_nothing()?);
        }
        Ok(())
    };
    starts("before")?;
    let clones = storm::park(template, count)?;
    let killed = Instant::now();
    storm::kill(&clones);
    starts("while")?;
    drop(clones);
    health::recovered()?;
    let recovered = killed.elapsed().as_secs_f64() * 1e3;
    starts("after")?;
    report.sample(
        &format!("{count} killed at once: until none is left"),
        "ms",
        recovered,
    );
    Ok(())
}
