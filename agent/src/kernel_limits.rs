//! Raises limits that the kernel computes at boot from the memory size and never again, when memory is plugged.
//!
//! A template is booted with little memory. Without this, a guest of any size would have a small guest's limits
//! of threads, files and sockets. The formulas are those of Linux 6.1, each with its file. They depend on
//! memory alone (`pid_max` depends on the number of possible CPUs, which a template has from boot). Table sizes
//! stay: the TCP table is allocated at boot, and resizing the connection tracking table waits for all CPUs for
//! milliseconds (`nf_conntrack_hash_resize`). The limit of tracked connections does not depend on that table:
//! `nf_conntrack_max` is compared with the number of connections, and each bucket is a list. When 65,536
//! connections are tracked, the 1,024 buckets of a template have lists of 64, which is slower to search but
//! correct. A guest that tracks that many can write `nf_conntrack_buckets` itself.
//!
//! Invariant: no limit is lowered, and nothing changes unless the guest has more memory than ever before. New
//! network namespaces copy their limits from the agent's network namespace.

use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::error::{Result, WithContext};
use crate::warning;

const PAGE: u64 = 4096;
const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const SYSCTLS: &str = "/proc/sys";

/// Pages of a thread's stack in the kernel (THREAD_SIZE, arch/x86/include/asm/page_64_types.h).
const STACK: u64 = 4;
/// Bytes charged for an inotify watch, a fanotify mark and an epoll watch: sizes of structures on x86-64.
const INOTIFY_WATCH: u64 = 80 + 2 * INODE;
const FANOTIFY_MARK: u64 = 2 * INODE;
const EPOLL_WATCH: u64 = 120 + 64;
const INODE: u64 = 608;

/// Number of the counters in struct ucounts that are namespaces (kernel/ucount.c).
const NAMESPACES: [&str; 8] = [
    "user/max_user_namespaces",
    "user/max_pid_namespaces",
    "user/max_uts_namespaces",
    "user/max_ipc_namespaces",
    "user/max_net_namespaces",
    "user/max_mnt_namespaces",
    "user/max_cgroup_namespaces",
    "user/max_time_namespaces",
];

/// The memory in pages that the present limits are computed for, or 0 if this agent must not change them.
static MADE_FOR: AtomicU64 = AtomicU64::new(0);

/// Notes that the kernel's own limits are in force. Must be called before memory is plugged.
pub fn of_boot() {
    MADE_FOR.store(total_pages(), Ordering::Relaxed);
}

/// Raises the limits if there is more memory than they were computed for. A limit that cannot be raised is
/// logged, because a guest works even with limits that are too low.
pub fn follow_memory() {
    if MADE_FOR.load(Ordering::Relaxed) == 0 {
        return;
    }
    let total = total_pages();
    if MADE_FOR.fetch_max(total, Ordering::Relaxed) >= total {
        return;
    }
    let limits = Limits::of(as_booted(total));
    for (file, least) in limits.sysctls() {
        if let Err(e) = raise(Path::new(SYSCTLS), file, &least) {
            warning!("{e}");
        }
    }
    for resource in [Resource::Nproc, Resource::Sigpending] {
        if let Err(e) = raise_own(resource, limits.processes) {
            warning!("{e}");
        }
    }
}

/// Number of pages that the kernel manages: `totalram_pages()`.
fn total_pages() -> u64 {
    let info = rustix::system::sysinfo();
    info.totalram.saturating_mul(u64::from(info.mem_unit)) / PAGE
}

/// The value that `totalram_pages()` would have had at boot, computed from its present value.
///
/// At boot the kernel allocates struct pages, 64 bytes per page, before it counts. Those of plugged memory are
/// allocated from counted pages.
fn as_booted(pages: u64) -> u64 {
    pages - pages / 64
}

/// The limits of a kernel booted with a certain memory size.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Limits {
    threads: u64,
    /// The limit of PID 1, which its children inherit; also the limit of namespaces of each kind.
    processes: u64,
    files: u64,
    inotify_watches: u64,
    fanotify_marks: u64,
    epoll_watches: u64,
    /// In pages: no pressure, pressure, maximum.
    tcp_memory: [u64; 3],
    udp_memory: [u64; 3],
    /// Maximum of a TCP socket's buffers, in bytes.
    tcp_send: u64,
    tcp_receive: u64,
    tcp_orphans: u64,
    tcp_time_wait: u64,
    tcp_syn_backlog: u64,
    tracked_connections: u64,
}

impl Limits {
    /// The limits of a kernel that counts this many pages at boot.
    fn of(pages: u64) -> Limits {
        let threads = threads(pages);
        let free = free_buffer_pages(pages);
        let established = tcp_established(pages);
        Limits {
            threads,
            processes: threads / 2,
            files: files(pages),
            inotify_watches: watches(pages, INOTIFY_WATCH),
            fanotify_marks: watches(pages, FANOTIFY_MARK),
            epoll_watches: pages / 25 * PAGE / EPOLL_WATCH,
            tcp_memory: socket_memory(free / 16),
            udp_memory: socket_memory(free / 8),
            tcp_send: tcp_buffer(free, 64 * KIB, 4 * MIB),
            tcp_receive: tcp_buffer(free, 128 * KIB, 6 * MIB),
            tcp_orphans: established / 2,
            tcp_time_wait: established / 2,
            tcp_syn_backlog: (established / 128).max(128),
            tracked_connections: tracked_connections(pages),
        }
    }

    /// Each file below `/proc/sys`, with the minimum for each of its numbers.
    fn sysctls(&self) -> impl Iterator<Item = (&'static str, [u64; 3])> {
        let one = |n| [n, 0, 0];
        let namespaces = one(self.processes);
        [
            ("kernel/threads-max", one(self.threads)),
            ("fs/file-max", one(self.files)),
            ("fs/inotify/max_user_watches", one(self.inotify_watches)),
            ("fs/fanotify/max_user_marks", one(self.fanotify_marks)),
            ("fs/epoll/max_user_watches", one(self.epoll_watches)),
            ("net/ipv4/tcp_mem", self.tcp_memory),
            ("net/ipv4/udp_mem", self.udp_memory),
            ("net/ipv4/tcp_wmem", [0, 0, self.tcp_send]),
            ("net/ipv4/tcp_rmem", [0, 0, self.tcp_receive]),
            ("net/ipv4/tcp_max_orphans", one(self.tcp_orphans)),
            ("net/ipv4/tcp_max_tw_buckets", one(self.tcp_time_wait)),
            ("net/ipv4/tcp_max_syn_backlog", one(self.tcp_syn_backlog)),
            ("net/netfilter/nf_conntrack_max", one(self.tracked_connections)),
        ]
        .into_iter()
        .chain(NAMESPACES.into_iter().map(move |file| (file, namespaces)))
    }
}

/// An eighth of memory, in stacks (`set_max_threads`, kernel/fork.c; at most FUTEX_TID_MASK).
fn threads(pages: u64) -> u64 {
    (pages / (8 * STACK)).clamp(20, 0x3fff_ffff)
}

/// A tenth of memory, at 1 KiB per file (`files_maxfiles_init`, fs/file_table.c). The kernel first subtracts
/// one and a half times the memory in use that early, some 2 MiB.
fn files(pages: u64) -> u64 {
    (pages * (PAGE / KIB) / 10).max(8192)
}

/// A hundredth of memory (`inotify_user_setup`, fs/notify/inotify/inotify_user.c; `fanotify_user_setup`,
/// fs/notify/fanotify/fanotify_user.c).
fn watches(pages: u64, cost: u64) -> u64 {
    (pages / 100 * PAGE / cost).clamp(8192, 1 << 20)
}

/// Pages above the zones' high watermarks (`nr_free_buffer_pages`, mm/page_alloc.c). The watermarks are 0.3 %
/// to 2 % of memory, depending on huge pages; this uses the middle.
fn free_buffer_pages(pages: u64) -> u64 {
    pages - pages / 100
}

/// `tcp_init_mem`, net/ipv4/tcp.c; `udp_init`, net/ipv4/udp.c.
fn socket_memory(limit: u64) -> [u64; 3] {
    let limit = limit.max(128);
    let low = limit / 4 * 3;
    [low, limit, low * 2]
}

/// A 128th of memory (`tcp_init`, net/ipv4/tcp.c).
fn tcp_buffer(free: u64, least: u64, most: u64) -> u64 {
    (free * (PAGE / 128)).clamp(least, most)
}

/// Buckets of the connection table, one per 128 KiB (`tcp_init`, net/ipv4/tcp.c; `alloc_large_system_hash`,
/// mm/page_alloc.c); used by `tcp_sk_init`, net/ipv4/tcp_ipv4.c.
fn tcp_established(pages: u64) -> u64 {
    let whole_mib = pages.next_multiple_of(MIB / PAGE);
    (whole_mib / (128 * KIB / PAGE)).next_power_of_two().min(1 << 19)
}

/// `nf_conntrack_init_start`, net/netfilter/nf_conntrack_core.c.
fn tracked_connections(pages: u64) -> u64 {
    if pages > 4 * GIB / PAGE {
        262_144
    } else if pages > GIB / PAGE {
        65_536
    } else {
        (pages * PAGE / 16384 / 8).max(1024)
    }
}

/// Raises each number of a file to at least `least`. If the file is missing, the kernel lacks the feature that it limits.
fn raise(root: &Path, file: &str, least: &[u64]) -> Result<()> {
    match raise_numbers(&root.join(file), least) {
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
        outcome => outcome.with_context(|| format!("raise {file} to {least:?}")),
    }
}

fn raise_numbers(path: &Path, least: &[u64]) -> io::Result<()> {
    let mut file = File::options().read(true).write(true).open(path)?;
    let mut text = [0; 128];
    let length = file.read(&mut text)?;
    let old = numbers(&text[..length]).ok_or(ErrorKind::InvalidData)?;
    let new: Vec<u64> = old
        .iter()
        .zip(least)
        .map(|(old, least)| *old.max(least))
        .collect();
    if new == old {
        return Ok(());
    }
    let text: Vec<String> = new.iter().map(u64::to_string).collect();
    // The kernel accepts a number only from the file's beginning and in one write (sysctl_writes_strict).
    file.write_all_at(format!("{}\n", text.join("\t")).as_bytes(), 0)
}

fn numbers(text: &[u8]) -> Option<Vec<u64>> {
    let text = std::str::from_utf8(text).ok()?;
    text.split_ascii_whitespace().map(|n| n.parse().ok()).collect()
}

/// Raises a resource limit of this process and of the processes it starts afterwards (`fork_init`,
/// kernel/fork.c).
fn raise_own(resource: Resource, least: u64) -> Result<()> {
    let old = getrlimit(resource);
    // `None` means unlimited.
    let at_least = |limit: Option<u64>| limit.map(|limit| limit.max(least));
    let new = Rlimit {
        current: at_least(old.current),
        maximum: at_least(old.maximum),
    };
    if new == old {
        return Ok(());
    }
    setrlimit(resource, new).with_context(|| format!("raise the limit {resource:?} to {least}"))
}

#[cfg(test)]
#[path = "kernel_limits_test.rs"]
mod tests;
