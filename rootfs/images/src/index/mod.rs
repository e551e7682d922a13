//! A layer index: all that is needed to show a layer's tree, and to read its files from spans of its stored form.
//!
//! Indexes come from a first unpacking, a SOCI index, an eStargz table of contents, a converted image's tables or a
//! Nydus bootstrap. All have the same three parts: the tree; the pieces, which say where in the stream each part of the
//! data file is; and the spans, which say where in the stored blob each part of the stream is.

pub mod error;
pub mod estargz;
mod foreign;
#[cfg(test)]
mod interop_test;
pub mod kept;
pub mod rfc3339;
pub mod soci;
#[cfg(test)]
pub(crate) mod testing;

use std::ops::Range;

use thaw_imagefs::tree::PAGE;

pub use crate::layer::Piece;
use crate::layer::tree::LayerTree;
use crate::span::SpanTable;

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

/// How a data file is filled from a stored blob: the information that a lazily filled cache file needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Content {
    /// Bytes of the data file, a multiple of 4096.
    pub data_length: u64,
    pub pieces: Pieces,
    pub spans: SpanTable,
}

/// Why a content is refused: it refers to data that does not exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the layer's index is malformed: {0}")]
pub struct ContentError(&'static str);

impl Content {
    /// Checks that the pieces lie in the data file and the spans hold all of them.
    ///
    /// # Errors
    /// [`ContentError`] names the broken rule.
    pub fn new(data_length: u64, pieces: Pieces, spans: SpanTable) -> Result<Content, ContentError> {
        let refuse = |why| Err(ContentError(why));
        if !data_length.is_multiple_of(PAGE) {
            return refuse("the data file does not end with a page");
        }
        let mut end = 0;
        match &pieces {
            Pieces::Identity if !spans.covers(0..data_length) => {
                return refuse("its spans do not hold all of the data file");
            }
            Pieces::Identity => {}
            Pieces::Map(map) => {
                for piece in map {
                    let data_end = piece.data_offset.checked_add(piece.length);
                    let stream_end = piece.stream_offset.checked_add(piece.length);
                    let (Some(data_end), Some(stream_end)) = (data_end, stream_end) else {
                        return refuse("a piece ends beyond 2^64");
                    };
                    if piece.length == 0 || piece.data_offset < end {
                        return refuse("pieces are empty, overlap or are out of order");
                    }
                    if data_end > data_length {
                        return refuse("a piece lies behind the end of the data file");
                    }
                    if !spans.covers(piece.stream_offset..stream_end) {
                        return refuse("its spans do not hold all of a piece");
                    }
                    end = data_end;
                }
            }
        }
        Ok(Content {
            data_length,
            pieces,
            spans,
        })
    }
}

impl Pieces {
    /// The pieces that intersect `data` of a data file, cut to it, in order.
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
            Self::Identity if data.is_empty() => Vec::new(),
            Self::Identity => vec![Piece {
                data_offset: data.start,
                length: data.end - data.start,
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

#[cfg(test)]
mod rebuild_test;
