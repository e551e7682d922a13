//! `make bench-boot`: boot to agent ready, by stage, thaw-vmm and QEMU's microvm in turn.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use thaw_bench::{Report, boot, conclude};

/// Boots of each; the first pair, which warms the page cache, is not counted.
const ROUNDS: usize = 20;

fn main() -> ExitCode {
    conclude("boot", measure())
}

fn measure() -> Result<Report, String> {
    let from = |name: &str, hint: &str| {
        std::env::var_os(name)
            .map(PathBuf::from)
            .ok_or(format!("{name} is not set: {hint}"))
    };
    let kernel = from("THAW_KERNEL", "run this through `make bench-boot`")?;
    let guest_image = from("THAW_BIN", "run this through `make bench-boot`")?.join("guest.erofs");
    let directory = tempfile::tempdir().map_err(|e| format!("no temporary directory: {e}"))?;
    let peer = boot::qemu::usable();
    if let Err(why) = &peer {
        eprintln!("bench-boot: without QEMU's rows: {why}");
    }
    let mut report = Report::new("boot");
    for round in 0..=ROUNDS {
        let thaw = boot::thaw::boot(&kernel, &guest_image, directory.path())
            .map_err(|e| format!("boot {round} under thaw-vmm: {e}"))?;
        let qemu = match peer {
            Ok(()) => Some(
                boot::qemu::boot(&kernel, &guest_image, directory.path())
                    .map_err(|e| format!("boot {round} under QEMU: {e}"))?,
            ),
            Err(_) => None,
        };
        eprintln!("bench-boot: round {round} of {ROUNDS}");
        if round > 0 {
            sample(&mut report, "thaw", thaw);
            if let Some(qemu) = qemu {
                sample(&mut report, "qemu microvm", qemu);
            }
        }
    }
    if peer.is_ok() {
        report.ratio(
            "boot_over_qemu_microvm",
            "thaw: boot to agent ready",
            "qemu microvm: boot to agent ready",
        )?;
    }
    report
        .write(Path::new("target/bench"))
        .map_err(|e| format!("cannot write target/bench: {e}"))?;
    Ok(report)
}

fn sample(report: &mut Report, vmm: &str, boot: boot::Boot) {
    let stages = [
        ("VMM start", boot.vmm),
        ("kernel", boot.kernel),
        ("agent", Some(boot.agent)),
        ("boot to agent ready", Some(boot.total)),
    ];
    for (stage, time) in stages {
        if let Some(time) = time {
            report.sample(&format!("{vmm}: {stage}"), "ms", time);
        }
    }
}
