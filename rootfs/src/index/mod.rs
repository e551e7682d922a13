//! A layer index: all that is needed to show a layer's tree, and to read its files from spans of its stored form.
//!
//! Whoever makes one (a first unpacking, a SOCI index, an eStargz table of contents, a converted image's tables, a Nydus
//! bootstrap), the rest of Thaw sees the same three things: the tree, the pieces that say where in the stream each part of
//! the data file is, and the spans that say where in the stored blob each part of the stream is.

pub mod estargz;
pub mod form;
pub mod soci;

use std::ops::Range;

use crate::span::SpanTable;
use crate::tree::LayerTree;

/// A run of bytes of a data file that stands in one piece in the stream. What lies between pieces is zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Where in the data file.
    pub data_offset: u64,
    /// Bytes; of a file's last page, only those the file has.
    pub length: u64,
    /// Where in the stream.
    pub stream_offset: u64,
}

/// The pieces of a data file, sorted by `data_offset`, not overlapping.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Pieces {
    /// The stream is the data file (converted images).
    Identity,
    Map(Vec<Piece>),
}

/// A layer that can be read in pieces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerIndex {
    pub tree: LayerTree,
    pub content: Content,
}

/// How a data file is made from a stored blob; what a lazily filled cache file needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Content {
    /// Bytes of the data file, a multiple of 4096.
    pub data_length: u64,
    pub pieces: Pieces,
    pub spans: SpanTable,
}

impl Pieces {
    /// The pieces that reach into `data` of a data file, cut to it, in order.
    pub fn within(&self, data: Range<u64>) -> Vec<Piece> {
        let cut = |piece: &Piece| {
            let start = piece.data_offset.max(data.start);
            let end = (piece.data_offset + piece.length).min(data.end);
            (start < end).then(|| Piece {
                data_offset: start,
                length: end - start,
                stream_offset: piece.stream_offset + (start - piece.data_offset),
            })
        };
        match self {
            Self::Identity => vec![Piece {
                data_offset: data.start,
                length: data.end.saturating_sub(data.start),
                stream_offset: data.start,
            }],
            Self::Map(pieces) => {
                let first = pieces.partition_point(|piece| piece.data_offset + piece.length <= data.start);
                pieces[first..]
                    .iter()
                    .take_while(|piece| piece.data_offset < data.end)
                    .filter_map(cut)
                    .collect()
            }
        }
    }
}
