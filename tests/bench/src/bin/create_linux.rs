//! `make bench-create`, its part with the real guest: from the creation through thawd's API to the started process.

use std::process::ExitCode;

use thaw_bench::create::Ready;
use thaw_bench::create::storm::{self, CREATED, Storm};
use thaw_bench::surroundings::Surroundings;
use thaw_bench::{Report, by_quick, conclude};

/// As many at once as their slowest is to be compared with their median.
const FEW: usize = 50;
/// Of many at once a few rounds are as many samples as many of few at once: in the lab one of 50 takes a minute. The most at once are last,
/// because on a busy machine a guest among them may not answer in time.
const WHOLE: &[Storm] = &[
    Storm::new(Ready::Parts, 1, 20),
    Storm::new(Ready::Parts, 10, 20),
    Storm::new(Ready::Parts, FEW, 5),
    Storm::new(Ready::Parked, 1, 20),
    Storm::new(Ready::Parked, 10, 10),
    Storm::new(Ready::Nothing, 1, 20),
    Storm::new(Ready::Nothing, 10, 5),
    Storm::new(Ready::Parts, 200, 1),
];
/// To see that all of it works, and about where it stands.
const QUICK: &[Storm] = &[
    Storm::new(Ready::Parts, 1, 2),
    Storm::new(Ready::Parts, FEW, 1),
    Storm::new(Ready::Parked, 1, 2),
    Storm::new(Ready::Nothing, 1, 2),
];

fn main() -> ExitCode {
    let storms = by_quick(QUICK, WHOLE);
    let measured = tokio::runtime::Runtime::new()
        .map_err(|e| format!("no runtime: {e}"))
        .and_then(|runtime| runtime.block_on(measure(storms)));
    conclude("create-linux", measured)
}

async fn measure(storms: &[Storm]) -> Result<Report, String> {
    let mut place = Surroundings::read("make bench-create")?.place("busybox");
    let mut report = Report::new("create-linux");
    report.note(
        "The guest is Linux with busybox's image, one vCPU and 128 MiB. Its process, `sleep`, runs when the creation is answered. \
         Rows are named as above.",
    );
    for storm in storms {
        place = storm.run(place, &mut report).await?;
        if (storm.at_once, storm.ready) == (FEW, Ready::Parts) {
            let warm = storm::name(FEW, Ready::Parts, false, CREATED);
            report.ratio_of(
                &format!("create_linux_p99_over_p50_at_{FEW}"),
                (&warm, 99.0),
                (&warm, 50.0),
            )?;
        }
        report.keep()?;
    }
    Ok(report)
}
