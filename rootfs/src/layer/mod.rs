//! Unpacking a layer.
mod data;

use std::io::Read;

pub use data::{DataSink, FileSink};

use crate::tree::LayerTree;

/// How much a layer may hold before it is refused.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Entries.
    pub entries: u64,
    /// Bytes of one PAX header or GNU long name.
    pub header_bytes: u64,
    /// Bytes of all names, link targets and xattrs together.
    pub tree_bytes: u64,
    /// Bytes of file data stored.
    pub data_bytes: u64,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            entries: 4 << 20,
            header_bytes: 1 << 20,
            tree_bytes: 1 << 30,
            data_bytes: 1 << 40,
        }
    }
}

/// Why a layer was refused.
#[derive(Debug, thiserror::Error)]
pub enum LayerError {
    #[error("the layer ends in the middle of {what} at byte {offset}: it is truncated, fetch it again")]
    TruncatedLayer { offset: u64, what: String },
}

/// Reads an uncompressed tar stream to its end.
///
/// # Errors
/// See [`LayerError`].
pub fn unpack(_tar: impl Read, _data: &mut impl DataSink, _limits: &Limits) -> Result<LayerTree, LayerError> {
    unimplemented!()
}
