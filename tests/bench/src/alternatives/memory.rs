//! Memory of a thawed machine: mapped from the snapshot's file, mapped in advance, or copied in by a page server over userfaultfd(2).

use std::io;
use std::path::Path;

use thaw_protocol::control::MemoryMode;
use thaw_tiny_guest::bare::rereading;

use crate::Report;
use crate::clock::{monotonic_ns, us_since};
use crate::thaw::clone::Template;

/// Guest memory, MiB; all but 2 MiB of it has data.
const MEMORY_MIB: u32 = 256;

const MODES: [(MemoryMode, &str); 3] = [
    (MemoryMode::Cow, "cow"),
    (MemoryMode::Populate, "populate"),
    (MemoryMode::Uffd, "uffd"),
];

fn name(mode: &str, what: &str) -> String {
    format!("memory {mode}: {what}")
}

const LOADED: &str = "snapshot loaded into a shell, to first byte";
const READ: &str = "guest reads all of 254 MiB";
const OWN: &str = "memory of the clone's own afterwards";

/// One clone of each mode in turn, `rounds` times; one more round, which warms up, is not counted.
pub fn run(report: &mut Report, rounds: usize, directory: &Path) -> io::Result<()> {
    let template = Template::of(&rereading(MEMORY_MIB), MEMORY_MIB, directory)?;
    for round in 0..=rounds {
        for (mode, called) in MODES {
            let start = monotonic_ns();
            let (mut clone, _server) = template.parked_as(mode)?;
            clone.thaw()?;
            clone.first_byte()?;
            let (loaded, start) = (us_since(start), monotonic_ns());
            clone.first_byte()?;
            let read = us_since(start);
            let own = anonymous_kib(clone.vmm.pid())?;
            if round > 0 {
                report.sample(&name(called, LOADED), "ms", loaded / 1e3);
                report.sample(&name(called, READ), "ms", read / 1e3);
                report.sample(&name(called, OWN), "MiB", own / 1024.0);
            }
        }
    }
    for what in [(LOADED, "loaded"), (READ, "read_all")] {
        report
            .ratio(
                &format!("uffd_{}_over_cow", what.1),
                &name("uffd", what.0),
                &name("cow", what.0),
            )
            .map_err(io::Error::other)?;
    }
    Ok(())
}

/// Memory that a process shares with no file, KiB.
fn anonymous_kib(pid: i32) -> io::Result<f64> {
    let rollup = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
    let line = rollup.lines().find_map(|line| line.strip_prefix("Anonymous:"));
    line.and_then(|line| line.trim().strip_suffix(" kB")?.parse().ok())
        .ok_or_else(|| io::Error::other("smaps_rollup has no line of anonymous memory"))
}
