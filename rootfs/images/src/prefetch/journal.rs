//! The journal of a recording: a file that keeps the recorded reads even if the recording process is killed.
//!
//! The file is beside the image and is text: a line with the load order without its runs, then for each first read a
//! line `BLOB CHUNK`, where BLOB is the index in that order's blobs. The writer holds a lock on it. A journal with
//! content and without a lock was left by a killed process; it becomes the image's load order if none is recorded yet,
//! because a complete order of an earlier run is worth more than a part of a later one.
//!
//! Invariants: one writer at a time. The size is bounded, as the recorder's is. The content is hostile when it is read:
//! a torn or malformed line, and everything after it, is ignored.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use thaw_failpoint::{Failpoint, reach};
use thaw_imagefs::blob::CHUNK_SIZE;
use thaw_imagefs::digest::Digest;

use crate::error::Error;
use crate::store::Image;

use super::record::Recorder;
use super::saved;
use crate::load_order::{LoadOrder, OrderedBlob};

const JOURNAL: &str = "recording";
/// Most bytes: more than the lines of all chunks that a recorder remembers.
const MAX_JOURNAL: u64 = 16 << 20;

/// The file, to be appended to.
#[derive(Debug)]
pub struct Journal {
    /// Locked.
    file: File,
    path: PathBuf,
    places: HashMap<Digest, usize>,
    /// First reads that are in the journal or were left out of it.
    written: usize,
    bytes: u64,
}

fn path(image: &Image) -> PathBuf {
    image.metadata.with_file_name(JOURNAL)
}

impl Journal {
    /// Begins to record an image that has these blobs. `None` while another recording of the image runs.
    ///
    /// # Errors
    /// `DiskFull`, `Io`: the image may have been removed meanwhile; `Malformed` for an image of too many blobs.
    pub fn begin(image: &Image, blobs: Vec<OrderedBlob>) -> Result<Option<Self>, Error> {
        let path = path(image);
        let io = |error| Error::io(&path, error);
        let file = File::options()
            .read(true)
            .append(true)
            .create(true)
            .open(&path)
            .map_err(io)?;
        if !lock(&file).map_err(io)? {
            return Ok(None);
        }
        reach(Failpoint::RecordingMade);
        settle(image, &file, &path)?;
        let places = blobs.iter().enumerate().map(|(at, blob)| (blob.digest, at));
        let mut journal = Self {
            places: places.collect(),
            file,
            written: 0,
            bytes: 0,
            path: path.clone(),
        };
        let mut head = LoadOrder::new(image.digest, blobs, Vec::new(), 0)?.to_json()?;
        head.push(b'\n');
        journal.append(&head)?;
        Ok(Some(journal))
    }

    /// Appends the reads that the recorder has seen since the last call.
    ///
    /// # Errors
    /// `DiskFull`, `Io`.
    pub fn follow(&mut self, recorder: &Recorder) -> Result<(), Error> {
        let mut lines = String::new();
        for (blob, chunk) in recorder.reads(self.written) {
            self.written += 1;
            if let Some(place) = self.places.get(blob) {
                // Writing to a string cannot fail.
                let _ = writeln!(lines, "{place} {chunk}");
            }
        }
        match lines.is_empty() || self.bytes + lines.len() as u64 > MAX_JOURNAL {
            true => Ok(()),
            false => self.append(lines.as_bytes()),
        }
    }

    /// Ends the recording and saves its load order, if it has one.
    ///
    /// # Errors
    /// `Io`.
    pub fn end(self) -> Result<(), Error> {
        self.file
            .set_len(0)
            .map_err(|error| Error::io(&self.path, error))?;
        reach(Failpoint::RecordingEnded);
        Ok(())
    }

    fn append(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.bytes += bytes.len() as u64;
        self.file
            .write_all(bytes)
            .map_err(|error| Error::io(&self.path, error))?;
        reach(Failpoint::RecordingWritten);
        Ok(())
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        // Closing the file is not enough: a process that is being started has a copy of the descriptor for a moment.
        let _ = flock(&self.file, FlockOperation::Unlock);
    }
}

/// Saves the reads in a killed recording's journal as the image's load order. A failure is logged, and the next call retries.
pub fn recover(image: &Image) {
    let path = path(image);
    let file = match File::options().read(true).write(true).open(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return,
        Err(error) => return tracing::warn!("{}: {error}", path.display()),
    };
    let left = file.metadata().map(|it| it.len() > 0);
    let settled = match left.and_then(|left| Ok(left && lock(&file)?)) {
        Ok(false) => return,
        Ok(true) => settle(image, &file, &path),
        Err(error) => Err(Error::io(&path, error)),
    };
    if let Err(error) = settled {
        tracing::warn!("a recording that was broken off is not used: {error}");
    }
}

/// Saves the recording in a locked file, and empties the file.
fn settle(image: &Image, file: &File, path: &Path) -> Result<(), Error> {
    let io = |error| Error::io(path, error);
    if file.metadata().map_err(io)?.len() == 0 {
        return Ok(());
    }
    match read(file).map_err(io)? {
        Some(order) if !order.runs.is_empty() && saved::recorded(image).is_none() => {
            let (image_digest, bytes) = (image.digest, order.bytes());
            tracing::info!(image = %image_digest, bytes, "a recording that was broken off is kept");
            saved::keep(image, &order)?;
        }
        _ => {}
    }
    file.set_len(0).map_err(io)?;
    reach(Failpoint::RecordingSettled);
    Ok(())
}

/// The load order of a journal, up to the first invalid line; `None` without a valid head.
fn read(file: &File) -> io::Result<Option<LoadOrder>> {
    let mut lines = BufReader::new(file.take(MAX_JOURNAL));
    let mut line = Vec::new();
    lines.read_until(b'\n', &mut line)?;
    let Ok(head) = LoadOrder::from_json(&line) else {
        return Ok(None);
    };
    let mut recorder = Recorder::default();
    loop {
        line.clear();
        lines.read_until(b'\n', &mut line)?;
        let Some((place, chunk)) = first_read(&line) else {
            break;
        };
        let Some((blob, offset)) = head.blobs.get(place).zip(chunk.checked_mul(CHUNK_SIZE)) else {
            break;
        };
        recorder.access(&blob.digest, offset, 1);
    }
    Ok(recorder.order(head.image, head.blobs).ok())
}

/// A whole line `BLOB CHUNK`.
fn first_read(line: &[u8]) -> Option<(usize, u64)> {
    let line = std::str::from_utf8(line).ok()?.strip_suffix('\n')?;
    let (place, chunk) = line.split_once(' ')?;
    Some((place.parse().ok()?, chunk.parse().ok()?))
}

/// Takes the lock if it is free.
fn lock(file: &File) -> io::Result<bool> {
    loop {
        match flock(file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(true),
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => return Ok(false),
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
#[path = "journal_test.rs"]
mod tests;
