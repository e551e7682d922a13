//! Limits that the kernel works out at boot from the memory it finds, and never again: raised when memory is plugged.
//!
//! A template is booted small. Without this a guest of any size would have a small one's threads, files and sockets. The
//! formulas are Linux 6.1's, each with its file; they depend on memory alone (`pid_max` depends on CPUs, but on those that
//! are possible, which a template has from boot). The sizes of tables stay: the kernel makes the TCP table at boot, and to
//! change that of connection tracking waits for all CPUs, for milliseconds (`nf_conntrack_hash_resize`). The most
//! connections tracked does not depend on that table: `nf_conntrack_max` is a count that each new connection is held
//! against, and a bucket is a list. A template's 1,024 buckets have lists of 64 when 65,536 are tracked: slower to search,
//! and never wrong. A guest that tracks so many may write `nf_conntrack_buckets` itself.
//!
//! Invariant: nothing is lowered, and nothing is touched unless the guest has more memory than it ever had. Namespaces of
//! the network made later take what is each one's own from the agent's, whose limits these are.

use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::error::{For, Result};
use crate::warning;

const PAGE: u64 = 4096;
const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const SYSCTLS: &str = "/proc/sys";

/// Pages of a thread's stack in the kernel (THREAD_SIZE, arch/x86/include/asm/page_64_types.h).
const STACK: u64 = 4;
/// Bytes that a watch of inotify, a mark of fanotify and a watch of epoll count for: sizes of structures on x86-64.
const INOTIFY_WATCH: u64 = 80 + 2 * INODE;
const FANOTIFY_MARK: u64 = 2 * INODE;
const EPOLL_WATCH: u64 = 120 + 64;
const INODE: u64 = 608;

/// Of struct ucounts, those that are namespaces (kernel/ucount.c).
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

/// Pages of memory the limits in force are made for; 0: they are not this agent's to change.
static MADE_FOR: AtomicU64 = AtomicU64::new(0);

/// The kernel's own limits are in force. Before anything is plugged.
pub fn of_boot() {
    MADE_FOR.store(total_pages(), Ordering::Relaxed);
}

/// Raises the limits if there is more memory than they are made for. A guest with limits that are too low still works, so
/// what cannot be raised is logged.
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

/// Pages the kernel manages, which is `totalram_pages()`.
fn total_pages() -> u64 {
    let info = rustix::system::sysinfo();
    info.totalram.saturating_mul(u64::from(info.mem_unit)) / PAGE
}

/// What `totalram_pages()` would have been at boot, of what it is now.
///
/// At boot the kernel takes struct pages, 64 bytes for each page, out before it counts. Those of plugged memory are taken
/// from pages that are counted.
fn as_booted(pages: u64) -> u64 {
    pages - pages / 64
}

/// The limits of a kernel booted with some memory.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Limits {
    threads: u64,
    /// Of PID 1, which its children inherit; also namespaces of each kind.
    processes: u64,
    files: u64,
    inotify_watches: u64,
    fanotify_marks: u64,
    epoll_watches: u64,
    /// Pages: no pressure, pressure, the most.
    tcp_memory: [u64; 3],
    udp_memory: [u64; 3],
    /// Bytes that a TCP socket's buffers may grow to.
    tcp_send: u64,
    tcp_receive: u64,
    tcp_orphans: u64,
    tcp_time_wait: u64,
    tcp_syn_backlog: u64,
    tracked_connections: u64,
}

impl Limits {
    /// Of a kernel that counts this many pages at boot.
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

    /// Each file below `/proc/sys` with the least each of its numbers may be.
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

/// Stacks in an eighth of memory (`set_max_threads`, kernel/fork.c; the most is FUTEX_TID_MASK).
fn threads(pages: u64) -> u64 {
    (pages / (8 * STACK)).clamp(20, 0x3fff_ffff)
}

/// A tenth of memory, 1 KiB a file (`files_maxfiles_init`, fs/file_table.c). The kernel first takes off half as much
/// again as is in use that early, some 2 MiB.
fn files(pages: u64) -> u64 {
    (pages * (PAGE / KIB) / 10).max(8192)
}

/// A hundredth of memory (`inotify_user_setup`, fs/notify/inotify/inotify_user.c; `fanotify_user_setup`,
/// fs/notify/fanotify/fanotify_user.c).
fn watches(pages: u64, cost: u64) -> u64 {
    (pages / 100 * PAGE / cost).clamp(8192, 1 << 20)
}

/// Pages above the zones' high watermarks (`nr_free_buffer_pages`, mm/page_alloc.c). Those are a third of a percent of
/// memory to 2 %, as huge pages are on or not; the middle is taken.
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

/// Buckets of the table of connections, one for 128 KiB (`tcp_init`, net/ipv4/tcp.c; `alloc_large_system_hash`,
/// mm/page_alloc.c; what is made of it: `tcp_sk_init`, net/ipv4/tcp_ipv4.c).
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

/// Makes each number of a file at least `least`. A file that is not there is of a kernel without what it limits.
fn raise(root: &Path, file: &str, least: &[u64]) -> Result<()> {
    match raise_numbers(&root.join(file), least) {
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
        outcome => outcome.for_(|| format!("raise {file} to {least:?}")),
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
    // The kernel takes a number only whole, from the file's beginning (sysctl_writes_strict).
    file.write_all_at(format!("{}\n", text.join("\t")).as_bytes(), 0)
}

fn numbers(text: &[u8]) -> Option<Vec<u64>> {
    let text = std::str::from_utf8(text).ok()?;
    text.split_ascii_whitespace().map(|n| n.parse().ok()).collect()
}

/// Of this process and of who it starts from now on (`fork_init`, kernel/fork.c).
fn raise_own(resource: Resource, least: u64) -> Result<()> {
    let old = getrlimit(resource);
    // None is without a limit.
    let at_least = |limit: Option<u64>| limit.map(|limit| limit.max(least));
    let new = Rlimit {
        current: at_least(old.current),
        maximum: at_least(old.maximum),
    };
    if new == old {
        return Ok(());
    }
    setrlimit(resource, new).for_(|| format!("raise the limit {resource:?} to {least}"))
}

#[cfg(test)]
#[path = "kernel_limits_test.rs"]
mod tests;
