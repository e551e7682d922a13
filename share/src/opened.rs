//! The file that the message being served has opened, on its way to the VMM.
//!
//! The VMM reads and writes such a file itself, which saves two changes of process for each message
//! ([`thaw_protocol::share`]). It could do the same through this process, so it gains no right: the descriptor is
//! the one behind the guest's handle. Invariant: a call for such a file ends as soon as the host's page cache and
//! disk allow. So only regular files of local file systems are handed over, and none whose every write waits for the
//! disk. (A file with `chattr +S` is, which only slows the guest down.)

use std::cell::Cell;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;

use rustix::fs::{FileType, fstat, fstatfs};
use virtiofsd::filesystem::ZeroCopyWriter;
use virtiofsd::oslib::ReadvFlags;

/// The types of local file systems (statfs(2)): ext2 to ext4, XFS, Btrfs, tmpfs.
const LOCAL: [i64; 4] = [
    libc::EXT4_SUPER_MAGIC,
    libc::XFS_SUPER_MAGIC,
    libc::BTRFS_SUPER_MAGIC,
    libc::TMPFS_MAGIC,
];

thread_local! {
    static OPENED: Cell<Option<File>> = const { Cell::new(None) };
}

/// The file that the message served last on this thread has opened, if the VMM may have it.
pub fn take() -> Option<File> {
    OPENED.take()
}

/// A file was opened with these flags (open(2)). `read` reads from it into what it is given.
pub fn note(flags: u32, read: impl FnOnce(&mut Duplicate) -> io::Result<usize>) {
    // O_SYNC contains O_DSYNC.
    if flags & (libc::O_DSYNC | libc::O_DIRECT) as u32 != 0 {
        return;
    }
    let mut duplicate = Duplicate(None);
    // Without a duplicate, this process goes on serving the file.
    let _ = read(&mut duplicate);
    OPENED.set(duplicate.0.filter(is_for_the_vmm));
}

fn is_for_the_vmm(file: &File) -> bool {
    let is_regular =
        fstat(file).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile);
    is_regular
        && fstatfs(file).is_ok_and(|system| {
            let is_synced = system.f_flags as u64 & libc::ST_SYNCHRONOUS != 0;
            LOCAL.contains(&system.f_type) && !is_synced
        })
}

/// The file behind a handle, which virtiofsd shows only to the target of a read.
pub struct Duplicate(Option<File>);

impl ZeroCopyWriter for Duplicate {
    fn read_from_file_at(
        &mut self,
        file: &File,
        _count: usize,
        _offset: u64,
        _flags: Option<ReadvFlags>,
    ) -> io::Result<usize> {
        self.0 = Some(file.as_fd().try_clone_to_owned()?.into());
        Ok(0)
    }
}

#[cfg(test)]
#[path = "opened_test.rs"]
mod tests;
