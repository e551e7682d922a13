//! A RAFS v6 bootstrap, byte by byte: EROFS with an extended superblock behind the ordinary one, and three tables.
//!
//! ```text
//! 1024  EROFS superblock, 128 bytes (incompatible features: chunked files, device table)
//! 1152  extended superblock, 256 bytes: flags, blob table, chunk size, chunk table, prefetch table
//! 1408  device table: 128 bytes for each blob, which has a device's number in chunk indexes (counted from 1)
//!       blob table: 256 bytes for each blob; chunk table: 80 bytes for each chunk
//! ```
//!
//! Source: the structures of the crate `nydus-rafs` (Apache-2.0), modules `metadata::layout::v6` and `metadata::layout::v5`.

use thaw_imagefs::digest::Digest;
use thaw_imagefs::erofs::{Nid, ReadError, Reader};
use thaw_imagefs::tree::{BlobExtent, PAGE, Tree};

use crate::index::{Content, Piece, Pieces};
use crate::span::{Expansion, MAX_SPAN, Span, SpanDigest, SpanTable};

const EROFS_MAGIC: u32 = 0xE0F5_E1E2;
const RAFS_V5_MAGIC: u32 = 0x5241_4653;
const SUPER: usize = 1024;
const EXTENDED: usize = SUPER + 128;
const DEVICES: usize = EXTENDED + 256;
const DEVICE: usize = 128;
const BLOB: usize = 256;
const CHUNK: usize = 80;

/// `s_feature_compat`: this is RAFS.
const COMPAT_RAFS_V6: u32 = 0x4000_0000;
const INCOMPAT_CHUNKED_FILE: u32 = 0x4;
const INCOMPAT_DEVICE_TABLE: u32 = 0x8;

/// Flags of the extended superblock.
const HASH_BLAKE3: u64 = 0x4;
const HASH_SHA256: u64 = 0x8;
/// Explicit owners, xattrs, compressors, digests also in the blob, and the flags that Nydus's tool declares compatible.
const KNOWN_FLAGS: u64 = 0x1ff | 0xff00_0000;

/// A blob's features. Aligned data; metadata, digests, tar headers or a table of contents also in it; version 2 of tables
/// that are not used here.
const BLOB_ALIGNED: u32 = 0x1;
const BLOB_ZRAN: u32 = 0x8;
const BLOB_SEPARATE: u32 = 0x10;
const KNOWN_FEATURES: u32 = BLOB_ALIGNED | 0x2 | 0x4 | 0x20 | 0x7000_0000;

const CHUNK_COMPRESSED: u32 = 0x1;
const CHUNK_HOLE: u32 = 0x2;
const CHUNK_ENCRYPTED: u32 = 0x4;
const CHUNK_BATCH: u32 = 0x8;

/// Blobs: their number has eight bits, of which 0 is the bootstrap.
const MAX_BLOBS: usize = 255;
/// Most bytes of a blob's data.
const MAX_DATA: u64 = 1 << 42;

/// Why a bootstrap is refused.
#[derive(Debug, thiserror::Error)]
pub enum BootstrapError {
    #[error("it is RAFS v5: convert the image again with nydus-image create --fs-version 6")]
    Version5,
    #[error(
        "it is EROFS but not RAFS v6 (its devices are flattened, or it was made by a later version of Nydus): use a RAFS v6 image"
    )]
    NotRafs,
    #[error("it uses {0}, which Thaw does not read: convert the image again without")]
    Unsupported(&'static str),
    #[error("it has unknown {what} {value:#x}: it was made by a later version of Nydus")]
    Unknown { what: &'static str, value: u64 },
    #[error("it is damaged: {0}")]
    Damaged(&'static str),
    #[error(transparent)]
    Metadata(#[from] ReadError),
}

use BootstrapError::{Damaged, Unknown, Unsupported};

/// The content of a bootstrap.
pub struct Bootstrap {
    pub tree: Tree,
    /// In the order of the indexes in the tree's extents.
    pub blobs: Vec<Blob>,
}

/// A data blob.
pub struct Blob {
    /// SHA-256 of the stored blob, which identifies it in the manifest.
    pub id: Digest,
    pub content: Content,
}

/// The used fields of an entry of the blob table.
struct BlobEntry {
    id: Digest,
    compressor: Compressor,
    digester: Digester,
    data_length: u64,
    spans: Vec<Span>,
}

#[derive(Clone, Copy)]
enum Compressor {
    None,
    Lz4Block,
    Gzip,
    Zstd,
}

#[derive(Clone, Copy)]
enum Digester {
    Blake3,
    Sha256,
}

impl Bootstrap {
    /// Reads a bootstrap. `stored` returns the length of the stored blob with a digest, if the image has it.
    ///
    /// # Errors
    /// [`BootstrapError`].
    pub fn decode(bytes: &[u8], stored: impl Fn(&Digest) -> Option<u64>) -> Result<Self, BootstrapError> {
        let raw = Raw(bytes);
        if raw.u32(0) == Some(RAFS_V5_MAGIC) {
            return Err(BootstrapError::Version5);
        }
        let ended = Damaged("it ends before its tables");
        if bytes.len() < DEVICES {
            return Err(ended);
        }
        let number = |at| raw.u32(at).unwrap_or_default();
        if number(SUPER) != EROFS_MAGIC {
            return Err(Damaged("it has no EROFS superblock"));
        }
        let (compatible, incompatible) = (number(SUPER + 8), number(SUPER + 80));
        if compatible & COMPAT_RAFS_V6 == 0 {
            return Err(BootstrapError::NotRafs);
        }
        if incompatible & !(INCOMPAT_CHUNKED_FILE | INCOMPAT_DEVICE_TABLE) != 0 {
            return Err(Unknown {
                what: "EROFS features",
                value: incompatible.into(),
            });
        }
        let extended = Extended::decode(&raw)?;
        let device_count = usize::from(raw.u16(SUPER + 86).unwrap_or_default());
        let blobs = blob_table(&raw, &extended, &stored)?;
        if device_count != blobs.len() {
            return Err(Damaged("it has another number of devices than of blobs"));
        }
        devices(&raw, &blobs)?;
        let blobs = chunk_table(&raw, &extended, blobs)?;
        let contents = blobs
            .into_iter()
            .map(|blob| content(blob, &stored))
            .collect::<Result<Vec<_>, _>>()?;
        let tree = tree(bytes, &contents)?;
        Ok(Self {
            tree,
            blobs: contents,
        })
    }
}

/// The extended superblock.
struct Extended {
    digester: Digester,
    blobs: (u64, u64),
    chunks: (u64, u64),
    chunk_size: u32,
}

impl Extended {
    fn decode(raw: &Raw) -> Result<Self, BootstrapError> {
        let u32 = |at| raw.u32(EXTENDED + at).unwrap_or_default();
        let u64 = |at| raw.u64(EXTENDED + at).unwrap_or_default();
        let flags = u64(0);
        if flags & !KNOWN_FLAGS != 0 {
            return Err(Unknown {
                what: "flags (encryption, perhaps)",
                value: flags & !KNOWN_FLAGS,
            });
        }
        let digester = match (flags & HASH_BLAKE3 != 0, flags & HASH_SHA256 != 0) {
            (true, false) => Digester::Blake3,
            (false, true) => Digester::Sha256,
            _ => return Err(Damaged("it names no digest algorithm, or two")),
        };
        let chunk_size = u32(20);
        if !chunk_size.is_power_of_two() || u64::from(chunk_size) < PAGE || chunk_size > 16 << 20 {
            return Err(Damaged("its chunk size is none"));
        }
        Ok(Self {
            digester,
            blobs: (u64(8), u32(16).into()),
            chunk_size,
            chunks: (u64(24), u64(32)),
        })
    }
}

fn blob_table(
    raw: &Raw,
    extended: &Extended,
    stored: &impl Fn(&Digest) -> Option<u64>,
) -> Result<Vec<BlobEntry>, BootstrapError> {
    let table = raw
        .table(extended.blobs, BLOB)
        .ok_or(Damaged("its blob table is not in it, or of a broken length"))?;
    if table.len() / BLOB > MAX_BLOBS {
        return Err(Damaged("it has more than 255 blobs"));
    }
    let mut blobs = Vec::new();
    for (index, entry) in (0u32..).zip(table.chunks_exact(BLOB)) {
        let entry = Raw(entry);
        let u32 = |at| entry.u32(at).unwrap_or_default();
        let u64 = |at| entry.u64(at).unwrap_or_default();
        if u32(64) != index {
            return Err(Damaged("its blobs are out of order"));
        }
        let features = u32(84);
        if features & (BLOB_ZRAN | BLOB_SEPARATE) != 0 {
            return Err(Unsupported("blobs that refer to ordinary layers (zran)"));
        }
        if features & !KNOWN_FEATURES != 0 {
            return Err(Unknown {
                what: "blob features (encryption or batches of chunks, perhaps)",
                value: (features & !KNOWN_FEATURES).into(),
            });
        }
        if features & BLOB_ALIGNED == 0 {
            return Err(Unsupported("data that is not aligned to 4096 bytes"));
        }
        if u32(68) != extended.chunk_size {
            return Err(Damaged("a blob has another chunk size than the image"));
        }
        let id = blob_id(entry.0).ok_or(Damaged("a blob's name is no SHA-256"))?;
        stored(&id).ok_or(Damaged("a blob is not among the image's layers"))?;
        let data_length = u64(96)
            .checked_next_multiple_of(PAGE)
            .filter(|length| *length <= MAX_DATA)
            .ok_or(Damaged("a blob is too large"))?;
        blobs.push(BlobEntry {
            id,
            compressor: match u32(76) {
                0 => Compressor::None,
                1 => Compressor::Lz4Block,
                2 => Compressor::Gzip,
                3 => Compressor::Zstd,
                other => {
                    return Err(Unknown {
                        what: "compressor",
                        value: other.into(),
                    });
                }
            },
            digester: match u32(80) {
                0 => Digester::Blake3,
                1 => Digester::Sha256,
                other => {
                    return Err(Unknown {
                        what: "digest algorithm",
                        value: other.into(),
                    });
                }
            },
            data_length,
            spans: Vec::new(),
        });
    }
    Ok(blobs)
}

/// The 64 hex digits at the start of an entry.
fn blob_id(entry: &[u8]) -> Option<Digest> {
    Digest::from_hex(std::str::from_utf8(entry.get(..64)?).ok()?)
}

/// Checks that the device table names the blobs in their order, because chunk indexes refer to devices.
fn devices(raw: &Raw, blobs: &[BlobEntry]) -> Result<(), BootstrapError> {
    let slot = usize::from(raw.u16(SUPER + 88).unwrap_or_default());
    if !blobs.is_empty() && slot != DEVICES / DEVICE {
        return Err(Damaged("its device table is elsewhere"));
    }
    for (index, blob) in blobs.iter().enumerate() {
        let device = raw
            .bytes((DEVICES + index * DEVICE) as u64, DEVICE as u64)
            .ok_or(Damaged("its device table is not in it"))?;
        if blob_id(device) != Some(blob.id) {
            return Err(Damaged("its devices are not its blobs"));
        }
        if Raw(device).u32(68) != Some(0) {
            return Err(Unsupported("a flattened device table"));
        }
    }
    Ok(())
}

/// Assigns the chunks to their blobs.
fn chunk_table(
    raw: &Raw,
    extended: &Extended,
    mut blobs: Vec<BlobEntry>,
) -> Result<Vec<BlobEntry>, BootstrapError> {
    let table = raw
        .table(extended.chunks, CHUNK)
        .ok_or(Damaged("its chunk table is not in it, or of a broken length"))?;
    if table.is_empty() && blobs.iter().any(|blob| blob.data_length > 0) {
        return Err(Unsupported("chunk tables that are in the blobs alone"));
    }
    for chunk in table.chunks_exact(CHUNK) {
        let raw = Raw(chunk);
        let u32 = |at| raw.u32(at).unwrap_or_default();
        let u64 = |at| raw.u64(at).unwrap_or_default();
        let blob = blobs
            .get_mut(u32(32) as usize)
            .ok_or(Damaged("a chunk is in no blob"))?;
        let flags = u32(36);
        if flags & CHUNK_ENCRYPTED != 0 {
            return Err(Unsupported("encryption"));
        }
        if flags & CHUNK_BATCH != 0 {
            return Err(Unsupported("batches of chunks"));
        }
        if flags & CHUNK_HOLE != 0 {
            continue;
        }
        if flags & !CHUNK_COMPRESSED != 0 {
            return Err(Unknown {
                what: "chunk flags",
                value: flags.into(),
            });
        }
        let mut digest = [0; 32];
        digest.copy_from_slice(&chunk[..32]);
        let (stored_length, length) = (u64::from(u32(40)), u64::from(u32(44)));
        let (stored_start, start) = (u64(48), u64(56));
        let stored_end = stored_start.checked_add(stored_length);
        let end = start.checked_add(length);
        let (Some(stored_end), Some(end)) = (stored_end, end) else {
            return Err(Damaged("a chunk lies beyond its blob"));
        };
        if !start.is_multiple_of(PAGE) || end > blob.data_length || length == 0 || length > MAX_SPAN {
            return Err(Damaged("a chunk lies beyond its blob, or not on a page"));
        }
        let expansion = match blob.compressor {
            _ if flags & CHUNK_COMPRESSED == 0 => Expansion::Plain,
            Compressor::None => return Err(Damaged("a chunk is compressed in a blob without compressor")),
            Compressor::Lz4Block => Expansion::Lz4,
            Compressor::Gzip => Expansion::Gzip,
            Compressor::Zstd => Expansion::Zstd,
        };
        // The image's algorithm and each blob's own, because a blob from another image may have a different one.
        let digest = match (blob.digester, extended.digester) {
            (Digester::Blake3, Digester::Blake3) => SpanDigest::StreamBlake3(digest),
            (Digester::Sha256, Digester::Sha256) => SpanDigest::StreamSha256(digest),
            _ => return Err(Unsupported("two digest algorithms in one image")),
        };
        blob.spans.push(Span {
            stored: stored_start..stored_end,
            stream: start..end,
            digest,
            expansion,
        });
    }
    Ok(blobs)
}

/// Sorts the spans. The rest of a chunk's last page is zeros.
fn content(blob: BlobEntry, stored: &impl Fn(&Digest) -> Option<u64>) -> Result<Blob, BootstrapError> {
    let mut spans = blob.spans;
    spans.sort_by_key(|span| (span.stream.start, span.stream.end, span.stored.start));
    // The same chunk may be listed for each image that was merged into this one.
    spans.dedup();
    let pieces = spans
        .iter()
        .map(|span| Piece {
            data_offset: span.stream.start,
            length: span.stream.end - span.stream.start,
            stream_offset: span.stream.start,
        })
        .collect();
    let stored_length = stored(&blob.id).unwrap_or_default();
    let spans = SpanTable::new(spans, stored_length)
        .map_err(|_| Damaged("chunks overlap, or lie beyond their stored blob"))?;
    let content = Content::new(blob.data_length, Pieces::Map(pieces), spans)
        .map_err(|_| Damaged("chunks do not fit their blob"))?;
    Ok(Blob { id: blob.id, content })
}

fn tree(bytes: &[u8], blobs: &[Blob]) -> Result<Tree, BootstrapError> {
    let reader = Reader::with_devices(bytes)?;
    // An entry of a chunk table has eight bytes, and tools write tables that do not overlap.
    let mut budget = bytes.len() as u64 / 8;
    thaw_imagefs::erofs::read_tree_with(&reader, |inode| {
        let corrupt = |what| BootstrapError::from(corrupt(what, inode.nid));
        let bits = inode.chunk_bits().ok_or(corrupt("layout of data"))?;
        budget = budget
            .checked_sub(inode.chunks())
            .ok_or(corrupt("amount of chunks"))?;
        let mut extents: Vec<BlobExtent> = Vec::new();
        for index in 0..inode.chunks() {
            let chunk = reader.chunk_index(inode, index)?;
            let Some(block) = chunk.block else { continue };
            let file_offset = index << bits;
            let size = (inode.size - file_offset).min(1 << bits);
            // The device's number has the low byte; the rest is part of the chunk's place in a table.
            let blob = u32::from(chunk.device & 0xff)
                .checked_sub(1)
                .ok_or(corrupt("data in the bootstrap"))?;
            let data_offset = u64::from(block) * PAGE;
            let is_there = blobs.get(blob as usize).is_some_and(|blob| {
                let end = data_offset + size;
                end <= blob.content.data_length && covers(&blob.content, data_offset, end)
            });
            if !is_there {
                return Err(corrupt("data that no chunk has"));
            }
            let length = size.next_multiple_of(PAGE);
            match extents.last_mut() {
                Some(last)
                    if last.blob == blob
                        && last.file_offset + last.length == file_offset
                        && last.data_offset + last.length == data_offset =>
                {
                    last.length += length;
                }
                _ => extents.push(BlobExtent {
                    file_offset,
                    blob,
                    data_offset,
                    length,
                }),
            }
        }
        Ok(extents)
    })
}

/// Whether the chunks cover a range of the data file, except the ends of pages.
fn covers(content: &Content, start: u64, end: u64) -> bool {
    let spans = content.spans.spans();
    let mut at = start;
    for span in &spans[content.spans.overlapping(start..end)] {
        if span.stream.start > at {
            return false;
        }
        at = span.stream.end;
        if at < end {
            at = at.next_multiple_of(PAGE);
        }
    }
    at >= end
}

fn corrupt(what: &'static str, nid: Nid) -> ReadError {
    ReadError::Corrupt { what, nid }
}

/// Little-endian numbers at byte offsets, if the bytes exist.
struct Raw<'a>(&'a [u8]);

impl<'a> Raw<'a> {
    fn bytes(&self, offset: u64, length: u64) -> Option<&'a [u8]> {
        let end = usize::try_from(offset.checked_add(length)?).ok()?;
        self.0.get(usize::try_from(offset).ok()?..end)
    }

    /// A table of entries of `size` bytes.
    fn table(&self, (offset, length): (u64, u64), size: usize) -> Option<&'a [u8]> {
        if length == 0 {
            return Some(&[]);
        }
        self.bytes(offset, length)
            .filter(|table| table.len().is_multiple_of(size))
    }

    fn array<const N: usize>(&self, at: usize) -> Option<[u8; N]> {
        self.0.get(at..)?.first_chunk().copied()
    }

    fn u16(&self, at: usize) -> Option<u16> {
        self.array(at).map(u16::from_le_bytes)
    }

    fn u32(&self, at: usize) -> Option<u32> {
        self.array(at).map(u32::from_le_bytes)
    }

    fn u64(&self, at: usize) -> Option<u64> {
        self.array(at).map(u64::from_le_bytes)
    }
}
