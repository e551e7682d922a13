//! `make bench-service`, its part with the real guest: E2B's Python SDK, and the gateway to a server in a sandbox.

use std::path::Path;
use std::process::ExitCode;

use thaw_bench::service::sdk::{PARTS, Rounds, Service, notes};
use thaw_bench::surroundings::Surroundings;
use thaw_bench::{Report, by_parts, conclude};
use tokio::runtime::Runtime;

const WHOLE: Rounds = Rounds {
    creations: 20,
    commands: 50,
    small: 500,
    downloads: 10,
    bytes: 64 << 20,
    resumes: 10,
};
/// To see that all of it works, and about where it stands.
const QUICK: Rounds = Rounds {
    creations: 2,
    commands: 5,
    small: 50,
    downloads: 2,
    bytes: 8 << 20,
    resumes: 2,
};
/// The test image that has Python.
const IMAGE: &str = "python3";

fn main() -> ExitCode {
    let (plan, parts) = by_parts(QUICK, WHOLE, &PARTS);
    let runtime = Runtime::new().map_err(|e| format!("no runtime: {e}"));
    let measured = runtime.and_then(|runtime| runtime.block_on(measure(&plan, &parts)));
    conclude("service-linux", measured)
}

/// Adds these parts to what target/bench has of this commit.
async fn measure(rounds: &Rounds, parts: &[&str]) -> Result<Report, String> {
    let surroundings = Surroundings::read("make bench-service")?;
    let report = Report::resume("service-linux", Path::new("target/bench"));
    let mut report = report.map_err(|e| format!("cannot read what target/bench has: {e}"))?;
    notes(&mut report);
    let service = Service::start(surroundings.place(IMAGE), &surroundings.image(IMAGE))?;
    service.measure(parts, rounds, &mut report).await?;
    Ok(report)
}
