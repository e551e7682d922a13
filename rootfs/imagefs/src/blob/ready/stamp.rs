//! The stamp of a data file: its metadata after the store's last write.
//!
//! Invariant: set bits are trusted only while the data file has the inode, length and times in its stamp. The store makes each write while
//! it holds the ready file's lock, and ends it with a new stamp. If a process that holds the lock finds another inode, length or time,
//! something else has changed the file (or a writer was killed), and all bits are cleared. Each chunk is then compared with its digest
//! before it is served, as after a reboot.
//!
//! A stamp is valid within one boot only: the first process that opens the file in another boot clears the bits anyway. Times are as coarse
//! as the kernel's tick, so a change within the same tick as the store's last write is not detected.

use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::{MutexGuard, PoisonError};

use rustix::fs::{FlockOperation, flock};

use super::{BlobError, ReadyFile};
use crate::digest::Digest;

/// Offset of the stamp in the header, behind the bytes that a release without stamps reads or writes. All zero means that there is no
/// stamp.
const AT: u64 = 128;
const BYTES: usize = 48;

/// The metadata that reveals a change of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp([u8; BYTES]);

impl Stamp {
    fn of(file: &Metadata) -> Stamp {
        let words = [
            file.ino(),
            file.len(),
            file.mtime() as u64,
            file.mtime_nsec() as u64,
            file.ctime() as u64,
            file.ctime_nsec() as u64,
        ];
        let mut bytes = [0; BYTES];
        for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        Stamp(bytes)
    }
}

/// The right to write the data file, exclusive among the threads of this process and among processes.
struct Held<'a> {
    file: &'a File,
    _thread: MutexGuard<'a, ()>,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        let _ = flock(self.file, FlockOperation::Unlock);
    }
}

impl ReadyFile {
    /// Writes a chunk's bytes with `write`, and marks the chunk as ready. `write` must write correct bytes to `data`.
    ///
    /// # Errors
    /// `Io`; the chunk's bit is then unchanged.
    pub fn fill(
        &self,
        data: &File,
        chunk: u64,
        write: impl FnOnce() -> io::Result<()>,
    ) -> Result<(), BlobError> {
        self.change(data, || write().map(|()| self.set_ready(chunk)))
    }

    /// Extends `data` to its full length if it was truncated. Returns whether it was: then the lost chunks are missing until each has been
    /// compared with its digest.
    ///
    /// # Errors
    /// `Io`.
    pub fn restore_length(&self, data: &File) -> Result<bool, BlobError> {
        if data.metadata()?.len() >= self.length() {
            return Ok(false);
        }
        // The bits are cleared first: a reader that saw a bit set and then read zeros sees it unset when it checks again.
        self.change(data, || {
            self.clear(self.chunks_of(data.metadata()?.len(), u64::MAX));
            data.set_len(self.length())
        })?;
        Ok(true)
    }

    /// Records that the present contents of `data` match its bits. For a new blob, before another process gets its files.
    ///
    /// # Errors
    /// `Io`.
    pub fn stamp(&self, data: &File) -> Result<(), BlobError> {
        self.put(Stamp::of(&data.metadata()?))
    }

    /// Whether the data file differs from its stamp: it was changed, or a write of the store is in progress. Does not block.
    ///
    /// # Errors
    /// `Io`.
    pub fn looks_changed(&self, look: impl Fn() -> io::Result<Metadata>) -> Result<bool, BlobError> {
        Ok(self.got()? != Some(Stamp::of(&look()?)))
    }

    /// Makes all chunks missing if something other than the store changed the data file. `look` returns the file's metadata. Returns
    /// whether any chunk was ready. Without a change this only reads metadata and stamp.
    ///
    /// # Errors
    /// `Io`.
    pub fn void_if_changed(&self, look: impl Fn() -> io::Result<Metadata>) -> Result<bool, BlobError> {
        if !self.looks_changed(&look)? {
            return Ok(false);
        }
        // A write of the store may be in progress. Once the lock is held, it has ended and left its stamp.
        let _held = self.hold()?;
        self.settle(Stamp::of(&look()?))
    }

    /// Compares a chunk of `data` with its digest, and sets its bit if they agree. Returns whether it is ready.
    ///
    /// # Errors
    /// `Io`.
    pub fn verify(&self, data: &File, chunk: u64, buffer: &mut Vec<u8>) -> Result<bool, BlobError> {
        if self.is_ready(chunk) {
            return Ok(true);
        }
        let before = Stamp::of(&data.metadata()?);
        if !self.agrees(data, chunk, buffer)? {
            return Ok(false);
        }
        let _held = self.hold()?;
        // A process that detects a change clears the bits. So if the file changed after the comparison, the bit must not be set without
        // another comparison.
        let agrees = Stamp::of(&data.metadata()?) == before || self.agrees(data, chunk, buffer)?;
        if agrees {
            self.set_ready(chunk);
        }
        Ok(agrees)
    }

    /// Changes the data file under the lock, and stamps it. If it was changed before by something else, the bits are cleared first.
    fn change(&self, data: &File, change: impl FnOnce() -> io::Result<()>) -> Result<(), BlobError> {
        let _held = self.hold()?;
        self.settle(Stamp::of(&data.metadata()?))?;
        let changed = change();
        // Also after a failed write: its chunk's bit is not set.
        self.put(Stamp::of(&data.metadata()?))?;
        Ok(changed?)
    }

    /// Clears the bits if the data file has changed since its stamp. The lock must be held.
    fn settle(&self, now: Stamp) -> Result<bool, BlobError> {
        let was = self.got()?;
        if was == Some(now) {
            return Ok(false);
        }
        let had = self.ready_count();
        self.clear(0..self.chunk_count());
        self.put(now)?;
        let layer = Digest::from(self.id());
        match was {
            _ if had == 0 => {}
            Some(_) => tracing::warn!(
                %layer, chunks = had,
                "a cache file was changed behind the store's back, or a write to it was cut off: each chunk is compared \
                 with its digest before it is used"
            ),
            // Written by a release without stamps.
            None => {
                tracing::info!(%layer, chunks = had, "a cache file has no stamp: it is compared with its digests")
            }
        }
        Ok(had > 0)
    }

    fn hold(&self) -> Result<Held<'_>, BlobError> {
        let thread = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        rustix::io::retry_on_intr(|| flock(&self.file, FlockOperation::LockExclusive))
            .map_err(io::Error::from)?;
        Ok(Held {
            file: &self.file,
            _thread: thread,
        })
    }

    fn got(&self) -> Result<Option<Stamp>, BlobError> {
        let mut bytes = [0; BYTES];
        self.file.read_exact_at(&mut bytes, AT)?;
        Ok((bytes != [0; BYTES]).then_some(Stamp(bytes)))
    }

    fn put(&self, stamp: Stamp) -> Result<(), BlobError> {
        Ok(self.file.write_all_at(&stamp.0, AT)?)
    }
}

#[cfg(test)]
#[path = "stamp_test.rs"]
mod tests;
