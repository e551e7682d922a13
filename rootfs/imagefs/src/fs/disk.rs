//! An image as one disk: its metadata, then its blobs at their addresses, with zeros between them. A guest with EROFS mounts the disk
//! itself.

use std::fs::File;
use std::io;

use super::blobs::Blobs;
use super::{ImageError, MissingRange, PlacedBlob};
use crate::tree::PAGE;

/// The source of a part of the disk's bytes.
pub enum Source<'a> {
    Zeros,
    /// A file, from this offset on.
    File(&'a File, u64),
}

/// The disk.
pub struct DiskImage {
    metadata: File,
    metadata_length: u64,
    blobs: Blobs,
}

/// A part of the disk.
enum Part<'a> {
    Zeros,
    Metadata(u64),
    Blob(&'a PlacedBlob, u64),
}

impl DiskImage {
    /// `metadata` is read when needed. The guest that mounts it checks it.
    ///
    /// # Errors
    /// If `metadata` is empty or not a regular file, or a blob overlaps it or another blob, or a blob file does not fit its description.
    pub fn open(metadata: File, blobs: Vec<PlacedBlob>) -> Result<DiskImage, ImageError> {
        let facts = metadata.metadata().map_err(ImageError::Map)?;
        if !facts.is_file() || facts.len() == 0 {
            return Err(ImageError::Map(io::Error::new(
                io::ErrorKind::InvalidInput,
                "not a regular file, or an empty one",
            )));
        }
        let metadata_length = facts.len();
        Ok(DiskImage {
            metadata,
            metadata_length,
            blobs: Blobs::new(metadata_length, blobs)?,
        })
    }

    /// Bytes of the disk: a multiple of 4096.
    pub fn length(&self) -> u64 {
        self.blobs.end().next_multiple_of(PAGE)
    }

    /// The part at an address, and how many bytes of it follow.
    fn at(&self, address: u64) -> (Part<'_>, u64) {
        if address < self.metadata_length {
            return (Part::Metadata(address), self.metadata_length - address);
        }
        match self.blobs.at(address) {
            Some((blob, offset)) => (Part::Blob(blob, offset), blob.length - offset),
            None => {
                let next = self.blobs.next(address).unwrap_or(u64::MAX);
                (Part::Zeros, next - address)
            }
        }
    }

    fn parts<'a>(
        &'a self,
        mut address: u64,
        mut length: u64,
        mut each: impl FnMut(Part<'a>, u64) -> io::Result<()>,
    ) -> io::Result<()> {
        while length > 0 {
            let (part, there) = self.at(address);
            let now = there.min(length);
            each(part, now)?;
            address += now;
            length -= now;
        }
        Ok(())
    }

    fn blob_parts<'a>(&'a self, address: u64, length: u64, mut each: impl FnMut(&'a PlacedBlob, u64, u64)) {
        // The closure never fails.
        let _ = self.parts(address, length, |part, length| {
            if let Part::Blob(blob, offset) = part {
                each(blob, offset, length);
            }
            Ok(())
        });
    }

    /// The blob ranges that a read of `length` bytes needs and that are not ready.
    pub fn missing(&self, address: u64, length: u64) -> Vec<MissingRange> {
        let mut missing = Vec::new();
        self.blob_parts(address, length, |blob, offset, length| {
            missing.extend(blob.missing(offset, length));
        });
        missing
    }

    /// Calls `each` for the blob ranges that a read covers: blob, offset, bytes.
    pub fn touched(&self, address: u64, length: u64, mut each: impl FnMut([u8; 32], u64, u64)) {
        self.blob_parts(address, length, |blob, offset, length| {
            each(blob.digest, offset, length)
        });
    }

    /// Calls `each` for the parts of a range, which must be ready, in order.
    ///
    /// # Errors
    /// Errors of `each`; EIO for bytes that are not ready.
    pub fn read(
        &self,
        address: u64,
        length: u64,
        mut each: impl FnMut(Source<'_>, u64) -> io::Result<()>,
    ) -> io::Result<()> {
        self.parts(address, length, |part, length| match part {
            Part::Zeros => each(Source::Zeros, length),
            Part::Metadata(offset) => each(Source::File(&self.metadata, offset), length),
            Part::Blob(blob, offset) => {
                blob.require_ready(offset, length)?;
                each(Source::File(blob.file.data(), offset), length)
                    .inspect_err(|error| blob.unreadable(offset, length, error))
            }
        })
    }
}
