//! Cuts the files of a snapshot into chunks, and packs these into layers.
//!
//! Invariant: the same files give the same packs and the same table, with one version of zstd. A pack has the new chunks of one span of
//! one file, so what changes elsewhere changes no pack, except that a chunk is stored with its first place. All spans of a snapshot have
//! one size, [`LEAST_SPAN`] doubled until there are at most [`ENOUGH_PACKS`] of them.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Write};

use sha2::{Digest as _, Sha256};
use thaw_imagefs::digest::Digest;
use zstd::bulk::Compressor;

use super::table::{Chunk, FileChunks, Table};
use super::{CHUNK, ENOUGH_PACKS, LEAST_SPAN, MAX_CHUNKS, MAX_PACK, MAX_PACKS};
use crate::snapshot::contents::{data_range, read_part};
use crate::snapshot::hash::Hash;

/// zstd's compression level: the default of its tool.
const LEVEL: i32 = 3;

/// A pack that was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pack {
    /// SHA-256 of its bytes.
    pub digest: Digest,
    /// Its bytes.
    pub size: u64,
    /// Bytes of its chunks.
    pub data_bytes: u64,
}

/// Why files cannot be packed.
#[derive(Debug, thiserror::Error)]
pub enum PackError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("it has more than {MAX_CHUNKS} chunks that differ, or more than {MAX_PACKS} parts with some")]
    TooMany,
}

/// Packs files, one pack at a time.
pub struct Packer {
    files: Vec<File>,
    table: Table,
    known: HashMap<Hash, u32>,
    /// Bytes of a span.
    span: u64,
    /// The next span: number of its file, and its first byte.
    next: (usize, u64),
    compressor: Compressor<'static>,
}

impl Packer {
    /// Of the memory and the disks of a snapshot, in this order.
    ///
    /// # Errors
    /// The size of a file, or where it has data, cannot be read.
    pub fn new(files: Vec<File>) -> io::Result<Packer> {
        let span = span_for(&files)?;
        Packer::with_span(files, span)
    }

    fn with_span(files: Vec<File>, span: u64) -> io::Result<Packer> {
        let sizes = files.iter().map(|file| {
            Ok(FileChunks {
                bytes: file.metadata()?.len(),
                placed: Vec::new(),
            })
        });
        Ok(Packer {
            table: Table {
                files: sizes.collect::<io::Result<_>>()?,
                ..Table::default()
            },
            files,
            known: HashMap::new(),
            span,
            next: (0, 0),
            compressor: Compressor::new(LEVEL)?,
        })
    }

    /// Bytes of a span: a pack has no more.
    pub fn span(&self) -> u64 {
        self.span
    }

    /// Writes the next pack. Returns `None` if there is none. Blocks.
    ///
    /// # Errors
    /// [`PackError`].
    pub fn pack(&mut self, into: &mut dyn Write) -> Result<Option<Pack>, PackError> {
        let mut pack = Writing {
            into,
            hasher: Sha256::new(),
            size: 0,
            data_bytes: 0,
        };
        while let Some(file) = self.table.files.get(self.next.0) {
            let (number, start) = self.next;
            let end = (start + self.span).min(file.bytes);
            self.next = match end == file.bytes {
                true => (number + 1, 0),
                false => (number, end),
            };
            self.pack_span(number, start, end, &mut pack)?;
            if pack.size > 0 {
                self.table.packs += 1;
                return Ok(Some(Pack {
                    digest: <[u8; 32]>::from(pack.hasher.finalize()).into(),
                    size: pack.size,
                    data_bytes: pack.data_bytes,
                }));
            }
        }
        Ok(None)
    }

    /// The table, once all packs are written.
    pub fn into_table(self) -> Table {
        self.table
    }

    /// Adds the chunks of a span to the table, and the new ones to the pack.
    fn pack_span(
        &mut self,
        file: usize,
        start: u64,
        end: u64,
        pack: &mut Writing<'_>,
    ) -> Result<(), PackError> {
        let chunk = u64::from(CHUNK);
        let mut buffer = Vec::new();
        for number in start / chunk..end.div_ceil(chunk) {
            let at = number * chunk;
            if !read_part(&self.files[file], at..(at + chunk).min(end), &mut buffer)? {
                continue;
            }
            let hash = Hash::of(&buffer);
            let known = match self.known.get(&hash) {
                Some(known) => *known,
                None => self.add(hash, &buffer, pack)?,
            };
            let number = u32::try_from(number).map_err(|_| PackError::TooMany)?;
            self.table.files[file].placed.push((number, known));
        }
        Ok(())
    }

    fn add(&mut self, hash: Hash, bytes: &[u8], pack: &mut Writing<'_>) -> Result<u32, PackError> {
        let number = self.table.chunks.len();
        if number >= MAX_CHUNKS || self.table.packs as usize >= MAX_PACKS {
            return Err(PackError::TooMany);
        }
        let compressed = self.compressor.compress(bytes)?;
        let is_zstd = compressed.len() < bytes.len();
        let stored = if is_zstd { &compressed[..] } else { bytes };
        self.table.chunks.push(Chunk {
            hash,
            pack: self.table.packs,
            offset: pack.size as u32,
            stored: stored.len() as u32,
            bytes: bytes.len() as u32,
            is_zstd,
        });
        pack.write(stored)?;
        pack.data_bytes += bytes.len() as u64;
        self.known.insert(hash, number as u32);
        Ok(number as u32)
    }
}

/// Bytes of a span for these files: the fewest with which at most [`ENOUGH_PACKS`] spans have data, or the most that a pack may have.
fn span_for(files: &[File]) -> io::Result<u64> {
    let mut span = LEAST_SPAN;
    while span < MAX_PACK && !are_few(files, span)? {
        span *= 2;
    }
    Ok(span)
}

/// Whether at most [`ENOUGH_PACKS`] spans of so many bytes have data. Holes are passed over, so a large disk with little data counts little.
fn are_few(files: &[File], span: u64) -> io::Result<bool> {
    let mut count = 0;
    for file in files {
        let (mut at, end) = (0, file.metadata()?.len());
        while let Some((data, _)) = data_range(file, at, end)? {
            count += 1;
            if count > ENOUGH_PACKS {
                return Ok(false);
            }
            at = (data / span + 1) * span;
        }
    }
    Ok(true)
}

/// A pack that is being written.
struct Writing<'a> {
    into: &'a mut dyn Write,
    hasher: Sha256,
    /// Bytes so far: at most those of a span.
    size: u64,
    data_bytes: u64,
}

impl Writing<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.into.write_all(bytes)?;
        self.hasher.update(bytes);
        self.size += bytes.len() as u64;
        Ok(())
    }
}

#[cfg(test)]
#[path = "pack_test.rs"]
mod tests;
