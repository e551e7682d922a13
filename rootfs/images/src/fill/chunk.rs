//! Assembling chunks in memory from spans, comparing them with their digests, and writing each as a whole.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use thaw_failpoint::{Failpoint, reach};

use crate::error::Error;
use crate::index::Piece;

use super::blob::Blob;
use super::{FillStats, count, within};

/// A span that was read: its index, its range of the stream, and its bytes.
pub type Expanded = (usize, Range<u64>, Arc<[u8]>);

/// Some chunks of a blob that are being assembled.
pub struct Assembly {
    blob: Arc<Blob>,
    chunks: Vec<Wanted>,
    /// Write also chunks that are ready.
    again: bool,
}

struct Wanted {
    chunk: u64,
    start: u64,
    bytes: Vec<u8>,
    pieces: Vec<Piece>,
}

impl Wanted {
    fn new(blob: &Blob, chunk: u64) -> Self {
        let range = blob.files.ready.chunk_range(chunk);
        Self {
            chunk,
            start: range.start,
            bytes: vec![0; (range.end - range.start) as usize],
            pieces: blob.pieces(chunk),
        }
    }

    /// Copies the parts of `stream`, whose content is `bytes`, that the chunk needs.
    fn add(&mut self, stream: &Range<u64>, bytes: &[u8]) {
        for piece in &self.pieces {
            let from = piece.stream_offset.max(stream.start);
            let to = (piece.stream_offset + piece.length).min(stream.end);
            if from >= to {
                continue;
            }
            let target = (piece.data_offset - self.start + (from - piece.stream_offset)) as usize;
            let source = (from - stream.start) as usize;
            let length = (to - from) as usize;
            if let (Some(target), Some(source)) = (
                self.bytes.get_mut(target..target + length),
                bytes.get(source..source + length),
            ) {
                target.copy_from_slice(source);
            }
        }
    }

    fn overlaps(&self, stream: &Range<u64>) -> bool {
        self.pieces.iter().any(|piece| {
            piece.stream_offset < stream.end && stream.start < piece.stream_offset + piece.length
        })
    }
}

impl Assembly {
    pub fn new(blob: Arc<Blob>, chunks: Vec<u64>, again: bool) -> Self {
        let chunks = chunks.into_iter().map(|chunk| Wanted::new(&blob, chunk));
        Self {
            chunks: chunks.collect(),
            blob,
            again,
        }
    }

    pub fn blob(&self) -> &Blob {
        &self.blob
    }

    /// Whether all its chunks are ready, even if others wrote them.
    pub fn is_ready(&self) -> bool {
        let ready = &self.blob.files.ready;
        self.chunks.iter().all(|wanted| ready.is_ready(wanted.chunk))
    }

    /// The spans of which the chunks consist, in order.
    pub fn spans(&self) -> Vec<usize> {
        let Some(content) = self.blob.content() else {
            return Vec::new();
        };
        let mut spans = BTreeSet::new();
        for piece in self.chunks.iter().flat_map(|wanted| &wanted.pieces) {
            spans.extend(
                content
                    .spans
                    .overlapping(piece.stream_offset..piece.stream_offset + piece.length),
            );
        }
        spans.into_iter().collect()
    }

    /// Those of these spans that chunks which are not ready yet need.
    pub fn still_wanted(&self, spans: &[usize]) -> Vec<usize> {
        let missing = |wanted: &&Wanted| !self.blob.files.ready.is_ready(wanted.chunk);
        let wanted = |span: &&usize| {
            let stream = self.stream(**span);
            stream.is_some_and(|stream| {
                self.chunks
                    .iter()
                    .filter(missing)
                    .any(|wanted| wanted.overlaps(&stream))
            })
        };
        spans.iter().filter(wanted).copied().collect()
    }

    fn stream(&self, span: usize) -> Option<Range<u64>> {
        let content = self.blob.content()?;
        content.spans.spans().get(span).map(|span| span.stream.clone())
    }

    /// Copies a span's bytes to their chunks.
    pub fn add(&mut self, span: usize, bytes: &[u8]) {
        if let Some(stream) = self.stream(span) {
            self.chunks
                .iter_mut()
                .for_each(|wanted| wanted.add(&stream, bytes));
        }
    }

    /// Compares and writes the chunks that are not ready. All spans have been added, except those that only ready chunks need.
    ///
    /// # Errors
    /// `ChunkDigest`, `DiskFull`, `Io`; correct chunks are still written.
    pub fn commit(&self, stats: &FillStats) -> Result<(), Error> {
        let mut result = Ok(());
        for wanted in &self.chunks {
            let written = commit(&self.blob, wanted.chunk, &wanted.bytes, self.again, stats);
            if result.is_ok() {
                result = written;
            }
        }
        result
    }
}

/// Writes every chunk that `spans`, neighbours whose stream begins at `stream.start`, yield completely. Returns the spans of which another
/// chunk still needs a part.
///
/// # Errors
/// Those of [`Assembly::commit`].
pub fn commit_whole(
    blob: &Blob,
    stream: &Range<u64>,
    spans: &[Expanded],
    stats: &FillStats,
) -> Result<Vec<usize>, Error> {
    let mut partly = Vec::new();
    let mut result = Ok(());
    for chunk in blob.chunks_within(stream) {
        if blob.files.ready.is_ready(chunk) {
            continue;
        }
        let mut wanted = Wanted::new(blob, chunk);
        let whole = wanted
            .pieces
            .iter()
            .all(|piece| within(&(piece.stream_offset..piece.stream_offset + piece.length), stream));
        if whole {
            for (_, range, bytes) in spans {
                wanted.add(range, bytes);
            }
            let written = commit(blob, chunk, &wanted.bytes, false, stats);
            if result.is_ok() {
                result = written;
            }
        } else {
            let parts = spans.iter().filter(|(_, range, _)| wanted.overlaps(range));
            partly.extend(parts.map(|(span, ..)| *span));
        }
    }
    result.map(|()| partly)
}

/// Compares a chunk with its digest, or learns it; writes it; then sets its bit.
fn commit(blob: &Blob, chunk: u64, bytes: &[u8], again: bool, stats: &FillStats) -> Result<(), Error> {
    let ready = &blob.files.ready;
    if ready.is_ready(chunk) && !again {
        return Ok(());
    }
    let path = blob.files.directory.join("data");
    let failed = |error| Error::blob(blob.id, &path, error);
    let digest = *blake3::hash(bytes).as_bytes();
    match ready.digest(chunk).map_err(failed)? {
        Some(expected) if expected == digest => {}
        // A crash may have torn learned data. The bytes were verified by their spans' digests.
        Some(_) | None if ready.is_learned() => {
            ready.record(chunk, &digest).map_err(failed)?;
            reach(Failpoint::ChunkDigestLearned);
        }
        _ => {
            count(&stats.mismatches, 1);
            return Err(Error::ChunkDigest {
                blob: blob.id,
                offset: ready.chunk_range(chunk).start,
                place: blob
                    .origins
                    .first()
                    .map_or_else(String::new, |origin| origin.reference.to_string()),
            });
        }
    }
    let data = &blob.files.data;
    let filled = ready.fill(data, chunk, || {
        write(data, ready.chunk_range(chunk).start, bytes)?;
        reach(Failpoint::ChunkWritten);
        Ok(())
    });
    filled.map_err(failed)?;
    reach(Failpoint::ChunkReady);
    count(&stats.chunks, 1);
    Ok(())
}

/// Writes a chunk. Zeros over a hole stay a hole.
fn write(data: &File, offset: u64, bytes: &[u8]) -> io::Result<()> {
    if bytes.iter().all(|byte| *byte == 0) {
        let mut there = vec![0; bytes.len()];
        data.read_exact_at(&mut there, offset)?;
        if there == bytes {
            return Ok(());
        }
    }
    data.write_all_at(bytes, offset)
}
