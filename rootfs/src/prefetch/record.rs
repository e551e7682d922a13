//! Making a load order of what a guest read.
//!
//! Invariant: each chunk of each blob stands in it at most once, at its first read, so it is bounded by the image and not
//! by how long or how often the guest reads.

use std::collections::HashMap;

use crate::blob::CHUNK_SIZE;
use crate::digest::Digest;
use crate::error::Error;

use super::order::{LoadOrder, OrderedBlob, Run};

/// Chunks of 128 KiB a recorder remembers: of 64 GiB of files, which bounds its memory.
const MAX_CHUNKS: u64 = 1 << 19;

/// Accesses so far.
#[derive(Debug)]
pub struct Recorder {
    image: Digest,
    blobs: Vec<Recorded>,
    places: HashMap<Digest, u32>,
    runs: Vec<Run>,
    chunks: u64,
    dropped: u64,
}

#[derive(Debug)]
struct Recorded {
    blob: OrderedBlob,
    /// One bit a chunk.
    seen: Vec<u64>,
}

impl Recorder {
    /// Of an image that has these blobs, none of which has been read.
    pub fn new(image: Digest, blobs: Vec<OrderedBlob>) -> Self {
        let places = (0u32..).zip(&blobs).map(|(place, blob)| (blob.digest, place));
        let places = places.collect();
        let blobs = blobs.into_iter().map(|blob| Recorded { blob, seen: Vec::new() });
        Self {
            image,
            blobs: blobs.collect(),
            places,
            runs: Vec::new(),
            chunks: 0,
            dropped: 0,
        }
    }

    /// The guest read bytes of a blob. What is not of this image, or not in the blob, is left out.
    pub fn access(&mut self, blob: &Digest, offset: u64, length: u64) {
        let Some(&place) = self.places.get(blob) else {
            return;
        };
        let Some(recorded) = self.blobs.get_mut(place as usize) else {
            return;
        };
        let end = offset.saturating_add(length).min(recorded.blob.length);
        if offset >= end {
            return;
        }
        for chunk in offset / CHUNK_SIZE..end.div_ceil(CHUNK_SIZE) {
            if self.chunks == MAX_CHUNKS {
                self.dropped += 1;
                return;
            }
            if !recorded.first_read(chunk) {
                continue;
            }
            self.chunks += 1;
            let start = chunk * CHUNK_SIZE;
            let length = CHUNK_SIZE.min(recorded.blob.length - start);
            match self.runs.last_mut() {
                Some(last) if last.blob == place && last.offset + last.length == start => {
                    last.length += length;
                }
                _ => self.runs.push(Run {
                    blob: place,
                    offset: start,
                    length,
                }),
            }
        }
    }

    /// Accesses were lost.
    pub fn lost(&mut self, accesses: u64) {
        self.dropped += accesses;
    }

    /// Whether nothing has been read.
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// The order so far.
    ///
    /// # Errors
    /// `Malformed` for an image of more blobs than a load order holds.
    pub fn order(&self) -> Result<LoadOrder, Error> {
        let blobs = self.blobs.iter().map(|it| it.blob.clone()).collect();
        LoadOrder::new(self.image, blobs, self.runs.clone(), self.dropped)
    }
}

impl Recorded {
    /// Marks a chunk. Returns whether it was not marked.
    fn first_read(&mut self, chunk: u64) -> bool {
        let (word, bit) = ((chunk / 64) as usize, 1 << (chunk % 64));
        if self.seen.len() <= word {
            self.seen.resize(word + 1, 0);
        }
        let first = self.seen[word] & bit == 0;
        self.seen[word] |= bit;
        first
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn recorder(lengths: &[u64]) -> (Recorder, Vec<Digest>) {
        let digests: Vec<_> = (0..lengths.len()).map(|it| Digest::of(&[it as u8])).collect();
        let blobs = digests.iter().zip(lengths).map(|(digest, length)| OrderedBlob {
            digest: *digest,
            layer: Some(*digest),
            length: *length,
        });
        (Recorder::new(Digest::of(b"image"), blobs.collect()), digests)
    }

    #[test]
    fn first_reads_in_order_whole_chunks_neighbours_joined() {
        let (mut recorder, blobs) = recorder(&[CHUNK_SIZE * 3 + 4096, 4096]);
        recorder.access(&blobs[0], CHUNK_SIZE * 3, 10);
        recorder.access(&blobs[1], 5, 1);
        recorder.access(&blobs[0], 0, 1);
        recorder.access(&blobs[0], 0, CHUNK_SIZE + 1);
        recorder.access(&Digest::of(b"another"), 0, 1);
        recorder.access(&blobs[1], 4096, 1);
        recorder.lost(2);
        let order = recorder.order().unwrap();
        let runs: Vec<_> = order.runs.iter().map(|run| (run.blob, run.offset, run.length)).collect();
        assert_eq!(
            runs,
            [(0, CHUNK_SIZE * 3, 4096), (1, 0, 4096), (0, 0, CHUNK_SIZE * 2)]
        );
        assert_eq!(order.dropped, 2);
    }

    proptest! {
        #[test]
        fn every_chunk_read_is_there_exactly_once(
            reads in proptest::collection::vec((0usize..2, 0u64..2_000_000, 0u64..400_000), 0..100)
        ) {
            let lengths = [1_048_576u64, 1_318_912];
            let (mut recorder, blobs) = recorder(&lengths);
            let mut wanted = std::collections::BTreeSet::new();
            for (blob, offset, length) in reads {
                recorder.access(&blobs[blob], offset, length);
                let end = (offset + length).min(lengths[blob]);
                if offset < end {
                    wanted.extend((offset / CHUNK_SIZE..end.div_ceil(CHUNK_SIZE)).map(|it| (blob as u32, it)));
                }
            }
            let order = recorder.order().unwrap();
            let mut got = Vec::new();
            for run in &order.runs {
                got.extend((run.offset / CHUNK_SIZE..(run.offset + run.length).div_ceil(CHUNK_SIZE)).map(|it| (run.blob, it)));
            }
            let count = got.len();
            let got: std::collections::BTreeSet<_> = got.into_iter().collect();
            prop_assert_eq!(count, got.len());
            prop_assert_eq!(got, wanted);
        }
    }
}
