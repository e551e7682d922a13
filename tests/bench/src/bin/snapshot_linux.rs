//! `make bench-snapshot`, its part with the real guest: a warm HTTP server, from its cold start to its clones on another node.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use thaw_bench::snapshot::remote::{self, Registry};
use thaw_bench::snapshot::server::{self, Host, JAVA, PYTHON, Program, Size, series};
use thaw_bench::snapshot::{clones, stop};
use thaw_bench::{Report, by_quick, conclude};
use thaw_tiny_node::{Linux, Place};

/// What is thawed.
const SIZE: Size = Size {
    memory_mib: 512,
    filled_mib: 200,
};
/// How often each is measured.
struct Rounds {
    /// Cold starts, and thaws on the same node.
    starts: usize,
    /// Freezes of each size, pauses, and first thaws on another node.
    slow: usize,
    clones: usize,
    versions: usize,
}

const WHOLE: Rounds = Rounds {
    starts: 10,
    slow: 5,
    clones: 100,
    versions: 10,
};
/// To see that all of it works, and about where it stands.
const QUICK: Rounds = Rounds {
    starts: 2,
    slow: 1,
    clones: 10,
    versions: 3,
};

fn main() -> ExitCode {
    let rounds = by_quick(QUICK, WHOLE);
    let measured = tokio::runtime::Runtime::new()
        .map_err(|e| format!("no runtime: {e}"))
        .and_then(|runtime| runtime.block_on(measure(&rounds)));
    conclude("snapshot-linux", measured)
}

async fn measure(rounds: &Rounds) -> Result<Report, String> {
    let said = |name: &str| {
        std::env::var(name).map_err(|_| format!("{name} is not set: run this through `make bench-snapshot`"))
    };
    let binaries = PathBuf::from(said("THAW_BIN")?);
    let data = std::env::var("THAW_DATA").map(PathBuf::from);
    let directory = data.ok().and_then(|data| Some(data.parent()?.to_owned()));
    let directory = tempfile::tempdir_in(directory.unwrap_or_else(std::env::temp_dir));
    let directory = directory.map_err(|e| format!("no temporary directory: {e}"))?;
    let programs = [PYTHON, JAVA];
    let images = programs.map(|program| program.image);
    let registry = Registry::start(directory.path(), &said("THAW_TEST_IMAGES")?, &images)?;
    let linux = Linux {
        kernel: said("THAW_KERNEL")?.into(),
        guest_image: binaries.join("guest.erofs"),
        image: registry.image(PYTHON.image),
    };
    let place = || Place::of_linux(directory.path(), &binaries, linux.clone());
    let mut report = Report::new("snapshot-linux");
    for program in programs {
        let filled = series(program, server::FILLED);
        report.sample(&filled, "MiB", f64::from(SIZE.filled_mib));
    }
    notes(&mut report);
    for program in programs {
        let image = registry.image(program.image);
        let host = Host::start(place(), program, &image, SIZE).await?;
        on_one_node(&host, &registry, rounds, &mut report).await?;
        host.node.stop();
        ratios_of_one_node(&mut report, program, rounds)?;
        // What was measured is kept, whatever comes after.
        write(&mut report)?;
        let host = Host::start(place(), program, &image, SIZE).await?;
        registry.first_thaws(&host, rounds.slow, &mut report).await?;
        host.node.stop();
        ratios_of_another(&mut report, program)?;
        write(&mut report)?;
    }
    Ok(report)
}

fn write(report: &mut Report) -> Result<(), String> {
    let written = report.write(Path::new("target/bench"));
    written
        .map(drop)
        .map_err(|e| format!("cannot write target/bench: {e}"))
}

/// All that needs no other node. Pushes the versions.
async fn on_one_node(
    host: &Host,
    registry: &Registry,
    rounds: &Rounds,
    report: &mut Report,
) -> Result<(), String> {
    let said = |what: &str| eprintln!("bench-snapshot-linux: {}", host.series(what));
    said("cold starts");
    host.cold_starts(SIZE, rounds.starts, report).await?;
    let before = clones::before(host)?;
    let server = host.cold(SIZE).await?;
    let frozen = host.freeze(&server).await?;
    let snapshot = frozen.snapshot.ok_or("the node did not store the snapshot")?;
    said("thaws");
    host.thaws(&snapshot, rounds.starts, report).await?;
    said("clones");
    clones::measure(host, &snapshot, rounds.clones, before, report).await?;
    said("versions");
    registry
        .push_versions(host, &server, snapshot, rounds.versions, report)
        .await?;
    said("pauses");
    let server = host.pauses(server, rounds.slow, report).await?;
    host.delete(server).await?;
    match host.program.name == PYTHON.name {
        true => stop::measure(host, rounds.slow, report).await,
        // A freeze does not know what runs in a guest.
        false => Ok(()),
    }
}

/// The name of a ratio of a program: Python's have no addition.
fn name(ratio: &str, program: Program) -> String {
    match program.name == PYTHON.name {
        true => ratio.to_owned(),
        false => format!("{ratio}_{}", program.name.to_lowercase()),
    }
}

fn ratios_of_one_node(report: &mut Report, program: Program, rounds: &Rounds) -> Result<(), String> {
    let (clones, versions) = (clones::name(rounds.clones), remote::versions(rounds.versions));
    let mut ratios = vec![
        ("first_response_over_cold_start", server::THAWED, server::COLD),
        ("pause_bytes_over_dirtied", server::PAUSED_BYTES, server::FILLED),
    ];
    // A first look has fewer of both.
    if (rounds.clones, rounds.versions) == (WHOLE.clones, WHOLE.versions) {
        ratios.push(("hundred_clones_memory_over_dirtied", &clones, server::FILLED));
        ratios.push(("stored_ten_versions_over_one", &versions, remote::ONE));
    }
    let (large, small) = (stop::name(stop::LARGE), stop::name(stop::SMALL));
    if program.name == PYTHON.name {
        ratios.push(("stop_1g_over_128m", &large, &small));
    }
    add(report, program, &ratios)
}

fn ratios_of_another(report: &mut Report, program: Program) -> Result<(), String> {
    let ratios = [
        (
            "remote_first_response_over_fetch_all",
            remote::REMOTE,
            remote::WHOLE,
        ),
        (
            "remote_bytes_over_working_set",
            remote::FETCHED,
            server::WORKING_SET,
        ),
    ];
    add(report, program, &ratios)
}

/// Adds ratios of a program's series, each with its numerator and its denominator.
fn add(report: &mut Report, program: Program, ratios: &[(&str, &str, &str)]) -> Result<(), String> {
    for (ratio, over, under) in ratios {
        let (over, under) = (series(program, over), series(program, under));
        report.ratio(&name(ratio, program), &over, &under)?;
    }
    Ok(())
}

fn notes(report: &mut Report) {
    report.note(format!(
        "An HTTP server, Python's or Java's, in a guest of {} MiB that fills {} MiB with random bytes before it answers; through thawd's API, \
         one at a time, from the request to the whole page.",
        SIZE.memory_mib, SIZE.filled_mib
    ));
    report.note(
        "The registry is behind a link of 100 Mbit/s with 5 ms; the image is on the other node already. Each version is the same server \
         after ten more pages.",
    );
}
