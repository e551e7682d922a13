//! `make bench-host`: many VMMs killed at once, on this machine's own KVM, and what that leaves of the host.

use std::io;
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use thaw_bench::host::kill::{self, Crowd, Way};
use thaw_bench::host::{filters, health, hostile, neighbour, node};
use thaw_bench::thaw::clone::Template;
use thaw_bench::thaw::storm;
use thaw_bench::{Report, table};

/// VMMs killed at once, in the order they are tried: the host must be well after each before the next.
const CROWDS: [usize; 4] = [100, 200, 500, 1000];
/// How often each crowd is killed by SIGKILL; the other ways, once.
const ROUNDS: usize = 5;
/// Starts that are timed before each kill and after it.
const STARTS: usize = 20;
/// Resets of its devices by a hostile guest.
const RESETS: u32 = 1_000_000;
/// Guest memory, MiB.
const MEMORY: u32 = 128;

const USAGE: &str = "usage: bench-host [--most N]   (kills crowds of at most N VMMs at once; 1000)";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let most = match &arguments[..] {
        [] => Ok(usize::MAX),
        [option, directory, bytes] if option == kill::TAKE => return take(directory, bytes),
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

/// This program as the process that takes all memory of a crowd's cgroup.
fn take(directory: &str, bytes: &str) -> ExitCode {
    let bytes = bytes.parse().map_err(io::Error::other);
    match bytes.and_then(|bytes| kill::take(Path::new(directory), bytes)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("bench-host: taking memory: {why}");
            ExitCode::FAILURE
        }
    }
}

fn measure(most: usize) -> Result<Report, String> {
    let directory = tempfile::tempdir().map_err(|e| format!("no temporary directory: {e}"))?;
    let mut report = Report::new("host");
    own_filters(&mut report, directory.path()).map_err(|e| format!("seccomp programs: {e}"))?;
    hostile_guests(&mut report, directory.path()).map_err(|e| format!("hostile guests: {e}"))?;
    neighbour::measure(&mut report, directory.path()).map_err(|e| format!("a flooded neighbour: {e}"))?;
    let template =
        Template::build(MEMORY, false, directory.path()).map_err(|e| format!("the template: {e}"))?;
    health::recovered().map_err(|e| format!("before any crowd: {e}"))?;
    let crowds: Vec<usize> = CROWDS.into_iter().filter(|count| *count <= most).collect();
    let mut waited: Vec<health::Waiting> = Vec::new();
    for count in &crowds {
        for smaller in waited.drain(..) {
            smaller
                .leaves_room()
                .map_err(|e| format!("before {count}: {e}"))?;
        }
        for way in Way::ALL {
            let rounds = if way == Way::Signal { ROUNDS } else { 1 };
            for round in 1..=rounds {
                let ended = storm(&mut report, &template, *count, way);
                waited.push(ended.map_err(|e| format!("{count} {}, round {round}: {e}", way.verb()))?);
                eprintln!("bench-host: {count} {}: {round} of {rounds}", way.verb());
            }
        }
        let ended = node::storm(&mut report, *count);
        waited.push(ended.map_err(|e| format!("{count} killed with their thawd: {e}"))?);
        eprintln!("bench-host: {count} killed with their thawd: 1 of 1");
    }
    if let Some(largest) = crowds.last() {
        let name = |when| start_name(*largest, Way::Signal, when);
        report.ratio(
            "start_after_kill_storm_over_before",
            &name("after"),
            &name("before"),
        )?;
        report.note(format!(
            "`start_after_kill_storm_over_before` is of {largest} VMMs that are killed at once."
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

fn hostile_guests(report: &mut Report, directory: &Path) -> io::Result<()> {
    let touched = hostile::touched_over_limit(directory)?;
    let log = hostile::log_after_resets(directory, RESETS)?;
    let ratios = [
        ("touched_over_limit", touched),
        ("log_mib_after_million_resets", log as f64 / f64::from(1 << 20)),
    ];
    report
        .ratios
        .extend(ratios.map(|(name, value)| (name.into(), value)));
    Ok(())
}

fn start_name(count: usize, way: Way, when: &str) -> String {
    format!("start, {when} {count} were {}", way.verb())
}

/// Times starts, has `count` parked VMMs end at once, waits until the host is well, and times starts again. Gives the kernel workers
/// that waited.
fn storm(report: &mut Report, template: &Template, count: usize, way: Way) -> io::Result<health::Waiting> {
    let mut starts = |when: &str| -> io::Result<()> {
        for _ in 0..STARTS {
            report.sample(&start_name(count, way, when), "µs", template.from_nothing()?);
        }
        Ok(())
    };
    starts("before")?;
    let crowd = Crowd::begin(way)?;
    let clones = storm::park(template, count)?;
    crowd.complete()?;
    let watch = health::Watch::begin();
    let killed = Instant::now();
    crowd.kill(&clones)?;
    starts("while")?;
    drop(clones);
    health::recovered()?;
    let recovered = killed.elapsed().as_secs_f64() * 1e3;
    let waited = watch.most()?;
    starts("after")?;
    let crowd = format!("{count} {}", way.verb());
    report.sample(&format!("{crowd}: until none is left"), "ms", recovered);
    waited.sample(report, &crowd);
    Ok(waited)
}
