//! A file mapped into memory, shared with every other process that maps it.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::ptr::NonNull;

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::guarded::{Content, Guard};

/// A read-only mapping of a whole file.
pub struct Mapped {
    /// Ends before the mapping does.
    guard: Option<Guard>,
    start: NonNull<u8>,
    length: usize,
}

impl Mapped {
    /// Maps a regular file of at least one byte. The file must not be changed or truncated while it is mapped: the store writes metadata
    /// files under another name, and only ever unlinks them. For files that are truncated all the same see [`crate::guarded`].
    pub fn new(file: &File) -> io::Result<Mapped> {
        let metadata = file.metadata()?;
        if !metadata.is_file() || metadata.len() == 0 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "not a regular file, or an empty one",
            ));
        }
        let length = usize::try_from(metadata.len()).map_err(|_| io::ErrorKind::OutOfMemory)?;
        // SAFETY: a new mapping at an address the kernel chooses touches no memory of this process.
        let start = unsafe {
            mmap(
                std::ptr::null_mut(),
                length,
                ProtFlags::READ,
                MapFlags::SHARED,
                file,
                0,
            )
        }?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        let guard = Some(Guard::new(start, length, Content::Metadata));
        Ok(Mapped { guard, start, length })
    }
}

impl AsRef<[u8]> for Mapped {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: `start` begins a mapping of `length` readable bytes that lives as long as `self`; the file is not
        // changed while it is mapped (the contract of `new`).
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.length) }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        self.guard = None;
        // SAFETY: this value owns the mapping, and no reference into it outlives `self`. A failure would only leak it.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.length) };
    }
}

// SAFETY: the mapping is never written; any thread may read it and the last owner unmap it.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}
