//! Reads EROFS images from memory: the metadata images written by this crate, and any other image that is uncompressed and has one device.
//!
//! Invariant: the bytes are hostile. Every offset is checked against them before it is followed, and every step makes progress. Nothing
//! panics, and no length that the image states determines an allocation.

mod entries;
mod mapping;
mod xattrs;

use crate::tree::Timestamp;

use super::format::{
    BLOCK_BITS, CHUNK_FORMAT_ALL, INCOMPAT_CHUNKED_FILE, INCOMPAT_DEVICE_TABLE, INCOMPAT_ZERO_PADDING,
    INODE_COMPACT, INODE_EXTENDED, LAYOUT_CHUNK_BASED, LAYOUT_FLAT_INLINE, LAYOUT_FLAT_PLAIN, MAGIC,
    SLOT_BITS, SUPER_OFFSET, SUPER_SIZE, XATTR_ENTRY, XATTR_HEADER,
};

pub use entries::{DirectoryEntry, Entries};
pub use mapping::{ChunkIndex, Mapping, Mappings};
pub use xattrs::{ResolvedXattr, Xattrs};

/// An inode's number: its offset from the metadata's start in slots of 32 bytes.
pub type Nid = u64;

/// Why an image or a part of it cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    #[error("not an EROFS image: no superblock with its magic number")]
    NotErofs,
    #[error("the EROFS image needs a feature that is not supported: {what} {value:#x}")]
    Unsupported { what: &'static str, value: u32 },
    #[error("the EROFS image is corrupt: {what} of inode {nid}")]
    Corrupt { what: &'static str, nid: Nid },
    #[error("inode {nid} is not a {expected}")]
    WrongType { nid: Nid, expected: &'static str },
}

/// The contents of the superblock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Superblock {
    pub root: Nid,
    pub inodes: u64,
    /// The time of every compact inode.
    pub build_time: Timestamp,
    /// Bytes of the address space.
    pub length: u64,
    pub uuid: [u8; 16],
    /// Byte offsets of inode slot 0 and of shared xattr 0.
    metadata: u64,
    shared_xattrs: u64,
    has_device_table: bool,
    extra_devices: u16,
}

/// The type of an inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileType {
    File,
    Directory,
    CharDevice,
    BlockDevice,
    Fifo,
    Socket,
    Symlink,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    Plain { start: u64 },
    Inline { start: u64 },
    Chunks { bits: u32, has_indexes: bool },
}

impl FileType {
    fn of(mode: u16) -> Option<Self> {
        match u32::from(mode) & libc::S_IFMT {
            libc::S_IFREG => Some(Self::File),
            libc::S_IFDIR => Some(Self::Directory),
            libc::S_IFCHR => Some(Self::CharDevice),
            libc::S_IFBLK => Some(Self::BlockDevice),
            libc::S_IFIFO => Some(Self::Fifo),
            libc::S_IFSOCK => Some(Self::Socket),
            libc::S_IFLNK => Some(Self::Symlink),
            _ => None,
        }
    }
}

impl Layout {
    /// The layout that an inode's `i_format` and `i_u` describe.
    fn of(format: u16, union: u32) -> Result<Self, ReadError> {
        let start = u64::from(union) << BLOCK_BITS;
        match format >> 1 & 7 {
            LAYOUT_FLAT_PLAIN => Ok(Self::Plain { start }),
            LAYOUT_FLAT_INLINE => Ok(Self::Inline { start }),
            LAYOUT_CHUNK_BASED => {
                let format = union as u16;
                if format & !CHUNK_FORMAT_ALL != 0 {
                    return Err(ReadError::Unsupported {
                        what: "chunk format",
                        value: union,
                    });
                }
                let has_indexes = format & super::format::CHUNK_INDEXES != 0;
                let bits = BLOCK_BITS + u32::from(format & super::format::CHUNK_BITS_MASK);
                Ok(Self::Chunks { bits, has_indexes })
            }
            other => Err(ReadError::Unsupported {
                what: "data layout",
                value: u32::from(other),
            }),
        }
    }
}

/// The fields whose sizes differ between compact and extended inodes.
struct Numbers {
    nlink: u32,
    uid: u32,
    gid: u32,
    size: u64,
    mtime: Timestamp,
}

impl Numbers {
    fn compact(raw: &[u8], build_time: Timestamp) -> Self {
        Self {
            nlink: u32::from(u16_at(raw, 6)),
            uid: u32::from(u16_at(raw, 24)),
            gid: u32::from(u16_at(raw, 26)),
            size: u64::from(u32_at(raw, 8)),
            mtime: build_time,
        }
    }

    fn extended(raw: &[u8]) -> Self {
        Self {
            nlink: u32_at(raw, 44),
            uid: u32_at(raw, 24),
            gid: u32_at(raw, 28),
            size: u64_at(raw, 8),
            mtime: Timestamp {
                seconds: u64_at(raw, 32) as i64,
                nanoseconds: u32_at(raw, 40),
            },
        }
    }
}

/// One inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inode {
    pub nid: Nid,
    pub file_type: FileType,
    /// Type and permission bits, as in `st_mode`.
    pub mode: u16,
    pub nlink: u32,
    pub uid: u32,
    pub gid: u32,
    /// Bytes of data, of directory entries or of the link's target.
    pub size: u64,
    pub mtime: Timestamp,
    /// Linux's 32-bit device number for a device, else 0.
    pub device: u32,
    layout: Layout,
    /// Byte offset and length of the xattr area; inline data and chunk tables follow it.
    xattr_start: u64,
    xattr_length: u64,
}

/// A metadata image whose superblock has been checked.
#[derive(Debug)]
pub struct Reader<B> {
    bytes: B,
    superblock: Superblock,
}

impl<B: AsRef<[u8]>> Reader<B> {
    /// Reads the superblock.
    ///
    /// # Errors
    /// If there is no superblock, or it requires unsupported features: compression, other block sizes, several devices.
    pub fn new(bytes: B) -> Result<Reader<B>, ReadError> {
        let reader = Self::with_devices(bytes)?;
        let unsupported = |what, value| Err(ReadError::Unsupported { what, value });
        if reader.superblock.has_device_table {
            return unsupported("feature bits", INCOMPAT_DEVICE_TABLE);
        }
        match reader.superblock.extra_devices {
            0 => Ok(reader),
            more => unsupported("extra devices", u32::from(more)),
        }
    }

    /// As [`Reader::new`], but the image may have several devices, as RAFS images have. Only [`Reader::chunk_index`] reports which device
    /// data is on; [`Reader::mappings`] treats all devices as one.
    ///
    /// # Errors
    /// As [`Reader::new`].
    pub fn with_devices(bytes: B) -> Result<Reader<B>, ReadError> {
        let block = bytes
            .as_ref()
            .get(SUPER_OFFSET..SUPER_OFFSET + SUPER_SIZE)
            .ok_or(ReadError::NotErofs)?;
        let (u16, u32, u64) = (
            |at| u16_at(block, at),
            |at| u32_at(block, at),
            |at| u64_at(block, at),
        );
        if u32(0) != MAGIC {
            return Err(ReadError::NotErofs);
        }
        let unsupported = |what, value| Err(ReadError::Unsupported { what, value });
        if u32::from(block[12]) != BLOCK_BITS {
            return unsupported("block bits", u32::from(block[12]));
        }
        let known = INCOMPAT_ZERO_PADDING | INCOMPAT_CHUNKED_FILE | INCOMPAT_DEVICE_TABLE;
        let unknown = u32(80) & !known;
        if unknown != 0 {
            return unsupported("feature bits", unknown);
        }
        let superblock = Superblock {
            root: Nid::from(u16(14)),
            inodes: u64(16),
            build_time: Timestamp {
                seconds: u64(24) as i64,
                nanoseconds: u32(32),
            },
            length: u64::from(u32(36)) << BLOCK_BITS,
            uuid: block[48..64].try_into().expect("16 bytes"),
            metadata: u64::from(u32(40)) << BLOCK_BITS,
            shared_xattrs: u64::from(u32(44)) << BLOCK_BITS,
            has_device_table: u32(80) & INCOMPAT_DEVICE_TABLE != 0,
            extra_devices: u16(86),
        };
        Ok(Reader { bytes, superblock })
    }

    /// The superblock.
    pub fn superblock(&self) -> &Superblock {
        &self.superblock
    }

    /// The image's bytes.
    pub fn bytes(&self) -> &[u8] {
        self.bytes.as_ref()
    }

    /// The bytes `start..start + length`, if the image has them.
    fn slice(&self, start: u64, length: u64) -> Option<&[u8]> {
        let end = usize::try_from(start.checked_add(length)?).ok()?;
        self.bytes.as_ref().get(usize::try_from(start).ok()?..end)
    }

    /// The inode with a number. The number need not be trusted.
    ///
    /// # Errors
    /// If there is no such inode or it is malformed.
    pub fn inode(&self, nid: Nid) -> Result<Inode, ReadError> {
        let corrupt = |what| ReadError::Corrupt { what, nid };
        let start = nid
            .checked_mul(1 << SLOT_BITS)
            .and_then(|offset| offset.checked_add(self.superblock.metadata))
            .ok_or(corrupt("number"))?;
        let compact = self.slice(start, INODE_COMPACT as u64).ok_or(corrupt("place"))?;
        let format = u16_at(compact, 0);
        let is_extended = format & 1 != 0;
        let length = if is_extended {
            INODE_EXTENDED
        } else {
            INODE_COMPACT
        } as u64;
        let raw = self.slice(start, length).ok_or(corrupt("place"))?;
        let xattr_length = match u16_at(raw, 2) {
            0 => 0,
            count => (XATTR_HEADER + (usize::from(count) - 1) * XATTR_ENTRY) as u64,
        };
        let mode = u16_at(raw, 4);
        let file_type = FileType::of(mode).ok_or(corrupt("type"))?;
        let union = u32_at(raw, 16);
        let is_device = matches!(file_type, FileType::CharDevice | FileType::BlockDevice);
        let numbers = match is_extended {
            true => Numbers::extended(raw),
            false => Numbers::compact(raw, self.superblock.build_time),
        };
        // Sizes are signed in the kernel. Up to this limit no sum of an offset and a length overflows here.
        if numbers.size > i64::MAX as u64 {
            return Err(corrupt("size"));
        }
        Ok(Inode {
            nid,
            file_type,
            mode,
            nlink: numbers.nlink,
            uid: numbers.uid,
            gid: numbers.gid,
            size: numbers.size,
            mtime: numbers.mtime,
            device: if is_device { union } else { 0 },
            layout: Layout::of(format, union)?,
            xattr_start: start + length,
            xattr_length,
        })
    }

    /// Checks the inode's type.
    fn expect(&self, inode: &Inode, file_type: FileType, expected: &'static str) -> Result<(), ReadError> {
        match inode.file_type == file_type {
            true => Ok(()),
            false => Err(ReadError::WrongType {
                nid: inode.nid,
                expected,
            }),
        }
    }

    /// One block of a flat inode whose data is in the metadata. The last block ends where the data does.
    fn block(&self, inode: &Inode, index: u64) -> Result<&[u8], ReadError> {
        let corrupt = || ReadError::Corrupt {
            what: "data",
            nid: inode.nid,
        };
        let offset = index
            .checked_mul(1 << BLOCK_BITS)
            .filter(|offset| *offset < inode.size)
            .ok_or(corrupt())?;
        let length = (inode.size - offset).min(1 << BLOCK_BITS);
        let is_last = inode.size - offset <= 1 << BLOCK_BITS;
        let start = match inode.layout {
            Layout::Inline { .. } if is_last => inode.inline_start(),
            Layout::Plain { start } | Layout::Inline { start } => start + offset,
            Layout::Chunks { .. } => return Err(corrupt()),
        };
        self.slice(start, length).ok_or(corrupt())
    }

    /// A symbolic link's target.
    ///
    /// # Errors
    /// If the inode is not a symbolic link or its target is not in the image.
    pub fn read_link(&self, inode: &Inode) -> Result<Vec<u8>, ReadError> {
        self.expect(inode, FileType::Symlink, "symbolic link")?;
        // Linux reads at most a page of a target.
        if inode.size == 0 || inode.size > 1 << BLOCK_BITS {
            return Err(ReadError::Corrupt {
                what: "target",
                nid: inode.nid,
            });
        }
        Ok(self.block(inode, 0)?.to_vec())
    }
}

impl Inode {
    /// log2 of the size of its chunks in bytes, if it has a chunk table.
    pub fn chunk_bits(&self) -> Option<u32> {
        match self.layout {
            Layout::Chunks { bits, .. } => Some(bits),
            Layout::Plain { .. } | Layout::Inline { .. } => None,
        }
    }

    /// Number of entries in its chunk table; 0 for a file in one piece.
    pub fn chunks(&self) -> u64 {
        match self.layout {
            Layout::Chunks { bits, .. } => self.size.div_ceil(1 << bits),
            Layout::Plain { .. } | Layout::Inline { .. } => 0,
        }
    }

    /// Offset of the inline data or of the chunk table.
    fn inline_start(&self) -> u64 {
        self.xattr_start + self.xattr_length
    }
}

/// Little-endian numbers. The callers' slices must be long enough.
fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}
