//! The metadata document: the EROFS image in blocks, each compressed and each with its digest, and where the blobs are.
//!
//! Its head (all but the blocks) is pinned twice: with the whole by the manifest's SHA-256, and alone by the BLAKE3 in the
//! layer's annotation ([`ROOT_ANNOTATION`]). So who has the manifest can read and verify the head, then any block, without
//! the rest.

use crate::digest::Digest;
use crate::error::Error;

use super::manifest::MAX_BLOBS;
use super::wire::{Cursor, PAGE, Put, ZSTD, compress};

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

/// Where a blob is in the address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    pub address: u64,
    pub length: u64,
    /// SHA-256 of its chunk table.
    pub table: Digest,
}

/// Block of the EROFS image as it is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Block {
    stored: usize,
    is_zstd: bool,
    digest: [u8; 32],
}

/// What comes before the blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Head {
    metadata_length: u64,
    blobs: Vec<Placed>,
    blocks: Vec<Block>,
}

/// The document, and the length of its head.
///
/// # Errors
/// Of the compressor, which is out of memory then.
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
    // Grows as blocks expand: what the head states is not allocated at once.
    let mut metadata = Vec::new();
    for (index, block) in head.blocks.iter().enumerate() {
        let start = (index as u64) << BLOCK_LOG2;
        let length = (head.metadata_length - start).min(1 << BLOCK_LOG2) as usize;
        let stored = cursor.bytes(block.stored)?;
        let expanded = expand(stored, block.is_zstd, length)
            .filter(|expanded| blake3::hash(expanded) == block.digest)
            .ok_or_else(|| cursor.malformed(&format!("block {index} is not what its digest says")))?;
        metadata.extend_from_slice(&expanded);
    }
    match cursor.rest().is_empty() {
        true => Ok((metadata, head.blobs)),
        false => Err(cursor.malformed("it goes on after its last block")),
    }
}

fn expand(stored: &[u8], is_zstd: bool, length: usize) -> Option<Vec<u8>> {
    let expanded = match is_zstd {
        true => zstd::bulk::decompress(stored, length).ok()?,
        false => stored.to_vec(),
    };
    (expanded.len() == length).then_some(expanded)
}

fn decode_head(cursor: &mut Cursor) -> Result<Head, Error> {
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
    let mut blocks = Vec::new();
    for _ in 0..cursor.count(block_count, BLOCK)? {
        let stored = cursor.u32()?;
        blocks.push(Block {
            stored: (stored & !ZSTD) as usize,
            is_zstd: stored & ZSTD != 0,
            digest: cursor.array()?,
        });
    }
    Ok(Head {
        metadata_length,
        blobs,
        blocks,
    })
}
