//! The file that records which file each node id of a guest means. It outlives the process that writes it.
//!
//! The file has a header, then records. A record is a node and the name at which it was found, or a node that
//! the guest has forgotten. A node's last record counts. Invariant: the header's `start` leads to complete
//! records, except that the last may be truncated if the writer was killed, and is then ignored. The contents
//! are not trusted, because the guest may have taken over the process that wrote them. A record names a child
//! of a node, never a path, so it can name nothing that the guest could not look up itself.

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
/// Node, parent, inode number, file type; then the length of the name, and the name.
const FIXED: usize = 30;
/// Longest name on Linux, in bytes.
const NAME: usize = 255;
/// Most bytes of records, half of which may be obsolete: enough for more than 300,000 nodes. Further nodes are
/// not recorded.
const MAX_SIZE: u64 = 32 << 20;
/// Records are compacted when the obsolete ones are larger by this than the live ones.
const SLACK: u64 = 1 << 20;

/// The place where a node was found, and the file that was there.
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

/// The file, opened for writing.
#[derive(Debug)]
pub struct Ledger {
    file: File,
    start: u64,
    end: u64,
    /// Bytes of the records that are not obsolete.
    live: u64,
    full: bool,
}

/// The records that earlier processes have made in the file.
#[derive(Debug, Default)]
pub struct Past {
    /// Number of processes that wrote to it before.
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

/// A node id and its place, or `None` if the node was forgotten.
type Record = (u64, Option<Place>);

/// Decodes a record. Returns it and the bytes after it.
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

/// Size of a node's record, in bytes.
fn bytes_of(name: usize) -> u64 {
    (FIXED + name) as u64
}

impl Ledger {
    /// Opens a file for reading and writing, which no other process uses now. An unreadable file is started
    /// over.
    ///
    /// # Errors
    /// The file cannot be read or written.
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
        let fits = start >= HEADER && start <= length && length - start <= 2 * MAX_SIZE;
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

    /// Starts over: no node is known.
    pub fn clear(&mut self) {
        (self.start, self.live, self.full) = (self.end, 0, false);
        self.set_start();
    }

    /// Records where a node is. `before` is the length of its earlier name if it has moved.
    pub fn put(&mut self, node: u64, place: &Place, before: Option<usize>) {
        let bytes = encode(node, place);
        self.live += bytes.len() as u64;
        self.live -= before.map_or(0, bytes_of).min(self.live);
        self.append(&bytes);
    }

    /// Records that a node, whose name had this length, is forgotten.
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

    /// Appends a record. If this fails, the guest loses that node when another process takes over.
    fn append(&mut self, bytes: &[u8]) {
        let used = self.end - self.start;
        if used > 2 * self.live + SLACK {
            self.compact();
        }
        if self.end - self.start + bytes.len() as u64 > MAX_SIZE {
            return self.give_up("it is full");
        }
        match self.file.write_all_at(bytes, self.end) {
            Ok(()) => self.end += bytes.len() as u64,
            Err(error) => self.give_up(&error.to_string()),
        }
    }

    fn give_up(&mut self, why: &str) {
        if !std::mem::replace(&mut self.full, true) {
            tracing::warn!("further nodes are not recorded and will be lost if this process ends: {why}");
        }
    }

    /// Writes the live records after all others, sets the header to them, and frees the old ones.
    fn compact(&mut self) {
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
            // A file system without support keeps the bytes until the sandbox ends.
            let _ = rustix::fs::fallocate(&self.file, punch, from, length);
        }
    }

    fn set_start(&mut self) {
        if let Err(error) = self.file.write_all_at(&self.start.to_le_bytes(), START) {
            self.give_up(&error.to_string());
        }
    }
}

/// Parses records into nodes. Also returns how many bytes were complete records.
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
    /// The place of a child of `parent`.
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
