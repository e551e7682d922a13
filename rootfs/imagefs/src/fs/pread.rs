//! Reads a shared file at offsets, straight into guest memory.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use fuse_backend_rs::file_buf::FileVolatileSlice;
use fuse_backend_rs::file_traits::FileReadWriteVolatile;

/// Most buffers passed to one system call.
const BATCH: usize = 256;

/// A file that is only read, and only at offsets, so many threads may read at once.
pub struct Positioned<'a>(pub &'a File);

fn read_only() -> io::Error {
    io::Error::from_raw_os_error(libc::EROFS)
}

fn no_position() -> io::Error {
    io::Error::from_raw_os_error(libc::ESPIPE)
}

impl FileReadWriteVolatile for Positioned<'_> {
    fn read_vectored_at_volatile(&mut self, slices: &[FileVolatileSlice], offset: u64) -> io::Result<usize> {
        let offset = i64::try_from(offset).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
        let vectors: Vec<libc::iovec> = slices
            .iter()
            .take(BATCH)
            .map(|slice| libc::iovec {
                iov_base: slice.as_ptr().cast(),
                iov_len: slice.len(),
            })
            .collect();
        // SAFETY: each vector is a slice of guest memory that the caller keeps mapped during the call. The kernel writes to it as a guest
        // might at any time; no reference to it exists in this process.
        let read =
            unsafe { libc::preadv(self.0.as_raw_fd(), vectors.as_ptr(), vectors.len() as i32, offset) };
        usize::try_from(read).map_err(|_| io::Error::last_os_error())
    }

    fn read_at_volatile(&mut self, slice: FileVolatileSlice, offset: u64) -> io::Result<usize> {
        self.read_vectored_at_volatile(&[slice], offset)
    }

    fn read_volatile(&mut self, _: FileVolatileSlice) -> io::Result<usize> {
        Err(no_position())
    }

    fn write_volatile(&mut self, _: FileVolatileSlice) -> io::Result<usize> {
        Err(read_only())
    }

    fn write_at_volatile(&mut self, _: FileVolatileSlice, _: u64) -> io::Result<usize> {
        Err(read_only())
    }
}
