//! The metadata document: the EROFS image in blocks, each compressed and with its digest, and the addresses of the
//! blobs.
//!
//! Its head (all but the blocks) is bound twice: with the whole by the manifest's SHA-256, and alone by the BLAKE3 in
//! the layer's annotation ([`ROOT_ANNOTATION`]). With the manifest, a reader can read and verify the head, then any
//! block, without the rest.

use std::ops::Range;

use thaw_imagefs::digest::Digest;

use crate::error::Error;

use super::wire::{Cursor, PAGE, Put, ZSTD, compress};
use crate::manifest::MAX_BLOBS;

const MAGIC: &[u8; 8] = b"THAWMETA";
const VERSION: u32 = 1;
const HEAD: usize = 32;
const BLOB: usize = 48;
const BLOCK: usize = 36;
/// log2 of the bytes of a block.
const BLOCK_LOG2: u32 = 17;

/// BLAKE3 of the head, in hex.
pub const ROOT_ANNOTATION: &str = "vnd.thaw.image.metadata.root";
/// Bytes of the head.
pub const HEAD_ANNOTATION: &str = "vnd.thaw.image.metadata.head";

/// Largest document.
pub const MAX_DOCUMENT: u64 = 256 << 20;
/// Largest EROFS image in one.
pub const MAX_METADATA: u64 = 256 << 20;

/// The place of a blob in the address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    pub address: u64,
    pub length: u64,
    /// SHA-256 of its chunk table.
    pub table: Digest,
}

/// A stored block of the EROFS image.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Block {
    /// Its range in the document.
    stored: Range<u64>,
    is_zstd: bool,
    digest: [u8; 32],
}

/// The head: the part before the blocks, with which each block can be read alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetadataHead {
    /// Bytes of the EROFS image.
    pub metadata_length: u64,
    /// Sorted by address.
    pub blobs: Vec<Placed>,
    blocks: Vec<Block>,
}

/// The document, and the length of its head.
///
/// # Errors
/// Those of the compressor, which means that it is out of memory.
pub fn encode(metadata: &[u8], blobs: &[Placed], level: i32) -> std::io::Result<(Vec<u8>, usize)> {
    let blocks = metadata.len().div_ceil(1 << BLOCK_LOG2);
    let mut head = Vec::with_capacity(HEAD + blobs.len() * BLOB + blocks * BLOCK);
    head.extend_from_slice(MAGIC);
    head.put_u32(VERSION);
    head.put_u32(BLOCK_LOG2);
    head.put_u64(metadata.len() as u64);
    head.put_u32(blobs.len() as u32);
    head.put_u32(0);
    for blob in blobs {
        head.put_u64(blob.address);
        head.put_u64(blob.length);
        head.extend_from_slice(blob.table.bytes());
    }
    let mut body = Vec::new();
    for block in metadata.chunks(1 << BLOCK_LOG2) {
        let (length, stored) = compress(block.to_vec(), level)?;
        head.put_u32(length);
        head.extend_from_slice(blake3::hash(block).as_bytes());
        body.extend_from_slice(&stored);
    }
    let length = head.len();
    head.append(&mut body);
    Ok((head, length))
}

/// Reads a document: the EROFS image, every block compared with its digest, and the blobs by address.
///
/// # Errors
/// `Malformed`.
pub fn decode(what: &str, bytes: &[u8]) -> Result<(Vec<u8>, Vec<Placed>), Error> {
    let mut cursor = Cursor::new(what, bytes);
    let head = decode_head(&mut cursor)?;
    if head.blocks.last().map(|block| block.stored.end) != Some(bytes.len() as u64) {
        return Err(cursor.malformed("it does not end with its last block"));
    }
    // Grows as blocks expand, because the head may state any length.
    let mut metadata = Vec::new();
    for index in 0..head.blocks.len() {
        let stored = &head.blocks[index].stored;
        let stored = bytes
            .get(stored.start as usize..stored.end as usize)
            .ok_or_else(|| cursor.malformed("it ends too early"))?;
        metadata.extend_from_slice(&head.expand(what, index, stored)?);
    }
    Ok((metadata, head.blobs))
}

impl MetadataHead {
    /// Reads a document's first bytes, whose number is in [`HEAD_ANNOTATION`]; `root` is the value of [`ROOT_ANNOTATION`].
    ///
    /// # Errors
    /// `Malformed`, also if their digest differs.
    pub fn decode(what: &str, head: &[u8], root: &[u8; 32]) -> Result<Self, Error> {
        let mut cursor = Cursor::new(what, head);
        if blake3::hash(head) != *root {
            return Err(cursor.malformed("its head is not what the manifest's root says"));
        }
        let decoded = decode_head(&mut cursor)?;
        match cursor.rest().is_empty() {
            true => Ok(decoded),
            false => Err(cursor.malformed("its head is longer than its entries")),
        }
    }

    /// The block that contains a byte of the EROFS image, and the block's range in the document.
    pub fn block(&self, offset: u64) -> Option<(usize, Range<u64>)> {
        let index = usize::try_from(offset >> BLOCK_LOG2).ok()?;
        Some((index, self.blocks.get(index)?.stored.clone()))
    }

    /// A block's bytes, compared with its digest.
    ///
    /// # Errors
    /// `Malformed`.
    pub fn expand(&self, what: &str, index: usize, stored: &[u8]) -> Result<Vec<u8>, Error> {
        let length = (self.metadata_length - ((index as u64) << BLOCK_LOG2)).min(1 << BLOCK_LOG2) as usize;
        let block = &self.blocks[index];
        let expanded = match block.is_zstd {
            true => zstd::bulk::decompress(stored, length).ok(),
            false => Some(stored.to_vec()),
        };
        expanded
            .filter(|expanded| expanded.len() == length && blake3::hash(expanded) == block.digest)
            .ok_or_else(|| Error::malformed(what, format!("block {index} is not what its digest says")))
    }
}

fn decode_head(cursor: &mut Cursor) -> Result<MetadataHead, Error> {
    cursor.head(MAGIC, VERSION)?;
    if cursor.u32()? != BLOCK_LOG2 {
        return Err(cursor.malformed("its blocks are not of 128 KiB"));
    }
    let metadata_length = cursor.u64()?;
    let blob_count = cursor.u32()?;
    cursor.zeros(4)?;
    if metadata_length == 0 || metadata_length > MAX_METADATA || !metadata_length.is_multiple_of(PAGE) {
        return Err(cursor.malformed("its EROFS image is not of whole pages, or larger than 256 MiB"));
    }
    if blob_count as usize > MAX_BLOBS {
        return Err(cursor.malformed("it has more than 256 blobs"));
    }
    let mut blobs = Vec::new();
    let mut end = metadata_length;
    for _ in 0..cursor.count(blob_count, BLOB)? {
        let blob = Placed {
            address: cursor.u64()?,
            length: cursor.u64()?,
            table: Digest::from(cursor.array::<32>()?),
        };
        // Addresses are 32-bit numbers of 4 KiB blocks.
        let fits = blob
            .address
            .checked_add(blob.length)
            .filter(|end| *end <= u64::from(u32::MAX) * PAGE);
        match fits {
            Some(next) if blob.address >= end && (blob.address | blob.length).is_multiple_of(PAGE) => {
                end = next
            }
            _ => return Err(cursor.malformed("its blobs overlap, are unaligned or out of bounds")),
        }
        blobs.push(blob);
    }
    let block_count = metadata_length.div_ceil(1 << BLOCK_LOG2) as u32;
    let block_count = cursor.count(block_count, BLOCK)?;
    let mut end = (HEAD + blobs.len() * BLOB + block_count * BLOCK) as u64;
    let mut blocks = Vec::new();
    for _ in 0..block_count {
        let stored = cursor.u32()?;
        let start = end;
        end += u64::from(stored & !ZSTD);
        blocks.push(Block {
            stored: start..end,
            is_zstd: stored & ZSTD != 0,
            digest: cursor.array()?,
        });
    }
    Ok(MetadataHead {
        metadata_length,
        blobs,
        blocks,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_block_is_read_and_verified_alone() {
        let metadata: Vec<u8> = (0..300_000u32 / 4096 * 4096).map(|at| (at / 100) as u8).collect();
        let blob = Placed {
            address: 2 << 20,
            length: 4096,
            table: Digest::of(b"table"),
        };
        let (document, head) = encode(&metadata, &[blob], 3).unwrap();
        assert_eq!(decode("test", &document).unwrap(), (metadata.clone(), vec![blob]));
        let root = *blake3::hash(&document[..head]).as_bytes();
        let decoded = MetadataHead::decode("test", &document[..head], &root).unwrap();
        assert_eq!(decoded.blobs, [blob]);
        for offset in [0, 131_071, 131_072, metadata.len() as u64 - 1] {
            let (index, stored) = decoded.block(offset).unwrap();
            let stored = &document[stored.start as usize..stored.end as usize];
            let block = decoded.expand("test", index, stored).unwrap();
            assert_eq!(block[offset as usize % (1 << 17)], metadata[offset as usize]);
            let mut damaged = stored.to_vec();
            damaged[stored.len() / 2] ^= 1;
            assert!(decoded.expand("test", index, &damaged).is_err());
        }
        assert_eq!(decoded.block(1 << 20), None);
        assert!(MetadataHead::decode("test", &document[..head], &[0; 32]).is_err());
        assert!(decode("test", &document[..document.len() - 1]).is_err());
        assert!(decode("test", &[&document[..], b"more"].concat()).is_err());
    }

    #[test]
    fn heads_that_make_no_sense_are_refused() {
        let blob = |address, length| Placed {
            address,
            length,
            table: Digest::of(b"table"),
        };
        let metadata = vec![0; 8192];
        let refused = |blobs: &[Placed]| {
            let (document, _) = encode(&metadata, blobs, 3).unwrap();
            decode("test", &document).is_err()
        };
        assert!(!refused(&[blob(8192, 4096), blob(12288, 0), blob(12288, 4096)]));
        for blobs in [
            &[blob(4096, 4096)][..],
            &[blob(8192, 100)],
            &[blob(8200, 4096)],
            &[blob(8192, 8192), blob(12288, 4096)],
            &[blob(u64::MAX - 4095, 4096)],
            &[blob(1 << 44, 4096)],
        ] {
            assert!(refused(blobs), "{blobs:?}");
        }
        let (document, _) = encode(&metadata, &[], 3).unwrap();
        for (at, value) in [(0, b'X'), (8, 2), (12, 16), (16, 1), (22, 1), (24, 1), (28, 1)] {
            let mut changed = document.clone();
            changed[at] = value;
            assert!(decode("test", &changed).is_err(), "{at}");
        }
    }
}
