//! `make bench-data`: a guest's requests to its disks, through the threads of a machine's devices, beside a plain program's to a file.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use thaw_bench::data::Disks;
use thaw_bench::data::driver::{LONGEST, Operation};
use thaw_bench::data::workload::{BYTES, Deep, Offsets, Plain, Random, Store};
use thaw_bench::{Report, by_quick, conclude};

/// Rounds, each of every workload on the disk and on the file in turn.
const WHOLE: usize = 20;
const QUICK: usize = 3;
/// Random requests in flight, and how many of them a round sends: about as long for each.
const DEPTHS: [(usize, usize); 3] = [(1, 5_000), (8, 20_000), (32, 40_000)];
/// Random calls of the plain program in a round; requests with a sync; round trips to a neighbour.
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
const OWN: &str = "a read of a disk, beside its own syncs";

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
        for (depth, count) in DEPTHS {
            let driver = &mut disks.disk;
            random_round(&mut Deep { driver, depth }, &disk_of(depth), count, report)?;
        }
        random_round(&mut plain, "file", RANDOM, report)?;
        one_round(&mut disks.disk, "disk", report)?;
        one_round(&mut plain, "file", report)?;
        for trip in disks.round_trips(TRIPS)? {
            report.sample(IDLE, "µs", trip);
        }
        for trip in disks.round_trips_beside_syncs(TRIPS)? {
            report.sample(BESIDE, "µs", trip);
        }
        for trip in disks.disk.reads_beside_syncs(TRIPS)? {
            report.sample(OWN, "µs", trip);
        }
    }
    for (ratio, what) in [("randread", READS), ("randwrite", WRITES)] {
        let file = format!("{what}: file");
        for (depth, _) in DEPTHS {
            let disk = format!("{what}: {}", disk_of(depth));
            report.ratio(&format!("{ratio}_over_host_depth_{depth}"), &disk, &file)?;
        }
        // The deepest queue is what a busy guest has.
        report.ratio(
            &format!("{ratio}_over_host"),
            &format!("{what}: {}", disk_of(32)),
            &file,
        )?;
    }
    for (ratio, what) in [
        ("fsync_over_host", SYNCS),
        ("seqread_over_host", LONG_READS),
        ("seqwrite_over_host", LONG_WRITES),
    ] {
        report.ratio(ratio, &format!("{what}: disk"), &format!("{what}: file"))?;
    }
    report.ratio_of("fsync_neighbour_rtt_p99_over_idle", (BESIDE, 99.0), (IDLE, 99.0))?;
    report.ratio_of("fsync_own_rtt_p99_over_idle", (OWN, 99.0), (IDLE, 99.0))?;
    report.note(
        "The driver keeps 1, 8 or 32 random requests and 4 long ones in flight, and one that is synced; ratios without a depth are of 32. The \
         plain program has one thread and makes one call after the other. Files are in the page cache; a sync reaches the host's disk.",
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

/// The disk's name in the report when its driver has so many random requests in flight.
fn disk_of(depth: usize) -> String {
    format!("disk, {depth} in flight")
}

/// Adds the rate of some work that takes from `began` until now.
fn rate(report: &mut Report, (what, which): (&str, &str), (amount, unit): (f64, &str), began: Instant) {
    let rate = amount / began.elapsed().as_secs_f64();
    report.sample(&format!("{what}: {which}"), unit, rate);
}

/// So many random reads, then writes.
fn random_round(
    store: &mut impl Random,
    which: &str,
    count: usize,
    report: &mut Report,
) -> Result<(), String> {
    for (what, operation) in [(READS, Operation::Read), (WRITES, Operation::Write)] {
        let began = Instant::now();
        store.random(operation, &mut Offsets::new(BYTES), count)?;
        rate(report, (what, which), (count as f64 / 1e3, "kop/s"), began);
    }
    Ok(())
}

/// Each other workload once.
fn one_round(store: &mut impl Store, which: &str, report: &mut Report) -> Result<(), String> {
    let began = Instant::now();
    store.write_and_sync(&mut Offsets::new(BYTES), SYNCED)?;
    rate(report, (SYNCS, which), (SYNCED as f64, "op/s"), began);
    for (what, operation) in [(LONG_READS, Operation::Read), (LONG_WRITES, Operation::Write)] {
        let began = Instant::now();
        store.sequential(operation)?;
        rate(
            report,
            (what, which),
            (BYTES as f64 / f64::from(1 << 30), "GiB/s"),
            began,
        );
    }
    Ok(())
}
