//! File trees as they travel from a tar stream to EROFS: what one layer says, and what all layers together make.
//!
//! No file data is held here, only where it is: extents of a layer's data file, in which every file starts on a page
//! and is padded with zeros to a page.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use thaw_protocol::encoding::{self, EncodingError};
use thaw_protocol::tags;

/// Bytes of a page, of an EROFS block and of the alignment of file data.
pub const PAGE: u64 = 4096;

/// A moment, as POSIX counts it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Timestamp {
    /// Seconds since the epoch; negative before it.
    pub seconds: i64,
    /// 0..=999_999_999, always counted forward.
    pub nanoseconds: u32,
}

/// One extended attribute.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Xattr {
    /// Full name with its namespace, e.g. `security.capability`.
    pub name: Vec<u8>,
    pub value: Vec<u8>,
}

/// What every inode has.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attributes {
    /// Permission, set-id and sticky bits: `0o7777`. The type is the [`Kind`].
    pub mode: u16,
    pub uid: u32,
    pub gid: u32,
    pub mtime: Timestamp,
    /// Sorted by name, each name once.
    pub xattrs: Vec<Xattr>,
}

impl Attributes {
    /// What a directory nobody described gets: 0755, root, the epoch.
    pub fn implied_directory() -> Attributes {
        Attributes {
            mode: 0o755,
            ..Attributes::default()
        }
    }
}

/// A piece of a file that is stored. Pieces are sorted, do not touch or overlap; what lies between them is zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extent {
    /// Where in the file; a multiple of [`PAGE`].
    pub file_offset: u64,
    /// Where in the layer's data file; a multiple of [`PAGE`].
    pub data_offset: u64,
    /// Bytes, a multiple of [`PAGE`]; may reach past the end of the file by less than a page.
    pub length: u64,
}

/// A piece of a file of a [`Tree`] that is stored. As [`Extent`], and neighbours may touch where they are stored apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlobExtent {
    /// Where in the file; a multiple of [`PAGE`].
    pub file_offset: u64,
    /// Which data file, counted as the lengths are that are given to [`crate::erofs::write`].
    pub blob: u32,
    /// Where in that data file; a multiple of [`PAGE`].
    pub data_offset: u64,
    /// Bytes, a multiple of [`PAGE`]; may reach past the end of the file by less than a page.
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

/// What a non-directory is. Directories differ between [`LayerTree`] and [`Tree`] and are spelled out there.
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

/// What a layer says about one path.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(remote = "Self")]
pub enum Change {
    /// The directory exists and has these attributes; what it holds already stays.
    Directory(Attributes),
    /// Anything else: replaces what was there.
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
    /// Components joined by single slashes, none of them `.`, `..` or empty; the root is the empty path.
    pub path: Vec<u8>,
    pub change: Change,
}

/// One layer: its entries in the order of the tar stream, which decides when a path is named twice.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerTree {
    pub entries: Vec<LayerEntry>,
    /// Bytes of the layer's data file, a multiple of [`PAGE`].
    pub data_length: u64,
}

/// First bytes of a stored [`LayerTree`]: what it is and the version of its form.
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
    /// The form in which the store keeps it.
    ///
    /// # Errors
    /// Only when out of memory for the encoding.
    pub fn to_bytes(&self) -> Result<Vec<u8>, StoredTreeError> {
        Ok([LAYER_TREE_MAGIC.as_slice(), &encoding::encode(self)?].concat())
    }

    /// Reads what [`LayerTree::to_bytes`] made.
    ///
    /// # Errors
    /// When it is of another version or damaged.
    pub fn from_bytes(bytes: &[u8]) -> Result<LayerTree, StoredTreeError> {
        let body = bytes
            .strip_prefix(LAYER_TREE_MAGIC)
            .ok_or(StoredTreeError::Version)?;
        Ok(encoding::decode(body)?)
    }
}

/// Index of an inode in a [`Tree`].
pub type InodeIndex = u32;

/// What an inode of a [`Tree`] is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Names to inodes, without `.` and `..`. The order of the map, by bytes, is the order EROFS wants.
    Directory {
        entries: BTreeMap<Box<[u8]>, InodeIndex>,
    },
    /// A regular file. Of a merged tree all extents lie in the data file of the layer that named it, counted from the
    /// bottom.
    File {
        size: u64,
        extents: Vec<BlobExtent>,
    },
    Symlink {
        target: Vec<u8>,
    },
    CharDevice {
        major: u32,
        minor: u32,
    },
    BlockDevice {
        major: u32,
        minor: u32,
    },
    Fifo,
    Socket,
}

/// One inode of a [`Tree`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inode {
    pub attributes: Attributes,
    pub kind: Kind,
}

/// A whole file system: inode 0 is the root; an inode no directory names is not part of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tree {
    pub inodes: Vec<Inode>,
}

impl Tree {
    /// The root's index.
    pub const ROOT: InodeIndex = 0;

    /// A tree of an empty root directory.
    pub fn new(root: Attributes) -> Tree {
        Tree {
            inodes: vec![Inode {
                attributes: root,
                kind: Kind::Directory {
                    entries: BTreeMap::new(),
                },
            }],
        }
    }

    /// The inode at `index`. Indices come from this tree, so it is there.
    pub fn inode(&self, index: InodeIndex) -> &Inode {
        &self.inodes[index as usize]
    }

    /// The entries of a directory; none for anything else.
    pub fn entries(&self, index: InodeIndex) -> Option<&BTreeMap<Box<[u8]>, InodeIndex>> {
        match &self.inode(index).kind {
            Kind::Directory { entries } => Some(entries),
            _ => None,
        }
    }

    /// The inode at a path of plain components, symbolic links not followed.
    pub fn lookup(&self, path: &[u8]) -> Option<InodeIndex> {
        path.split(|byte| *byte == b'/')
            .filter(|component| !component.is_empty())
            .try_fold(Tree::ROOT, |directory, name| {
                self.entries(directory)?.get(name).copied()
            })
    }
}

#[cfg(test)]
#[path = "tree_golden_test.rs"]
mod golden;
