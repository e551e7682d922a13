//! Checks of KVM: presence, access, capabilities, and whether it is hardware virtualisation.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;

use super::{Check, Host, hardware_virtualisation};

/// linux/kvm.h: `_IO(KVMIO, 0x00)` and `_IO(KVMIO, 0x03)`.
const KVM_GET_API_VERSION: libc::c_ulong = 0xAE00;
const KVM_CHECK_EXTENSION: libc::c_ulong = 0xAE03;
/// The only version since Linux 2.6.22.
const API_VERSION: i32 = 12;

/// The capabilities that thaw-vmm requires (numbers of linux/kvm.h).
const REQUIRED: [(&str, libc::c_ulong); 16] = [
    ("KVM_CAP_IRQCHIP", 0),
    ("KVM_CAP_USER_MEMORY", 3),
    ("KVM_CAP_SET_TSS_ADDR", 4),
    ("KVM_CAP_EXT_CPUID", 7),
    ("KVM_CAP_CLOCKSOURCE", 8),
    ("KVM_CAP_MP_STATE", 14),
    ("KVM_CAP_SYNC_MMU", 16),
    ("KVM_CAP_DESTROY_MEMORY_REGION_WORKS", 21),
    ("KVM_CAP_IRQ_ROUTING", 25),
    ("KVM_CAP_IRQFD", 32),
    ("KVM_CAP_IOEVENTFD", 36),
    ("KVM_CAP_SET_IDENTITY_MAP_ADDR", 37),
    ("KVM_CAP_ADJUST_CLOCK", 39),
    ("KVM_CAP_TSC_DEADLINE_TIMER", 72),
    ("KVM_CAP_READONLY_MEM", 81),
    ("KVM_CAP_IMMEDIATE_EXIT", 136),
];

/// Optional capabilities: name, number, what a lack costs.
const WISHED: [(&str, libc::c_ulong, &str); 5] = [
    (
        "KVM_CAP_TSC_CONTROL",
        60,
        "a snapshot cannot move to a host with another TSC frequency",
    ),
    (
        "KVM_CAP_KVMCLOCK_CTRL",
        76,
        "a paused guest may report a soft lockup",
    ),
    (
        "KVM_CAP_X2APIC_API",
        129,
        "x2APIC identifiers above 255 are not saved; not reached with 16 vCPUs",
    ),
    (
        "KVM_CAP_VM_DISABLE_NX_HUGE_PAGES",
        220,
        "each VM start may wait for its nx-lpage-recovery thread",
    ),
    (
        "KVM_CAP_PRE_FAULT_MEMORY",
        236,
        "guest memory is populated fault by fault instead of in batches",
    ),
];

pub(super) fn checks(host: &Host) -> Vec<Check> {
    let (device, kvm) = device(host);
    let mut checks = vec![device];
    if let Some(kvm) = kvm {
        checks.push(api(&kvm));
        checks.push(required(&kvm));
        checks.push(wished(&kvm));
    }
    checks.push(hardware(host));
    checks.push(nested(host));
    checks.push(nx_huge_pages(host));
    checks.push(apic(host));
    checks
}

fn device(host: &Host) -> (Check, Option<File>) {
    const NAME: &str = "/dev/kvm";
    let check = match OpenOptions::new().read(true).write(true).open(host.path(NAME)) {
        Ok(kvm) => return (Check::ok(NAME, "opens").essential(), Some(kvm)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Check::missing(
            NAME,
            "not there",
            "no sandbox can run",
            "enable virtualisation in the firmware (or nested virtualisation on the host of this VM), then: modprobe kvm_intel or kvm_amd",
        ),
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => Check::missing(
            NAME,
            "may not be opened",
            "no sandbox can run",
            "usermod -aG kvm $USER, and log in again",
        ),
        Err(e) => Check::missing(
            NAME,
            e.to_string(),
            "no sandbox can run",
            "see dmesg for why KVM does not work",
        ),
    };
    (check.essential(), None)
}

fn ioctl(kvm: &File, request: libc::c_ulong, argument: libc::c_ulong) -> i32 {
    // SAFETY: both requests used here take an integer, not a pointer; on any other device they fail with ENOTTY.
    unsafe { libc::ioctl(kvm.as_raw_fd(), request as _, argument) }
}

fn api(kvm: &File) -> Check {
    const NAME: &str = "KVM API";
    match ioctl(kvm, KVM_GET_API_VERSION, 0) {
        API_VERSION => Check::ok(NAME, "version 12").essential(),
        other => Check::missing(
            NAME,
            format!("version {other}"),
            "no sandbox can run",
            "use Linux 5.10 or later",
        )
        .essential(),
    }
}

fn required(kvm: &File) -> Check {
    const NAME: &str = "KVM capabilities";
    let lacking: Vec<&str> = REQUIRED
        .iter()
        .filter(|(_, number)| ioctl(kvm, KVM_CHECK_EXTENSION, *number) <= 0)
        .map(|(name, _)| *name)
        .collect();
    if lacking.is_empty() {
        return Check::ok(NAME, format!("all {} that are needed", REQUIRED.len())).essential();
    }
    let found = format!("lacks {}", lacking.join(", "));
    Check::missing(
        NAME,
        found,
        "no sandbox can run",
        "use a newer kernel, or another hypervisor below this VM",
    )
    .essential()
}

fn wished(kvm: &File) -> Check {
    const NAME: &str = "KVM extras";
    let lacking: Vec<_> = WISHED
        .iter()
        .filter(|(_, number, _)| ioctl(kvm, KVM_CHECK_EXTENSION, *number) <= 0)
        .collect();
    if lacking.is_empty() {
        return Check::ok(NAME, format!("all {} that help", WISHED.len()));
    }
    let names: Vec<_> = lacking.iter().map(|(name, _, _)| *name).collect();
    let costs: Vec<_> = lacking.iter().map(|(_, _, cost)| *cost).collect();
    Check::warn(
        NAME,
        format!("lacks {}", names.join(", ")),
        costs.join("; "),
        "a newer kernel may have them",
    )
}

fn hardware(host: &Host) -> Check {
    const NAME: &str = "virtualisation";
    if hardware_virtualisation(host) {
        return Check::ok(
            NAME,
            if host.cpu_has("svm") {
                "AMD SVM"
            } else {
                "Intel VMX"
            },
        );
    }
    Check::warn(
        NAME,
        "software KVM: the CPU flags have neither svm nor vmx",
        "Linux guests do not run at speed, or at all; tiny test guests do",
        "run Linux guests in the lab (tests/lab/run -- COMMAND), or use a machine with hardware virtualisation",
    )
}

fn nested(host: &Host) -> Check {
    const NAME: &str = "bare metal";
    if !host.cpu_has("hypervisor") {
        return Check::ok(NAME, "not a virtual machine");
    }
    Check::warn(
        NAME,
        "this host is itself a virtual machine",
        "each exit of a guest goes through the hypervisor below: several µs instead of one",
        "use bare metal where start times matter",
    )
}

fn nx_huge_pages(host: &Host) -> Check {
    const NAME: &str = "kvm.nx_huge_pages";
    match host.read("/sys/module/kvm/parameters/nx_huge_pages") {
        None => Check::ok(NAME, "no such parameter"),
        Some(value) if matches!(value.as_str(), "N" | "0" | "off" | "never") => Check::ok(NAME, value),
        Some(value)
            if host
                .kernel()
                .is_some_and(|(major, minor, _)| (major, minor) >= (6, 14)) =>
        {
            Check::ok(NAME, format!("{value}; harmless since Linux 6.14"))
        }
        Some(value) => Check::warn(
            NAME,
            value,
            "each VM start waits for its recovery thread: up to 100 ms at the 99th percentile",
            "where the CPU is not affected by iTLB multihit: echo never > /sys/module/kvm/parameters/nx_huge_pages",
        ),
    }
}

fn apic(host: &Host) -> Check {
    const NAME: &str = "x2APIC";
    if host.cpu_has("x2apic") {
        return Check::ok(NAME, "the CPU has it");
    }
    Check::warn(
        NAME,
        "xAPIC only",
        "each interrupt between vCPUs is an MMIO access: about 2 µs more",
        "enable x2APIC in the firmware, or expose it to this VM",
    )
}

#[cfg(test)]
mod tests {
    use super::super::{State, tests::host_with};
    use super::*;

    #[test]
    fn software_kvm_is_told_from_hardware() {
        let (_r, software) = host_with(&[("/proc/cpuinfo", "flags : fpu hypervisor\n")]);
        assert_eq!(hardware(&software).state, State::Warn);
        assert!(hardware(&software).fix.contains("lab"));
        let (_r, amd) = host_with(&[("/proc/cpuinfo", "flags : fpu svm\n")]);
        assert_eq!((hardware(&amd).state, nested(&amd).state), (State::Ok, State::Ok));
    }

    #[test]
    fn nx_huge_pages_matter_only_on_older_kernels() {
        let parameter = ("/sys/module/kvm/parameters/nx_huge_pages", "Y\n");
        let (_r, old) = host_with(&[parameter, ("/proc/sys/kernel/osrelease", "6.13.9")]);
        assert_eq!(nx_huge_pages(&old).state, State::Warn);
        let (_r, new) = host_with(&[parameter, ("/proc/sys/kernel/osrelease", "6.14.0")]);
        assert_eq!(nx_huge_pages(&new).state, State::Ok);
    }

    #[test]
    fn a_device_that_is_not_kvm_has_no_version() {
        let (_root, host) = host_with(&[("/dev/kvm", "")]);
        let (check, file) = device(&host);
        assert_eq!(check.state, State::Ok);
        assert_eq!(api(&file.unwrap()).state, State::Missing);
    }
}
