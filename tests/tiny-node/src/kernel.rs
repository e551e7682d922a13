//! What a process costs, and how many objects of each kind the kernel has for all processes together.

use std::collections::BTreeMap;
use std::fs;

/// Kinds of objects that sandboxes are made of, as slabinfo(5) names them.
const KINDS: [&str; 9] = [
    "net_namespace",
    "kvm_vcpu",
    "kvm_mmu_page_header",
    "sock_inode_cache",
    "mnt_cache",
    "nsproxy",
    "pid",
    "task_struct",
    "eventpoll_epi",
];

/// One process's resident memory, descriptors and threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cost {
    pub rss_kib: u64,
    pub descriptors: u64,
    pub threads: u64,
}

impl Cost {
    /// Of a process that lives.
    pub fn of(pid: i32) -> Option<Cost> {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let field = |name: &str| -> Option<u64> {
            let line = status.lines().find_map(|l| l.strip_prefix(name))?;
            line.split_whitespace().next()?.parse().ok()
        };
        Some(Cost {
            rss_kib: field("VmRSS:")?,
            descriptors: fs::read_dir(format!("/proc/{pid}/fd")).ok()?.count() as u64,
            threads: field("Threads:")?,
        })
    }
}

/// How many objects of each kind there are; empty where the kernel does not tell.
pub fn objects() -> BTreeMap<&'static str, u64> {
    let text = fs::read_to_string("/proc/slabinfo").unwrap_or_default();
    let of = |kind: &'static str| {
        let mut words = text
            .lines()
            .map(str::split_whitespace)
            .find_map(|mut words| (words.next() == Some(kind)).then_some(words))?;
        Some((kind, words.next()?.parse().ok()?))
    };
    KINDS.into_iter().filter_map(of).collect()
}
