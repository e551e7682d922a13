//! Mounts the file systems of every Linux system, on a read-only root. A missing directory is an error of the guest image, and a missing
//! file system one of the kernel. Both are logged and the other mounts are made, so that the log can be read.

use std::fs;
use std::path::Path;

use rustix::mount::{MountFlags, mount};

use crate::error::{Error, Result, WithContext};
use crate::network;

struct Mount {
    kind: &'static str,
    target: &'static str,
    flags: MountFlags,
    data: &'static str,
}

const NOSUID_NOEXEC_NODEV: MountFlags = MountFlags::NOSUID
    .union(MountFlags::NOEXEC)
    .union(MountFlags::NODEV);
const NOSUID_NODEV: MountFlags = MountFlags::NOSUID.union(MountFlags::NODEV);

const MOUNTS: &[Mount] = &[
    Mount {
        kind: "proc",
        target: "/proc",
        flags: NOSUID_NOEXEC_NODEV,
        data: "",
    },
    Mount {
        kind: "sysfs",
        target: "/sys",
        flags: NOSUID_NOEXEC_NODEV,
        data: "",
    },
    Mount {
        kind: "devtmpfs",
        target: "/dev",
        flags: MountFlags::NOSUID,
        data: "mode=0755",
    },
    Mount {
        kind: "devpts",
        target: "/dev/pts",
        flags: MountFlags::NOSUID.union(MountFlags::NOEXEC),
        data: "gid=5,mode=0620,ptmxmode=0666",
    },
    Mount {
        kind: "tmpfs",
        target: "/dev/shm",
        flags: NOSUID_NODEV,
        data: "mode=1777",
    },
    Mount {
        kind: "mqueue",
        target: "/dev/mqueue",
        flags: NOSUID_NOEXEC_NODEV,
        data: "",
    },
    Mount {
        kind: "tmpfs",
        target: "/run",
        flags: NOSUID_NODEV,
        data: "mode=0755",
    },
    Mount {
        kind: "tmpfs",
        target: "/tmp",
        flags: NOSUID_NODEV,
        data: "mode=1777",
    },
    Mount {
        kind: "cgroup2",
        target: "/sys/fs/cgroup",
        flags: NOSUID_NOEXEC_NODEV,
        data: "nsdelegate,memory_recursiveprot",
    },
];

/// Mounts everything. Returns the errors of the mounts that failed.
pub fn mount_all() -> Vec<Error> {
    let mut failures: Vec<Error> = MOUNTS.iter().filter_map(|m| mount_one(m).err()).collect();
    for (link, target) in [
        ("/dev/fd", "/proc/self/fd"),
        ("/dev/stdin", "/proc/self/fd/0"),
        ("/dev/stdout", "/proc/self/fd/1"),
        ("/dev/stderr", "/proc/self/fd/2"),
    ] {
        if fs::symlink_metadata(link).is_err()
            && let Err(e) = std::os::unix::fs::symlink(target, link)
        {
            failures.push(Error::System {
                what: format!("link {link}"),
                source: e,
            });
        }
    }
    failures.extend(crate::container::cgroup::enable_controllers(Path::new("")).err());
    failures
}

fn mount_one(m: &Mount) -> Result<()> {
    // Directories below /dev appear with it; those of the read-only root must be in the image.
    if !Path::new(m.target).is_dir() {
        fs::create_dir(m.target).with_context(|| format!("create {}", m.target))?;
    }
    let data = std::ffi::CString::new(m.data).map_err(|_| Error::Invalid("mount data".into()))?;
    match mount(m.kind, m.target, m.kind, m.flags, data.as_c_str()) {
        // The kernel may have mounted it (CONFIG_DEVTMPFS_MOUNT).
        Err(rustix::io::Errno::BUSY) => Ok(()),
        other => other.with_context(|| format!("mount {} on {}", m.kind, m.target)),
    }
}

/// Kernel settings every container relies on, and the loopback interface.
pub fn settings() {
    for (path, value) in [
        // As in container engines: a separate network has no privileged ports to protect.
        ("/proc/sys/net/ipv4/ip_unprivileged_port_start", "0"),
        ("/proc/sys/net/ipv4/ping_group_range", "0 2147483647"),
        // TCP gives the network device up to 45 segments (64 KiB) at once. By default it gives what the connection sends in 1 ms
        // (tcp_tso_autosize, net/ipv4/tcp_output.c), so that no packet holds up others on a wire for long. Here each packet costs an exit,
        // and the host divides it for the wire.
        ("/proc/sys/net/ipv4/tcp_min_tso_segs", "45"),
    ] {
        if let Err(e) = fs::write(path, value) {
            crate::warning!("{path}: {e}");
        }
    }
    if let Err(e) = network::loopback_up() {
        crate::warning!("loopback: {e}");
    }
}

/// For tests that run the agent as PID 1 of new mount, PID, network, UTS and IPC namespaces over the host's root: mounts a /proc of these
/// namespaces and an empty /run, and leaves kernel-wide settings alone.
pub fn namespaced() {
    use rustix::mount::{MountPropagationFlags, mount_change};
    let _ = mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE);
    for m in MOUNTS
        .iter()
        .filter(|m| ["/proc", "/sys", "/run", "/sys/fs/cgroup"].contains(&m.target))
    {
        if let Err(e) = mount_one(m) {
            crate::warning!("{e}");
        }
    }
    if let Err(e) = crate::container::cgroup::enable_controllers(Path::new("")) {
        crate::warning!("{e}");
    }
    if let Err(e) = network::loopback_up() {
        crate::warning!("loopback: {e}");
    }
}
