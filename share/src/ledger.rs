//! The file that says which file each node id of a guest means. It outlives the process that writes it.
//!
//! A header, then records: a node and the name it was found by, or a node the guest has forgotten. The last record of a node counts.
//! Invariant: the header's `start` leads to records that are whole, up to the last, which the writer's end may have cut off; that
//! one counts as never written. What is read is not trusted: the guest may have taken over the process that wrote it.
//! A record names a child of a node, never a path, so it can name nothing the guest could not look up itself.

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

const MAGIC: [u8; 8] = *b"THAWNODE";
const VERSION: u64 = 1;
/// Magic, version, generation, start.
const HEADER: u64 = 32;
const START: u64 = 24;
/// Node, parent, inode number, file type; then a length and the name.
const FIXED: usize = 30;
/// Bytes of a name on Linux.
const NAME: usize = 255;
/// Bytes of records, of which half may be of the past: more than 300,000 nodes. Those beyond are not remembered.
const MOST: u64 = 32 << 20;
/// Records are written anew when those of the past take this much more than those that count.
const SMALL: u64 = 1 << 20;

/// Where a node was found, and what was there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The node of its directory.
    pub parent: u64,
    pub name: CString,
    /// The host's inode number.
    pub ino: u64,
    /// `S_IFMT` of its mode.
    pub kind: u32,
}

/// The file, open for writing.
#[derive(Debug)]
pub struct Ledger {
    file: File,
    start: u64,
    end: u64,
    /// Bytes of the records that count.
    live: u64,
    full: bool,
}

/// What a file holds of processes that have ended.
#[derive(Debug, Default)]
pub struct Past {
    /// How many processes wrote to it before.
    pub generation: u64,
    pub places: HashMap<u64, Place>,
}

fn encode(node: u64, place: &Place) -> Vec<u8> {
    let name = place.name.to_bytes();
    let mut bytes = Vec::with_capacity(FIXED + name.len());
    bytes.extend(node.to_le_bytes());
    bytes.extend(place.parent.to_le_bytes());
    bytes.extend(place.ino.to_le_bytes());
    bytes.extend(place.kind.to_le_bytes());
    bytes.extend((name.len() as u16).to_le_bytes());
    bytes.extend(name);
    bytes
}

fn number<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at + N)?.try_into().ok()
}

/// A node id and its place; none: the node was forgotten.
type Record = (u64, Option<Place>);

/// A record, and the bytes behind it.
fn decode(bytes: &[u8]) -> Option<(Record, &[u8])> {
    let length = usize::from(u16::from_le_bytes(number(bytes, FIXED - 2)?));
    let name = bytes.get(FIXED..FIXED + length)?;
    let is_name = !matches!(name, b"." | b"..") && !name.contains(&b'/') && length <= NAME;
    let place = match length {
        0 => None,
        _ if !is_name => return None,
        _ => Some(Place {
            parent: u64::from_le_bytes(number(bytes, 8)?),
            name: CString::new(name).ok()?,
            ino: u64::from_le_bytes(number(bytes, 16)?),
            kind: u32::from_le_bytes(number(bytes, 24)?),
        }),
    };
    let node = u64::from_le_bytes(number(bytes, 0)?);
    Some(((node, place), &bytes[FIXED + length..]))
}

/// Bytes of a node's record.
fn bytes_of(name: usize) -> u64 {
    (FIXED + name) as u64
}

impl Ledger {
    /// Takes a file for reading and writing, which nobody else has now. One that cannot be read begins anew.
    ///
    /// # Errors
    /// Those of the file.
    pub fn open(file: File) -> io::Result<(Ledger, Past)> {
        let mut header = [0; HEADER as usize];
        let length = file.metadata()?.len();
        let mut ledger = Ledger {
            file,
            start: HEADER,
            end: HEADER,
            live: 0,
            full: false,
        };
        if length >= HEADER {
            ledger.file.read_exact_at(&mut header, 0)?;
        }
        let word = |at: usize| number(&header, at).map_or(0, u64::from_le_bytes);
        let (version, generation, start) = (word(8), word(16), word(START as usize));
        let fits = start >= HEADER && start <= length && length - start <= 2 * MOST;
        if header[..8] != MAGIC || version != VERSION || !fits {
            ledger.write_header(0)?;
            return Ok((ledger, Past::default()));
        }
        let mut bytes = vec![0; (length - start) as usize];
        ledger.file.read_exact_at(&mut bytes, start)?;
        let (places, read) = parse(&bytes);
        (ledger.start, ledger.end) = (start, start + read);
        ledger.live = places
            .values()
            .map(|place| bytes_of(place.name.to_bytes().len()))
            .sum();
        let generation = generation.wrapping_add(1);
        ledger.write_header(generation)?;
        Ok((ledger, Past { generation, places }))
    }

    /// Begins anew: no node means anything.
    pub fn clear(&mut self) {
        (self.start, self.live, self.full) = (self.end, 0, false);
        self.set_start();
    }

    /// Remembers where a node is; `before` is the length of the name it had, if it was somewhere else.
    pub fn put(&mut self, node: u64, place: &Place, before: Option<usize>) {
        let bytes = encode(node, place);
        self.live += bytes.len() as u64;
        self.live -= before.map_or(0, bytes_of).min(self.live);
        self.append(&bytes);
    }

    /// Forgets a node, whose name had this length.
    pub fn forget(&mut self, node: u64, name: usize) {
        self.live -= bytes_of(name).min(self.live);
        let mut bytes = vec![0; FIXED];
        bytes[..8].copy_from_slice(&node.to_le_bytes());
        self.append(&bytes);
    }

    fn write_header(&self, generation: u64) -> io::Result<()> {
        let words = [VERSION, generation, self.start];
        let words = words.iter().flat_map(|word| word.to_le_bytes());
        let header: Vec<u8> = MAGIC.into_iter().chain(words).collect();
        self.file.write_all_at(&header, 0)
    }

    /// What cannot be written down costs the guest that node, should this process end.
    fn append(&mut self, bytes: &[u8]) {
        let used = self.end - self.start;
        if used > 2 * self.live + SMALL {
            self.shrink();
        }
        if self.end - self.start + bytes.len() as u64 > MOST {
            return self.give_up("it is full");
        }
        match self.file.write_all_at(bytes, self.end) {
            Ok(()) => self.end += bytes.len() as u64,
            Err(error) => self.give_up(&error.to_string()),
        }
    }

    fn give_up(&mut self, why: &str) {
        if !std::mem::replace(&mut self.full, true) {
            tracing::warn!("nodes are not remembered from now on, should this process end: {why}");
        }
    }

    /// Writes the records that count behind all there are, has the header lead there, and lets go of the old ones.
    fn shrink(&mut self) {
        let mut bytes = vec![0; (self.end - self.start) as usize];
        if self.file.read_exact_at(&mut bytes, self.start).is_err() {
            return;
        }
        let (places, _) = parse(&bytes);
        let records: Vec<u8> = places
            .iter()
            .flat_map(|(node, place)| encode(*node, place))
            .collect();
        if self.file.write_all_at(&records, self.end).is_err() {
            return;
        }
        let old = self.start;
        self.start = self.end;
        self.end += records.len() as u64;
        self.live = records.len() as u64;
        self.set_start();
        let punch = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
        let from = old.max(HEADER).next_multiple_of(4096);
        if let Some(length) = self.start.checked_sub(from).filter(|length| *length > 0) {
            // A file system that cannot keeps the bytes until the sandbox ends.
            let _ = rustix::fs::fallocate(&self.file, punch, from, length);
        }
    }

    fn set_start(&mut self) {
        if let Err(error) = self.file.write_all_at(&self.start.to_le_bytes(), START) {
            self.give_up(&error.to_string());
        }
    }
}

/// The nodes records tell of, and how many bytes were whole records.
fn parse(bytes: &[u8]) -> (HashMap<u64, Place>, u64) {
    let (mut places, mut rest) = (HashMap::new(), bytes);
    while let Some(((node, place), behind)) = decode(rest) {
        match place {
            Some(place) => drop(places.insert(node, place)),
            None => drop(places.remove(&node)),
        }
        rest = behind;
    }
    (places, (bytes.len() - rest.len()) as u64)
}

impl Place {
    /// Of a child of `parent`.
    pub fn new(parent: u64, name: &CStr, ino: u64, mode: u32) -> Place {
        Place {
            parent,
            name: name.to_owned(),
            ino,
            kind: mode & libc::S_IFMT,
        }
    }
}

#[cfg(test)]
#[path = "ledger_test.rs"]
mod tests;
