//! `make bench-data`: a guest's requests to its disks, through the threads of a machine's devices, beside a plain program's to a file.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use thaw_bench::data::Disks;
use thaw_bench::data::driver::{LONGEST, Operation};
use thaw_bench::data::workload::{BYTES, Offsets, Plain, Store};
use thaw_bench::{Report, by_quick, conclude};

/// Rounds, each of every workload on the disk and on the file in turn.
const WHOLE: usize = 20;
const QUICK: usize = 3;
/// Random requests of a round; those with a sync; round trips to a neighbour.
const RANDOM: usize = 40_000;
const SYNCED: usize = 100;
const TRIPS: usize = 500;

const READS: &str = "random reads of 4 KiB";
const WRITES: &str = "random writes of 4 KiB";
const SYNCS: &str = "random writes of 4 KiB, each synced";
const LONG_READS: &str = "reads of 1 MiB, in order";
const LONG_WRITES: &str = "writes of 1 MiB, in order";
const IDLE: &str = "a read of another disk, idle";
const BESIDE: &str = "a read of another disk, beside syncs";

fn main() -> ExitCode {
    let rounds = by_quick(QUICK, WHOLE);
    conclude("data", measure(rounds))
}

fn measure(rounds: usize) -> Result<Report, String> {
    let mut report = Report::new("data");
    let place = Path::new("target/bench");
    std::fs::create_dir_all(place).map_err(|e| format!("{}: {e}", place.display()))?;
    let mut disks = Disks::new(filled(place)?.into(), filled(place)?.into())?;
    let mut plain = Plain::new(filled(place)?);
    for round in 0..=rounds {
        // The first warms up.
        let mut discarded = Report::new("warm-up");
        let report = if round == 0 { &mut discarded } else { &mut report };
        one_round(&mut disks.disk, "disk", report)?;
        one_round(&mut plain, "file", report)?;
        for trip in disks.round_trips(TRIPS)? {
            report.sample(IDLE, "µs", trip);
        }
        for trip in disks.round_trips_beside_syncs(TRIPS)? {
            report.sample(BESIDE, "µs", trip);
        }
    }
    for (ratio, what) in [
        ("randread_over_host", READS),
        ("randwrite_over_host", WRITES),
        ("fsync_over_host", SYNCS),
        ("seqread_over_host", LONG_READS),
        ("seqwrite_over_host", LONG_WRITES),
    ] {
        report.ratio(ratio, &format!("{what}: disk"), &format!("{what}: file"))?;
    }
    report.ratio_of("fsync_neighbour_rtt_p99_over_idle", (BESIDE, 99.0), (IDLE, 99.0))?;
    report.note(
        "The driver keeps 32 random requests and 4 long ones in flight, and one that is synced. The plain program has one thread and \
         makes one call after the other. Files are in the page cache; a sync reaches the host's disk.",
    );
    report
        .write(place)
        .map_err(|e| format!("{}: {e}", place.display()))?;
    Ok(report)
}

/// A file without a name, of [`BYTES`] bytes that are no zeros.
fn filled(place: &Path) -> Result<File, String> {
    let failed = |e: std::io::Error| format!("a file in {}: {e}", place.display());
    let mut file = tempfile::tempfile_in(place).map_err(failed)?;
    let bytes = vec![1; LONGEST];
    for _ in (0..BYTES).step_by(LONGEST) {
        file.write_all(&bytes).map_err(failed)?;
    }
    file.sync_all().map_err(failed)?;
    Ok(file)
}

/// Each workload once.
fn one_round(store: &mut impl Store, which: &str, report: &mut Report) -> Result<(), String> {
    let mut sample = |what: &str, unit: &str, amount: f64, began: Instant| {
        let rate = amount / began.elapsed().as_secs_f64();
        report.sample(&format!("{what}: {which}"), unit, rate);
    };
    for (what, operation) in [(READS, Operation::Read), (WRITES, Operation::Write)] {
        let began = Instant::now();
        store.random(operation, &mut Offsets::new(BYTES), RANDOM)?;
        sample(what, "kop/s", RANDOM as f64 / 1e3, began);
    }
    let began = Instant::now();
    store.write_and_sync(&mut Offsets::new(BYTES), SYNCED)?;
    sample(SYNCS, "op/s", SYNCED as f64, began);
    for (what, operation) in [(LONG_READS, Operation::Read), (LONG_WRITES, Operation::Write)] {
        let began = Instant::now();
        store.sequential(operation)?;
        sample(what, "GiB/s", BYTES as f64 / f64::from(1 << 30), began);
    }
    Ok(())
}
