//! `make bench-snapshot`, its parts with the real guest: a warm HTTP server, from its cold start to its clones on another node, and how long
//! freezes stop guests. A run measures one part, whose results have a file of their own, so that parts can be measured on different days.

use std::path::PathBuf;
use std::process::ExitCode;

use thaw_bench::clock::progress;
use thaw_bench::snapshot::remote::{self, Registry};
use thaw_bench::snapshot::server::{self, Host, JAVA, NAME, PYTHON, Program, Size, series};
use thaw_bench::snapshot::{clones, stop};
use thaw_bench::{Report, by_parts, conclude};
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
    starts: 5,
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

/// What a run measures: a program, or how long freezes stop guests.
const PARTS: [&str; 3] = ["python", "java", "stop"];

fn main() -> ExitCode {
    let (rounds, parts) = by_parts(QUICK, WHOLE, &PARTS);
    let [part] = parts[..] else {
        eprintln!("{NAME}: name one of {}", PARTS.join(", "));
        return ExitCode::from(2);
    };
    let name = format!("snapshot-{part}");
    let measured = tokio::runtime::Runtime::new()
        .map_err(|e| format!("no runtime: {e}"))
        .and_then(|runtime| runtime.block_on(measure(&rounds, part, Report::new(&name))));
    conclude(&name, measured)
}

/// Measures a part. What was measured is kept after each step.
async fn measure(rounds: &Rounds, part: &str, mut report: Report) -> Result<Report, String> {
    let said = |name: &str| {
        std::env::var(name).map_err(|_| format!("{name} is not set: run this through `make bench-snapshot`"))
    };
    let binaries = PathBuf::from(said("THAW_BIN")?);
    let data = std::env::var("THAW_DATA").map(PathBuf::from);
    let directory = data.ok().and_then(|data| Some(data.parent()?.to_owned()));
    let directory = tempfile::tempdir_in(directory.unwrap_or_else(std::env::temp_dir));
    let directory = directory.map_err(|e| format!("no temporary directory: {e}"))?;
    let program = match part {
        "java" => JAVA,
        _ => PYTHON,
    };
    let mut images = vec![PYTHON.image];
    if program.image != PYTHON.image {
        images.push(program.image);
    }
    progress(NAME, "images to the registry");
    let registry = Registry::start(directory.path(), &said("THAW_TEST_IMAGES")?, &images)?;
    let linux = Linux {
        kernel: said("THAW_KERNEL")?.into(),
        guest_image: binaries.join("guest.erofs"),
        image: registry.image(PYTHON.image),
    };
    let place = || Place::of_linux(directory.path(), &binaries, linux.clone());
    let image = registry.image(program.image);
    let start = |size| {
        progress(NAME, format!("{part}: a node"));
        Host::start(place(), program, &image, size)
    };
    if part == "stop" {
        let host = start(stop::SMALL).await?;
        stop::measure(&host, rounds.slow, &mut report).await?;
        host.node.stop();
        stop_ratios(&mut report)?;
        return Ok(report);
    }
    notes(&mut report);
    let filled = series(program, server::FILLED);
    report.sample(&filled, "MiB", f64::from(SIZE.filled_mib));
    let host = start(SIZE).await?;
    on_one_node(&host, &registry, rounds, &mut report).await?;
    host.node.stop();
    let host = start(SIZE).await?;
    on_another(&host, &registry, rounds, &mut report).await?;
    host.node.stop();
    Ok(report)
}

/// How long freezes of a large guest stop it, over those of a small one.
fn stop_ratios(report: &mut Report) -> Result<(), String> {
    let ratios = [
        (
            "linux_stop_1g_over_128m",
            stop::name(stop::LARGE),
            stop::name(stop::SMALL),
        ),
        ("gap_1g_over_128m", stop::gap(stop::LARGE), stop::gap(stop::SMALL)),
    ];
    for (ratio, large, small) in ratios {
        add(report, PYTHON, ratio, (&large, &small))?;
    }
    report.note(
        "A freeze writes memory while the guest runs only on Linux 6.4 and later. The lab's kernel is older: the guest is stopped until all is \
         written.",
    );
    Ok(())
}

/// All that needs no other node. Pushes the versions.
async fn on_one_node(
    host: &Host,
    registry: &Registry,
    rounds: &Rounds,
    report: &mut Report,
) -> Result<(), String> {
    let said = |what: &str| progress(NAME, host.series(what));
    let program = host.program;
    said("cold starts");
    host.cold_starts(SIZE, rounds.starts, report).await?;
    report.keep()?;
    let before = clones::before(host)?;
    let server = host.cold(SIZE).await?;
    let frozen = host.freeze(&server).await?;
    let held = frozen.memory_bytes;
    let snapshot = frozen.snapshot.ok_or("the node did not store the snapshot")?;
    said("thaws");
    host.thaws(&snapshot, rounds.starts, report).await?;
    add(
        report,
        program,
        "first_response_over_cold_start",
        (server::THAWED, server::COLD),
    )?;
    said("clones");
    let count = rounds.clones;
    clones::measure(host, (&snapshot, held), count, before, report).await?;
    // A first look has fewer.
    if count == WHOLE.clones {
        let (taken, written) = (clones::taken(count), clones::written(count));
        add(
            report,
            program,
            "hundred_clones_memory_over_dirtied",
            (&taken, &written),
        )?;
    }
    report.keep()?;
    said("versions");
    registry
        .push_versions(host, &server, snapshot, rounds.versions, report)
        .await?;
    if rounds.versions == WHOLE.versions {
        let versions = remote::versions(rounds.versions);
        add(
            report,
            program,
            "stored_ten_versions_over_one",
            (&versions, remote::ONE),
        )?;
    }
    report.keep()?;
    host.delete(server).await?;
    said("pauses");
    host.pauses(SIZE, rounds.slow, report).await?;
    add(
        report,
        program,
        "pause_bytes_over_dirtied",
        (server::PAUSED_BYTES, server::DIRTIED),
    )
}

/// First thaws on a node that has nothing of the snapshots.
async fn on_another(
    host: &Host,
    registry: &Registry,
    rounds: &Rounds,
    report: &mut Report,
) -> Result<(), String> {
    progress(NAME, host.series("thaws from the registry"));
    registry.first_thaws(host, rounds.slow, report).await?;
    let ratios = [
        (
            "remote_first_response_over_fetch_all",
            (remote::REMOTE, remote::WHOLE),
        ),
        (
            "remote_bytes_over_working_set",
            (remote::FETCHED, server::WORKING_SET),
        ),
    ];
    for (ratio, of) in ratios {
        add(report, host.program, ratio, of)?;
    }
    Ok(())
}

/// The name of a ratio of a program: Python's have no addition.
fn name(ratio: &str, program: Program) -> String {
    match program.name == PYTHON.name {
        true => ratio.to_owned(),
        false => format!("{ratio}_{}", program.name.to_lowercase()),
    }
}

/// Adds a ratio of a program's series, a numerator and a denominator, and keeps what there is.
fn add(
    report: &mut Report,
    program: Program,
    ratio: &str,
    (over, under): (&str, &str),
) -> Result<(), String> {
    let (over, under) = (series(program, over), series(program, under));
    report.ratio(&name(ratio, program), &over, &under)?;
    report.keep()
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
    report.note("Of the clones each shows its page and is paused then, with its memory kept.");
    report.note(
        "What a machine dirtied is its anonymous memory, with about 1 MiB of the VMM itself. A pause's bytes are without the sandbox's disk, whose \
         blocks it may share.",
    );
}
