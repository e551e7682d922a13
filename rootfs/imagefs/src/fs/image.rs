//! One image: its metadata, and the blobs that contain its file data.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Write};
use std::sync::{Mutex, MutexGuard, PoisonError};

use fuse_backend_rs::api::filesystem::ZeroCopyWriter;

use crate::erofs::{FileType, Inode, Mapping, Nid, ReadError, Reader};

use super::blobs::Blobs;
use super::mapped::Mapped;
use super::pread::Positioned;
use super::{ImageError, MissingRange, PlacedBlob};

/// The zeros that holes are read from.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// An image in a slot.
pub struct Image {
    pub name: Vec<u8>,
    pub reader: Reader<Mapped>,
    blobs: Blobs,
    /// Files for which it is final whether they can be mapped.
    mappable: Mutex<HashMap<Nid, bool>>,
}

/// The source of a mapping's bytes.
pub enum Backing<'a> {
    Hole,
    /// The metadata itself: tails of files, or an image that contains its data.
    Metadata(&'a [u8]),
    /// A blob, at this offset.
    Blob(&'a PlacedBlob, u64),
}

impl Image {
    pub fn open(name: &str, metadata: &File, blobs: Vec<PlacedBlob>) -> Result<Image, ImageError> {
        let reader = Reader::new(Mapped::new(metadata).map_err(ImageError::Map)?)?;
        let root = reader.inode(reader.superblock().root)?;
        if root.file_type != FileType::Directory {
            return Err(ImageError::RootNotDirectory);
        }
        let blobs = Blobs::new(reader.bytes().len() as u64, blobs)?;
        Ok(Image {
            name: name.into(),
            reader,
            blobs,
            mappable: Mutex::default(),
        })
    }

    /// Distinguishes different images: a part of the UUID, which depends only on the content.
    pub fn generation(&self) -> u64 {
        let uuid = self.reader.superblock().uuid;
        u64::from(u32::from_le_bytes([uuid[0], uuid[1], uuid[2], uuid[3]]))
    }

    fn file(&self, nid: Nid) -> Result<Inode, ReadError> {
        let inode = self.reader.inode(nid)?;
        match inode.file_type {
            FileType::File => Ok(inode),
            _ => Err(ReadError::WrongType {
                nid,
                expected: "regular file",
            }),
        }
    }

    /// The backing of a mapping, and its length. Shorter than the mapping if that extends into another backing.
    fn backing(&self, mapping: &Mapping) -> io::Result<(Backing<'_>, u64)> {
        let Some(address) = mapping.address else {
            return Ok((Backing::Hole, mapping.length));
        };
        let metadata = self.reader.bytes();
        if address < metadata.len() as u64 {
            let length = mapping.length.min(metadata.len() as u64 - address);
            let bytes = &metadata[address as usize..(address + length) as usize];
            return Ok((Backing::Metadata(bytes), length));
        }
        match self.blobs.at(address) {
            Some((blob, offset)) => Ok((
                Backing::Blob(blob, offset),
                mapping.length.min(blob.length - offset),
            )),
            None => {
                tracing::error!(address, image = ?self.name.escape_ascii().to_string(), "file data is outside every blob");
                Err(io::Error::from_raw_os_error(libc::EUCLEAN))
            }
        }
    }

    /// Calls `each` for the pieces of a range of a file.
    pub fn pieces<'a>(
        &'a self,
        nid: Nid,
        offset: u64,
        length: u64,
        mut each: impl FnMut(Backing<'a>, u64) -> io::Result<()>,
    ) -> io::Result<()> {
        let inode = self.file(nid).map_err(read_error)?;
        for mapping in self.reader.mappings(&inode, offset, length) {
            let mut mapping = mapping.map_err(read_error)?;
            while mapping.length > 0 {
                let (backing, length) = self.backing(&mapping)?;
                each(backing, length)?;
                mapping.offset += length;
                mapping.length -= length;
                mapping.address = mapping.address.map(|address| address + length);
            }
        }
        Ok(())
    }

    /// The blob ranges that a read needs and that are not ready. None for a read that fails.
    pub fn missing(&self, nid: Nid, offset: u64, size: u32) -> Vec<MissingRange> {
        let mut missing = Vec::new();
        let walked = self.pieces(nid, offset, u64::from(size), |backing, length| {
            if let Backing::Blob(blob, offset) = backing {
                missing.extend(blob.missing(offset, length));
            }
            Ok(())
        });
        match walked {
            Ok(()) => missing,
            Err(_) => Vec::new(),
        }
    }

    /// Calls `each` for the blob ranges that a read of a file covers: blob, offset, bytes.
    pub fn touched(&self, nid: Nid, offset: u64, size: u64, each: &mut dyn FnMut([u8; 32], u64, u64)) {
        // A read that fails covers the pieces before the failure.
        let _ = self.pieces(nid, offset, size, |backing, length| {
            if let Backing::Blob(blob, offset) = backing {
                each(blob.digest, offset, length);
            }
            Ok(())
        });
    }

    /// Whether a file can be mapped, if that is final.
    pub fn known_mappable(&self, nid: Nid) -> Option<bool> {
        self.mappable().get(&nid).copied()
    }

    pub fn remember_mappable(&self, nid: Nid, mappable: bool) {
        self.mappable().insert(nid, mappable);
    }

    fn mappable(&self) -> MutexGuard<'_, HashMap<Nid, bool>> {
        // Single values, valid even if a thread panicked while it held the lock.
        self.mappable.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads a file into guest memory.
    pub fn read(&self, nid: Nid, offset: u64, size: u32, out: &mut dyn ZeroCopyWriter) -> io::Result<usize> {
        let size = u64::from(size).min(out.available_bytes() as u64);
        let mut total = 0;
        self.pieces(nid, offset, size, |backing, length| {
            match backing {
                Backing::Hole => zeros(out, length)?,
                Backing::Metadata(bytes) => out.write_all(bytes)?,
                Backing::Blob(blob, at) => {
                    // The code that parks reads has checked this. It is checked again, because unverified bytes must never be served.
                    blob.require_ready(at, length)?;
                    out.write_all_from(&mut Positioned(blob.file.data()), length as usize, at)
                        .inspect_err(|error| blob.unreadable(at, length, error))?;
                }
            }
            total += length as usize;
            Ok(())
        })
        .map_err(|error| match error.raw_os_error() {
            Some(_) => error,
            None => io::Error::from_raw_os_error(libc::EIO),
        })?;
        Ok(total)
    }

    /// The first offset from `offset` on that is data (or a hole, if `data` is false). The file's end counts as a hole.
    pub fn seek(&self, nid: Nid, offset: u64, data: bool) -> io::Result<u64> {
        let inode = self.file(nid).map_err(read_error)?;
        let past_end = || io::Error::from_raw_os_error(libc::ENXIO);
        if offset >= inode.size {
            return Err(past_end());
        }
        for mapping in self.reader.mappings(&inode, offset, u64::MAX) {
            let mapping = mapping.map_err(read_error)?;
            if mapping.address.is_some() == data {
                return Ok(mapping.offset);
            }
        }
        if data { Err(past_end()) } else { Ok(inode.size) }
    }
}

fn zeros(out: &mut dyn ZeroCopyWriter, length: u64) -> io::Result<()> {
    let mut left = length;
    while left > 0 {
        let now = left.min(ZEROS.len() as u64);
        Write::write_all(out, &ZEROS[..now as usize])?;
        left -= now;
    }
    Ok(())
}

/// The errno for metadata that cannot be read. Logs the error if the image is at fault.
pub fn read_error(error: ReadError) -> io::Error {
    let errno = match error {
        // The guest named an inode of another type, which its kernel never does by itself.
        ReadError::WrongType { .. } => libc::EINVAL,
        ReadError::Unsupported { .. } => libc::EOPNOTSUPP,
        ReadError::NotErofs | ReadError::Corrupt { .. } => libc::EUCLEAN,
    };
    if errno != libc::EINVAL {
        tracing::error!(%error, "image metadata");
    }
    io::Error::from_raw_os_error(errno)
}
