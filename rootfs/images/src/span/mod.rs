//! A stored blob cut into *spans*, each of which can be fetched and expanded without the others.
//!
//! A blob as a registry stores it (gzip, zstd, plain tar, compressed chunks) yields a *stream* of bytes. A [`SpanTable`] maps stream bytes
//! to the stored bytes that yield them, with the state that expanding them requires: for deflate, the bits before and the last 32 KiB of
//! output (a *zran* checkpoint); for whole gzip members, zstd frames, LZ4 blocks and plain bytes, none.
//!
//! Invariant: a table is hostile until checked. [`SpanTable::new`] accepts only spans that are sorted by stream offset, do not overlap in
//! the stream, lie in the blob, and take and yield no more than [`MAX_SPAN`] bytes; [`SpanTable::expand`] yields exactly a span's stream
//! bytes, verified against its digest, or an error, and never uses more memory than that.

mod expand;
pub(crate) mod inflate;
mod window;

#[cfg(test)]
#[path = "span_test.rs"]
mod tests;

use std::ops::Range;
use std::sync::Arc;

pub(crate) use expand::ZSTD_WINDOW_LOG;
pub(crate) use window::Packer;
pub use window::{WINDOW, Window};

use crate::ranges::Check;

/// Most bytes a span may yield or take: bounds the memory one read costs.
pub const MAX_SPAN: u64 = 64 << 20;

/// Least bytes of stream between two checkpoints that we record. A larger value makes a guest wait longer at a miss, because a span is
/// fetched and inflated from its start; a smaller value makes the index larger. 1 MiB costs a quarter of the wait of SOCI's 4 MiB, with an
/// index of about one percent of the stream.
pub const SPAN: u64 = 1 << 20;

/// How a span's stored bytes become its stream bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expansion {
    /// They are the stream bytes.
    Plain,
    /// Raw deflate resumed within a gzip member (zlib's `examples/zran.c`), at a checkpoint as zran and SOCI write it: `in`, the offset of
    /// the first whole byte; `bits`, how many high bits of byte `in - 1` come before it; `window`, the up to 32 KiB before the checkpoint
    /// in the stream. The span's first stored byte is the one that holds those bits: `stored.start` is `in - 1` if `bits` is not 0, or else
    /// `in`; so two neighbours may share a byte. A span may continue into the next gzip members, and stored bytes after its last stream
    /// byte are ignored.
    Deflate { bits: u8, window: Window },
    /// One or more whole gzip members, or the start of them: stored bytes may end after the span's last stream byte.
    Gzip,
    /// Whole zstd frames, or the start of them.
    Zstd,
    /// One LZ4 block (RAFS).
    Lz4,
}

/// How a span is verified.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SpanDigest {
    /// Not at all: the caller compares the digest of the data to which the span belongs.
    None,
    /// SHA-256 of the stored bytes (for SOCI, and as a first unpacking records it).
    StoredSha256([u8; 32]),
    /// SHA-256 of the stream bytes (eStargz, Nydus).
    StreamSha256([u8; 32]),
    /// BLAKE3 of the stream bytes (Nydus).
    StreamBlake3([u8; 32]),
    /// Length and BLAKE3 of each piece the stream bytes consist of, in order (converted images, whose spans are frames of
    /// several chunks). The lengths must sum to the span's.
    StreamChunksBlake3(Arc<[(u32, [u8; 32])]>),
    /// SHA-256 of parts of the stream bytes, in order (eStargz with several files in a gzip member). Bytes between parts are not verified,
    /// and no piece of a data file uses them; the last part ends the span.
    StreamPartsSha256(Arc<[StreamPart]>),
}

/// A part of a span's stream bytes that has a digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamPart {
    /// Bytes between the part before it and its start.
    pub skip: u32,
    pub length: u32,
    pub sha256: [u8; 32],
}

/// One span.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// Bytes of the stored blob to fetch.
    pub stored: Range<u64>,
    /// Bytes of the stream it yields.
    pub stream: Range<u64>,
    pub digest: SpanDigest,
    pub expansion: Expansion,
}

/// A zran checkpoint, as SOCI's ztoc has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checkpoint<'a> {
    /// Offset in the stored blob of the first whole byte.
    pub input: u64,
    /// Offset in the stream.
    pub output: u64,
    /// High bits of the byte before `input` that come first: 0 to 7.
    pub bits: u8,
    pub window: &'a Window,
}

/// Why a span cannot be expanded from the fetched bytes, or why a table is refused.
#[derive(Debug, thiserror::Error)]
pub enum SpanError {
    #[error("span {span}: its bytes have another digest than the index says")]
    Digest { span: usize },
    #[error("span {span}: it does not expand: {why}")]
    Expansion { span: usize, why: String },
    #[error("the span table is malformed: {0}")]
    Table(&'static str),
}

/// All spans of one stored blob, by stream offset. There may be gaps between them, which cannot be read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpanTable {
    spans: Vec<Span>,
}

/// Neighbouring spans that one range of the stored blob holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    /// Indices of the spans.
    pub spans: Range<usize>,
    /// The stored bytes to fetch.
    pub stored: Range<u64>,
}

impl Span {
    /// A span resumed at a checkpoint, whose first whole byte is at `input`; it ends before `stored_end`.
    pub fn deflate(
        input: u64,
        bits: u8,
        window: Window,
        stored_end: u64,
        stream: Range<u64>,
        digest: SpanDigest,
    ) -> Span {
        Span {
            stored: input.saturating_sub(u64::from(bits != 0))..stored_end,
            stream,
            digest,
            expansion: Expansion::Deflate { bits, window },
        }
    }

    /// The checkpoint at which it is resumed; `None` for other kinds of span.
    pub fn checkpoint(&self) -> Option<Checkpoint<'_>> {
        match &self.expansion {
            Expansion::Deflate { bits, window } => Some(Checkpoint {
                input: self.stored.start + u64::from(*bits != 0),
                output: self.stream.start,
                bits: *bits,
                window,
            }),
            _ => None,
        }
    }
}

fn length(range: &Range<u64>) -> u64 {
    range.end - range.start
}

impl SpanTable {
    /// Checks the spans of a blob of `stored_length` bytes.
    ///
    /// # Errors
    /// [`SpanError::Table`] when they break the invariant.
    pub fn new(spans: Vec<Span>, stored_length: u64) -> Result<SpanTable, SpanError> {
        let mut end = 0;
        for span in &spans {
            let (stored, stream) = (&span.stored, &span.stream);
            if stored.start > stored.end || stored.end > stored_length {
                return Err(SpanError::Table("a span lies beyond the stored blob"));
            }
            if stream.start >= stream.end {
                return Err(SpanError::Table("a span yields nothing"));
            }
            if stream.start < end {
                return Err(SpanError::Table("spans overlap or are out of order"));
            }
            if length(stored) > MAX_SPAN || length(stream) > MAX_SPAN {
                return Err(SpanError::Table("a span is larger than 64 MiB"));
            }
            if let SpanDigest::StreamChunksBlake3(chunks) = &span.digest
                && chunks.iter().map(|(chunk, _)| u64::from(*chunk)).sum::<u64>() != length(stream)
            {
                return Err(SpanError::Table("a span is not as long as its pieces"));
            }
            if let SpanDigest::StreamPartsSha256(parts) = &span.digest
                && parts
                    .iter()
                    .map(|part| u64::from(part.skip) + u64::from(part.length))
                    .sum::<u64>()
                    != length(stream)
            {
                return Err(SpanError::Table("a span is not as long as its parts"));
            }
            match &span.expansion {
                Expansion::Plain if length(stored) != length(stream) => {
                    return Err(SpanError::Table("a plain span is not as long as what it yields"));
                }
                Expansion::Deflate { bits: 8.., .. } => {
                    return Err(SpanError::Table("a checkpoint has more than 7 bits"));
                }
                _ => {}
            }
            end = stream.end;
        }
        Ok(SpanTable { spans })
    }

    /// The spans, by stream offset.
    pub fn spans(&self) -> &[Span] {
        &self.spans
    }

    /// End of the last span's stream.
    pub fn stream_length(&self) -> u64 {
        self.spans.last().map_or(0, |span| span.stream.end)
    }

    /// Indices of the spans that yield any byte of `stream`.
    pub fn overlapping(&self, stream: Range<u64>) -> Range<usize> {
        let first = self.spans.partition_point(|span| span.stream.end <= stream.start);
        let last = self.spans.partition_point(|span| span.stream.start < stream.end);
        first..last.max(first)
    }

    /// Whether every byte of `stream` is in a span.
    pub fn covers(&self, stream: Range<u64>) -> bool {
        if stream.start >= stream.end {
            return true;
        }
        let within = &self.spans[self.overlapping(stream.clone())];
        let gapless = within
            .windows(2)
            .all(|pair| pair[0].stream.end == pair[1].stream.start);
        let reaches = |span: Option<&Span>, offset| span.is_some_and(|span| span.stream.contains(&offset));
        gapless && reaches(within.first(), stream.start) && reaches(within.last(), stream.end - 1)
    }

    /// Joins spans whose stored bytes touch, or have at most `gap` bytes between them, to runs of at most `most` stored
    /// bytes (one span may be longer).
    pub fn runs(&self, spans: Range<usize>, most: u64, gap: u64) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::new();
        for index in spans {
            let stored = self.spans[index].stored.clone();
            match runs.last_mut() {
                Some(run)
                    if stored.start >= run.stored.start
                        && stored.start <= run.stored.end.saturating_add(gap)
                        && stored.end >= run.stored.end
                        && stored.end - run.stored.start <= most =>
                {
                    run.spans.end = index + 1;
                    run.stored.end = stored.end;
                }
                _ => runs.push(Run {
                    spans: index..index + 1,
                    stored,
                }),
            }
        }
        runs
    }

    /// The stored bytes of span `index`, from the bytes of a run that contains it.
    ///
    /// # Errors
    /// If the run does not contain them.
    pub fn of_run<'a>(&self, index: usize, run: &Run, stored: &'a [u8]) -> Result<&'a [u8], SpanError> {
        let range = &self.spans[index].stored;
        let from = range.start.checked_sub(run.stored.start);
        let to = range.end.checked_sub(run.stored.start);
        from.zip(to)
            .and_then(|(from, to)| stored.get(from as usize..to as usize))
            .ok_or_else(|| SpanError::Expansion {
                span: index,
                why: "fewer bytes were read than it takes".into(),
            })
    }

    /// A check of all spans of a run against its stored bytes, for [`crate::ranges::Ranges::read`].
    pub fn run_check(self: &Arc<SpanTable>, run: &Run) -> Check {
        let (table, run) = (Arc::clone(self), run.clone());
        Arc::new(move |stored| {
            for index in run.spans.clone() {
                table
                    .of_run(index, &run, stored)
                    .and_then(|stored| table.check(index, stored))
                    .map_err(|error| error.to_string())?;
            }
            Ok(())
        })
    }
}
