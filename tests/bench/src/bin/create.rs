//! `make bench-create`: sandboxes of a tiny guest through thawd's API, on this machine's own KVM.

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use thaw_bench::create::storm::{self, CREATED, Storm};
use thaw_bench::create::{Node, Ready, cycle_cpu, cycles, growth, parked_byte, reads};
use thaw_bench::{Report, by_parts, conclude};
use thaw_daemon::api::watch::ring;
use thaw_tiny_guest::bare::concise;
use thaw_tiny_node::Place;

/// How much is measured.
struct Plan {
    storms: &'static [Storm],
    /// Rounds of parked machines without thawd: one at a time, and [`FEW`] at once.
    alone: usize,
    alone_few: usize,
    cycles: usize,
    /// How long they run before they are measured.
    warm_up: Duration,
    /// Rounds of [`ROUND`] cycles whose CPU time is measured.
    cpu_rounds: usize,
    /// Sandboxes beside which creations are timed, few and many, and rounds of that.
    beside: (usize, usize),
    beside_rounds: usize,
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
    alone: 100,
    alone_few: 20,
    cycles: 10_000,
    // thawd keeps the changes of that time for those who watch, so it grows until then.
    warm_up: ring::FRESH,
    cpu_rounds: 10,
    beside: (10, 2_000),
    beside_rounds: 50,
    watchers: 1_000,
    watch_seconds: 10,
};
/// To see that all of it works, and about where it stands.
const QUICK: Plan = Plan {
    storms: &[
        Storm::new(Ready::Parts, 1, 2),
        Storm::new(Ready::Parts, FEW, 2),
        Storm::new(Ready::Parked, 1, 2),
        Storm::new(Ready::Parked, FEW, 2),
        Storm::new(Ready::Nothing, 1, 2),
    ],
    alone: 20,
    alone_few: 2,
    cycles: 40,
    warm_up: Duration::ZERO,
    cpu_rounds: 2,
    beside: (10, 100),
    beside_rounds: 5,
    watchers: 50,
    watch_seconds: 1,
};

/// One creation at a time alone, often: for a profile of thawd beside it.
const ONE: Plan = Plan {
    storms: &[Storm::new(Ready::Parts, 1, 40), Storm::new(Ready::Parked, 1, 40)],
    alone: 40,
    alone_few: 0,
    cycles: 0,
    warm_up: Duration::ZERO,
    cpu_rounds: 0,
    beside: (0, 0),
    beside_rounds: 0,
    watchers: 0,
    watch_seconds: 0,
};

/// As many at once as their slowest is to be compared with their median.
const FEW: usize = 50;
/// Sandboxes that are listed.
const SANDBOXES: usize = 10_000;
/// Cycles of a round: enough that the kernel's steps of 10 ms do not count.
const ROUND: usize = 200;
/// Changes a second.
const CHANGES: u64 = 1_000;
/// Lists of each way.
const LISTS: usize = 200;
/// What the pools hold while creations and deletions follow one another.
const STEADY: usize = 8;

/// The parts, each with a result of its own.
const CREATIONS: &str = "creations";
const BESIDE_MANY: &str = "beside-many";

fn main() -> ExitCode {
    let (plan, parts) = match std::env::args().nth(1).as_deref() {
        Some(cycle_cpu::BARE) => return bare_cycles(),
        Some("--one") => (&ONE, vec![CREATIONS]),
        _ => by_parts(&QUICK, &WHOLE, &[CREATIONS, BESIDE_MANY]),
    };
    for part in parts {
        let measured = tokio::runtime::Runtime::new()
            .map_err(|e| format!("no runtime: {e}"))
            .and_then(|runtime| match part {
                CREATIONS => runtime.block_on(measure(plan)),
                _ => runtime.block_on(measure_beside_many(plan)),
            });
        let code = conclude("create", measured);
        if code != ExitCode::SUCCESS {
            return code;
        }
    }
    ExitCode::SUCCESS
}

/// As the bare program that [`cycle_cpu`] runs.
fn bare_cycles() -> ExitCode {
    let count = std::env::args().nth(2).and_then(|n| n.parse().ok());
    match count
        .ok_or_else(|| "how many?".to_string())
        .and_then(|n| cycle_cpu::bare(n).map_err(|e| e.to_string()))
    {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("bench-create {}: {why}", cycle_cpu::BARE);
            ExitCode::FAILURE
        }
    }
}

/// The ratios between creations, and of creations to what they stand on.
fn compare(report: &mut Report, plan: &Plan) -> Result<(), String> {
    let created = |count, ready| storm::name(count, ready, false, CREATED);
    let parked = created(1, Ready::Parked);
    report.ratio("create_over_parked_byte", &parked, &parked_byte::name(1))?;
    report.ratio("parked_over_shell_create", &parked, &created(1, Ready::Parts))?;
    if plan.alone_few > 0 {
        let parked = created(FEW, Ready::Parked);
        report.ratio("create50_over_parked50_byte", &parked, &parked_byte::name(FEW))?;
        report.ratio(
            "parked_over_shell_create_at_50",
            &parked,
            &created(FEW, Ready::Parts),
        )?;
    }
    Ok(())
}

/// What creations and the API's reads cost beside many sandboxes.
async fn measure_beside_many(plan: &Plan) -> Result<Report, String> {
    let mut report = Report::new("create-beside-many");
    report.note(
        "The guest is as above. Sandboxes are created one at a time beside those that stand by. Lists and watches are of thawd's \
         table alone, without guests.",
    );
    let node = Node::start(place()?, Ready::Parts, STEADY..=STEADY).await?;
    growth::run(&node, plan.beside, plan.beside_rounds, &mut report).await?;
    report.keep()?;
    drop(node.stop());
    reads::lists(&mut report, SANDBOXES, LISTS)?;
    reads::watches(&mut report, plan.watchers, CHANGES, plan.watch_seconds).await?;
    report.keep()?;
    Ok(report)
}

fn place() -> Result<Place, String> {
    let own = std::env::current_exe().map_err(|e| format!("where this program is: {e}"))?;
    let binaries = own.parent().unwrap_or(Path::new("."));
    Place::new(binaries, &concise()).ok_or_else(|| "this host cannot run it".into())
}

async fn measure(plan: &Plan) -> Result<Report, String> {
    let mut place = place()?;
    let name = match plan.cycles {
        0 => "create-one",
        _ => "create",
    };
    let mut report = Report::new(name);
    report.note(
        "The guest is a few instructions long and has no process; it runs when its creation is answered. The client shares the \
         processors with thawd. Rows named `parked` are of a thawd that keeps parked machines, which have loaded the template. Rows \
         named `a pool missed` are of creations for which a pool lacked a part that should have been ready; most are of a thawd \
         without pools.",
    );
    for storm in plan.storms {
        place = storm.run(place, &mut report).await?;
        report.keep()?;
    }
    parked_byte::run(&mut report, plan.alone, (FEW, plan.alone_few))
        .map_err(|e| format!("parked machines without thawd: {e}"))?;
    compare(&mut report, plan)?;
    report.keep()?;
    if plan.cycles == 0 {
        return Ok(report);
    }
    let warm = storm::name(FEW, Ready::Parts, false, CREATED);
    report.ratio_of(
        &format!("create_p99_over_p50_at_{FEW}"),
        (&warm, 99.0),
        (&warm, 50.0),
    )?;
    let node = Node::start(place, Ready::Parts, STEADY..=STEADY).await?;
    cycle_cpu::run(&node, plan.cpu_rounds, ROUND, &mut report).await?;
    report.keep()?;
    cycles::run(&node, plan.cycles, plan.warm_up, &mut report).await?;
    report.keep()?;
    drop(node.stop());
    Ok(report)
}
