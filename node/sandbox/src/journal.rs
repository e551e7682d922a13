//! The last output of a container, in two files in its sandbox's directory.
//!
//! Invariants: both files consist of complete frames of at most [`MOST_OF_FRAME`] bytes, and together hold at most twice [`MOST_OF_FILE`].
//! A position that a reader got is the beginning of a frame. If that frame was dropped, reading begins at the oldest frame. A frame that a
//! crash left incomplete is cut off by the next process that opens the journal.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use thaw_failpoint::{Failpoint, reach};
use thaw_sys::lock::Lock;
use tokio::sync::watch;

use crate::agent_client::Output;

/// The current file in a sandbox's directory, and the previous one.
const FILE: &str = "output";
const FILE_BEFORE: &str = "output.before";
/// Maximum size of a file, bytes. The run directory is usually in memory.
const MOST_OF_FILE: u64 = 1 << 20;
/// Maximum number of bytes of output in one frame.
const MOST_OF_FRAME: usize = 64 << 10;
/// A frame begins with its stream (one byte) and its length (four bytes, little-endian).
const HEAD: usize = 5;
const STDOUT: u8 = 1;
const STDERR: u8 = 2;

/// The extent of a journal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Extent {
    /// Position of the next frame.
    pub end: u64,
    /// Whether the journal is complete.
    pub over: bool,
}

/// Some frames, and the position after them.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Frames {
    pub frames: Vec<(Output, Vec<u8>)>,
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
    directory: PathBuf,
    parts: Mutex<Parts>,
    extent: watch::Sender<Extent>,
}

impl Journal {
    /// Whether a sandbox's directory has a journal: if so, the owner of the sandbox monitors its container.
    pub fn exists(directory: &Path) -> bool {
        // While the files are rotated, there may be only the previous one.
        directory.join(FILE).exists() || directory.join(FILE_BEFORE).exists()
    }

    /// Opens the journal, or creates it.
    pub fn open(directory: &Path) -> io::Result<Journal> {
        let before = match Part::open(&directory.join(FILE_BEFORE), 0, false) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => None,
            before => Some(before?),
        };
        let start = before.as_ref().map_or(0, |b| b.length);
        let now = Part::open(&directory.join(FILE), start, true)?;
        reach(Failpoint::JournalBegun);
        Ok(Journal {
            directory: directory.to_owned(),
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
        for piece in data.chunks(MOST_OF_FRAME) {
            let stream = match output {
                Output::Stdout => STDOUT,
                Output::Stderr => STDERR,
            };
            let frame = [&[stream], &(piece.len() as u32).to_le_bytes()[..], piece].concat();
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
        let (file, before) = (self.directory.join(FILE), self.directory.join(FILE_BEFORE));
        fs::rename(&file, &before)?;
        let start = parts.now.start + parts.now.length;
        let now = Part::open(&file, start, true)?;
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
        let wanted = length.saturating_sub(at).min((HEAD + MOST_OF_FRAME) as u64);
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
            for (_, data) in read.frames {
                tail.extend_from_slice(&data);
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
        let mut bytes = vec![0; HEAD + MOST_OF_FRAME];
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

/// The complete frames at the beginning of `bytes`, and their total length.
fn decode(mut bytes: &[u8]) -> (Vec<(Output, Vec<u8>)>, usize) {
    let (all, mut frames) = (bytes.len(), Vec::new());
    while let Some((head, rest)) = bytes.split_first_chunk::<HEAD>() {
        let [stream, length @ ..] = *head;
        let length = u32::from_le_bytes(length) as usize;
        let output = match stream {
            STDOUT => Output::Stdout,
            STDERR => Output::Stderr,
            _ => break,
        };
        if length == 0 || length > MOST_OF_FRAME || length > rest.len() {
            break;
        }
        let (data, rest) = rest.split_at(length);
        frames.push((output, data.to_vec()));
        bytes = rest;
    }
    (frames, all - bytes.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn all(journal: &Journal) -> Vec<(Output, Vec<u8>)> {
        let (mut at, mut all) = (0, Vec::new());
        loop {
            let frames = journal.read(at).unwrap();
            if frames.frames.is_empty() {
                return all;
            }
            at = frames.next;
            all.extend(frames.frames);
        }
    }

    fn size(directory: &Path) -> u64 {
        [FILE, FILE_BEFORE]
            .iter()
            .filter_map(|name| directory.join(name).metadata().ok())
            .map(|m| m.len())
            .sum()
    }

    #[test]
    fn one_whose_next_file_was_not_begun_is_there_and_goes_on() {
        let directory = tempfile::tempdir().unwrap();
        let journal = Journal::open(directory.path()).unwrap();
        assert!(Journal::exists(directory.path()));
        journal.append(Output::Stdout, b"before").unwrap();
        drop(journal);
        // State after thawd is killed between the two steps of the rotation.
        fs::rename(directory.path().join(FILE), directory.path().join(FILE_BEFORE)).unwrap();
        assert!(Journal::exists(directory.path()));
        let journal = Journal::open(directory.path()).unwrap();
        journal.append(Output::Stdout, b"after").unwrap();
        let kept: Vec<Vec<u8>> = all(&journal).into_iter().map(|(_, data)| data).collect();
        assert_eq!(kept, [b"before".to_vec(), b"after".to_vec()]);
    }

    #[test]
    fn the_last_of_it_is_kept_and_no_more() {
        let directory = tempfile::tempdir().unwrap();
        let journal = Journal::open(directory.path()).unwrap();
        for number in 0..100u8 {
            journal.append(Output::Stdout, &vec![number; 100_000]).unwrap();
            assert!(size(directory.path()) <= 2 * MOST_OF_FILE);
        }
        let kept = all(&journal);
        assert_eq!(kept.last().unwrap().1[0], 99);
        let bytes: usize = kept.iter().map(|(_, data)| data.len()).sum();
        assert!(bytes as u64 > MOST_OF_FILE);
        let numbers: Vec<u8> = kept.iter().map(|(_, data)| data[0]).collect();
        assert!(numbers.is_sorted());
        // A late reader begins at the oldest frame.
        assert!(journal.read(0).unwrap().start > 0);
        let end = journal.extent().borrow().end;
        assert_eq!(journal.read(end).unwrap().next, end);
        drop(journal);
        assert_eq!(all(&Journal::open(directory.path()).unwrap()), kept);
    }

    proptest! {
        #[test]
        fn whatever_a_crash_left_is_opened_and_goes_on(
            pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..50), 0..8),
            cut in 0usize..500,
            noise in prop::collection::vec(any::<u8>(), 0..50),
        ) {
            let directory = tempfile::tempdir().unwrap();
            let journal = Journal::open(directory.path()).unwrap();
            for piece in &pieces {
                journal.append(Output::Stderr, piece).unwrap();
            }
            drop(journal);
            let path = directory.path().join(FILE);
            let mut bytes = fs::read(&path).unwrap();
            bytes.truncate(cut);
            bytes.extend(noise);
            fs::write(&path, bytes).unwrap();
            let journal = Journal::open(directory.path()).unwrap();
            let before = all(&journal);
            journal.append(Output::Stdout, b"x").unwrap();
            let mut after = all(&journal);
            prop_assert_eq!(after.pop(), Some((Output::Stdout, b"x".to_vec())));
            prop_assert_eq!(after, before);
        }
    }
}
