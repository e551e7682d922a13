//! Copies a disk: by reflink if the filesystem supports it, otherwise its data without its holes.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{Mode, OFlags, SeekFrom};
use rustix::io::Errno;

/// Maximum number of bytes that one call copies.
const STEP: u64 = 1 << 30;

/// Makes the empty file `to` a copy of `from`.
pub(super) fn copy(from: &OwnedFd, to: &OwnedFd) -> io::Result<()> {
    if rustix::fs::ioctl_ficlone(to, from).is_ok() {
        return Ok(());
    }
    // Each call passes its offset, because the VMM shares the descriptors' own offset.
    let size = rustix::fs::fstat(from)?.st_size as u64;
    rustix::fs::ftruncate(to, size)?;
    let from = reopened(from)?;
    let mut at = 0;
    while at < size {
        at = match rustix::fs::seek(&from, SeekFrom::Data(at)) {
            Ok(data) => data,
            Err(Errno::NXIO) => return Ok(()),
            Err(e) => return Err(e.into()),
        };
        let end = rustix::fs::seek(&from, SeekFrom::Hole(at))?;
        while at < end {
            at += copy_some(&from, to, at, end - at)?;
        }
    }
    Ok(())
}

/// Copies up to `length` bytes at `offset`. Returns the number of bytes copied.
fn copy_some(from: &File, to: &OwnedFd, offset: u64, length: u64) -> io::Result<u64> {
    let (mut source, mut target) = (offset, offset);
    let length = length.min(STEP) as usize;
    match rustix::fs::copy_file_range(from, Some(&mut source), to.as_fd(), Some(&mut target), length) {
        Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
        Ok(copied) => Ok(copied as u64),
        Err(Errno::XDEV | Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
            let mut buffer = vec![0; length.min(1 << 20)];
            std::os::unix::fs::FileExt::read_exact_at(from, &mut buffer, offset)?;
            let mut done = 0;
            while done < buffer.len() {
                done += rustix::io::pwrite(to, &buffer[done..], offset + done as u64)?;
            }
            Ok(buffer.len() as u64)
        }
        Err(e) => Err(e.into()),
    }
}

/// Opens the same file again, with an offset of its own.
fn reopened(file: &OwnedFd) -> io::Result<File> {
    use std::os::fd::AsRawFd;
    File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// A nameless copy in `directory`, open for reading and writing.
pub(super) fn nameless_copy(from: &OwnedFd, directory: &Path) -> io::Result<OwnedFd> {
    std::fs::create_dir_all(directory)?;
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let to = rustix::fs::open(directory, flags, Mode::RUSR | Mode::WUSR)?;
    copy(from, &to)?;
    Ok(to)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{FileExt, MetadataExt};

    #[test]
    fn a_copy_has_the_data_and_the_holes() {
        let directory = tempfile::tempdir().unwrap();
        let original = tempfile::tempfile_in(directory.path()).unwrap();
        original.set_len(64 << 20).unwrap();
        original.write_all_at(&[5; 5000], 1 << 20).unwrap();
        original.write_all_at(b"end", (64 << 20) - 3).unwrap();
        let copied: File = nameless_copy(&original.into(), directory.path()).unwrap().into();
        let metadata = copied.metadata().unwrap();
        assert_eq!(metadata.len(), 64 << 20);
        assert!(metadata.blocks() * 512 < 1 << 20, "{} blocks", metadata.blocks());
        let mut bytes = [0; 5001];
        copied.read_exact_at(&mut bytes, 1 << 20).unwrap();
        assert_eq!((bytes[0], bytes[4999], bytes[5000]), (5, 5, 0));
        let mut end = [0; 3];
        copied.read_exact_at(&mut end, (64 << 20) - 3).unwrap();
        assert_eq!(&end, b"end");
    }
}
