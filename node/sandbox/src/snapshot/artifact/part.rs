//! Which bytes of which packs yield a part of a file: the 2 MiB of which `manifest.json` has one hash.
//!
//! Invariant: a read yields only chunks that have the hashes of the table, at their places.

use std::ops::Range;

use zstd::bulk::Decompressor;

use super::CHUNK;
use super::table::{Chunk, Table};
use super::unpack::{UnpackError, expand};
use crate::snapshot::manifest;

/// Chunks in a part.
const CHUNKS: u64 = manifest::CHUNK / CHUNK as u64;

/// A read of a pack that yields chunks of a part. Chunks that follow one another in the pack are read together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackRead {
    /// Number of the pack.
    pub pack: u32,
    /// The bytes of the pack to read.
    pub stored: Range<u64>,
    chunks: Vec<Wanted>,
}

/// A chunk of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Wanted {
    /// Its number in the table.
    number: u32,
    chunk: Chunk,
    /// Where it belongs: its first byte in the part.
    at: usize,
}

impl Table {
    /// The reads that yield a part of a file: all of its bytes that are not zero.
    pub fn reads(&self, file: usize, part: u64) -> Vec<PackRead> {
        let placed = self.files.get(file).map_or(&[][..], |file| &file.placed[..]);
        let (first, end) = (
            part.saturating_mul(CHUNKS),
            part.saturating_add(1).saturating_mul(CHUNKS),
        );
        let from = placed.partition_point(|(number, _)| u64::from(*number) < first);
        let within = placed[from..]
            .iter()
            .take_while(|(number, _)| u64::from(*number) < end);
        let mut wanted: Vec<Wanted> = within
            .filter_map(|(number, chunk)| {
                Some(Wanted {
                    number: *chunk,
                    chunk: *self.chunks.get(*chunk as usize)?,
                    at: (u64::from(*number) - first) as usize * CHUNK as usize,
                })
            })
            .collect();
        wanted.sort_by_key(|wanted| (wanted.number, wanted.at));
        let mut reads: Vec<PackRead> = Vec::new();
        for next in wanted {
            let start = u64::from(next.chunk.offset);
            let end = start + u64::from(next.chunk.stored);
            match reads.last_mut() {
                // The same chunk again, or the next one of the pack.
                Some(read) if read.pack == next.chunk.pack && start <= read.stored.end => {
                    read.stored.end = end;
                    read.chunks.push(next);
                }
                _ => reads.push(PackRead {
                    pack: next.chunk.pack,
                    stored: start..end,
                    chunks: vec![next],
                }),
            }
        }
        reads
    }
}

impl PackRead {
    /// The chunks, each with its first byte in the part. `stored` are the bytes that were read.
    ///
    /// # Errors
    /// [`UnpackError`]: they are not what the table says.
    pub fn chunks(&self, stored: &[u8]) -> Result<Vec<(usize, Vec<u8>)>, UnpackError> {
        let mut decompressor = Decompressor::new().map_err(UnpackError::Write)?;
        let mut buffer = vec![0; CHUNK as usize];
        let mut chunks = Vec::with_capacity(self.chunks.len());
        for Wanted { number, chunk, at } in &self.chunks {
            let start = (u64::from(chunk.offset) - self.stored.start) as usize;
            let stored = stored.get(start..start + chunk.stored as usize);
            let stored = stored.ok_or_else(|| UnpackError::Read(std::io::ErrorKind::UnexpectedEof.into()))?;
            let bytes = expand(*number, chunk, stored, &mut decompressor, &mut buffer)?;
            chunks.push((*at, bytes.to_vec()));
        }
        Ok(chunks)
    }
}
