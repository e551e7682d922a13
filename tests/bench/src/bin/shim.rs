//! `make bench-shim`: containers by `ctr run`, with runc and with Thaw in turn, where Linux guests run.

use std::process::ExitCode;

use thaw_bench::clock::progress;
use thaw_bench::shim::{Node, Way, memory, starts};
use thaw_bench::{Report, by_quick, conclude};

/// How much is measured.
struct Plan {
    /// Rounds; those that warm up are not counted.
    rounds: usize,
    at_once: usize,
}

const WHOLE: Plan = Plan {
    rounds: 20,
    at_once: 50,
};
/// To see that all of it works.
const QUICK: Plan = Plan {
    rounds: 3,
    at_once: 5,
};
/// The first thaws of a template record and read what later ones have.
const WARM_UP: usize = 3;

fn main() -> ExitCode {
    let plan = by_quick(&QUICK, &WHOLE);
    conclude("shim", measure(plan))
}

fn measure(plan: &Plan) -> Result<Report, String> {
    let node = Node::start();
    let mut report = Report::new("shim");
    for number in 0..plan.rounds + WARM_UP {
        let counted = (number >= WARM_UP).then_some(&mut report);
        starts::round(&node, number, counted).map_err(|e| format!("round {number}: {e}"))?;
        progress(
            "bench-shim",
            format!("round {number} of {}", plan.rounds + WARM_UP),
        );
    }
    notes(&mut report);
    report.ratio(
        "ctr_run_over_runc",
        &starts::row(Way::Own),
        &starts::row(Way::Runc),
    )?;
    report.ratio(
        "ctr_run_over_runc_overlayfs",
        &starts::row(Way::Overlayfs),
        &starts::row(Way::Runc),
    )?;
    report.keep()?;
    progress("bench-shim", "memory of idle pods");
    memory::measure(&node, &mut report).map_err(|e| format!("memory: {e}"))?;
    report.ratio(
        "idle_pod_over_runc",
        &memory::whole_row(Way::Own),
        &memory::whole_row(Way::Runc),
    )?;
    report.keep()?;
    for way in [Way::Runc, Way::Own] {
        progress("bench-shim", format!("{} at once: {}", plan.at_once, way.name()));
        starts::at_once(&node, way, plan.at_once, &mut report)
            .map_err(|e| format!("{}, at once: {e}", way.name()))?;
        report.keep()?;
    }
    let [of_runc, many] = [Way::Runc, Way::Own].map(|way| starts::row_at_once(way, plan.at_once));
    report.ratio(
        &format!("pods{}_over_runc{}", plan.at_once, plan.at_once),
        &many,
        &of_runc,
    )?;
    report.ratio_of(
        &format!("pods{}_p99_over_p50", plan.at_once),
        (&many, 99.0),
        (&many, 50.0),
    )?;
    report.keep()?;
    Ok(report)
}

fn notes(report: &mut Report) {
    report.note(
        "Each sample is one `ctr run` of `true`, from its spawn to its exit; the three ways alternate. Every microVM was thawed from \
         an existing template: anything else fails the benchmark. thawd's stages are those of runs with its own snapshotter; some \
         stages overlap.",
    );
    report.note("Memory is the proportional share of each process, as the mean of ten sleeping pods.");
}
