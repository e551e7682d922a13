//! `make bench-tenants`: what it costs that tenants share no image and no template, on this machine's own KVM.

use std::path::Path;
use std::process::ExitCode;

use thaw_bench::tenants::{LATER, MEMORY, Stock, name, round};
use thaw_bench::{Report, by_quick, conclude};

/// Tenants of a node.
const TENANTS: [usize; 2] = [1, MOST];
const MOST: usize = 4;
/// Each a new node, shared and separate in turn.
const ROUNDS: usize = 10;
/// To see that all of it works, and about where it stands.
const QUICK: usize = 1;

fn main() -> ExitCode {
    let rounds = by_quick(QUICK, ROUNDS);
    conclude("tenants", measure(rounds))
}

fn measure(rounds: usize) -> Result<Report, String> {
    let own = std::env::current_exe().map_err(|e| format!("where this program is: {e}"))?;
    let binaries = own.parent().unwrap_or(Path::new("."));
    let mut report = Report::new("tenants");
    for _ in 0..rounds {
        for tenants in TENANTS {
            for stock in Stock::ALL {
                round(binaries, tenants, stock, &mut report)?;
            }
        }
    }
    for (ratio, what) in [("memory", MEMORY), ("later_creation", LATER)] {
        let [shared, separate] = Stock::ALL.map(|stock| name(MOST, stock, what));
        report.ratio(
            &format!("tenants_{ratio}_separate_over_shared_at_{MOST}"),
            &separate,
            &shared,
        )?;
    }
    report.note(
        "Each tenant creates 4 sandboxes from a local image of 32 MiB. The guest is a few instructions long and fills 62 MiB before \
         it becomes a template. Each round starts an empty node. If tenants share, the first creation of all pulls the image and \
         builds the template; if they are separate, the first creation of each tenant does. Nothing is prepared in advance.",
    );
    report.note(
        "Memory counts each page once: anonymous pages of VMMs, thawd's memory files, and the page cache of files in THAW_DATA. The \
         guest reads nothing of its image, so only the pull of the image put pages of it into the page cache.",
    );
    report
        .write(Path::new("target/bench"))
        .map_err(|e| format!("cannot write target/bench: {e}"))?;
    Ok(report)
}
