//! The read-only file system a sandbox sees: a synthetic root directory with one entry for each image slot.
//!
//! A node id is `slot << 48 | EROFS nid`, and the root is 1. The id alone says which inode of which image is meant, so
//! the server keeps no lookup counts and no open files, and there is nothing to save when a guest is frozen. An image
//! never changes, so the guest may cache it for ever; the root may change at any moment, so the guest may cache nothing
//! of it, not even the absence of a name. An inode's generation is its image's own: a node id that now means another
//! image is seen to be another inode, and one whose image has come back is seen to be the same.

mod blobs;
mod dax;
mod disk;
mod entries;
mod image;
mod mapped;
mod pread;
mod serve;

#[cfg(test)]
mod testing;
#[cfg(test)]
#[path = "fs_test.rs"]
mod tests;

use std::collections::BTreeMap;
use std::fs::File;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use crate::blob::BlobFile;
use crate::digest::Digest;
use crate::erofs::{Nid, ReadError};

pub use dax::{LEAST as DAX_LEAST, MapPart, RANGE as DAX_RANGE};
pub use disk::{DiskImage, Source};
use image::Image;

/// Node id of the synthetic root.
pub const ROOT_NODE: u64 = 1;
const SLOT_SHIFT: u32 = 48;
const NID_MASK: u64 = (1 << SLOT_SHIFT) - 1;

/// A blob and where it is in its image's address space.
pub struct PlacedBlob {
    /// First byte; a multiple of 4096.
    pub address: u64,
    /// Bytes, a multiple of 4096.
    pub length: u64,
    /// SHA-256 of the layer (its DiffID), by which missing bytes are asked for.
    pub digest: [u8; 32],
    pub file: BlobFile,
}

impl PlacedBlob {
    /// The parts of a range that are not ready.
    fn missing(&self, offset: u64, length: u64) -> impl Iterator<Item = MissingRange> {
        self.file.missing(offset, length).map(|range| MissingRange {
            blob: self.digest,
            offset: range.start,
            length: range.end - range.start,
        })
    }

    /// EIO if a range is not ready: what is not verified is never served.
    fn require_ready(&self, offset: u64, length: u64) -> std::io::Result<()> {
        if self.file.is_ready(offset, length) {
            return Ok(());
        }
        tracing::error!(
            blob = %Digest::from(self.digest),
            offset,
            length,
            "a read came before its bytes"
        );
        Err(std::io::Error::from_raw_os_error(libc::EIO))
    }

    /// Says that a range that is ready cannot be read: the medium's fault, or the file was cut behind the store's back.
    fn unreadable(&self, offset: u64, length: u64, error: &std::io::Error) {
        tracing::error!(
            blob = %Digest::from(self.digest),
            offset,
            length,
            %error,
            "a blob's cache file cannot be read; try `thaw image verify`"
        );
    }
}

/// Bytes a read needs that are not in their blob yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MissingRange {
    /// [`PlacedBlob::digest`].
    pub blob: [u8; 32],
    /// First byte within the blob; on a chunk's boundary.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
}

/// Why an image cannot be shown.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    #[error("image slot {0} is taken: remove its image first")]
    SlotTaken(u16),
    #[error("image slot 0 is the root's own: use 1 to 65535")]
    SlotZero,
    #[error("image slot {0} is empty")]
    SlotEmpty(u16),
    #[error(
        "image name {0:?} is not a directory's name: use 1 to 255 bytes without '/' and NUL, not '.' or '..'"
    )]
    BadName(String),
    #[error("image name {0:?} is in use")]
    NameTaken(String),
    #[error("image metadata: {0}")]
    Metadata(#[from] ReadError),
    #[error("image metadata: the root is not a directory")]
    RootNotDirectory,
    #[error("cannot map the image metadata: {0}")]
    Map(std::io::Error),
    #[error("blob at {address:#x}: {why}")]
    Blob { address: u64, why: &'static str },
}

/// The file system. All methods may be called at once from many threads.
#[derive(Default)]
pub struct RootFs {
    slots: RwLock<BTreeMap<u16, Arc<Image>>>,
    /// Whether there is a window to map files into.
    has_window: bool,
}

/// What a node id names.
enum Node {
    Root,
    Inode(u16, Arc<Image>, Nid),
}

impl RootFs {
    /// An empty root.
    pub fn new() -> RootFs {
        RootFs::default()
    }

    /// An empty root, on a device with a window that files can be mapped into.
    pub fn with_window() -> RootFs {
        RootFs {
            has_window: true,
            ..RootFs::default()
        }
    }

    /// Shows an image as directory `name`. `metadata` is mapped, and must not be changed while it is shown.
    ///
    /// # Errors
    /// See [`ImageError`].
    pub fn add_image(
        &self,
        slot: u16,
        name: &str,
        metadata: &File,
        blobs: Vec<PlacedBlob>,
    ) -> Result<(), ImageError> {
        let is_name =
            (1..=255).contains(&name.len()) && !name.contains(['/', '\0']) && name != "." && name != "..";
        if !is_name {
            return Err(ImageError::BadName(name.into()));
        }
        if slot == 0 {
            return Err(ImageError::SlotZero);
        }
        let image = Arc::new(Image::open(name, metadata, blobs)?);
        let mut slots = self.slots.write().unwrap_or_else(PoisonError::into_inner);
        if slots.contains_key(&slot) {
            return Err(ImageError::SlotTaken(slot));
        }
        if slots.values().any(|other| other.name == image.name) {
            return Err(ImageError::NameTaken(name.into()));
        }
        slots.insert(slot, image);
        Ok(())
    }

    /// Takes an image away. Reads under way end as if it were there.
    ///
    /// # Errors
    /// When the slot is empty.
    pub fn remove_image(&self, slot: u16) -> Result<(), ImageError> {
        let removed = self
            .slots
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&slot);
        removed.map(drop).ok_or(ImageError::SlotEmpty(slot))
    }

    /// What a read of `size` bytes at `offset` of a node has to wait for, in order; nothing when it may be served, with
    /// data or with an error.
    pub fn missing(&self, node: u64, offset: u64, size: u32) -> Vec<MissingRange> {
        match self.node(node) {
            Some(Node::Inode(_, image, nid)) => image.missing(nid, offset, size),
            Some(Node::Root) | None => Vec::new(),
        }
    }

    /// Calls `each` for the blob ranges a read of `size` bytes at `offset` of a node is about: blob, offset, bytes.
    pub fn touched(&self, node: u64, offset: u64, size: u64, each: &mut dyn FnMut([u8; 32], u64, u64)) {
        if let Some(Node::Inode(_, image, nid)) = self.node(node) {
            image.touched(nid, offset, size, each);
        }
    }

    /// The image slot of a node; none for the root, and where there is no image.
    pub fn slot(&self, node: u64) -> Option<u16> {
        match self.node(node)? {
            Node::Root => None,
            Node::Inode(slot, ..) => Some(slot),
        }
    }

    fn slots(&self) -> RwLockReadGuard<'_, BTreeMap<u16, Arc<Image>>> {
        self.slots.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn node(&self, node: u64) -> Option<Node> {
        if node == ROOT_NODE {
            return Some(Node::Root);
        }
        let slot = (node >> SLOT_SHIFT) as u16;
        let image = self.slots().get(&slot)?.clone();
        Some(Node::Inode(slot, image, node & NID_MASK))
    }
}

/// The node id of an inode.
fn node_id(slot: u16, nid: Nid) -> u64 {
    u64::from(slot) << SLOT_SHIFT | nid & NID_MASK
}

/// The inode number a program sees. Unique in the file system; small in the first slot, so that programs with 32-bit
/// inode numbers work there, and always small enough for overlayfs to add its own bits.
fn inode_number(slot: u16, nid: Nid) -> u64 {
    u64::from(slot.wrapping_sub(1)) << 40 | nid & ((1 << 40) - 1)
}
