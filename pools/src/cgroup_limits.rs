//! Resource limits of a sandbox, which the kernel enforces on its cgroup.
//!
//! Invariant: a VMM whose guest stays within its size never reaches the limits of memory and processes, so the kernel kills only a VMM
//! whose guest does not. `docs/operations.md` has the measurements behind the numbers; a test checks [`MEASURED_OVERHEAD`].

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use crate::cgroup::{Cgroup, controllers};

/// Bytes that do not grow with the guest: heaps and stacks of the VMM and thaw-share, sockets, page tables of windows.
const FIXED: u64 = 128 << 20;
/// Most of these bytes that a VMM uses while its guest touches all its memory: four times the measured value.
pub const MEASURED_OVERHEAD: u64 = 32 << 20;
/// The fraction of a guest's memory that its page tables and KVM's own records of it take at most: one part in this many.
const TABLES: u64 = 32;
/// Bytes of kernel memory for each file that thaw-share holds: an inode, its name, an open file.
const SHARED_FILE: u64 = 2 << 10;
/// Most files that thaw-share holds (`share/src/jail.rs`).
const SHARED_FILES: u64 = 1 << 20;
/// Most processes and threads: a VMM's vCPUs and devices, thaw-share's threads, and KVM's own, several times over.
pub const PROCESSES: u64 = 256;
/// The period of a CPU limit, microseconds.
const CPU_PERIOD: u64 = 100_000;
/// File systems whose files are memory that the kernel cannot reclaim: tmpfs, ramfs, and overlayfs, which may lie on one.
const IN_MEMORY: [u32; 3] = [0x0102_1994, 0x8584_58f6, 0x794c_7630];
/// The files of a memory limit, of cgroup v2 and v1.
const MEMORY: [&str; 2] = ["memory.max", "memory.limit_in_bytes"];
/// The v1 limit of memory and swap together: never less than that of memory alone.
const WITH_SWAP: &str = "memory.memsw.limit_in_bytes";
/// The CPU limit's file of cgroup v2, and its files of v1.
const CPU: &str = "cpu.max";
const CPU_V1: [&str; 2] = ["cpu.cfs_period_us", "cpu.cfs_quota_us"];
/// The limits of one sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CgroupLimits {
    /// Bytes, also with swap.
    pub memory: u64,
}

/// Why a limit could not be set.
#[derive(Debug, thiserror::Error)]
pub enum LimitError {
    #[error("{} is not there: its controller is not enabled for this directory", .0.display())]
    Missing(PathBuf),
    #[error("cannot write {value} to {}: {source}", file.display())]
    Write {
        file: PathBuf,
        value: String,
        source: io::Error,
    },
}

/// The memory that a limit must allow for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// All of the guest's memory, MiB.
    pub memory_mib: u32,
    /// Bytes that its VMM and thaw-share may keep in files in memory.
    pub in_files: u64,
    /// It has a thaw-share, for which the kernel keeps a file open for each file that the guest caches.
    pub shares: bool,
}

impl CgroupLimits {
    /// The limits of a sandbox with these needs.
    pub fn of(needs: Needs) -> CgroupLimits {
        let guest = u64::from(needs.memory_mib) << 20;
        let shared = match needs.shares {
            // A file that the guest caches takes about as much memory in the guest as on the host.
            true => guest.min(SHARED_FILE * SHARED_FILES),
            false => 0,
        };
        let memory = with_tables(needs.memory_mib)
            .saturating_add(FIXED)
            .saturating_add(shared)
            .saturating_add(needs.in_files);
        CgroupLimits { memory }
    }
}

fn with_tables(memory_mib: u32) -> u64 {
    let guest = u64::from(memory_mib) << 20;
    guest + guest / TABLES
}

/// Whether data written to a file takes memory, or may.
pub fn is_in_memory(file: impl AsFd) -> bool {
    rustix::fs::fstatfs(file).is_ok_and(|s| is_memory(s.f_type as u32))
}

/// Bytes of memory that a file takes once it is completely written: its size if it is in memory, otherwise 0.
pub fn file_in_memory(file: impl AsFd) -> u64 {
    let size = rustix::fs::fstat(&file).map_or(0, |stat| u64::try_from(stat.st_size).unwrap_or(0));
    if is_in_memory(file) { size } else { 0 }
}

/// Bytes of memory that the file system at a path takes once it is full: its size if it is in memory, otherwise 0.
pub fn tree_in_memory(path: &Path) -> u64 {
    match rustix::fs::statfs(path) {
        Ok(s) if is_memory(s.f_type as u32) => {
            s.f_blocks.saturating_mul(u64::try_from(s.f_bsize).unwrap_or(0))
        }
        _ => 0,
    }
}

fn is_memory(kind: u32) -> bool {
    IN_MEMORY.contains(&kind)
}

impl Cgroup {
    /// Sets the limits of memory, swap and processes. A foreign cgroup keeps its own.
    ///
    /// # Errors
    /// Names the file that is missing or cannot be written; limits that were already set stay.
    pub fn limit(&self, limits: &CgroupLimits) -> Result<(), LimitError> {
        if !self.is_ours() {
            return Ok(());
        }
        self.set_memory(limits.memory)?;
        // A kernel that does not account for swap lacks this file.
        self.set("memory.swap.max", 0)?;
        // If only thaw-share or only the VMM were killed, the guest would see errors: the kernel kills both or neither. Not in cgroup v1.
        self.set("memory.oom.group", 1)?;
        match self.set("pids.max", PROCESSES)? {
            true => Ok(()),
            false => Err(self.missing("pids.max")),
        }
    }

    /// Limits CPU time, in thousandths of a CPU ([`CPU_LIMIT_MILLIS`](thaw_protocol::api::CPU_LIMIT_MILLIS)), and enables the controller
    /// if it is off. A foreign cgroup keeps its own limit.
    ///
    /// # Errors
    /// Those of [`Cgroup::limit`].
    pub fn limit_cpu(&self, millis: u32) -> Result<(), LimitError> {
        if !self.is_ours() {
            return Ok(());
        }
        let quota = u64::from(millis) * CPU_PERIOD / 1000;
        for directory in self.directories() {
            if let Some(root) = directory.ancestors().nth(2) {
                controllers::enable(root, directory, &[("+cpu", CPU)]);
            }
        }
        if self.set(CPU, format_args!("{quota} {CPU_PERIOD}"))? {
            return Ok(());
        }
        let [period, quota_file] = CPU_V1;
        match self.set(period, CPU_PERIOD)? && self.set(quota_file, quota)? {
            true => Ok(()),
            false => Err(self.missing(CPU)),
        }
    }

    /// Raises the limit for a VMM that writes its guest's memory to a file in memory: by that size, and by the bytes that its processes
    /// have already written to such files. If there is no limit, none is set.
    ///
    /// # Errors
    /// Those of [`Cgroup::limit`].
    pub fn make_room(&self, needs: Needs) -> Result<(), LimitError> {
        if !self.is_ours() || MEMORY.iter().all(|name| self.number(name).is_none()) {
            return Ok(());
        }
        let memory = CgroupLimits::of(needs)
            .memory
            .saturating_add(self.in_files())
            .saturating_add(with_tables(needs.memory_mib));
        self.set_memory(memory)
    }

    /// In a v1 hierarchy the limit with swap must never be below the other.
    fn set_memory(&self, memory: u64) -> Result<(), LimitError> {
        let grows = self.number(MEMORY[1]).is_some_and(|now| now < memory);
        if grows {
            self.set(WITH_SWAP, memory)?;
        }
        if !self.set(MEMORY[0], memory)? && !self.set(MEMORY[1], memory)? {
            return Err(self.missing(MEMORY[0]));
        }
        if !grows {
            self.set(WITH_SWAP, memory)?;
        }
        Ok(())
    }

    /// Bytes of files in memory that its processes have written and that still exist.
    fn in_files(&self) -> u64 {
        let statistics = self.directories().iter().map(|d| d.join("memory.stat"));
        let text = statistics.filter_map(|file| fs::read_to_string(file).ok());
        let shared = text.filter_map(|text| {
            let line = text.lines().find_map(|line| line.strip_prefix("shmem "))?;
            line.trim().parse().ok()
        });
        shared.fold(0, u64::saturating_add)
    }

    fn missing(&self, name: &str) -> LimitError {
        let first = self.directories().first().cloned().unwrap_or_default();
        LimitError::Missing(first.join(name))
    }

    /// Writes a file in the first of its directories that has it. Returns whether one has.
    fn set(&self, name: &str, value: impl std::fmt::Display) -> Result<bool, LimitError> {
        let value = value.to_string();
        for directory in self.directories() {
            let file = directory.join(name);
            match controllers::write(&file, &value) {
                Ok(()) => return Ok(true),
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(source) => return Err(LimitError::Write { file, value, source }),
            }
        }
        Ok(false)
    }

    fn number(&self, name: &str) -> Option<u64> {
        let mut read = self.directories().iter().map(|d| d.join(name));
        read.find_map(|file| fs::read_to_string(file).ok()?.trim().parse().ok())
    }
}

#[cfg(test)]
#[path = "cgroup_limits_test.rs"]
mod tests;
