//! The tree of one layer: the entries of its tar stream, and the places of their data.
//!
//! A layer's tree holds no file data, only extents of the layer's data file, in which every file starts on a page and is
//! padded with zeros to a page.

use serde::{Deserialize, Serialize};
use thaw_imagefs::tree::{Attributes, BlobExtent};
use thaw_protocol::encoding::{self, EncodingError};
use thaw_protocol::tags;

/// A stored piece of a file. Pieces are sorted and do not touch or overlap; the data between them is zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extent {
    /// Offset in the file; a multiple of [`PAGE`](thaw_imagefs::tree::PAGE).
    pub file_offset: u64,
    /// Offset in the layer's data file; a multiple of [`PAGE`](thaw_imagefs::tree::PAGE).
    pub data_offset: u64,
    /// Number of bytes, a multiple of [`PAGE`](thaw_imagefs::tree::PAGE); may exceed the end of the file by less than a page.
    pub length: u64,
}

impl Extent {
    /// The extent, of data file `blob`.
    pub fn of_blob(self, blob: u32) -> BlobExtent {
        let Self {
            file_offset,
            data_offset,
            length,
        } = self;
        BlobExtent {
            file_offset,
            blob,
            data_offset,
            length,
        }
    }
}

/// An inode other than a directory. Directories differ between [`LayerTree`] and [`Tree`](thaw_imagefs::tree::Tree), which define them
/// separately.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(remote = "Self")]
pub enum Leaf {
    File { size: u64, extents: Vec<Extent> },
    Symlink { target: Vec<u8> },
    CharDevice { major: u32, minor: u32 },
    BlockDevice { major: u32, minor: u32 },
    Fifo,
    Socket,
}

tags!(Leaf {
    File = 0,
    Symlink = 1,
    CharDevice = 2,
    BlockDevice = 3,
    Fifo = 4,
    Socket = 5,
});

/// The change that a layer makes at one path.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(remote = "Self")]
pub enum Change {
    /// The directory exists and has these attributes; its existing entries stay.
    Directory(Attributes),
    /// Any other inode, which replaces the existing one.
    Leaf(Attributes, Leaf),
    /// Another name of the inode at `target`, a path of the same form.
    HardLink { target: Vec<u8> },
    /// Hides the path of lower layers (`.wh.NAME`).
    Whiteout,
    /// Hides everything lower layers have under this directory (`.wh..wh..opq`).
    Opaque,
}

tags!(Change {
    Directory = 0,
    Leaf = 1,
    HardLink = 2,
    Whiteout = 3,
    Opaque = 4,
});

/// One entry of a layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerEntry {
    /// Components separated by single slashes; no component is `.`, `..` or empty. The root is the empty path.
    pub path: Vec<u8>,
    pub change: Change,
}

/// One layer: its entries in the order of the tar stream, which decides if a path occurs twice.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerTree {
    pub entries: Vec<LayerEntry>,
    /// Bytes of the layer's data file, a multiple of [`PAGE`](thaw_imagefs::tree::PAGE).
    pub data_length: u64,
}

/// First bytes of a stored [`LayerTree`]: the magic and the version of the format.
const LAYER_TREE_MAGIC: &[u8; 8] = b"thawlt\0\x01";

/// A stored layer tree that cannot be read; the layer must be unpacked again.
#[derive(Debug, thiserror::Error)]
pub enum StoredTreeError {
    #[error("the stored layer tree is of another version or not one at all: remove it, and it is made again")]
    Version,
    #[error("the stored layer tree is damaged ({0}): remove it, and it is made again")]
    Damaged(#[from] EncodingError),
}

impl LayerTree {
    /// Encodes it for the store.
    ///
    /// # Errors
    /// Only if there is no memory for the encoding.
    pub fn to_bytes(&self) -> Result<Vec<u8>, StoredTreeError> {
        Ok([LAYER_TREE_MAGIC.as_slice(), &encoding::encode(self)?].concat())
    }

    /// Reads the output of [`LayerTree::to_bytes`].
    ///
    /// # Errors
    /// If the bytes are damaged or of another version.
    pub fn from_bytes(bytes: &[u8]) -> Result<LayerTree, StoredTreeError> {
        let body = bytes
            .strip_prefix(LAYER_TREE_MAGIC)
            .ok_or(StoredTreeError::Version)?;
        Ok(encoding::decode(body)?)
    }
}

#[cfg(test)]
#[path = "tree_golden_test.rs"]
mod golden;
