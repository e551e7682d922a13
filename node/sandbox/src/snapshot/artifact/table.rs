//! The chunk table of a snapshot in a registry: which chunks its files consist of, and where each is stored.
//!
//! Invariants of a decoded table: the chunks of a pack follow one another from its first byte, so none overlap; each chunk has another
//! hash, and a place in a file that is as long as the chunk; chunks are numbered in the order of their first places. One table has one
//! encoding, and decoding allocates no more than the bytes it was given allow.

use std::collections::HashSet;

use super::{ArtifactError, CHUNK, MAX_CHUNKS, MAX_PACK, MAX_PACKS};
use crate::snapshot::hash::Hash;

/// Most bytes of a table: room for the most chunks, each in one or two places.
pub const MAX_TABLE: u64 = 32 << 20;
/// Most files: the memory, and disks.
const MAX_FILES: usize = 64;
/// Largest file, bytes, so that chunks are numbered by a u32.
const MAX_FILE: u64 = 1 << 40;

const MAGIC: &[u8; 8] = b"THAWSNAP";
const VERSION: u32 = 1;
/// Bytes of a chunk's record, of a file's head, and of a place.
const RECORD: usize = 48;
const FILE: usize = 16;
const PLACE: usize = 8;
/// In the length of a chunk: it is stored as a zstd frame.
const ZSTD: u32 = 1 << 31;
const PART: &str = "table";

/// A chunk that is stored once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// BLAKE3 of its bytes.
    pub hash: Hash,
    /// Number of its pack.
    pub pack: u32,
    /// Its first byte in the pack.
    pub offset: u32,
    /// Bytes in the pack.
    pub stored: u32,
    /// Its bytes: [`CHUNK`], or fewer at the end of a file.
    pub bytes: u32,
    /// Whether it is stored as one zstd frame. Otherwise as it is.
    pub is_zstd: bool,
}

/// A place of a chunk in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// Number of the chunk in the table.
    pub chunk: u32,
    /// Number of the file.
    pub file: u32,
    /// Its first byte in the file, divided by [`CHUNK`].
    pub number: u32,
}

/// A file and its chunks that are not zero, in ascending order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FileChunks {
    /// Bytes of the file, holes included.
    pub bytes: u64,
    /// Numbers of the places, and of their chunks in the table.
    pub placed: Vec<(u32, u32)>,
}

/// A chunk table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table {
    /// Number of packs.
    pub packs: u32,
    pub chunks: Vec<Chunk>,
    /// The memory, then the disks in the order of the snapshot's manifest.
    pub files: Vec<FileChunks>,
}

impl FileChunks {
    /// Bytes of the chunk with this number, if the file has it.
    fn length(&self, number: u32) -> Option<u32> {
        let start = u64::from(number) * u64::from(CHUNK);
        let left = self.bytes.checked_sub(start).filter(|left| *left > 0)?;
        u32::try_from(left.min(u64::from(CHUNK))).ok()
    }
}

impl Table {
    /// The bytes of the document.
    pub fn encode(&self) -> Vec<u8> {
        let places: usize = self
            .files
            .iter()
            .map(|file| FILE + file.placed.len() * PLACE)
            .sum();
        let mut out = Vec::with_capacity(32 + self.chunks.len() * RECORD + places);
        out.extend(MAGIC);
        let counts = [self.packs, self.files.len() as u32, self.chunks.len() as u32];
        for word in [VERSION, CHUNK].into_iter().chain(counts).chain([0]) {
            out.extend(word.to_le_bytes());
        }
        for chunk in &self.chunks {
            out.extend(chunk.hash.bytes());
            let zstd = if chunk.is_zstd { ZSTD } else { 0 };
            for word in [chunk.pack, chunk.offset, chunk.stored, chunk.bytes | zstd] {
                out.extend(word.to_le_bytes());
            }
        }
        for file in &self.files {
            out.extend(file.bytes.to_le_bytes());
            out.extend((file.placed.len() as u32).to_le_bytes());
            out.extend([0; 4]);
            for (number, chunk) in &file.placed {
                out.extend(number.to_le_bytes());
                out.extend(chunk.to_le_bytes());
            }
        }
        out
    }

    /// Reads and checks a table.
    ///
    /// # Errors
    /// [`ArtifactError`]: it is not one that this version writes.
    pub fn decode(bytes: &[u8]) -> Result<Table, ArtifactError> {
        let mut fields = Fields(bytes);
        if fields.take::<8>()? != *MAGIC {
            return malformed("it does not begin with its magic");
        }
        match fields.u32()? {
            VERSION => {}
            other => return Err(ArtifactError::Version { found: other.into() }),
        }
        if fields.u32()? != CHUNK {
            return malformed("its chunks have another size");
        }
        let (packs, files, chunks) = (fields.u32()?, fields.u32()?, fields.u32()?);
        fields.zeros()?;
        if packs as usize > MAX_PACKS || files as usize > MAX_FILES || chunks as usize > MAX_CHUNKS {
            return malformed("it has too many packs, files or chunks");
        }
        let chunks = fields.count(chunks, RECORD)?;
        let chunks = (0..chunks)
            .map(|_| chunk(&mut fields))
            .collect::<Result<_, _>>()?;
        let files = fields.count(files, FILE)?;
        let files = (0..files).map(|_| file(&mut fields)).collect::<Result<_, _>>()?;
        if !fields.0.is_empty() {
            return malformed("it goes on after its last file");
        }
        let table = Table { packs, chunks, files };
        table.check_chunks()?;
        table.check_places()?;
        Ok(table)
    }

    /// Chunks fill the packs without gaps, and no two are equal.
    fn check_chunks(&self) -> Result<(), ArtifactError> {
        let mut hashes = HashSet::with_capacity(self.chunks.len());
        let mut before: Option<&Chunk> = None;
        for chunk in &self.chunks {
            let follows = match before {
                Some(last) if last.pack == chunk.pack => chunk.offset == last.offset + last.stored,
                Some(last) => chunk.pack == last.pack + 1 && chunk.offset == 0,
                None => (chunk.pack, chunk.offset) == (0, 0),
            };
            if !follows {
                return malformed("a chunk does not begin where the one before it ends");
            }
            if u64::from(chunk.offset) + u64::from(chunk.stored) > MAX_PACK {
                return malformed("a pack is too large");
            }
            if !hashes.insert(chunk.hash) {
                return malformed("two chunks have one hash");
            }
            before = Some(chunk);
        }
        match before.map_or(0, |last| last.pack + 1) == self.packs {
            true => Ok(()),
            false => malformed("a pack has no chunks"),
        }
    }

    /// Places ascend within their file, and chunks are numbered in the order of their first places.
    fn check_places(&self) -> Result<(), ArtifactError> {
        let mut seen = 0;
        for file in &self.files {
            let mut next = 0;
            for (number, chunk) in &file.placed {
                if *number < next {
                    return malformed("the places of a file do not ascend");
                }
                let there = self.chunks.get(*chunk as usize).map(|chunk| chunk.bytes);
                if there.is_none() || there != file.length(*number) {
                    return malformed("a place is outside its file, or not as long as its chunk");
                }
                next = number + 1;
                if *chunk > seen {
                    return malformed("a chunk comes before its turn");
                }
                seen = seen.max(chunk + 1);
            }
        }
        match seen as usize == self.chunks.len() {
            true => Ok(()),
            false => malformed("a chunk has no place"),
        }
    }

    /// Compares the table with the sizes of the packs and of the files that other documents say.
    ///
    /// # Errors
    /// [`ArtifactError::Malformed`].
    pub fn check_sizes(
        &self,
        packs: impl Iterator<Item = u64>,
        files: impl Iterator<Item = u64>,
    ) -> Result<(), ArtifactError> {
        let mut sizes = vec![0; self.packs as usize];
        for chunk in &self.chunks {
            sizes[chunk.pack as usize] = u64::from(chunk.offset) + u64::from(chunk.stored);
        }
        if !packs.eq(sizes) {
            return malformed("the packs have other sizes");
        }
        match files.eq(self.files.iter().map(|file| file.bytes)) {
            true => Ok(()),
            false => malformed("the files have other sizes"),
        }
    }

    /// Bytes of all places: what the files occupy at most.
    pub fn data_bytes(&self) -> u64 {
        let placed = self.files.iter().flat_map(|file| &file.placed);
        placed
            .filter_map(|(_, chunk)| self.chunks.get(*chunk as usize))
            .map(|chunk| u64::from(chunk.bytes))
            .sum()
    }

    /// The chunks of a pack, with their numbers.
    pub fn of_pack(&self, pack: u32) -> impl Iterator<Item = (u32, &Chunk)> {
        let start = self.chunks.partition_point(|chunk| chunk.pack < pack);
        let end = self.chunks.partition_point(|chunk| chunk.pack <= pack);
        (start as u32..).zip(&self.chunks[start..end])
    }

    /// All places, ordered by chunk.
    pub fn places(&self) -> Vec<Place> {
        let files = (0..).zip(&self.files);
        let mut all: Vec<Place> = files
            .flat_map(|(file, placed)| {
                placed
                    .placed
                    .iter()
                    .map(move |&(number, chunk)| Place { chunk, file, number })
            })
            .collect();
        all.sort_unstable();
        all
    }
}

fn chunk(fields: &mut Fields<'_>) -> Result<Chunk, ArtifactError> {
    let hash = Hash::from(blake3::Hash::from(fields.take::<32>()?));
    let (pack, offset, stored, length) = (fields.u32()?, fields.u32()?, fields.u32()?, fields.u32()?);
    let (bytes, is_zstd) = (length & !ZSTD, length & ZSTD != 0);
    let is_sound = match is_zstd {
        true => 0 < stored && stored < bytes,
        false => stored == bytes,
    };
    if !is_sound || bytes == 0 || bytes > CHUNK || u64::from(offset) > MAX_PACK {
        return malformed("a chunk has lengths that none can have");
    }
    Ok(Chunk {
        hash,
        pack,
        offset,
        stored,
        bytes,
        is_zstd,
    })
}

fn file(fields: &mut Fields<'_>) -> Result<FileChunks, ArtifactError> {
    let (bytes, count) = (fields.u64()?, fields.u32()?);
    fields.zeros()?;
    if bytes > MAX_FILE {
        return malformed("a file is larger than any can be");
    }
    let count = fields.count(count, PLACE)?;
    let placed = (0..count).map(|_| Ok((fields.u32()?, fields.u32()?)));
    Ok(FileChunks {
        bytes,
        placed: placed.collect::<Result<_, ArtifactError>>()?,
    })
}

fn malformed<T>(problem: &str) -> Result<T, ArtifactError> {
    Err(ArtifactError::malformed(PART, problem))
}

/// The bytes that are left.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], ArtifactError> {
        match self.0.split_first_chunk::<N>() {
            Some((taken, rest)) => {
                self.0 = rest;
                Ok(*taken)
            }
            None => malformed("it is cut short"),
        }
    }

    fn u32(&mut self) -> Result<u32, ArtifactError> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, ArtifactError> {
        self.take().map(u64::from_le_bytes)
    }

    fn zeros(&mut self) -> Result<(), ArtifactError> {
        match self.u32()? {
            0 => Ok(()),
            _ => malformed("a reserved field is not zero"),
        }
    }

    /// How many entries of this size follow, if all are there.
    fn count(&self, count: u32, size: usize) -> Result<usize, ArtifactError> {
        let count = count as usize;
        match count.checked_mul(size) {
            Some(bytes) if bytes <= self.0.len() => Ok(count),
            _ => malformed("it is cut short"),
        }
    }
}

#[cfg(test)]
#[path = "table_test.rs"]
mod tests;
