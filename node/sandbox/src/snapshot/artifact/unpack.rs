//! Writes the chunks of a pack to the files that have them.
//!
//! Invariants: no byte is written before the hash of its chunk matches. Of a pack, no more than one chunk is in memory, whatever its
//! bytes say. Places without a chunk stay holes.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;

use zstd::bulk::Decompressor;

use super::CHUNK;
use super::table::{Chunk, Place, Table};
use crate::snapshot::hash::Hash;

/// Why a pack cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum UnpackError {
    /// Its bytes cannot be read, or end early.
    #[error("it cannot be read: {0}")]
    Read(io::Error),
    #[error("chunk {0} of the table is not what its hash says")]
    Wrong(u32),
    #[error("chunk {0} of the table does not decompress to its length")]
    Compressed(u32),
    /// A file cannot be written.
    #[error("it cannot be written: {0}")]
    Write(io::Error),
}

/// A checked table, and where its chunks belong.
#[derive(Debug)]
pub struct Placed {
    table: Table,
    places: Vec<Place>,
}

impl Placed {
    /// Of a decoded table.
    pub fn new(table: Table) -> Placed {
        Placed {
            places: table.places(),
            table,
        }
    }

    /// The table.
    pub fn table(&self) -> &Table {
        &self.table
    }

    /// Reads a pack, and writes its chunks to the files: those of the table, in its order. Returns the number of bytes written. Blocks.
    ///
    /// # Errors
    /// [`UnpackError`].
    pub fn unpack(&self, pack: u32, from: &mut dyn Read, files: &[File]) -> Result<u64, UnpackError> {
        let mut decompressor = Decompressor::new().map_err(UnpackError::Write)?;
        let (mut stored, mut bytes) = (vec![0; CHUNK as usize], vec![0; CHUNK as usize]);
        let mut written = 0;
        for (number, chunk) in self.table.of_pack(pack) {
            let stored = &mut stored[..chunk.stored as usize];
            from.read_exact(stored).map_err(UnpackError::Read)?;
            let data = expand(number, chunk, stored, &mut decompressor, &mut bytes)?;
            let first = self.places.partition_point(|place| place.chunk < number);
            let places = self.places[first..].iter();
            for place in places.take_while(|place| place.chunk == number) {
                let at = u64::from(place.number) * u64::from(CHUNK);
                files[place.file as usize]
                    .write_all_at(data, at)
                    .map_err(UnpackError::Write)?;
                written += data.len() as u64;
            }
        }
        Ok(written)
    }
}

/// The bytes of a chunk, compared with its hash. `stored` is its stored form; `into` has room for the largest chunk.
///
/// # Errors
/// [`UnpackError::Compressed`], [`UnpackError::Wrong`].
pub(super) fn expand<'a>(
    number: u32,
    chunk: &Chunk,
    stored: &'a [u8],
    decompressor: &mut Decompressor<'_>,
    into: &'a mut [u8],
) -> Result<&'a [u8], UnpackError> {
    let data: &[u8] = match chunk.is_zstd {
        true => {
            let into = &mut into[..chunk.bytes as usize];
            match decompressor.decompress_to_buffer(stored, into) {
                Ok(length) if length == chunk.bytes as usize => into,
                _ => return Err(UnpackError::Compressed(number)),
            }
        }
        false => stored,
    };
    match Hash::of(data) == chunk.hash {
        true => Ok(data),
        false => Err(UnpackError::Wrong(number)),
    }
}
