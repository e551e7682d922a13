//! The chunk table of a blob: its frames, its chunks and their digests, which are the leaves of the image's hash tree.
//!
//! Offsets are not stored: frames follow one another in the stored blob, chunks in the data file, both without gaps. So
//! no table can make two of them overlap.

use std::ops::Range;

use thaw_imagefs::digest::Digest;

use crate::error::Error;
use crate::index::{Content, Pieces};
use crate::span::{Expansion, Span, SpanDigest, SpanTable};

use super::wire::{Cursor, PAGE, Put, ZSTD};

const MAGIC: &[u8; 8] = b"THAWCHNK";
const VERSION: u32 = 1;
/// Bytes before the frames.
const HEAD: usize = 96;
const FRAME: usize = 8;
const CHUNK: usize = 36;

/// Largest table: 1.8 million chunks.
pub const MAX_TABLE: u64 = 64 << 20;
/// Most bytes of data in a frame, which bounds the cost of one read.
pub const MAX_FRAME: u64 = 8 << 20;
/// Most bytes of data in a chunk.
pub const MAX_CHUNK: u64 = 4 << 20;
/// Longest data file.
pub const MAX_DATA: u64 = 1 << 42;

/// Chunks that are stored together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Stored bytes.
    pub stored: u32,
    pub is_zstd: bool,
    /// Chunks, at least one.
    pub chunks: u32,
}

/// A run of pages that is stored once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Pages of data, at least one.
    pub pages: u32,
    /// BLAKE3 of the pages.
    pub digest: [u8; 32],
}

impl Chunk {
    /// Bytes of data.
    pub fn length(&self) -> u64 {
        u64::from(self.pages) * PAGE
    }
}

/// A chunk table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    /// SHA-256 of the stored blob.
    pub blob: Digest,
    /// Bytes of the stored blob.
    pub stored_length: u64,
    /// Bytes of the data file.
    pub data_length: u64,
    pub frames: Vec<Frame>,
    pub chunks: Vec<Chunk>,
}

impl Table {
    /// The document.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(HEAD + self.frames.len() * FRAME + self.chunks.len() * CHUNK);
        out.extend_from_slice(MAGIC);
        out.put_u32(VERSION);
        out.put_u32(0);
        out.put_u64(self.data_length);
        out.put_u64(self.stored_length);
        out.extend_from_slice(self.blob.bytes());
        out.put_u32(self.frames.len() as u32);
        out.put_u32(self.chunks.len() as u32);
        out.resize(HEAD, 0);
        for frame in &self.frames {
            out.put_u32(frame.stored | if frame.is_zstd { ZSTD } else { 0 });
            out.put_u32(frame.chunks);
        }
        for chunk in &self.chunks {
            out.put_u32(chunk.pages);
            out.extend_from_slice(&chunk.digest);
        }
        out
    }

    /// Reads a document, whose totals must be consistent.
    ///
    /// # Errors
    /// `Malformed`.
    pub fn decode(what: &str, bytes: &[u8]) -> Result<Self, Error> {
        let mut cursor = Cursor::new(what, bytes);
        cursor.head(MAGIC, VERSION)?;
        cursor.zeros(4)?;
        let data_length = cursor.u64()?;
        let stored_length = cursor.u64()?;
        let blob = Digest::from(cursor.array::<32>()?);
        let (frames, chunks) = (cursor.u32()?, cursor.u32()?);
        cursor.zeros(HEAD - 72)?;
        if data_length > MAX_DATA || !data_length.is_multiple_of(PAGE) {
            return Err(cursor.malformed("its data length is not a multiple of 4096 or too large"));
        }
        let frame_count = cursor.count(frames, FRAME)?;
        let mut frames = Vec::with_capacity(frame_count);
        let (mut stored_sum, mut chunk_sum) = (0, 0);
        for _ in 0..frame_count {
            let (stored, chunks) = (cursor.u32()?, cursor.u32()?);
            let frame = Frame {
                stored: stored & !ZSTD,
                is_zstd: stored & ZSTD != 0,
                chunks,
            };
            if frame.stored == 0 || chunks == 0 {
                return Err(cursor.malformed("a frame is empty"));
            }
            stored_sum += u64::from(frame.stored);
            chunk_sum += u64::from(chunks);
            frames.push(frame);
        }
        let chunk_count = cursor.count(chunks, CHUNK)?;
        let mut chunks = Vec::with_capacity(chunk_count);
        let mut data_sum = 0;
        for _ in 0..chunk_count {
            let chunk = Chunk {
                pages: cursor.u32()?,
                digest: cursor.array()?,
            };
            if chunk.pages == 0 || chunk.length() > MAX_CHUNK {
                return Err(cursor.malformed("a chunk is empty or too large"));
            }
            data_sum += chunk.length();
            chunks.push(chunk);
        }
        if !cursor.rest().is_empty() {
            return Err(cursor.malformed("it goes on after its last entry"));
        }
        if (stored_sum, chunk_sum, data_sum) != (stored_length, chunk_count as u64, data_length) {
            return Err(cursor.malformed("its frames or chunks do not sum up to the lengths it states"));
        }
        let table = Self {
            blob,
            stored_length,
            data_length,
            frames,
            chunks,
        };
        for (frame, chunks) in table.framed() {
            let data: u64 = chunks.iter().map(Chunk::length).sum();
            let stored = u64::from(frame.stored);
            let agrees = match frame.is_zstd {
                true => stored < data,
                false => stored == data,
            };
            if data > MAX_FRAME || !agrees {
                return Err(cursor.malformed("a frame is too large, or not as long as what it holds"));
            }
        }
        Ok(table)
    }

    /// Frames and their chunks. A frame that claims missing chunks has fewer.
    fn framed(&self) -> impl Iterator<Item = (&Frame, &[Chunk])> {
        let mut left = &self.chunks[..];
        self.frames.iter().map(move |frame| {
            let (chunks, rest) = left.split_at((frame.chunks as usize).min(left.len()));
            left = rest;
            (frame, chunks)
        })
    }

    /// Chunks and their places in the data file.
    pub fn placed(&self) -> impl Iterator<Item = (Range<u64>, &Chunk)> {
        let mut offset = 0;
        self.chunks.iter().map(move |chunk| {
            let start = offset;
            offset += chunk.length();
            (start..offset, chunk)
        })
    }

    /// How the data file is made from the stored blob: spans are frames, compared chunk by chunk.
    ///
    /// # Errors
    /// `Malformed`, for a table that was not decoded.
    pub fn content(&self, what: &str) -> Result<Content, Error> {
        let (mut stored, mut stream) = (0, 0);
        let spans = self.framed().map(|(frame, chunks)| {
            let (stored_start, stream_start) = (stored, stream);
            stored += u64::from(frame.stored);
            stream += chunks.iter().map(Chunk::length).sum::<u64>();
            Span {
                stored: stored_start..stored,
                stream: stream_start..stream,
                digest: SpanDigest::StreamChunksBlake3(
                    chunks
                        .iter()
                        .map(|chunk| (chunk.length() as u32, chunk.digest))
                        .collect(),
                ),
                expansion: match frame.is_zstd {
                    true => Expansion::Zstd,
                    false => Expansion::Plain,
                },
            }
        });
        let spans = spans.collect();
        Ok(Content {
            data_length: self.data_length,
            pieces: Pieces::Identity,
            spans: SpanTable::new(spans, self.stored_length)
                .map_err(|error| Error::malformed(what, error))?,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn table() -> Table {
        let chunk = |pages: u32| Chunk {
            pages,
            digest: *blake3::hash(&pages.to_le_bytes()).as_bytes(),
        };
        let frame = |stored, is_zstd, chunks| Frame {
            stored,
            is_zstd,
            chunks,
        };
        Table {
            blob: Digest::of(b"blob"),
            stored_length: 1000 + 4096 + 30_000,
            data_length: 4096 * (3 + 1 + 64),
            frames: vec![
                frame(1000, true, 2),
                frame(4096, false, 1),
                frame(30_000, true, 1),
            ],
            chunks: vec![chunk(1), chunk(2), chunk(1), chunk(64)],
        }
    }

    #[test]
    fn a_table_is_read_as_it_was_written() {
        let table = table();
        let decoded = Table::decode("test", &table.encode()).unwrap();
        assert_eq!(decoded, table);
        let content = decoded.content("test").unwrap();
        let spans = content.spans.spans();
        assert_eq!(
            (spans[1].stored.clone(), spans[1].stream.clone()),
            (1000..5096, 12288..16384)
        );
        assert_eq!(content.data_length, 68 * 4096);
        let placed: Vec<u64> = table.placed().map(|(range, _)| range.start / 4096).collect();
        assert_eq!(placed, [0, 1, 3, 4]);
        let empty = Table {
            stored_length: 0,
            data_length: 0,
            frames: vec![],
            chunks: vec![],
            ..table
        };
        assert_eq!(Table::decode("test", &empty.encode()).unwrap(), empty);
    }

    #[test]
    fn sums_that_do_not_agree_are_refused() {
        let changes: [fn(&mut Table); 14] = [
            |table| table.stored_length += 1,
            |table| table.data_length += 4096,
            |table| table.data_length += 1,
            |table| table.frames[0].stored += 1,
            |table| table.frames[0].chunks += 1,
            |table| table.frames[0].chunks = 0,
            |table| table.frames[1].stored = 0,
            |table| table.frames[1].is_zstd = true,
            |table| table.frames[2].is_zstd = false,
            |table| table.chunks[1].pages = 0,
            |table| table.chunks[3].pages += 1,
            |table| table.chunks[3].pages = u32::MAX,
            |table| table.chunks.truncate(3),
            |table| table.frames.truncate(2),
        ];
        for (at, change) in changes.iter().enumerate() {
            let mut changed = table();
            change(&mut changed);
            assert!(Table::decode("test", &changed.encode()).is_err(), "{at}");
        }
        // A frame of more than 8 MiB, of chunks none of which is too large.
        let mut large = table();
        large.frames[2].chunks = 3;
        large.chunks.truncate(3);
        large.chunks.extend(
            [Chunk {
                pages: 1024,
                digest: [0; 32],
            }; 3],
        );
        large.data_length = 4096 * (4 + 3072);
        let error = Table::decode("test", &large.encode()).unwrap_err();
        assert!(error.to_string().contains("too large"), "{error}");
    }

    proptest! {
        #[test]
        fn damage_is_an_error_or_another_table(
            at in 0usize..96 + 3 * 8 + 4 * 36,
            value: u8,
            end in 0usize..96 + 3 * 8 + 4 * 36,
        ) {
            let bytes = table().encode();
            prop_assert!(Table::decode("test", &bytes[..end]).is_err());
            let mut changed = bytes.clone();
            changed[at] = value;
            if let Ok(table) = Table::decode("test", &changed) {
                prop_assert_eq!(table.encode(), changed);
                prop_assert!(table.content("test").is_ok());
            }
        }
    }
}
