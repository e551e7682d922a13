//! What sandboxes have of their host's memory, each page counted once: what their VMMs alone have, the templates in thawd's
//! memory, and the page cache of what is stored.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::shim::memory::line;

const PAGE: usize = 4096;

/// Bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Anonymous pages of VMMs: what guests wrote, and the VMMs' own.
    vmms: u64,
    /// Memory files of thawd, which it maps into VMMs: templates.
    templates: u64,
    /// Pages of files below the data directory that are in the page cache.
    cache: u64,
}

impl Memory {
    /// What these VMMs, this thawd and this data directory have now.
    ///
    /// # Errors
    /// What cannot be looked at.
    pub fn of(vmms: &BTreeSet<i64>, thawd: i32, data: &Path) -> Result<Memory, String> {
        let mut memory = Memory::default();
        for vmm in vmms {
            let path = format!("/proc/{vmm}/smaps_rollup");
            let rollup = fs::read_to_string(&path).map_err(|e| format!("{path}: {e}"))?;
            memory.vmms += line(&rollup, "Pss_Anon:") as u64 * 1024;
        }
        memory.templates = memory_files(thawd).map_err(|e| format!("thawd's descriptors: {e}"))?;
        memory.cache = cached_below(data).map_err(|e| format!("{}: {e}", data.display()))?;
        Ok(memory)
    }

    /// What machines have: all but the page cache of what is stored.
    pub fn of_machines(self) -> u64 {
        self.vmms + self.templates
    }

    /// Each by its name.
    pub fn parts(self) -> [(&'static str, u64); 3] {
        [
            ("VMMs and guests", self.vmms),
            ("templates", self.templates),
            ("page cache of stores", self.cache),
        ]
    }

    /// All of them.
    pub fn whole(self) -> u64 {
        self.parts().into_iter().map(|(_, bytes)| bytes).sum()
    }
}

/// What the memory files take that a process has open, each once.
fn memory_files(pid: i32) -> io::Result<u64> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        let path = entry?.path();
        // Closed since it was listed.
        let (Ok(place), Ok(metadata)) = (fs::read_link(&path), fs::metadata(&path)) else {
            continue;
        };
        if place.to_string_lossy().starts_with("/memfd:") {
            files.insert((metadata.dev(), metadata.ino()), metadata.blocks() * 512);
        }
    }
    Ok(files.into_values().sum())
}

fn cached_below(directory: &Path) -> io::Result<u64> {
    let (mut bytes, mut left) = (0, vec![PathBuf::from(directory)]);
    while let Some(directory) = left.pop() {
        for entry in fs::read_dir(directory)? {
            let entry = entry?;
            let kind = entry.file_type()?;
            if kind.is_dir() {
                left.push(entry.path());
            } else if kind.is_file() {
                bytes += cached(&File::open(entry.path())?)?;
            }
        }
    }
    Ok(bytes)
}

/// Bytes of a file that are in the page cache (mincore(2) of a mapping of it).
fn cached(file: &File) -> io::Result<u64> {
    let length = file.metadata()?.len() as usize;
    if length == 0 {
        return Ok(0);
    }
    // SAFETY: a new mapping, at an address the kernel chooses, of a file that is open; nothing is read through it.
    let at = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            length,
            libc::PROT_READ,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            0,
        )
    };
    if at == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let mut pages = vec![0u8; length.div_ceil(PAGE)];
    // SAFETY: the range is the mapping made above, and there is a byte for each of its pages.
    let done = unsafe { libc::mincore(at, length, pages.as_mut_ptr()) };
    let error = io::Error::last_os_error();
    // SAFETY: the same mapping, which nothing refers to.
    unsafe { libc::munmap(at, length) };
    match done {
        0 => Ok(pages.iter().filter(|page| **page & 1 == 1).count() as u64 * PAGE as u64),
        _ => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_just_written_is_in_the_page_cache() {
        let directory = tempfile::tempdir().unwrap();
        let below = directory.path().join("a/b");
        fs::create_dir_all(&below).unwrap();
        fs::write(below.join("file"), vec![1; 3 * PAGE + 1]).unwrap();
        fs::write(below.join("empty"), "").unwrap();
        assert_eq!(cached_below(directory.path()).unwrap(), 4 * PAGE as u64);
    }

    #[test]
    fn a_memory_file_counts_once_with_what_it_takes() {
        let file = rustix::fs::memfd_create("template", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let file = File::from(file);
        file.set_len(1 << 20).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &[1; 2 * PAGE], 0).unwrap();
        // It has the file twice, and no other.
        let mut holder = std::process::Command::new("sleep")
            .arg("60")
            .stdin(file.try_clone().unwrap())
            .stdout(file)
            .spawn()
            .unwrap();
        let found = memory_files(holder.id() as i32);
        holder.kill().unwrap();
        holder.wait().unwrap();
        assert_eq!(found.unwrap(), 2 * PAGE as u64);
    }
}
