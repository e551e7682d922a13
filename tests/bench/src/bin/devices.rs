//! `make bench-devices`: disk, network, volume and vsock of one guest under thaw-vmm and under QEMU's microvm, in turn; and the output of a
//! command in a container.

use std::path::PathBuf;
use std::process::ExitCode;

use thaw_bench::clock::progress;
use thaw_bench::devices::setting::Setting;
use thaw_bench::devices::stdout::{Output, STDOUT};
use thaw_bench::devices::{
    DISK_BOTH, DISK_READS, DISK_WRITES, NET_IN, NET_OUT, VOLUME_WRITES, VSOCK_IN, VSOCK_OUT, qemu, row, thaw,
};
use thaw_bench::{Report, boot, by_quick, conclude};

/// How much is measured.
struct Plan {
    /// Guests of each VMM.
    boots: usize,
    /// What each guest measures, not counting a first round that warms up.
    rounds: usize,
}

const WHOLE: Plan = Plan { boots: 5, rounds: 10 };
/// To see that all of it works.
const QUICK: Plan = Plan { boots: 1, rounds: 2 };

fn main() -> ExitCode {
    let plan = by_quick(&QUICK, &WHOLE);
    conclude("devices", measure(plan))
}

fn measure(plan: &Plan) -> Result<Report, String> {
    let variable = |name: &str| {
        std::env::var_os(name).map(PathBuf::from).ok_or(format!(
            "{name} is not set: run this through `make bench-devices`"
        ))
    };
    let program = variable("THAW_BIN")?.join("bench-guest-devices");
    boot::qemu::usable()?;
    let virtiofsd = qemu::virtiofsd();
    // Where there is room for the disk.
    let place = variable("THAW_DATA")
        .ok()
        .and_then(|data| Some(data.parent()?.to_owned()));
    let directory = tempfile::tempdir_in(place.unwrap_or_else(std::env::temp_dir))
        .map_err(|e| format!("no temporary directory: {e}"))?;
    // Before this thread is on a host of its own.
    let output = Output::start();
    let setting = Setting::make(&variable("THAW_KERNEL")?, &program, directory.path())?;
    let mut report = Report::new("devices");
    notes(&mut report, virtiofsd.is_some());
    progress("bench-devices", "guests");
    for number in 1..=plan.boots {
        thaw::measure(&setting, plan.rounds, &mut report)
            .map_err(|e| format!("guest {number} under thaw-vmm: {e}"))?;
        qemu::measure(&setting, virtiofsd.as_deref(), plan.rounds, &mut report)
            .map_err(|e| format!("guest {number} under QEMU: {e}"))?;
        for _ in 0..plan.rounds {
            output
                .measure(&mut report)
                .map_err(|e| format!("output {number}: {e}"))?;
        }
        ratios(&mut report, virtiofsd.is_some())?;
        report.keep()?;
        progress(
            "bench-devices",
            format!("guests {number} of {} are done", plan.boots),
        );
    }
    setting.end();
    Ok(report)
}

fn notes(report: &mut Report, has_volume: bool) {
    report.note(
        "The guest makes one request after the other: direct ones of 4 KiB to its disk, a file in the host's page cache, and buffered \
         writes of 4 KiB to a volume. QEMU's disk has cache=writeback; virtiofsd has cache=auto, as thaw-share. A command's output goes \
         from the guest's agent through thawd to `thaw exec`.",
    );
    if !has_volume {
        report.note("This host has no virtiofsd, so QEMU's guest had no volume.");
    }
    if !qemu::has_vhost_net() {
        report.note("This host has no vhost-net, so QEMU itself served the network.");
    }
}

/// Rates of Thaw over QEMU's: more is better.
fn ratios(report: &mut Report, has_volume: bool) -> Result<(), String> {
    let mut ratio = |name: &str, what: &str| {
        let (ours, theirs) = (row(what, thaw::NAME), row(what, qemu::NAME));
        report.ratio(name, &ours, &theirs)
    };
    ratio("disk_read_over_qemu", DISK_READS)?;
    ratio("disk_write_over_qemu", DISK_WRITES)?;
    ratio("disk_over_qemu", DISK_BOTH)?;
    ratio("net_out_over_qemu", NET_OUT)?;
    ratio("net_in_over_qemu", NET_IN)?;
    ratio("vsock_out_over_qemu", VSOCK_OUT)?;
    ratio("vsock_in_over_qemu", VSOCK_IN)?;
    if has_volume {
        ratio("volume_randwrite_over_virtiofsd", VOLUME_WRITES)?;
    }
    report.ratio("stdout_over_vsock", STDOUT, &row(VSOCK_OUT, thaw::NAME))
}
