//! The file tree of a whole image, from which EROFS metadata is written.
//!
//! A tree holds no file data, only its places: extents of the layers' data files. In those, every file starts on a page and is padded with
//! zeros to a page.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Bytes of a page, of an EROFS block and of the alignment of file data.
pub const PAGE: u64 = 4096;

/// A point in time, as in POSIX.
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

/// The attributes that every inode has.
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
    /// The attributes of a directory that no layer describes: 0755, root, the epoch.
    pub fn implied_directory() -> Attributes {
        Attributes {
            mode: 0o755,
            ..Attributes::default()
        }
    }
}

/// A stored piece of a file. Pieces are sorted and do not overlap; between them are zeros. Adjacent pieces may touch if they are not stored
/// together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlobExtent {
    /// Offset in the file; a multiple of [`PAGE`].
    pub file_offset: u64,
    /// Index of the data file, in the order of the lengths passed to [`crate::erofs::write`].
    pub blob: u32,
    /// Offset in that data file; a multiple of [`PAGE`].
    pub data_offset: u64,
    /// Bytes, a multiple of [`PAGE`]; may reach past the end of the file by less than a page.
    pub length: u64,
}

/// Index of an inode in a [`Tree`].
pub type InodeIndex = u32;

/// The type of an inode of a [`Tree`], with its contents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Maps names to inodes, without `.` and `..`. The map's order, by bytes, is EROFS's order.
    Directory {
        entries: BTreeMap<Box<[u8]>, InodeIndex>,
    },
    /// A regular file. In a merged tree all its extents lie in the data file of the layer that named it, counted from the bottom.
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

/// A whole file system. Inode 0 is the root; an inode without a name in a directory is not part of it.
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

    /// The inode at `index`, which must come from this tree.
    pub fn inode(&self, index: InodeIndex) -> &Inode {
        &self.inodes[index as usize]
    }

    /// The entries of a directory; `None` for any other type.
    pub fn entries(&self, index: InodeIndex) -> Option<&BTreeMap<Box<[u8]>, InodeIndex>> {
        match &self.inode(index).kind {
            Kind::Directory { entries } => Some(entries),
            _ => None,
        }
    }

    /// The inode at a path of plain components. Symbolic links are not followed.
    pub fn lookup(&self, path: &[u8]) -> Option<InodeIndex> {
        path.split(|byte| *byte == b'/')
            .filter(|component| !component.is_empty())
            .try_fold(Tree::ROOT, |directory, name| {
                self.entries(directory)?.get(name).copied()
            })
    }
}
