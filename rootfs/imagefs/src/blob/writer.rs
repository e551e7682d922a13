//! Writes a layer's file data, streamed in order, into a cache file.
//!
//! The same writer makes a new blob and repairs an old one. Unpacking a layer again yields the same bytes: each chunk whose bit is unset is
//! compared with the digest recorded the first time, written in place, and marked ready.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;

use thaw_failpoint::{Failpoint, reach};

use super::ready::{BootId, Digests, ReadyFile};
use super::{BLOCK_SIZE, BlobError, CHUNK_SIZE};

/// The result of writing a new blob.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlobSummary {
    /// Bytes, a multiple of [`BLOCK_SIZE`].
    pub length: u64,
    /// BLAKE3 of each chunk.
    pub digests: Vec<[u8; 32]>,
}

/// The result of repairing a blob.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RefillSummary {
    /// Chunks written and made ready.
    pub repaired: u64,
}

enum Target {
    New { digests: Vec<[u8; 32]> },
    Refill { ready: ReadyFile, repaired: u64 },
}

/// Writes a blob in order. Zero chunks of a new blob stay holes.
pub struct BlobWriter {
    data: File,
    /// Bytes of the complete chunks that were written.
    flushed: u64,
    chunk: Vec<u8>,
    target: Target,
}

impl BlobWriter {
    /// A new blob in an empty data file.
    pub fn create(data: File) -> Self {
        Self {
            data,
            flushed: 0,
            chunk: Vec::new(),
            target: Target::New { digests: Vec::new() },
        }
    }

    /// Writes the missing chunks of an existing blob.
    pub fn refill(data: File, ready: ReadyFile) -> Self {
        Self {
            data,
            flushed: 0,
            chunk: Vec::new(),
            target: Target::Refill { ready, repaired: 0 },
        }
    }

    /// Bytes written so far, which is the offset of the next byte.
    pub fn position(&self) -> u64 {
        self.flushed + self.chunk.len() as u64
    }

    /// Pads with zeros to the next multiple of [`BLOCK_SIZE`], where a file may start.
    pub fn align(&mut self) -> io::Result<()> {
        const ZEROS: [u8; BLOCK_SIZE as usize] = [0; BLOCK_SIZE as usize];
        let rest = self.position().next_multiple_of(BLOCK_SIZE) - self.position();
        self.write_all(&ZEROS[..rest as usize])
    }

    fn flush_chunk(&mut self) -> Result<(), BlobError> {
        if self.chunk.is_empty() {
            return Ok(());
        }
        let digest = *blake3::hash(&self.chunk).as_bytes();
        match &mut self.target {
            Target::New { digests } => {
                digests.push(digest);
                if self.chunk.iter().any(|byte| *byte != 0) {
                    self.data.write_all_at(&self.chunk, self.flushed)?;
                }
            }
            Target::Refill { ready, repaired } => {
                let chunk = self.flushed / CHUNK_SIZE;
                if chunk >= ready.chunk_count() || ready.digest(chunk)? != Some(digest) {
                    return Err(BlobError::Unrepeatable { offset: self.flushed });
                }
                if !ready.is_ready(chunk) {
                    ready.fill(&self.data, chunk, || {
                        self.data.write_all_at(&self.chunk, self.flushed)?;
                        reach(Failpoint::RepairWritten);
                        Ok(())
                    })?;
                    reach(Failpoint::RepairReady);
                    *repaired += 1;
                }
            }
        }
        self.flushed += self.chunk.len() as u64;
        self.chunk.clear();
        Ok(())
    }

    /// Ends a new blob. No chunk is ready yet: the caller must first compare the layer with its DiffID, and then write the ready file with
    /// [`BlobWriter::seal`].
    pub fn finish(mut self) -> Result<BlobSummary, BlobError> {
        self.align()?;
        self.flush_chunk()?;
        self.data.set_len(self.flushed)?;
        let digests = match self.target {
            Target::New { digests } => digests,
            Target::Refill { .. } => {
                return Err(BlobError::Damaged("a repaired blob has its digests already"));
            }
        };
        Ok(BlobSummary {
            length: self.flushed,
            digests,
        })
    }

    /// Writes the ready file of a finished blob, with every chunk ready. Must be called only after the layer is verified.
    pub fn seal(
        summary: &BlobSummary,
        ready: File,
        id: [u8; 32],
        boot: BootId,
    ) -> Result<ReadyFile, BlobError> {
        ReadyFile::create(
            ready,
            id,
            summary.length,
            Digests::Sealed(&summary.digests),
            true,
            boot,
        )
    }

    /// Ends a repair. Fails if the layer ended before every chunk was seen; the error names the place.
    pub fn finish_refill(mut self) -> Result<RefillSummary, BlobError> {
        self.align()?;
        self.flush_chunk()?;
        match self.target {
            Target::Refill { ready, repaired } if self.flushed == ready.length() => {
                Ok(RefillSummary { repaired })
            }
            Target::Refill { .. } => Err(BlobError::Unrepeatable { offset: self.flushed }),
            Target::New { .. } => Err(BlobError::Damaged("a new blob has nothing to repair")),
        }
    }
}

impl Write for BlobWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let room = CHUNK_SIZE as usize - self.chunk.len();
        let taken = bytes.len().min(room);
        self.chunk.extend_from_slice(&bytes[..taken]);
        if taken == room {
            self.flush_chunk().map_err(|error| match error {
                BlobError::Io(error) => error,
                other => io::Error::other(other),
            })?;
        }
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
