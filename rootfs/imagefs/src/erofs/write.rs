//! Writes a laid-out image as bytes.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;

use crate::tree::{BlobExtent, Inode, InodeIndex, Kind, Tree};

use super::checksum::crc32c;
use super::format::{
    BLOCK, BLOCK_BITS, CHUNK_BITS_MASK, COMPAT_MTIME, COMPAT_SB_CHECKSUM, INCOMPAT_CHUNKED_FILE,
    LAYOUT_CHUNK_BASED, LAYOUT_FLAT_INLINE, LAYOUT_FLAT_PLAIN, MAGIC, NULL_ADDRESS, SUPER_OFFSET, SUPER_SIZE,
};
use super::plan::{Layout, Place, Plan, plan};
use super::{BlobPlacement, Summary, WriteError, directory, xattr};

/// Writes the metadata of `tree`. `blob_lengths` are the lengths of the layers' data files, bottom first. The same tree and lengths give
/// the same bytes.
///
/// # Errors
/// If the tree is invalid, the image would be too large, or `out` cannot be written.
pub fn write(tree: &Tree, blob_lengths: &[u64], out: &mut impl Write) -> Result<Summary, WriteError> {
    let plan = plan(tree, blob_lengths)?;
    out.write_all(&plan.encode()?)?;
    Ok(plan.summary)
}

/// Writes a self-contained image: metadata, then the blobs at their addresses. `out` must be empty; zeros become holes in it. Each blob is
/// given by its length and a reader of that many bytes.
///
/// # Errors
/// As [`write`]; also if a blob ends early.
pub fn write_with_data(
    tree: &Tree,
    blobs: &mut [(u64, &mut dyn Read)],
    out: &File,
) -> Result<Summary, WriteError> {
    const STEP: usize = 1 << 20;
    let lengths: Vec<u64> = blobs.iter().map(|(length, _)| *length).collect();
    let plan = plan(tree, &lengths)?;
    out.set_len(plan.summary.total_length)?;
    out.write_all_at(&plan.encode()?, 0)?;
    let mut buffer = vec![0; STEP];
    for ((length, source), placement) in blobs.iter_mut().zip(&plan.summary.blobs) {
        let mut done = 0;
        while done < *length {
            let step = &mut buffer[..(*length - done).min(STEP as u64) as usize];
            source.read_exact(step)?;
            for (index, page) in step.chunks(BLOCK as usize).enumerate() {
                if page.iter().any(|byte| *byte != 0) {
                    out.write_all_at(page, placement.address + done + index as u64 * BLOCK)?;
                }
            }
            done += step.len() as u64;
        }
    }
    Ok(plan.summary)
}

impl Plan<'_> {
    /// The metadata image: [`Summary::metadata_length`] bytes.
    ///
    /// # Errors
    /// If an xattr cannot be stored.
    pub fn encode(&self) -> Result<Vec<u8>, WriteError> {
        let mut image = vec![0; self.summary.metadata_length as usize];
        for (number, index) in self.order.iter().enumerate() {
            self.encode_inode(&mut image, number as u32, *index)?;
        }
        let shared = self.shared_block as usize * BLOCK as usize;
        image[shared..shared + self.shared.area.len()].copy_from_slice(&self.shared.area);

        let has_chunks = self
            .places
            .iter()
            .flatten()
            .any(|place| matches!(place.layout, Layout::Chunks { .. }));
        let root = self.place(Tree::ROOT).nid();
        let blocks = (self.summary.total_length >> BLOCK_BITS) as u32;
        let mut superblock = Fields(&mut image[SUPER_OFFSET..SUPER_OFFSET + SUPER_SIZE]);
        superblock.u32(0, MAGIC);
        superblock.u32(8, COMPAT_SB_CHECKSUM | COMPAT_MTIME);
        superblock.u8(12, BLOCK_BITS as u8);
        superblock.u16(14, root as u16);
        superblock.u64(16, self.summary.inodes);
        superblock.u64(24, self.build_time.seconds as u64);
        superblock.u32(32, self.build_time.nanoseconds);
        superblock.u32(36, blocks);
        superblock.u32(44, self.shared_block);
        superblock.u32(80, if has_chunks { INCOMPAT_CHUNKED_FILE } else { 0 });

        // Equal content gives an equal UUID, so a guest recognises an image that it sees again. RFC 9562, version 8.
        let mut uuid = [0; 16];
        uuid.copy_from_slice(&blake3::hash(&image).as_bytes()[..16]);
        uuid[6] = uuid[6] & 0x0f | 0x80;
        uuid[8] = uuid[8] & 0x3f | 0x80;
        image[SUPER_OFFSET + 48..SUPER_OFFSET + 64].copy_from_slice(&uuid);
        let sum = crc32c(&image[SUPER_OFFSET..BLOCK as usize]);
        Fields(&mut image[SUPER_OFFSET..]).u32(4, sum);
        Ok(image)
    }

    fn encode_inode(&self, image: &mut [u8], number: u32, index: InodeIndex) -> Result<(), WriteError> {
        let inode = self.tree.inode(index);
        let place = self.place(index);
        let xattrs = self.shared.inline_area(&inode.attributes.xattrs)?;
        let start = place.offset as usize;
        let behind = start + place.inode_size() + xattrs.len();
        image[start + place.inode_size()..behind].copy_from_slice(&xattrs);

        let union = match (&inode.kind, &place.layout) {
            (Kind::CharDevice { major, minor } | Kind::BlockDevice { major, minor }, _) => {
                device_number(*major, *minor)
            }
            (_, Layout::Plain { block } | Layout::Inline { block }) => *block,
            (_, Layout::Chunks { bits }) => (bits - BLOCK_BITS) & u32::from(CHUNK_BITS_MASK),
        };
        let icount = xattr::count(xattrs.len()).expect("inline_area() checked the size");
        encode_head(&mut image[start..], inode, place, union, number + 1, icount);

        match &inode.kind {
            Kind::Directory { .. } => {
                let entries = directory::sorted_entries(self.tree, index, place.parent);
                let describe = |child| (self.place(child).nid(), file_type(&self.tree.inode(child).kind));
                for (block, at) in directory::blocks(&entries).zip(block_offsets(place, behind)) {
                    directory::encode(block, &mut image[at..at + directory::used(block)], describe);
                }
            }
            Kind::Symlink { target } => {
                if let Some(at) = block_offsets(place, behind).next() {
                    image[at..at + target.len()].copy_from_slice(target);
                }
            }
            Kind::File { size, extents } => {
                if let Layout::Chunks { bits } = place.layout {
                    let count = size.div_ceil(1 << bits) as usize;
                    encode_chunks(
                        &mut image[behind..behind + count * 4],
                        bits,
                        extents,
                        &self.summary.blobs,
                    );
                }
            }
            _ => {}
        }
        Ok(())
    }
}

/// Image offsets of the blocks of an inode whose data is in the metadata.
fn block_offsets(place: &Place, behind: usize) -> impl Iterator<Item = usize> {
    let (first, inline) = match place.layout {
        Layout::Plain { block } => (block, None),
        Layout::Inline { block } => (block, Some(behind)),
        Layout::Chunks { .. } => (0, None),
    };
    let whole = match inline {
        Some(_) => place.size / BLOCK,
        None => place.size.div_ceil(BLOCK),
    };
    (0..whole as usize)
        .map(move |index| (first as usize + index) << BLOCK_BITS)
        .chain(inline)
}

fn encode_chunks(table: &mut [u8], bits: u32, extents: &[BlobExtent], blobs: &[BlobPlacement]) {
    table.fill(0xff);
    debug_assert_eq!(NULL_ADDRESS.to_le_bytes(), [0xff; 4]);
    for extent in extents {
        let address = blobs[extent.blob as usize].address;
        for offset in (0..extent.length).step_by(1 << bits) {
            let chunk = ((extent.file_offset + offset) >> bits) as usize;
            let block = ((address + extent.data_offset + offset) >> BLOCK_BITS) as u32;
            Fields(table).u32(chunk * 4, block);
        }
    }
}

fn encode_head(out: &mut [u8], inode: &Inode, place: &Place, union: u32, number: u32, icount: u16) {
    let layout = match place.layout {
        Layout::Plain { .. } => LAYOUT_FLAT_PLAIN,
        Layout::Inline { .. } => LAYOUT_FLAT_INLINE,
        Layout::Chunks { .. } => LAYOUT_CHUNK_BASED,
    };
    let attributes = &inode.attributes;
    let mut fields = Fields(out);
    fields.u16(0, layout << 1 | u16::from(place.is_extended));
    fields.u16(2, icount);
    fields.u16(4, mode_type(&inode.kind) | attributes.mode & 0o7777);
    fields.u32(16, union);
    fields.u32(20, number);
    if place.is_extended {
        fields.u64(8, place.size);
        fields.u32(24, attributes.uid);
        fields.u32(28, attributes.gid);
        fields.u64(32, attributes.mtime.seconds as u64);
        fields.u32(40, attributes.mtime.nanoseconds);
        fields.u32(44, place.nlink);
    } else {
        fields.u16(6, place.nlink as u16);
        fields.u32(8, place.size as u32);
        fields.u16(24, attributes.uid as u16);
        fields.u16(26, attributes.gid as u16);
    }
}

/// Linux's 32-bit device number: minor 0..8, major 8..20, minor 20..32.
fn device_number(major: u32, minor: u32) -> u32 {
    minor & 0xff | (major & 0xfff) << 8 | (minor & !0xff) << 12
}

/// The type bits of a mode.
fn mode_type(kind: &Kind) -> u16 {
    (match kind {
        Kind::Directory { .. } => libc::S_IFDIR,
        Kind::File { .. } => libc::S_IFREG,
        Kind::Symlink { .. } => libc::S_IFLNK,
        Kind::CharDevice { .. } => libc::S_IFCHR,
        Kind::BlockDevice { .. } => libc::S_IFBLK,
        Kind::Fifo => libc::S_IFIFO,
        Kind::Socket => libc::S_IFSOCK,
    }) as u16
}

/// The type in a directory entry (`EROFS_FT_*`).
fn file_type(kind: &Kind) -> u8 {
    match kind {
        Kind::File { .. } => 1,
        Kind::Directory { .. } => 2,
        Kind::CharDevice { .. } => 3,
        Kind::BlockDevice { .. } => 4,
        Kind::Fifo => 5,
        Kind::Socket => 6,
        Kind::Symlink { .. } => 7,
    }
}

/// Little-endian fields at byte offsets.
struct Fields<'a>(&'a mut [u8]);

impl Fields<'_> {
    fn u8(&mut self, at: usize, value: u8) {
        self.0[at] = value;
    }

    fn u16(&mut self, at: usize, value: u16) {
        self.0[at..at + 2].copy_from_slice(&value.to_le_bytes());
    }

    fn u32(&mut self, at: usize, value: u32) {
        self.0[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }

    fn u64(&mut self, at: usize, value: u64) {
        self.0[at..at + 8].copy_from_slice(&value.to_le_bytes());
    }
}
