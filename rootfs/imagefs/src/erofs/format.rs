//! Constants of the on-disk format (Linux `fs/erofs/erofs_fs.h`). All fields are little-endian.

pub const BLOCK_BITS: u32 = 12;
pub const BLOCK: u64 = 1 << BLOCK_BITS;
/// The superblock's offset in block 0, and its size in bytes without extensions.
pub const SUPER_OFFSET: usize = 1024;
pub const SUPER_SIZE: usize = 128;
pub const MAGIC: u32 = 0xE0F5_E1E2;

pub const COMPAT_SB_CHECKSUM: u32 = 0x1;
pub const COMPAT_MTIME: u32 = 0x2;
/// Compressed clusters are padded at their front. Meaningless without compression, but set by older tools.
pub const INCOMPAT_ZERO_PADDING: u32 = 0x1;
pub const INCOMPAT_CHUNKED_FILE: u32 = 0x4;
pub const INCOMPAT_DEVICE_TABLE: u32 = 0x8;

/// Inodes are addressed in slots of 32 bytes: an inode's number (nid) is its slot.
pub const SLOT_BITS: u32 = 5;
pub const SLOT: u64 = 1 << SLOT_BITS;
pub const INODE_COMPACT: usize = 32;
pub const INODE_EXTENDED: usize = 64;

/// Data layouts, bits 1..=3 of an inode's format; bit 0 is set for an extended inode.
pub const LAYOUT_FLAT_PLAIN: u16 = 0;
pub const LAYOUT_FLAT_INLINE: u16 = 2;
pub const LAYOUT_CHUNK_BASED: u16 = 4;

/// A chunk-based inode's format field: the chunk size's bits above 12, and whether entries are 8-byte indexes.
pub const CHUNK_BITS_MASK: u16 = 0x1f;
pub const CHUNK_INDEXES: u16 = 0x20;
pub const CHUNK_FORMAT_ALL: u16 = CHUNK_BITS_MASK | CHUNK_INDEXES;
/// A chunk that is a hole.
pub const NULL_ADDRESS: u32 = u32::MAX;

pub const DIRENT: usize = 12;

/// Inline xattr area: a header, then 4-byte numbers of shared xattrs, then entries.
pub const XATTR_HEADER: usize = 12;
pub const XATTR_ENTRY: usize = 4;

/// Namespaces and their prefixes. In an entry the index stands for the prefix.
pub const XATTR_PREFIXES: [(u8, &[u8]); 6] = [
    (1, b"user."),
    (2, b"system.posix_acl_access"),
    (3, b"system.posix_acl_default"),
    (4, b"trusted."),
    (5, b"lustre."),
    (6, b"security."),
];
