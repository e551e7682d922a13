//! `make bench-alternatives`: mechanisms that do one job in two ways, in turn, with tiny guests on this machine's own KVM.

use std::path::Path;
use std::process::ExitCode;

use thaw_bench::alternatives::{memory, owners};
use thaw_bench::{Report, by_quick, table};
use thaw_tiny_guest::bare::bare;
use thaw_tiny_node::Place;

const ROUNDS: usize = 20;
/// To see that all of it works, and about where it stands.
const QUICK: usize = 3;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let runtime = tokio::runtime::Runtime::new().map_err(|e| format!("no runtime: {e}"));
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = runtime.and_then(|runtime| {
        runtime.block_on(async {
            match words[..] {
                [owners::OWN, image, _] => owners::own(image).await,
                [owners::CLIENT, _, request] => owners::client(request).await,
                _ => measure(by_quick(QUICK, ROUNDS)).await,
            }
        })
    });
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("bench-alternatives: {why}");
            ExitCode::FAILURE
        }
    }
}

async fn measure(rounds: usize) -> Result<(), String> {
    let directory = tempfile::tempdir().map_err(|e| format!("no temporary directory: {e}"))?;
    let mut report = Report::new("alternatives");
    memory::run(&mut report, rounds, directory.path()).map_err(|e| format!("memory: {e}"))?;
    let own = std::env::current_exe().map_err(|e| format!("where this program is: {e}"))?;
    let binaries = own.parent().unwrap_or(Path::new("."));
    let place = Place::new(binaries, &bare(0)).ok_or("this host cannot run it")?;
    owners::run(place, rounds, &mut report).await?;
    report.note(
        "Snapshots are in memory (sealed memfds), so no row waits for a disk. The guest of the owners' rows is a few instructions long and \
         has no process; its template exists before.",
    );
    report
        .write(Path::new("target/bench"))
        .map_err(|e| format!("cannot write target/bench: {e}"))?;
    print!("{}", table::terminal(&report));
    Ok(())
}
