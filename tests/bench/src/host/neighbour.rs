//! What a guest that floods its disk does to another: how long the other's reads take.
//!
//! Two real thaw-vmm with tiny guests on two processors: the neighbour reads a page of its disk 16,384 times and times each; the
//! other sleeps, floods its disk under a rate limit, or floods it without one.

use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use thaw_protocol::control::{Backend, Command, DeviceId};
use thaw_protocol::device_limits::{Bucket, DeviceLimit, DeviceLimits};
use thaw_tiny_guest::Guest;
use thaw_tiny_guest::disk::{READ, TIMES, flooder, idler, reader};

use crate::report::Report;
use crate::vmm::{Vmm, open_kvm};

/// The ratio this is measured for.
pub const RATIO: &str = "neighbour_p99_under_limited_flood_over_idle";
/// Reads of the neighbour.
const READS: u32 = 16_384;
/// How often each kind of neighbourhood is measured, in turn.
const ROUNDS: usize = 9;
/// The flooder's limit: pages each second. Each wakes two threads, which may delay two of the neighbour's reads: at more than a
/// hundred a second they, and not what is read, would be the neighbour's slowest hundredth.
const LIMIT: u64 = 64;
/// What it may read at once beyond that, in pages.
const BURST: u64 = 8;
/// How long a flood goes on before the neighbour starts: its burst is over.
const BEGUN: Duration = Duration::from_millis(300);

/// What the other guest does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flood {
    None,
    Limited,
    Unlimited,
}

impl Flood {
    const ALL: [Flood; 3] = [Flood::None, Flood::Limited, Flood::Unlimited];

    fn name(self) -> &'static str {
        match self {
            Flood::None => "a neighbour's read, p99, beside an idle guest",
            Flood::Limited => "a neighbour's read, p99, beside a limited flood",
            Flood::Unlimited => "a neighbour's read, p99, beside an unlimited flood",
        }
    }
}

/// Samples all three, and the ratio.
pub fn measure(report: &mut Report, directory: &Path) -> io::Result<()> {
    // What is started from here runs on two processors.
    let before = sched_getaffinity(None)?;
    sched_setaffinity(None, &first_two(&before))?;
    let measured = (0..ROUNDS).try_for_each(|_| {
        Flood::ALL
            .into_iter()
            .try_for_each(|flood| round(report, directory, flood))
    });
    sched_setaffinity(None, &before)?;
    measured?;
    report
        .ratio(RATIO, Flood::Limited.name(), Flood::None.name())
        .map_err(io::Error::other)?;
    report.note(format!(
        "`{RATIO}` compares the medians of {ROUNDS} p99s. Each p99 is of {READS} reads, timed by the guest, on two processors. The \
         flood is limited to {LIMIT} reads per second."
    ));
    Ok(())
}

fn first_two(all: &CpuSet) -> CpuSet {
    let mut two = CpuSet::new();
    (0..CpuSet::MAX_CPU)
        .filter(|cpu| all.is_set(*cpu))
        .take(2)
        .for_each(|cpu| two.set(cpu));
    two
}

fn round(report: &mut Report, directory: &Path, flood: Flood) -> io::Result<()> {
    let (guest, limit) = match flood {
        Flood::None => (idler(), None),
        Flood::Limited => (flooder(), Some(limit())),
        Flood::Unlimited => (flooder(), None),
    };
    let other = Machine::boot(directory, &guest, limit)?;
    std::thread::sleep(BEGUN);
    let (began, read) = (Instant::now(), other.bytes_read()?);
    let mut neighbour = Machine::boot(directory, &reader(READS), None)?;
    neighbour.vmm.wait_for_end()?;
    let seconds = began.elapsed().as_secs_f64();
    let rate = (other.bytes_read()? - read) / f64::from(READ) / seconds;
    check(flood, rate, BURST as f64 / seconds)?;
    let mut times = neighbour.times()?;
    times.sort_unstable();
    let p99 = times[times.len() * 99 / 100];
    report.sample(flood.name(), "thousand ticks", f64::from(p99) / 1e3);
    if flood != Flood::None {
        let name = format!("{}: its reads a second", flood.name());
        report.sample(&name, "reads", rate);
    }
    Ok(())
}

/// The flood was what it is taken for: else nothing was measured.
/// `burst`: what its burst adds to the rate, where the host kept it from reading before.
fn check(flood: Flood, rate: f64, burst: f64) -> io::Result<()> {
    let limit = LIMIT as f64;
    let good = match flood {
        Flood::None => rate < 1.0,
        Flood::Limited => (limit * 0.5..limit * 1.5 + burst).contains(&rate),
        Flood::Unlimited => rate > limit * 10.0,
    };
    match good {
        true => Ok(()),
        false => Err(io::Error::other(format!(
            "{flood:?} flood: {rate:.0} reads a second, with a limit of {LIMIT}"
        ))),
    }
}

fn limit() -> DeviceLimits {
    let bytes = |pages: u64| NonZeroU64::new(pages * u64::from(READ)).expect("it is not 0");
    DeviceLimits::Disk(DeviceLimit {
        bytes: Some(Bucket {
            per_second: bytes(LIMIT),
            burst: bytes(BURST),
            once: 0,
        }),
        operations: None,
    })
}

/// A machine with a guest and a disk.
struct Machine {
    vmm: Vmm,
    disk: File,
}

impl Machine {
    fn boot(directory: &Path, guest: &Guest, limit: Option<DeviceLimits>) -> io::Result<Machine> {
        let disk = tempfile::tempfile_in(directory)?;
        disk.write_all_at(&[7; READ as usize], 0)?;
        disk.set_len(TIMES + 4 * u64::from(READS))?;
        let log: OwnedFd = File::create(directory.join("neighbour.log"))?.into();
        let mut vmm = Vmm::spawn(directory, &log)?;
        vmm.create(&open_kvm()?, 1, 64)?;
        let device = DeviceId::Blk0;
        vmm.attach(device, Backend::Disk { read_only: false }, disk.as_fd())?;
        if let Some(limits) = limit {
            vmm.ask(Command::Limit { device, limits }, &[])?;
        }
        let cmdline = String::new();
        vmm.call(Command::Boot { cmdline }, &[guest.kernel().as_fd()])?;
        Ok(Machine { vmm, disk })
    }

    /// What its process has read of files so far, bytes.
    fn bytes_read(&self) -> io::Result<f64> {
        let text = std::fs::read_to_string(format!("/proc/{}/io", self.vmm.pid()))?;
        let read = text.lines().find_map(|line| line.strip_prefix("rchar: "));
        let read = read.and_then(|bytes| bytes.parse().ok());
        read.ok_or_else(|| io::Error::other("/proc/PID/io has no rchar"))
    }

    /// What its guest timed.
    fn times(&self) -> io::Result<Vec<u32>> {
        let mut bytes = vec![0; 4 * READS as usize];
        self.disk.read_exact_at(&mut bytes, TIMES)?;
        let times: Vec<u32> = bytes
            .chunks_exact(4)
            .map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            .collect();
        match times.contains(&0) {
            true => Err(io::Error::other("the guest did not write its times")),
            false => Ok(times),
        }
    }
}
