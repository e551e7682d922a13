//! `make bench-service`: what a node has for paused sandboxes, and its gateway beside many connections, with tiny guests on this machine's
//! own KVM. Takes root.

use std::path::Path;
use std::process::ExitCode;

use thaw_bench::clock::progress;
use thaw_bench::create::{Node, Ready};
use thaw_bench::network::place;
use thaw_bench::service::{crowd, paused};
use thaw_bench::{Report, by_quick, conclude};
use thaw_tiny_guest::bare::lasting;
use thaw_tiny_node::Place;
use tokio::runtime::Runtime;

/// How much is measured.
struct Plan {
    paused: usize,
    /// Rounds of the gateway, alone and beside many connections, and requests in each.
    rounds: usize,
    requests: usize,
}

const WHOLE: Plan = Plan {
    paused: 1_000,
    rounds: 10,
    requests: 1_000,
};
/// To see that all of it works, and about where it stands.
const QUICK: Plan = Plan {
    paused: 50,
    rounds: 2,
    requests: 200,
};
/// What the pools hold while sandboxes are made.
const STEADY: usize = 8;

fn main() -> ExitCode {
    let plan = by_quick(&QUICK, &WHOLE);
    conclude("service", within(plan))
}

/// Measures in a network namespace that ends with this process.
fn within(plan: &Plan) -> Result<Report, String> {
    // Before there are other threads: they are in it too then.
    let _host = place::Place::enter()?;
    let runtime = Runtime::new().map_err(|e| format!("no runtime: {e}"))?;
    runtime.block_on(measure(plan))
}

async fn measure(plan: &Plan) -> Result<Report, String> {
    let own = std::env::current_exe().map_err(|e| format!("where this program is: {e}"))?;
    let place = Place::new(own.parent().unwrap_or(Path::new(".")), &lasting());
    let place = place.ok_or("this host cannot run it")?;
    let mut report = Report::new("service");
    let node = Node::start(place, Ready::Parts, STEADY..=STEADY).await?;
    progress("bench-service", "paused sandboxes");
    paused::run(&node, plan.paused, &mut report).await?;
    report.note(format!(
        "The guest of the paused sandboxes is a few instructions long. They were created and paused through thawd's API with their memory \
         released, and none has a process. `paused_kib_each` is the growth of thawd's resident memory (RSS) for {} of them, from the moment \
         when there are a tenth as many, divided by their number. The kernel's memory for their files is not in it.",
        plan.paused
    ));
    report.keep()?;
    progress("bench-service", "the gateway");
    crowd::run(node.stop(), plan.rounds, plan.requests, &mut report).await?;
    report.keep()?;
    Ok(report)
}
