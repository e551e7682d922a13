//! `make bench-snapshot`: thaws of a user's snapshot, on this machine's own KVM.

use std::path::Path;
use std::process::ExitCode;

use thaw_bench::clock::progress;
use thaw_bench::create::{Node, Ready};
use thaw_bench::snapshot::{CREATED, EACH, FIRST, PARKED, SECOND, Snapshots, UNHELD, size};
use thaw_bench::{Report, by_quick, conclude};
use thaw_tiny_guest::bare::lasting_filled;
use thaw_tiny_node::Place;

const NAME: &str = "bench-snapshot";
/// What the guest fills of its memory before it becomes a template: the snapshot has it too.
const FILLED_MIB: u32 = 64;
/// Creations, and thaws of a parked machine.
const ROUNDS: usize = 100;
/// Snapshots that are frozen, and thawed for the first time.
const SNAPSHOTS: usize = 20;

fn main() -> ExitCode {
    let (rounds, snapshots) = by_quick((10, 3), (ROUNDS, SNAPSHOTS));
    let measured = tokio::runtime::Runtime::new()
        .map_err(|e| format!("no runtime: {e}"))
        .and_then(|runtime| runtime.block_on(measure(rounds, snapshots)));
    conclude("snapshot", measured)
}

async fn measure(rounds: usize, snapshots: usize) -> Result<Report, String> {
    let own = std::env::current_exe().map_err(|e| format!("where this program is: {e}"))?;
    let binaries = own.parent().unwrap_or(Path::new("."));
    let place = Place::new(binaries, &lasting_filled(FILLED_MIB));
    let place = place.ok_or("this host cannot run it")?;
    let mut report = Report::new("snapshot");
    progress(NAME, "creations and thaws");
    let node = Node::start(place, Ready::Parked, EACH..=2 * EACH).await?;
    let mut measured = Snapshots::begin(node).await?;
    measured.creations(rounds, &mut report).await?;
    let mut last = measured.first_thaws(&mut report).await?;
    for _ in 1..snapshots {
        last = measured.first_thaws(&mut report).await?;
    }
    measured.parked_thaws(&last, rounds, &mut report).await?;
    let measured = measured
        .thaws_after_restarts(&last, snapshots, &mut report)
        .await?;
    measured.end().await?;
    report.ratio("thaw_over_template", PARKED, CREATED)?;
    report.ratio("first_thaw_over_second", FIRST, SECOND)?;
    report.ratio("thaw_after_restart_over_second", UNHELD, SECOND)?;
    report.note(
        "One sandbox at a time through thawd's API, from the request to the answer that its guest runs. The guest is a few instructions \
         long, has 128 MiB, and filled 62 MiB before it became a template, so template and snapshot have equally much memory.",
    );
    report.keep()?;
    progress(NAME, "freezes by size");
    size::run(binaries, snapshots, &mut report).await?;
    let [large, small] = [size::LARGE_MIB, size::SMALL_MIB].map(size::series);
    report.ratio("stop_1g_over_128m", &large, &small)?;
    report.keep()?;
    Ok(report)
}
