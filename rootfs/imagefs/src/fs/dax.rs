//! Which files a guest may map, and the sources of their bytes.
//!
//! A guest that may map a file (`FUSE_ATTR_DAX`) reads it only through the mapping, 2 MiB at a time, and cannot go back. So only files
//! whose bytes are all ready are offered: reading them through the mapping fetches no more than a read would. Bits are never cleared while
//! an image is in use, so a complete file stays complete.

use std::fs::File;
use std::io;

use super::image::{Backing, Image};
use super::{Node, RootFs};
use crate::erofs::{FileType, Inode, Nid};
use crate::tree::PAGE;

/// The range that a guest's kernel maps at once (`FUSE_DAX_SZ`).
pub const RANGE: u64 = 2 << 20;
/// Smallest file that is worth a range of the window.
pub const LEAST: u64 = 1 << 20;
/// Most parts of a range: each costs the host a mapping.
const MOST_PARTS: usize = 64;

/// A part of a range of a file. It lies in one blob.
pub struct MapPart<'a> {
    /// Offset in the range. Like the other fields, a multiple of 4096.
    pub at: u64,
    /// Bytes, including the zeros after the file's end in its last page.
    pub length: u64,
    pub file: &'a File,
    pub offset: u64,
}

fn unmappable() -> io::Error {
    io::Error::from_raw_os_error(libc::EINVAL)
}

impl Image {
    /// Whether the guest should map this file.
    pub fn is_mappable(&self, inode: &Inode) -> bool {
        if inode.file_type != FileType::File || inode.size < LEAST {
            return false;
        }
        if let Some(known) = self.known_mappable(inode.nid) {
            return known;
        }
        let mappable = match self.survey(inode) {
            Ok(true) => true,
            Ok(false) => return false,
            Err(_) => false,
        };
        self.remember_mappable(inode.nid, mappable);
        mappable
    }

    /// Whether all of a file's bytes are ready. Fails if the file can never be mapped. The time taken depends on the number of the file's
    /// pieces, not on its size.
    fn survey(&self, inode: &Inode) -> io::Result<bool> {
        let (mut at, mut whole) = (0u64, true);
        // The range that the last piece ended in, and the number of its parts so far.
        let (mut range, mut parts) = (0, 0);
        self.pieces(inode.nid, 0, inode.size, |backing, length| {
            let begin = at;
            at += length;
            let (blob, offset) = match backing {
                Backing::Hole => return Ok(()),
                Backing::Metadata(_) => return Err(unmappable()),
                Backing::Blob(blob, offset) => (blob, offset),
            };
            parts = if begin / RANGE == range { parts + 1 } else { 1 };
            if parts > MOST_PARTS || !(begin | offset).is_multiple_of(PAGE) {
                return Err(unmappable());
            }
            if (at - 1) / RANGE != begin / RANGE {
                parts = 1;
            }
            range = (at - 1) / RANGE;
            whole = whole && blob.file.is_ready(offset, length);
            Ok(())
        })?;
        Ok(whole)
    }

    fn map_parts<'a>(
        &'a self,
        nid: Nid,
        offset: u64,
        length: u64,
        mut each: impl FnMut(&'a super::PlacedBlob, MapPart<'a>) -> io::Result<()>,
    ) -> io::Result<()> {
        let (mut at, mut parts) = (0u64, 0);
        self.pieces(nid, offset, length, |backing, length| {
            let begin = at;
            at += length;
            match backing {
                // Unmapped parts read as zeros.
                Backing::Hole => Ok(()),
                Backing::Metadata(_) => Err(unmappable()),
                Backing::Blob(blob, offset) => {
                    parts += 1;
                    if parts > MOST_PARTS || !(begin | offset).is_multiple_of(PAGE) {
                        return Err(unmappable());
                    }
                    let part = MapPart {
                        at: begin,
                        // Blobs are whole pages.
                        length: length.next_multiple_of(PAGE),
                        file: blob.file.data(),
                        offset,
                    };
                    each(blob, part)
                }
            }
        })?;
        match at {
            0 => Err(unmappable()),
            _ => Ok(()),
        }
    }
}

impl RootFs {
    /// Calls `each` for the parts of a range of a file, which must be ready. Between them are holes.
    ///
    /// # Errors
    /// Errors of `each`; EINVAL if the range cannot be mapped; EIO if bytes are not ready.
    pub fn map(
        &self,
        node: u64,
        offset: u64,
        length: u64,
        mut each: impl FnMut(MapPart<'_>) -> io::Result<()>,
    ) -> io::Result<()> {
        let Some(Node::Inode(_, image, nid)) = self.node(node) else {
            return Err(io::Error::from_raw_os_error(libc::ESTALE));
        };
        if offset.checked_add(length).is_none() || !(offset | length).is_multiple_of(PAGE) || length > RANGE {
            return Err(unmappable());
        }
        image.map_parts(nid, offset, length, |blob, part| {
            blob.require_ready(part.offset, part.length)?;
            each(part)
        })
    }

    /// The `flags` of a node's attributes at present.
    pub fn attribute_flags(&self, node: u64) -> u32 {
        match self.node(node) {
            Some(Node::Inode(_, image, nid)) => image
                .reader
                .inode(nid)
                .map_or(0, |inode| self.flags(&image, &inode)),
            Some(Node::Root) | None => 0,
        }
    }
}
