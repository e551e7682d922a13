//! `make bench-thaw`, its part with the real guest: thaw to acknowledged handshake against cold boot to the same.

use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use thaw_bench::boot::MEMORY_MIB;
use thaw_bench::thaw::cost;
use thaw_bench::thaw::linux::{Host, Ready, Start, Template};
use thaw_bench::{Report, conclude};

/// Samples of each; one round more, which warms caches, is not counted.
const ROUNDS: usize = 15;
/// Running clones whose cost is measured.
const IDLE: usize = 10;
/// How long they idle first.
const SETTLED: Duration = Duration::from_secs(2);

const COLD: &str = "cold boot to handshake acknowledged";
const SPAWN: &str = "process spawn, restore, thaw to acknowledged";
const SHELL: &str = "shell: restore, thaw to acknowledged";
const PARKED: &str = "parked: thaw to acknowledged";
const WITHOUT: &str = "parked, no working set: thaw to acknowledged";

fn main() -> ExitCode {
    conclude("thaw-linux", measure())
}

fn measure() -> Result<Report, String> {
    let from = |name: &str| {
        std::env::var_os(name)
            .map(PathBuf::from)
            .ok_or(format!("{name} is not set: run this through `make bench-thaw`"))
    };
    let guest_image = from("THAW_BIN")?.join("guest.erofs");
    let directory = tempfile::tempdir().map_err(|e| format!("no temporary directory: {e}"))?;
    let host = Host::open(&from("THAW_KERNEL")?, &guest_image, directory.path())
        .map_err(|e| format!("opening KVM, kernel and guest image: {e}"))?;
    let mut template = host.template().map_err(|e| format!("the template: {e}"))?;
    host.record_working_set(&mut template)
        .map_err(|e| format!("recording the working set: {e}"))?;
    let mut report = Report::new("thaw-linux");
    for number in 0..=ROUNDS {
        let counted = (number > 0).then_some(&mut report);
        round(&host, &template, counted).map_err(|e| format!("round {number}: {e}"))?;
        eprintln!("bench-thaw-linux: round {number} of {ROUNDS}");
    }
    idle_cost(&mut report, &host, &template).map_err(|e| format!("cost of {IDLE} idle clones: {e}"))?;
    ratios(&mut report)?;
    report
        .write(Path::new("target/bench"))
        .map_err(|e| format!("cannot write target/bench: {e}"))?;
    Ok(report)
}

/// One start of each kind, in turn.
fn round(host: &Host, template: &Template, mut report: Option<&mut Report>) -> io::Result<()> {
    let mut sample = |what: &str, ready: Ready| {
        let Some(report) = &mut report else { return };
        report.sample(what, "ms", ready.ms);
        report.sample(&faults(what), "faults", ready.faults as f64);
        if let Some(exits) = ready.exits {
            report.sample(&exits_of(what), "exits", exits as f64);
        }
    };
    sample(COLD, host.cold()?);
    sample(PARKED, host.clone(template, Start::Parked, true)?);
    sample(WITHOUT, host.clone(template, Start::Parked, false)?);
    sample(SHELL, host.clone(template, Start::Shell, true)?);
    sample(SPAWN, host.clone(template, Start::Nothing, true)?);
    Ok(())
}

fn faults(what: &str) -> String {
    format!("{what}: page faults of the vCPU")
}

fn exits_of(what: &str) -> String {
    format!("{what}: KVM exits")
}

/// What clones cost that have shaken hands and do nothing.
fn idle_cost(report: &mut Report, host: &Host, template: &Template) -> io::Result<()> {
    let before = cost::available()?;
    let clones = (0..IDLE)
        .map(|_| host.clone(template, Start::Parked, true))
        .collect::<io::Result<Vec<_>>>()?;
    std::thread::sleep(SETTLED);
    let taken = before - cost::available()?;
    report.sample("idle clone: MemAvailable each", "KiB", taken / IDLE as f64);
    for clone in &clones {
        let footprint = cost::footprint(&clone.vmm, MEMORY_MIB)?;
        report.sample("idle clone: guest memory it wrote", "KiB", footprint.written);
        report.sample("idle clone: PSS besides", "KiB", footprint.vmm);
    }
    Ok(())
}

fn ratios(report: &mut Report) -> Result<(), String> {
    report.ratio("thaw_over_coldboot_linux", PARKED, COLD)?;
    report.ratio("shell_over_coldboot_linux", SHELL, COLD)?;
    report.ratio("spawn_over_coldboot_linux", SPAWN, COLD)?;
    report.ratio(
        "faults_with_over_without_working_set",
        &faults(PARKED),
        &faults(WITHOUT),
    )?;
    if report.percentile((&exits_of(COLD), 50.0)).is_err() {
        report.note("KVM exits are not shown: this host has no /sys/kernel/debug/kvm.");
    }
    Ok(())
}
