//! Names the machine, the commit and the build profile of a benchmark.

use std::fs;
use std::process::Command;

/// CPU model, count, memory, kernel, and whether KVM is hardware, software, or nested under emulation.
pub fn describe() -> String {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| {
        cpuinfo
            .lines()
            .find(|l| l.starts_with(name))
            .and_then(|l| l.split_once(':'))
            .map(|(_, v)| v.trim().to_string())
    };
    let model = field("model name").unwrap_or_else(|| "unknown CPU".into());
    let cpus = cpuinfo.lines().filter(|l| l.starts_with("processor")).count();
    let flags = field("flags").unwrap_or_default();
    let virtualisation = flags.split(' ').find(|f| *f == "svm" || *f == "vmx");
    let kvm = match virtualisation {
        _ if !fs::exists("/dev/kvm").unwrap_or(false) => "no KVM",
        None => "software KVM",
        Some(_) if std::env::var_os("THAW_LAB").is_some() => {
            "the nested lab: KVM inside QEMU TCG emulation, so only ratios mean anything"
        }
        Some(_) => "hardware KVM",
    };
    let memory_kib: u64 = fs::read_to_string("/proc/meminfo")
        .unwrap_or_default()
        .lines()
        .find_map(|l| {
            l.strip_prefix("MemTotal:")?
                .trim()
                .strip_suffix(" kB")?
                .parse()
                .ok()
        })
        .unwrap_or(0);
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    format!(
        "{model}, {cpus} CPUs, {} GiB, Linux {}, {kvm}",
        memory_kib.div_ceil(1 << 20),
        release.trim()
    )
}

/// The commit in `THAW_COMMIT` (set where the benchmark runs away from its repository), or git's HEAD.
pub fn commit() -> String {
    if let Ok(commit) = std::env::var("THAW_COMMIT") {
        return commit;
    }
    let output = Command::new("git")
        .args(["describe", "--always", "--dirty", "--abbrev=12"])
        .output();
    match output {
        Ok(o) if o.status.success() => String::from_utf8_lossy(&o.stdout).trim().to_string(),
        _ => "unknown".into(),
    }
}

/// The profile this program was built with: `release` or `debug`. What it measures is built with it (tests/bench/run).
pub fn profile() -> &'static str {
    if cfg!(debug_assertions) {
        "debug"
    } else {
        "release"
    }
}
