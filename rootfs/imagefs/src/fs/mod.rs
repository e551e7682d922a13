//! The read-only file system a sandbox sees: a synthetic root directory with one entry for each image slot.
//!
//! A node ID is `slot << 48 | EROFS nid`, and the root is 1. The ID alone identifies the image and its inode, so the server keeps no lookup
//! counts and no open files, and a freeze has nothing to save. An image never changes, so the guest may cache it for ever. The root may
//! change at any moment, so the guest may cache nothing about it, not even that a name is absent. An inode has its image's generation. So
//! if a node ID now belongs to another image, the guest sees another inode; if the same image has come back, it sees the same inode.

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

/// A blob and its place in the image's address space.
pub struct PlacedBlob {
    /// First byte; a multiple of 4096.
    pub address: u64,
    /// Bytes, a multiple of 4096.
    pub length: u64,
    /// SHA-256 of the layer (its DiffID), which requests for missing bytes name.
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

    /// EIO if a range is not ready, because unverified bytes must never be served.
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

    /// Logs that a ready range cannot be read: the medium is at fault, or something other than the store truncated the file.
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

/// Bytes that a read needs and that are not in their blob yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MissingRange {
    /// [`PlacedBlob::digest`].
    pub blob: [u8; 32],
    /// First byte in the blob, on a chunk boundary.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
}

/// Why an image cannot be added.
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

/// The file system. Many threads may call its methods at once.
#[derive(Default)]
pub struct RootFs {
    slots: RwLock<BTreeMap<u16, Arc<Image>>>,
    /// Whether the device has a window that files can be mapped into.
    has_window: bool,
}

/// The meaning of a node ID.
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

    /// Adds an image as directory `name`. `metadata` is mapped, and must not change while the image is in use.
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

    /// Removes an image. Reads in progress complete as if it were still there.
    ///
    /// # Errors
    /// If the slot is empty.
    pub fn remove_image(&self, slot: u16) -> Result<(), ImageError> {
        let removed = self
            .slots
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&slot);
        removed.map(drop).ok_or(ImageError::SlotEmpty(slot))
    }

    /// The ranges that a read of `size` bytes at `offset` of a node must wait for, in order. If there are none, the read can be answered
    /// now, with data or an error.
    pub fn missing(&self, node: u64, offset: u64, size: u32) -> Vec<MissingRange> {
        match self.node(node) {
            Some(Node::Inode(_, image, nid)) => image.missing(nid, offset, size),
            Some(Node::Root) | None => Vec::new(),
        }
    }

    /// Calls `each` for the blob ranges that a read of `size` bytes at `offset` of a node covers: blob, offset, bytes.
    pub fn touched(&self, node: u64, offset: u64, size: u64, each: &mut dyn FnMut([u8; 32], u64, u64)) {
        if let Some(Node::Inode(_, image, nid)) = self.node(node) {
            image.touched(nid, offset, size, each);
        }
    }

    /// The image slot of a node. `None` for the root, or if there is no image.
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

/// The inode number that a program sees. It is unique in the file system. It is small in the first slot, so that programs with 32-bit inode
/// numbers work there, and always small enough for overlayfs to add its own bits.
fn inode_number(slot: u16, nid: Nid) -> u64 {
    u64::from(slot.wrapping_sub(1)) << 40 | nid & ((1 << 40) - 1)
}
