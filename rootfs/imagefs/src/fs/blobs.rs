//! The blobs of an image, at their addresses.

use super::{ImageError, PlacedBlob};
use crate::tree::PAGE;

/// Blobs sorted by address. They overlap neither one another nor the metadata.
pub struct Blobs {
    blobs: Vec<PlacedBlob>,
    end: u64,
}

impl Blobs {
    /// Takes the blobs of an image whose metadata has `metadata` bytes.
    pub fn new(metadata: u64, mut blobs: Vec<PlacedBlob>) -> Result<Blobs, ImageError> {
        // An empty blob may have the same address as the next one. It is sorted first, so that a search finds the other.
        blobs.sort_by_key(|blob| (blob.address, blob.length));
        let mut end = metadata;
        for blob in &blobs {
            let bad = |why| ImageError::Blob {
                address: blob.address,
                why,
            };
            if !(blob.address | blob.length).is_multiple_of(PAGE) {
                return Err(bad("address and length must be multiples of 4096"));
            }
            if blob.address < end && blob.length > 0 {
                return Err(bad("it overlaps the metadata or another blob"));
            }
            if blob.file.len() != blob.length {
                return Err(bad(
                    "the cache file has another length than the image was made for",
                ));
            }
            if blob.file.id() != blob.digest {
                return Err(bad(
                    "the cache file is of another layer than the image was made for",
                ));
            }
            let blob_end = blob
                .address
                .checked_add(blob.length)
                .ok_or(bad("it ends beyond 2^64"))?;
            end = end.max(blob_end);
        }
        Ok(Blobs { blobs, end })
    }

    /// The blob at an address, and the offset in it.
    pub fn at(&self, address: u64) -> Option<(&PlacedBlob, u64)> {
        let index = self.blobs.partition_point(|blob| blob.address <= address);
        let blob = &self.blobs[index.checked_sub(1)?];
        let offset = address - blob.address;
        (offset < blob.length).then_some((blob, offset))
    }

    /// The address at which the first blob after `address` begins.
    pub fn next(&self, address: u64) -> Option<u64> {
        let index = self.blobs.partition_point(|blob| blob.address <= address);
        self.blobs.get(index).map(|blob| blob.address)
    }

    /// The end of metadata and blobs.
    pub fn end(&self) -> u64 {
        self.end
    }
}
