//! What a sandbox may take of its host at most: the kernel holds its cgroup to it.
//!
//! Invariant: a VMM whose guest keeps to its size never reaches the limits, so the kernel ends only one that does not.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use crate::cgroup::Cgroup;

/// Bytes for what does not grow with the guest: heaps and stacks of the VMM and thaw-share, sockets, page tables of windows.
const FIXED: u64 = 128 << 20;
/// What a guest's page tables and KVM's own records of its memory take, at most: this part of its memory.
const TABLES: u64 = 32;
/// Most processes and threads: a VMM's vCPUs and devices, thaw-share's threads, and KVM's own, several times over.
pub const PROCESSES: u64 = 256;
/// File systems whose files are memory that cannot be taken back, or may be: an overlay can lie on one.
const IN_MEMORY: [u32; 3] = [0x0102_1994, 0x8584_58f6, 0x794c_7630];
/// The files a limit of memory is in, of cgroup v2 and v1.
const MEMORY: [&str; 2] = ["memory.max", "memory.limit_in_bytes"];
/// The v1 limit of memory and swap together: never less than that of memory alone.
const WITH_SWAP: &str = "memory.memsw.limit_in_bytes";

/// Limits of one sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes, also with swap.
    pub memory: u64,
}

/// Why a limit is not set.
#[derive(Debug, thiserror::Error)]
pub enum LimitError {
    #[error("{} is not there: its controller is not enabled for this directory", .0.display())]
    Missing(PathBuf),
    #[error("cannot write {value} to {}: {source}", file.display())]
    Write {
        file: PathBuf,
        value: u64,
        source: io::Error,
    },
}

impl Limits {
    /// Of a guest of so much memory in all, whose VMM and thaw-share may keep so many bytes in files that are memory.
    pub fn of_guest(memory_mib: u32, in_files: u64) -> Limits {
        let memory = with_tables(memory_mib)
            .saturating_add(FIXED)
            .saturating_add(in_files);
        Limits { memory }
    }
}

fn with_tables(memory_mib: u32) -> u64 {
    let guest = u64::from(memory_mib) << 20;
    guest + guest / TABLES
}

/// Whether what is written to a file takes memory, or may.
pub fn is_in_memory(file: impl AsFd) -> bool {
    rustix::fs::fstatfs(file).is_ok_and(|s| is_memory(s.f_type as u32))
}

/// Bytes of memory that writing to a whole file takes: its size where it lies in memory, else none.
pub fn file_in_memory(file: impl AsFd) -> u64 {
    let size = rustix::fs::fstat(&file).map_or(0, |stat| u64::try_from(stat.st_size).unwrap_or(0));
    if is_in_memory(file) { size } else { 0 }
}

/// Bytes of memory that filling the file system at a path takes: its size where it is in memory, else none.
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
    /// Sets limits. Somebody else's place keeps its own.
    ///
    /// # Errors
    /// Names the file that is missing or cannot be written; what was set before it stays.
    pub fn limit(&self, limits: &Limits) -> Result<(), LimitError> {
        if !self.is_ours() {
            return Ok(());
        }
        self.set_one(&MEMORY, limits.memory)?;
        // A kernel that does not account for swap has neither file.
        self.set("memory.swap.max", 0)?;
        self.set(WITH_SWAP, limits.memory)?;
        self.set_one(&["pids.max"], PROCESSES)
    }

    /// Makes room for a guest's memory once more: for a VMM that writes it to a file in memory. Where there is no limit, none
    /// is set.
    pub fn make_room(&self, memory_mib: u32) -> Result<(), LimitError> {
        if !self.is_ours() {
            return Ok(());
        }
        let Some(now) = MEMORY.iter().find_map(|name| self.number(name)) else {
            return Ok(());
        };
        let memory = now.saturating_add(with_tables(memory_mib));
        // The larger one first.
        self.set(WITH_SWAP, memory)?;
        self.set_one(&MEMORY, memory)
    }

    /// Sets whichever of these files there is.
    fn set_one(&self, names: &[&str], value: u64) -> Result<(), LimitError> {
        for name in names {
            if self.set(name, value)? {
                return Ok(());
            }
        }
        let first = self.directories().first().cloned().unwrap_or_default();
        let name = names.first().copied().unwrap_or_default();
        Err(LimitError::Missing(first.join(name)))
    }

    /// Sets a file of any of its directories; whether there is one.
    fn set(&self, name: &str, value: u64) -> Result<bool, LimitError> {
        for directory in self.directories() {
            let file = directory.join(name);
            match write(&file, &value.to_string()) {
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

/// Has the controllers of limits in a cgroup v2 directory of ours, two below the root, where the host allows it. Where it does
/// not, [`Cgroup::limit`] names what is missing.
pub(crate) fn enable(root: &Path, directory: &Path) {
    for (controller, sign) in [("+memory", MEMORY[0]), ("+pids", "pids.max")] {
        if directory.join(sign).exists() {
            continue;
        }
        for above in [Some(root), directory.parent()].into_iter().flatten() {
            let file = above.join("cgroup.subtree_control");
            if let Err(error) = write(&file, controller) {
                tracing::debug!("cannot write {controller} to {}: {error}", file.display());
            }
        }
    }
}

/// Writes to a file of the kernel's; never makes one.
fn write(file: &Path, text: &str) -> io::Result<()> {
    OpenOptions::new()
        .write(true)
        .open(file)?
        .write_all(text.as_bytes())
}

#[cfg(test)]
#[path = "limits_test.rs"]
mod tests;
