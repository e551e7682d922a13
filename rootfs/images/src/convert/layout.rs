//! The order in which chunks are stored, and the files' extents after it.

use std::collections::HashSet;

use thaw_imagefs::digest::Digest;
use thaw_imagefs::tree::{BlobExtent, Kind, Tree};

use crate::error::Error;
use crate::form::{Form, layer_key};
use crate::load_order::{LoadOrder, OrderedBlob, Run};

use super::blobs::Blobs;
use super::chunks::{Chunks, Distinct, Piece, Place, SourceBlob};

/// A load order in terms of distinct chunks.
pub struct Ordered {
    /// Each chunk once, by its first read.
    chunks: Vec<u32>,
    dropped: u64,
    unmatched: u64,
}

impl Ordered {
    pub fn of(order: &LoadOrder, sources: &[SourceBlob], chunks: &Chunks) -> Self {
        // The document's blobs, by their indexes in the source.
        let blobs: Vec<Option<u32>> = order
            .blobs
            .iter()
            .map(|wanted| {
                let is_it = |source: &SourceBlob| {
                    source.length == wanted.length
                        && (source.id == wanted.digest
                            || (wanted.layer.is_some() && source.layer == wanted.layer))
                };
                sources.iter().position(is_it).map(|place| place as u32)
            })
            .collect();
        let mut pieces: Vec<&Piece> = chunks.pieces.iter().collect();
        pieces.sort_unstable_by_key(|piece| piece.source);
        let mut seen = HashSet::new();
        let mut ordered = Self {
            chunks: Vec::new(),
            dropped: order.dropped,
            unmatched: 0,
        };
        for run in &order.runs {
            let Some(blob) = blobs.get(run.blob as usize).copied().flatten() else {
                ordered.unmatched += run.length;
                continue;
            };
            let end = run.offset.saturating_add(run.length);
            let last_before = pieces
                .partition_point(|piece| piece.source <= (blob, run.offset))
                .saturating_sub(1);
            for piece in &pieces[last_before..] {
                if piece.source >= (blob, end) {
                    break;
                }
                let length = chunks.distinct[piece.chunk as usize].length;
                let reaches = piece.source.0 == blob && piece.source.1 + length > run.offset;
                if reaches && seen.insert(piece.chunk) {
                    ordered.chunks.push(piece.chunk);
                }
            }
        }
        ordered
    }

    /// The load order of the converted image, and the number of bytes of the original's that were not found.
    pub fn document(
        self,
        image: Digest,
        blobs: &Blobs,
        distinct: &[Distinct],
        places: &[(u32, u64)],
    ) -> Result<(Vec<u8>, u64), Error> {
        let names = blobs.list.iter().map(|blob| OrderedBlob {
            digest: layer_key(
                Form::Accelerated,
                &blob.stored.data.digest,
                &blob.stored.table.digest,
            ),
            layer: None,
            length: blob.length,
        });
        let mut runs: Vec<Run> = Vec::new();
        for index in self.chunks {
            let (blob, offset) = places[index as usize];
            let length = distinct[index as usize].length;
            match runs.last_mut() {
                Some(last) if last.blob == blob && last.offset + last.length == offset => {
                    last.length += length;
                }
                _ => runs.push(Run { blob, offset, length }),
            }
        }
        let order = LoadOrder::new(image, names.collect(), runs, self.dropped)?;
        Ok((order.to_json()?, self.unmatched))
    }
}

/// The chunks to store: first those that a start reads, in its order; then the others in order of appearance.
pub fn groups(chunks: &Chunks, order: Option<&Ordered>) -> Vec<Vec<u32>> {
    let is_new = |index: &u32| matches!(chunks.distinct[*index as usize].place, Place::Source { .. });
    let first: Vec<u32> = order
        .iter()
        .flat_map(|order| &order.chunks)
        .copied()
        .filter(is_new)
        .collect();
    let early: HashSet<u32> = first.iter().copied().collect();
    let rest = (0..chunks.distinct.len() as u32)
        .filter(|index| is_new(index) && !early.contains(index))
        .collect();
    vec![first, rest]
}

/// Gives every file the extents of its chunks.
pub fn set_extents(tree: &mut Tree, pieces: &[Piece], distinct: &[Distinct], places: &[(u32, u64)]) {
    for inode in &mut tree.inodes {
        if let Kind::File { extents, .. } = &mut inode.kind {
            extents.clear();
        }
    }
    for piece in pieces {
        let Kind::File { extents, .. } = &mut tree.inodes[piece.inode as usize].kind else {
            continue;
        };
        let (blob, data_offset) = places[piece.chunk as usize];
        let length = distinct[piece.chunk as usize].length;
        match extents.last_mut() {
            Some(last)
                if last.blob == blob
                    && last.file_offset + last.length == piece.file_offset
                    && last.data_offset + last.length == data_offset =>
            {
                last.length += length;
            }
            _ => extents.push(BlobExtent {
                file_offset: piece.file_offset,
                blob,
                data_offset,
                length,
            }),
        }
    }
}
