//! The stamp of a data file: its state after our last write.
//!
//! Invariant: set bits are trusted while the data file has the inode, length and times of its stamp. Each of our writes
//! is made while the ready file's lock is held, and ends with a new stamp. If a process that holds the lock finds
//! another inode, length or time, something else has changed the file (or a writer was killed), and all bits are
//! cleared. Each chunk is then compared with its digest before it is served, as after a reboot.
//!
//! A stamp is valid within one boot only: the first process that opens the file in another boot clears the bits anyway.
//! Times are as coarse as the kernel's tick: a change within the tick of our own last write is not seen.

use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::{MutexGuard, PoisonError};

use rustix::fs::{FlockOperation, flock};

use super::{BlobError, ReadyFile};
use crate::digest::Digest;

/// Where the stamp is in the header: behind what a release without stamps reads or writes. All zero: there is none.
const AT: u64 = 128;
const BYTES: usize = 48;

/// What shows that a file was changed.
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

/// The right to write the data file, among the threads of this process and among processes.
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
    /// Writes a chunk's bytes with `write`, and says that they are in `data` and are the right ones.
    ///
    /// # Errors
    /// `Io`; the chunk is then as ready as it was.
    pub fn fill(
        &self,
        data: &File,
        chunk: u64,
        write: impl FnOnce() -> io::Result<()>,
    ) -> Result<(), BlobError> {
        self.change(data, || write().map(|()| self.set_ready(chunk)))
    }

    /// Gives `data` the length it should have, where it was cut. Returns whether it was: its chunks are missing then, until each was
    /// compared with its digest.
    ///
    /// # Errors
    /// `Io`.
    pub fn restore_length(&self, data: &File) -> Result<bool, BlobError> {
        if data.metadata()?.len() >= self.length() {
            return Ok(false);
        }
        // Bits first: a reader that saw a bit before and reads zeros after sees it unset when it looks again.
        self.change(data, || {
            self.clear(self.chunks_of(data.metadata()?.len(), u64::MAX));
            data.set_len(self.length())
        })?;
        Ok(true)
    }

    /// Says that what is in `data` now is what its bits are of. Of a new blob, before anybody else has its files.
    ///
    /// # Errors
    /// `Io`.
    pub fn stamp(&self, data: &File) -> Result<(), BlobError> {
        self.put(Stamp::of(&data.metadata()?))
    }

    /// Whether the data file differs from its stamp: it was changed, or one of our writes is going on. Does not block.
    ///
    /// # Errors
    /// `Io`.
    pub fn looks_changed(&self, look: impl Fn() -> io::Result<Metadata>) -> Result<bool, BlobError> {
        Ok(self.got()? != Some(Stamp::of(&look()?)))
    }

    /// Makes all chunks missing if the data file, which `look` looks at, was changed by anybody but us. Returns whether any was
    /// ready. Where nothing has changed this is a look at the file and at its stamp.
    ///
    /// # Errors
    /// `Io`.
    pub fn void_if_changed(&self, look: impl Fn() -> io::Result<Metadata>) -> Result<bool, BlobError> {
        if !self.looks_changed(&look)? {
            return Ok(false);
        }
        // One of ours may be writing: then it has stamped it by the time we hold the lock.
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
        // A process that finds a change clears the bits: after a change that follows the comparison, our bit must not be set.
        let agrees = Stamp::of(&data.metadata()?) == before || self.agrees(data, chunk, buffer)?;
        if agrees {
            self.set_ready(chunk);
        }
        Ok(agrees)
    }

    /// Changes the data file. What is there already is not taken for ours.
    fn change(&self, data: &File, change: impl FnOnce() -> io::Result<()>) -> Result<(), BlobError> {
        let _held = self.hold()?;
        self.settle(Stamp::of(&data.metadata()?))?;
        let changed = change();
        // Also of a write that failed: of its chunk no bit is set.
        self.put(Stamp::of(&data.metadata()?))?;
        Ok(changed?)
    }

    /// Clears the bits unless the data file is what it was. The lock is held.
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
            // Of a release without stamps.
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
