//! The defaults that `docker run` gives a container.

use thaw_protocol::agent::{MessageField, layout, oci};

const CAPABILITIES: [&str; 14] = [
    "CAP_AUDIT_WRITE",
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_MKNOD",
    "CAP_NET_BIND_SERVICE",
    "CAP_NET_RAW",
    "CAP_SETFCAP",
    "CAP_SETGID",
    "CAP_SETPCAP",
    "CAP_SETUID",
    "CAP_SYS_CHROOT",
];

const MASKED: [&str; 11] = [
    "/proc/acpi",
    "/proc/asound",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/sys/firmware",
];

const READ_ONLY: [&str; 5] = [
    "/proc/bus",
    "/proc/fs",
    "/proc/irq",
    "/proc/sys",
    "/proc/sysrq-trigger",
];

/// The directory in the guest with the files that hold its name and its name servers.
const GUEST_ETC: &str = "/run/thaw/etc";

/// The network is the guest's own: one sandbox, one network.
const NAMESPACES: [&str; 5] = ["pid", "ipc", "uts", "mount", "cgroup"];

/// The default capabilities.
pub(super) fn default_capabilities() -> Vec<String> {
    CAPABILITIES.iter().map(|c| (*c).to_owned()).collect()
}

/// Whether a capability, named without `CAP_`, is a default.
pub(super) fn has_capability(name: &str) -> bool {
    CAPABILITIES.iter().any(|c| c.strip_prefix("CAP_") == Some(name))
}

/// These capabilities as the bounding set, and for root as the permitted and effective sets too.
pub(super) fn capabilities(all: &[String], is_root: bool) -> oci::LinuxCapabilities {
    let held = if is_root { all.to_vec() } else { Vec::new() };
    oci::LinuxCapabilities {
        Bounding: all.to_vec(),
        Permitted: held.clone(),
        Effective: held,
        ..Default::default()
    }
}

pub(super) fn rlimits() -> Vec<oci::POSIXRlimit> {
    vec![oci::POSIXRlimit {
        Type: "RLIMIT_NOFILE".into(),
        Soft: 1024,
        Hard: 524_288,
        ..Default::default()
    }]
}

pub(super) fn linux(id: &str) -> oci::Linux {
    oci::Linux {
        CgroupsPath: format!("/{id}"),
        Namespaces: NAMESPACES
            .iter()
            .map(|kind| oci::LinuxNamespace {
                Type: (*kind).into(),
                ..Default::default()
            })
            .collect(),
        MaskedPaths: MASKED.iter().map(|p| (*p).to_owned()).collect(),
        ReadonlyPaths: READ_ONLY.iter().map(|p| (*p).to_owned()).collect(),
        Resources: MessageField::some(oci::LinuxResources::default()),
        ..Default::default()
    }
}

/// The file whose content changes at every thaw. The agent writes it, and the container reads it.
pub(super) fn generation() -> oci::Mount {
    oci::Mount {
        destination: layout::GENERATION.into(),
        type_: "bind".into(),
        source: layout::GENERATION.into(),
        options: ["bind", "private", "ro"].map(str::to_owned).into(),
        ..Default::default()
    }
}

pub(super) fn mounts() -> Vec<oci::Mount> {
    let mount = |destination: &str, kind: &str, source: &str, options: &[&str]| oci::Mount {
        destination: destination.into(),
        type_: kind.into(),
        source: source.into(),
        options: options.iter().map(|o| (*o).to_owned()).collect(),
        ..Default::default()
    };
    let mut all = vec![
        mount("/proc", "proc", "proc", &["nosuid", "noexec", "nodev"]),
        mount(
            "/dev",
            "tmpfs",
            "tmpfs",
            &["nosuid", "strictatime", "mode=755", "size=65536k"],
        ),
        mount(
            "/dev/pts",
            "devpts",
            "devpts",
            &[
                "nosuid",
                "noexec",
                "newinstance",
                "ptmxmode=0666",
                "mode=0620",
                "gid=5",
            ],
        ),
        mount("/sys", "sysfs", "sysfs", &["nosuid", "noexec", "nodev", "ro"]),
        mount(
            "/sys/fs/cgroup",
            "cgroup2",
            "cgroup",
            &["nosuid", "noexec", "nodev", "ro"],
        ),
        mount("/dev/mqueue", "mqueue", "mqueue", &["nosuid", "noexec", "nodev"]),
        mount(
            "/dev/shm",
            "tmpfs",
            "shm",
            &["nosuid", "noexec", "nodev", "mode=1777", "size=65536k"],
        ),
    ];
    // The agent writes these files for the guest's identity, and again when that changes.
    all.extend(["hosts", "hostname", "resolv.conf"].map(|name| {
        mount(
            &format!("/etc/{name}"),
            "bind",
            &format!("{GUEST_ETC}/{name}"),
            &["bind", "private"],
        )
    }));
    all
}
