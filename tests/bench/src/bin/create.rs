//! `make bench-create`: sandboxes of a tiny guest through thawd's API, on this machine's own KVM.

use std::path::Path;
use std::process::ExitCode;

use thaw_bench::create::storm::{self, CREATED, Storm};
use thaw_bench::create::{Node, Ready, cycles, reads};
use thaw_bench::{Report, table};
use thaw_tiny_guest::bare::bare;
use thaw_tiny_node::Place;

/// How much is measured.
struct Plan {
    storms: &'static [Storm],
    cycles: usize,
    watchers: usize,
    watch_seconds: u64,
}

const WHOLE: Plan = Plan {
    storms: &[
        Storm::new(Ready::Parts, 1, 20),
        Storm::new(Ready::Parts, 10, 20),
        Storm::new(Ready::Parts, FEW, 20),
        Storm::new(Ready::Parts, 200, 20),
        Storm::new(Ready::Parked, 1, 20),
        Storm::new(Ready::Parked, 10, 20),
        Storm::new(Ready::Parked, FEW, 20),
        Storm::new(Ready::Nothing, 1, 20),
        Storm::new(Ready::Nothing, 10, 20),
        Storm::new(Ready::Nothing, FEW, 20),
    ],
    cycles: 10_000,
    watchers: 1_000,
    watch_seconds: 10,
};
/// To see that all of it works, and about where it stands.
const QUICK: Plan = Plan {
    storms: &[
        Storm::new(Ready::Parts, 1, 2),
        Storm::new(Ready::Parts, FEW, 2),
        Storm::new(Ready::Parked, 1, 2),
        Storm::new(Ready::Nothing, 1, 2),
    ],
    cycles: 40,
    watchers: 50,
    watch_seconds: 1,
};

/// One creation at a time alone, often: for a profile of thawd beside it.
const ONE: Plan = Plan {
    storms: &[Storm::new(Ready::Parts, 1, 40), Storm::new(Ready::Parked, 1, 40)],
    cycles: 0,
    watchers: 0,
    watch_seconds: 0,
};

/// As many at once as their slowest is to be compared with their median.
const FEW: usize = 50;
/// Sandboxes that are listed.
const SANDBOXES: usize = 10_000;
/// Changes a second.
const CHANGES: u64 = 1_000;
/// Lists of each way.
const LISTS: usize = 200;
/// What the pools hold while creations and deletions follow one another.
const STEADY: usize = 8;

fn main() -> ExitCode {
    let plan = match std::env::args().nth(1).as_deref() {
        Some("--quick") => &QUICK,
        Some("--one") => &ONE,
        _ => &WHOLE,
    };
    let measured = tokio::runtime::Runtime::new()
        .map_err(|e| format!("no runtime: {e}"))
        .and_then(|runtime| runtime.block_on(measure(plan)));
    match measured {
        Ok(report) => {
            print!("{}", table::terminal(&report));
            ExitCode::SUCCESS
        }
        Err(why) => {
            eprintln!("bench-create: {why}");
            ExitCode::FAILURE
        }
    }
}

async fn measure(plan: &Plan) -> Result<Report, String> {
    let own = std::env::current_exe().map_err(|e| format!("where this program is: {e}"))?;
    let binaries = own.parent().unwrap_or(Path::new("."));
    let mut place = Place::new(binaries, &bare(0)).ok_or("this host cannot run it")?;
    let name = match plan.cycles {
        0 => "create-one",
        _ => "create",
    };
    let mut report = Report::new(name);
    for storm in plan.storms {
        place = storm.run(place, &mut report).await?;
    }
    if plan.cycles == 0 {
        report
            .write(Path::new("target/bench"))
            .map_err(|e| format!("cannot write target/bench: {e}"))?;
        return Ok(report);
    }
    let node = Node::start(place, Ready::Parts, STEADY..=STEADY).await?;
    cycles::run(&node, plan.cycles, &mut report).await?;
    drop(node.stop());
    reads::lists(&mut report, SANDBOXES, LISTS)?;
    reads::watches(&mut report, plan.watchers, CHANGES, plan.watch_seconds).await?;
    let warm = storm::name(FEW, Ready::Parts, false, CREATED);
    report.ratio_of(
        &format!("create_p99_over_p50_at_{FEW}"),
        (&warm, 99.0),
        (&warm, 50.0),
    )?;
    report.note(
        "The guest is a few instructions long and has no process; it runs when its creation is answered. The client shares the \
         processors with thawd. Rows named `parked` are of a thawd that keeps parked machines, which have loaded the template. Rows \
         named `a pool missed` are of creations for which a pool lacked a part that should have been ready; most are of a thawd \
         without pools.",
    );
    report
        .write(Path::new("target/bench"))
        .map_err(|e| format!("cannot write target/bench: {e}"))?;
    Ok(report)
}
