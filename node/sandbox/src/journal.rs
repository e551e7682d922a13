//! The last output of a container, in two files: in its sandbox's directory, and after the sandbox's end beside its record
//! ([`crate::state::ended`]).
//!
//! A file is a sequence of frames. A frame is its kind (one byte), the length of its data (four bytes), for kinds 3 and 4 the time of its
//! arrival in nanoseconds since the Unix epoch (eight bytes), and the data. Numbers are little-endian. Kinds 1 (stdout) and 2 (stderr) have
//! no time: the previous release wrote them, and this one reads them.
//!
//! Invariants: both files consist of complete frames of at most [`MOST_OF_FRAME`] bytes, and together hold at most twice [`MOST_OF_FILE`].
//! A position that a reader got is the beginning of a frame. If that frame was dropped, reading begins at the oldest frame. A frame that a
//! crash left incomplete is cut off by the next process that opens the journal.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{SystemTime, UNIX_EPOCH};

use thaw_failpoint::{Failpoint, reach};
use thaw_sys::lock::Lock;
use tokio::sync::watch;

use crate::agent_client::Output;

/// The current file in a sandbox's directory. The previous one has [`BEFORE`] at its end.
pub(crate) const FILE: &str = "output";
/// The previous file there.
pub(crate) const FILE_BEFORE: &str = "output.before";
const BEFORE: &str = ".before";
/// Maximum size of a file, bytes. The run directory is usually in memory.
const MOST_OF_FILE: u64 = 1 << 20;
/// Maximum number of bytes of output in one frame.
const MOST_OF_FRAME: usize = 64 << 10;
/// Size of a frame's kind and length.
const HEAD: usize = 5;
/// Size of a frame's time.
const TIME: usize = 8;
/// Largest frame with its head.
const LARGEST: usize = HEAD + TIME + MOST_OF_FRAME;
/// The kinds of frames.
const UNTIMED_STDOUT: u8 = 1;
const UNTIMED_STDERR: u8 = 2;
const STDOUT: u8 = 3;
const STDERR: u8 = 4;

/// The extent of a journal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Extent {
    /// Position of the next frame.
    pub end: u64,
    /// Whether the journal is complete.
    pub over: bool,
}

/// A piece of output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    pub output: Output,
    /// When it arrived, in nanoseconds since the Unix epoch; 0 if the previous release wrote it.
    pub at: u64,
    pub data: Vec<u8>,
}

/// Some frames, and the position after them.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Frames {
    pub frames: Vec<Frame>,
    /// Position of the first frame: later than requested if the requested frames were dropped.
    pub start: u64,
    pub next: u64,
}

#[derive(Debug)]
struct Part {
    file: Arc<File>,
    start: u64,
    length: u64,
}

#[derive(Debug)]
struct Parts {
    before: Option<Part>,
    now: Part,
}

/// The output of one container.
#[derive(Debug)]
pub struct Journal {
    /// The current file.
    file: PathBuf,
    parts: Mutex<Parts>,
    extent: watch::Sender<Extent>,
}

impl Journal {
    /// Whether a sandbox's directory has a journal: if so, the owner of the sandbox monitors its container.
    pub fn exists(directory: &Path) -> bool {
        is_at(&directory.join(FILE))
    }

    /// Opens the journal in a sandbox's directory, or creates it.
    pub fn open(directory: &Path) -> io::Result<Journal> {
        let journal = Journal::at(directory.join(FILE))?;
        reach(Failpoint::JournalBegun);
        Ok(journal)
    }

    /// Opens the journal that [`Journal::keep`] moved to `file`, if there is one. It is complete.
    pub fn kept(file: &Path) -> io::Result<Option<Journal>> {
        if !is_at(file) {
            return Ok(None);
        }
        let journal = Journal::at(file.to_owned())?;
        journal.close();
        Ok(Some(journal))
    }

    /// Moves the files of the journal in a sandbox's directory, if it has one, to `file` and beside it. A process that has the journal open
    /// can still read it.
    pub fn keep(directory: &Path, file: &Path) -> io::Result<()> {
        let current = directory.join(FILE);
        for (from, to) in [(before(&current), before(file)), (current, file.to_owned())] {
            match fs::rename(from, to) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
                _ => {}
            }
        }
        Ok(())
    }

    /// Removes the files of a kept journal, and returns their size.
    pub fn remove(file: &Path) -> u64 {
        let removed = [before(file), file.to_owned()].map(|path| {
            let size = path.metadata().map_or(0, |m| m.len());
            fs::remove_file(path).map_or(0, |()| size)
        });
        removed.iter().sum()
    }

    /// The size of the files of a kept journal.
    pub fn size(file: &Path) -> u64 {
        let sizes = [before(file), file.to_owned()].map(|path| path.metadata().map_or(0, |m| m.len()));
        sizes.iter().sum()
    }

    fn at(file: PathBuf) -> io::Result<Journal> {
        let before = match Part::open(&before(&file), 0, false) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => None,
            before => Some(before?),
        };
        let start = before.as_ref().map_or(0, |b| b.length);
        let now = Part::open(&file, start, true)?;
        Ok(Journal {
            file,
            extent: watch::Sender::new(Extent {
                end: now.start + now.length,
                over: false,
            }),
            parts: Mutex::new(Parts { before, now }),
        })
    }

    /// Appends output. Blocks.
    pub fn append(&self, output: Output, data: &[u8]) -> io::Result<()> {
        let mut parts = self.parts();
        let kind = match output {
            Output::Stdout => STDOUT,
            Output::Stderr => STDERR,
        };
        let at = now();
        for piece in data.chunks(MOST_OF_FRAME) {
            let length = (piece.len() as u32).to_le_bytes();
            let frame = [&[kind], &length[..], &at.to_le_bytes()[..], piece].concat();
            if parts.now.length + frame.len() as u64 > MOST_OF_FILE {
                self.turn(&mut parts)?;
            }
            let now = &mut parts.now;
            if let Err(e) = now.file.write_all_at(&frame, now.length) {
                let _ = now.file.set_len(now.length);
                return Err(e);
            }
            now.length += frame.len() as u64;
            let end = now.start + now.length;
            self.extent.send_modify(|extent| extent.end = end);
        }
        Ok(())
    }

    /// Rotates the files.
    fn turn(&self, parts: &mut Parts) -> io::Result<()> {
        fs::rename(&self.file, before(&self.file))?;
        let start = parts.now.start + parts.now.length;
        let now = Part::open(&self.file, start, true)?;
        parts.before = Some(std::mem::replace(&mut parts.now, now));
        Ok(())
    }

    /// Marks the journal as complete.
    pub fn close(&self) {
        self.extent.send_modify(|extent| extent.over = true);
    }

    /// The extent, and its changes.
    pub fn extent(&self) -> watch::Receiver<Extent> {
        self.extent.subscribe()
    }

    /// Some of the frames from a position on; none at the end. Blocks.
    pub fn read(&self, from: u64) -> io::Result<Frames> {
        let (file, at, start, length) = {
            let parts = self.parts();
            let part = match &parts.before {
                Some(before) if from < parts.now.start => before,
                _ => &parts.now,
            };
            let start = from.max(part.start);
            (part.file.clone(), start - part.start, start, part.length)
        };
        let wanted = length.saturating_sub(at).min(LARGEST as u64);
        let mut bytes = vec![0; wanted as usize];
        file.read_exact_at(&mut bytes, at)?;
        let (frames, used) = decode(&bytes);
        Ok(Frames {
            frames,
            start,
            next: start + used as u64,
        })
    }

    /// The last bytes of both streams together, at most `most`. Blocks.
    pub fn tail(&self, most: u64) -> io::Result<Vec<u8>> {
        let (mut at, mut tail) = (0, Vec::new());
        let end = self.extent.borrow().end;
        while at < end {
            let read = self.read(at)?;
            if read.frames.is_empty() {
                break;
            }
            at = read.next;
            for frame in read.frames {
                tail.extend_from_slice(&frame.data);
                tail.drain(..tail.len().saturating_sub(most as usize));
            }
        }
        Ok(tail)
    }

    fn parts(&self) -> MutexGuard<'_, Parts> {
        self.parts.locked()
    }
}

impl Part {
    fn open(path: &Path, start: u64, create: bool) -> io::Result<Part> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(create).mode(0o600);
        let file = options.open(path)?;
        let mut length = 0;
        let end = file.metadata()?.len().min(MOST_OF_FILE);
        let mut bytes = vec![0; LARGEST];
        loop {
            let wanted = (end - length).min(bytes.len() as u64) as usize;
            file.read_exact_at(&mut bytes[..wanted], length)?;
            let (_, used) = decode(&bytes[..wanted]);
            if used == 0 {
                break;
            }
            length += used as u64;
        }
        file.set_len(length)?;
        Ok(Part {
            file: Arc::new(file),
            start,
            length,
        })
    }
}

/// The previous file of a journal.
fn before(file: &Path) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(BEFORE);
    name.into()
}

fn is_at(file: &Path) -> bool {
    // While the files are rotated, there may be only the previous one.
    file.exists() || before(file).exists()
}

/// Nanoseconds since the Unix epoch.
fn now() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |now| u64::try_from(now.as_nanos()).unwrap_or(u64::MAX))
}

/// The complete frames at the beginning of `bytes`, and their total length.
fn decode(mut bytes: &[u8]) -> (Vec<Frame>, usize) {
    let (all, mut frames) = (bytes.len(), Vec::new());
    while let Some((frame, rest)) = decode_frame(bytes) {
        frames.push(frame);
        bytes = rest;
    }
    (frames, all - bytes.len())
}

/// The frame at the beginning of `bytes`, and the bytes after it.
fn decode_frame(bytes: &[u8]) -> Option<(Frame, &[u8])> {
    let (head, rest) = bytes.split_first_chunk::<HEAD>()?;
    let [kind, length @ ..] = *head;
    let length = u32::from_le_bytes(length) as usize;
    let (output, is_timed) = match kind {
        UNTIMED_STDOUT => (Output::Stdout, false),
        UNTIMED_STDERR => (Output::Stderr, false),
        STDOUT => (Output::Stdout, true),
        STDERR => (Output::Stderr, true),
        _ => return None,
    };
    let (at, rest) = match is_timed {
        true => rest
            .split_first_chunk::<TIME>()
            .map(|(at, rest)| (u64::from_le_bytes(*at), rest))?,
        false => (0, rest),
    };
    if length == 0 || length > MOST_OF_FRAME || length > rest.len() {
        return None;
    }
    let (data, rest) = rest.split_at(length);
    let data = data.to_vec();
    Some((Frame { output, at, data }, rest))
}

#[cfg(test)]
#[path = "journal_test.rs"]
mod tests;
