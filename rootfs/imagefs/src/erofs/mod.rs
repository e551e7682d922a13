//! EROFS: one metadata image for a whole tree, and a reader of such images.
//!
//! The image is of the plain kind that Linux has mounted since 5.15: one device, no device table, blocks of 4 KiB, no compression. It
//! contains no file data: block addresses of files point past the metadata into a *synthesized address space*, in which each layer's data
//! file (a *blob*) has its own range ([`Summary::blobs`]). The server of the image shows the blobs at these addresses; [`write_with_data`]
//! writes them there in one file.
//!
//! On-disk structures: Linux `fs/erofs/erofs_fs.h`.

mod checksum;
mod directory;
mod format;
mod plan;
mod read;
mod tree;
mod write;
mod xattr;

use std::io;

pub use plan::{Plan, plan};
pub use read::{
    ChunkIndex, DirectoryEntry, Entries, FileType, Inode, Mapping, Mappings, Nid, ReadError, Reader,
    ResolvedXattr, Superblock, Xattrs,
};
pub use tree::{read_tree, read_tree_with};
pub use write::{write, write_with_data};

/// The place of a blob in the synthesized address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlobPlacement {
    /// First byte; a multiple of [`BLOB_ALIGNMENT`], past the metadata.
    pub address: u64,
    /// Bytes, a multiple of 4096.
    pub length: u64,
}

/// Blobs begin at multiples of a huge page, so that a blob mapped into a guest can be mapped by huge pages.
pub const BLOB_ALIGNMENT: u64 = 2 << 20;

/// The sizes and addresses of a laid-out image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Summary {
    /// Bytes of the metadata image, a multiple of 4096.
    pub metadata_length: u64,
    /// Bytes of the synthesized address space, a multiple of 4096.
    pub total_length: u64,
    /// The place of each blob, in the order of the lengths given.
    pub blobs: Vec<BlobPlacement>,
    /// Number of inodes.
    pub inodes: u64,
}

/// Why a tree cannot be an EROFS image.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    #[error("the image's {what} would be larger than {limit} bytes")]
    TooLarge { what: &'static str, limit: u64 },
    #[error("the tree is malformed: {0}")]
    Malformed(&'static str),
    #[error("cannot write the EROFS image: {0}")]
    Io(#[from] io::Error),
}
