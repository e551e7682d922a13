//! Making a load order from the reads of a guest.
//!
//! Invariant: the order has each chunk of each blob at most once, at its first read. Its size is bounded by the image,
//! not by how long or how often the guest reads.

use std::collections::HashMap;

use thaw_imagefs::blob::CHUNK_SIZE;
use thaw_imagefs::digest::Digest;

use crate::error::Error;

use crate::load_order::{LoadOrder, OrderedBlob, Run};

/// Chunks of 128 KiB that a recorder remembers, equal to 64 GiB of files, which bounds its memory.
const MAX_CHUNKS: usize = 1 << 19;

/// Blobs that a recorder remembers, which bounds its memory against a lying guest or VMM.
const MAX_BLOBS: usize = 1024;

/// Bytes of an access that are recorded: more than any request or mapping of a guest, and few chunks to process.
const MAX_ACCESS: u64 = 16 << 20;

/// Accesses so far, of an image that may not be known yet.
#[derive(Debug, Default)]
pub struct Recorder {
    /// Bytes of each blob of the image, once it is known.
    known: Option<HashMap<Digest, u64>>,
    blobs: Vec<Recorded>,
    places: HashMap<Digest, usize>,
    /// Index of the blob, and chunk.
    chunks: Vec<(usize, u64)>,
    dropped: u64,
    foreign: u64,
}

/// The chunks seen of one blob, one bit each.
#[derive(Debug)]
struct Recorded {
    digest: Digest,
    seen: HashMap<u64, u64>,
}

impl Recorder {
    /// Restricts the recording to these blobs, which are the image's. Reads of other blobs are no longer recorded.
    pub fn only(&mut self, blobs: &[OrderedBlob]) {
        self.known = Some(blobs.iter().map(|blob| (blob.digest, blob.length)).collect());
    }

    /// Accesses since [`Recorder::only`] to other blobs than the image's, or beyond a blob's end.
    pub fn foreign(&self) -> u64 {
        self.foreign
    }

    /// The guest read bytes of a blob.
    pub fn access(&mut self, blob: &Digest, offset: u64, length: u64) {
        let mut limit = u64::MAX;
        if let Some(known) = &self.known {
            limit = known.get(blob).copied().unwrap_or(0);
            if offset >= limit {
                self.foreign = self.foreign.saturating_add(1);
                return;
            }
        }
        let Some(place) = self.place(blob) else {
            self.lost(1);
            return;
        };
        if length == 0 {
            return;
        }
        let end = offset.saturating_add(length.min(MAX_ACCESS)).min(limit);
        for chunk in offset / CHUNK_SIZE..end.div_ceil(CHUNK_SIZE) {
            if self.chunks.len() == MAX_CHUNKS {
                self.lost(1);
                return;
            }
            if self.blobs[place].first_read(chunk) {
                self.chunks.push((place, chunk));
            }
        }
    }

    /// Accesses were lost.
    pub fn lost(&mut self, accesses: u64) {
        self.dropped = self.dropped.saturating_add(accesses);
    }

    /// Blob and chunk of each first read, in order, the first `from` left out.
    pub(super) fn reads(&self, from: usize) -> impl Iterator<Item = (&Digest, u64)> {
        let reads = self.chunks.get(from..).unwrap_or_default();
        reads
            .iter()
            .map(|(place, chunk)| (&self.blobs[*place].digest, *chunk))
    }

    /// First reads so far.
    pub fn len(&self) -> usize {
        self.chunks.len()
    }

    /// Whether nothing has been read.
    pub fn is_empty(&self) -> bool {
        self.chunks.is_empty()
    }

    /// The order of the reads of `image`, which has these blobs. Reads of other blobs, or beyond a blob's end, are left out.
    ///
    /// # Errors
    /// `Malformed` if the image has more blobs than a load order can hold.
    pub fn order(&self, image: Digest, blobs: Vec<OrderedBlob>) -> Result<LoadOrder, Error> {
        let place = |digest: &Digest| (0u32..).zip(&blobs).find(|(_, blob)| blob.digest == *digest);
        let places: Vec<_> = self.blobs.iter().map(|it| place(&it.digest)).collect();
        let mut runs: Vec<Run> = Vec::new();
        for (recorded, chunk) in &self.chunks {
            let Some((blob, known)) = places[*recorded] else {
                continue;
            };
            let start = chunk * CHUNK_SIZE;
            if start >= known.length {
                continue;
            }
            let length = CHUNK_SIZE.min(known.length - start);
            match runs.last_mut() {
                Some(last) if last.blob == blob && last.offset + last.length == start => {
                    last.length += length;
                }
                _ => runs.push(Run {
                    blob,
                    offset: start,
                    length,
                }),
            }
        }
        LoadOrder::new(image, blobs, runs, self.dropped)
    }

    fn place(&mut self, blob: &Digest) -> Option<usize> {
        if let Some(place) = self.places.get(blob) {
            return Some(*place);
        }
        let place = self.blobs.len();
        (place < MAX_BLOBS).then(|| {
            self.places.insert(*blob, place);
            self.blobs.push(Recorded {
                digest: *blob,
                seen: HashMap::new(),
            });
            place
        })
    }
}

impl Recorded {
    /// Marks a chunk. Returns whether it was not marked.
    fn first_read(&mut self, chunk: u64) -> bool {
        let (word, bit) = (self.seen.entry(chunk / 64).or_default(), 1 << (chunk % 64));
        let first = *word & bit == 0;
        *word |= bit;
        first
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn blobs(lengths: &[u64]) -> (Vec<OrderedBlob>, Vec<Digest>) {
        let digests: Vec<_> = (0..lengths.len()).map(|it| Digest::of(&[it as u8])).collect();
        let blobs = digests.iter().zip(lengths).map(|(digest, length)| OrderedBlob {
            digest: *digest,
            layer: Some(*digest),
            length: *length,
        });
        (blobs.collect(), digests)
    }

    #[test]
    fn first_reads_in_order_whole_chunks_neighbours_joined() {
        let (known, blobs) = blobs(&[CHUNK_SIZE * 3 + 4096, 4096]);
        let mut recorder = Recorder::default();
        recorder.access(&blobs[0], CHUNK_SIZE * 3, 10);
        recorder.access(&blobs[1], 5, 1);
        recorder.access(&blobs[0], 0, 1);
        recorder.access(&blobs[0], 0, CHUNK_SIZE + 1);
        recorder.access(&Digest::of(b"another"), 0, 1);
        recorder.access(&blobs[1], CHUNK_SIZE, u64::from(u32::MAX));
        recorder.lost(2);
        let order = recorder.order(Digest::of(b"image"), known).unwrap();
        let runs: Vec<_> = order
            .runs
            .iter()
            .map(|run| (run.blob, run.offset, run.length))
            .collect();
        assert_eq!(
            runs,
            [(0, CHUNK_SIZE * 3, 4096), (1, 0, 4096), (0, 0, CHUNK_SIZE * 2)]
        );
        assert_eq!(order.dropped, 2);
    }

    #[test]
    fn accesses_of_other_blobs_are_not_recorded() {
        let (own, digests) = blobs(&[CHUNK_SIZE + 1, CHUNK_SIZE]);
        let mut recorder = Recorder::default();
        recorder.only(&own[..1]);
        for (blob, offset) in [
            (&digests[1], 0),
            (&digests[0], CHUNK_SIZE + 1),
            (&digests[0], u64::MAX),
        ] {
            recorder.access(blob, offset, 4096);
        }
        assert!(recorder.is_empty());
        assert_eq!(recorder.foreign(), 3);
        recorder.access(&digests[0], CHUNK_SIZE - 1, u64::MAX);
        let chunks: Vec<_> = recorder.reads(0).map(|(_, chunk)| chunk).collect();
        assert_eq!(chunks, [0, 1]);
    }

    #[test]
    fn an_access_of_any_length_records_few_chunks() {
        let (_, digests) = blobs(&[1]);
        let mut recorder = Recorder::default();
        recorder.access(&digests[0], 0, u64::MAX);
        assert_eq!(recorder.len() as u64, MAX_ACCESS / CHUNK_SIZE);
    }

    proptest! {
        #[test]
        fn every_chunk_read_is_there_exactly_once(
            reads in proptest::collection::vec((0usize..2, 0u64..2_000_000, 0u64..400_000), 0..100)
        ) {
            let lengths = [1_048_576u64, 1_318_912];
            let (known, blobs) = blobs(&lengths);
            let mut recorder = Recorder::default();
            let mut wanted = std::collections::BTreeSet::new();
            for (blob, offset, length) in reads {
                recorder.access(&blobs[blob], offset, length);
                if length > 0 {
                    let chunks = offset / CHUNK_SIZE..(offset + length).div_ceil(CHUNK_SIZE);
                    let there = chunks.filter(|chunk| chunk * CHUNK_SIZE < lengths[blob]);
                    wanted.extend(there.map(|it| (blob as u32, it)));
                }
            }
            let order = recorder.order(Digest::of(b"image"), known).unwrap();
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
