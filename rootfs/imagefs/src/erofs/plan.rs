//! The layout of an image: the places of inodes, blocks and blobs. Nothing is written yet.
//!
//! ```text
//! block 0: superblock | inodes with their xattrs and inline data ... | directory and symlink blocks | shared xattrs | blobs
//! ```
//!
//! Inodes are in breadth-first order, the root first (its number must fit 16 bits). The layout depends only on the tree: equal trees give
//! equal bytes.

use std::collections::HashMap;

use crate::tree::{BlobExtent, Inode, InodeIndex, Kind, Timestamp, Tree};

use super::format::{
    BLOCK, BLOCK_BITS, CHUNK_BITS_MASK, INODE_COMPACT, INODE_EXTENDED, SLOT, SLOT_BITS, SUPER_OFFSET,
    SUPER_SIZE,
};
use super::xattr::Shared;
use super::{BLOB_ALIGNMENT, BlobPlacement, Summary, WriteError, directory};

/// Largest metadata image. Prevents a hostile layer from making a huge one out of holes alone.
const MAX_METADATA: u64 = 2 << 30;
/// Block numbers have 32 bits, and one value means a hole.
const MAX_ADDRESS: u64 = (u32::MAX as u64) << BLOCK_BITS;
/// Largest file, holes included.
const MAX_FILE: u64 = 1 << 44;

/// Where an inode's data is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Complete blocks from this one on. Also used for inodes without data.
    Plain { block: u32 },
    /// All blocks but the last from this one on; the last one follows the inode.
    Inline { block: u32 },
    /// A table of chunks of `1 << bits` bytes, which follows the inode.
    Chunks { bits: u32 },
}

/// The place of one inode.
#[derive(Clone, Debug)]
pub struct Place {
    /// Byte offset in the image, a multiple of a slot.
    pub offset: u64,
    pub is_extended: bool,
    /// Bytes of data.
    pub size: u64,
    pub nlink: u32,
    /// The parent, for a directory.
    pub parent: InodeIndex,
    pub layout: Layout,
}

impl Place {
    pub fn nid(&self) -> u64 {
        self.offset >> SLOT_BITS
    }

    pub fn inode_size(&self) -> usize {
        if self.is_extended {
            INODE_EXTENDED
        } else {
            INODE_COMPACT
        }
    }
}

/// A laid-out image.
pub struct Plan<'a> {
    pub(super) tree: &'a Tree,
    /// Inodes that are part of the tree, in the order of their numbers.
    pub(super) order: Vec<InodeIndex>,
    /// By inode index; `None` for an inode without a name.
    pub(super) places: Vec<Option<Place>>,
    pub(super) shared: Shared<'a>,
    /// The block of the shared xattr area.
    pub(super) shared_block: u32,
    /// The time of every compact inode: the most frequent time.
    pub(super) build_time: Timestamp,
    pub(super) summary: Summary,
}

impl Plan<'_> {
    /// Sizes and addresses.
    pub fn summary(&self) -> &Summary {
        &self.summary
    }

    /// The place of an inode that is part of the tree.
    pub(super) fn place(&self, index: InodeIndex) -> &Place {
        self.places[index as usize]
            .as_ref()
            .expect("a directory's entries are visited before they are placed")
    }
}

/// Lays out the metadata of `tree`. `blob_lengths` are the lengths of the layers' data files, bottom first.
///
/// # Errors
/// If the tree is invalid (a directory with two names, a bad name) or the image would be too large.
pub fn plan<'a>(tree: &'a Tree, blob_lengths: &[u64]) -> Result<Plan<'a>, WriteError> {
    check_blobs(tree, blob_lengths)?;
    let (order, mut places) = visit(tree)?;
    let inodes = || order.iter().map(|index| tree.inode(*index));
    let build_time = most_frequent_time(inodes());
    let shared = Shared::of(inodes())?;

    let mut cursor = Cursor {
        offset: (SUPER_OFFSET + SUPER_SIZE) as u64,
        data_blocks: 0,
    };
    for index in &order {
        let inode = tree.inode(*index);
        let Some(place) = &mut places[*index as usize] else {
            continue;
        };
        place.is_extended = needs_extended(inode, place, build_time);
        if let Kind::Directory { .. } = inode.kind {
            place.size = directory::size(&directory::sorted_entries(tree, *index, place.parent));
        }
        let head = place.inode_size() + shared.inline_area(&inode.attributes.xattrs)?.len();
        cursor.put(inode, place, head as u64);
        check_metadata(cursor.offset + cursor.data_blocks * BLOCK)?;
    }

    let first_block = cursor.offset.div_ceil(BLOCK);
    let shared_block = first_block + cursor.data_blocks;
    let metadata_length = (shared_block * BLOCK + shared.area.len() as u64).next_multiple_of(BLOCK);
    check_metadata(metadata_length)?;
    let (blobs, total_length) = place_blobs(blob_lengths, metadata_length)?;
    for index in &order {
        if let Some(place) = &mut places[*index as usize] {
            settle_block(&mut place.layout, &tree.inode(*index).kind, first_block, &blobs);
        }
    }
    let summary = Summary {
        metadata_length,
        total_length,
        blobs,
        inodes: order.len() as u64,
    };
    Ok(Plan {
        tree,
        order,
        places,
        shared,
        shared_block: shared_block as u32,
        build_time,
        summary,
    })
}

/// The part that is laid out so far: inodes with the bytes that follow each, and blocks of directories and symbolic links.
struct Cursor {
    /// Where the next inode can begin.
    offset: u64,
    data_blocks: u64,
}

impl Cursor {
    /// Places an inode and the data that follows it. `head` is the inode's size in bytes with its xattrs.
    fn put(&mut self, inode: &Inode, place: &mut Place, head: u64) {
        self.offset = self.offset.next_multiple_of(SLOT);
        match &inode.kind {
            Kind::Directory { .. } | Kind::Symlink { .. } => self.put_with_tail(place, head),
            Kind::File { size, extents, .. } => {
                place.offset = self.offset;
                self.offset += head;
                place.layout = file_layout(*size, extents);
                if let Layout::Chunks { bits } = place.layout {
                    self.offset += size.div_ceil(1 << bits) * 4;
                }
            }
            _ => {
                place.offset = self.offset;
                self.offset += head;
            }
        }
    }

    /// Places an inode whose data is in the metadata. Its blocks are numbered from the first such block, whose own number is not known yet.
    fn put_with_tail(&mut self, place: &mut Place, head: u64) {
        let block = self.data_blocks as u32;
        let tail = place.size % BLOCK;
        let inline = match tail {
            0 => None,
            tail => inline_offset(self.offset, head, tail),
        };
        match inline {
            Some(offset) => {
                place.offset = offset;
                place.layout = Layout::Inline { block };
                self.offset = offset + head + tail;
                self.data_blocks += place.size / BLOCK;
            }
            None => {
                place.offset = self.offset;
                place.layout = Layout::Plain { block };
                self.offset += head;
                self.data_blocks += place.size.div_ceil(BLOCK);
            }
        }
    }
}

fn check_metadata(length: u64) -> Result<(), WriteError> {
    match length > MAX_METADATA {
        true => Err(WriteError::TooLarge {
            what: "metadata",
            limit: MAX_METADATA,
        }),
        false => Ok(()),
    }
}

/// Places the layers' data files after the metadata. Also returns the total length.
fn place_blobs(lengths: &[u64], metadata_length: u64) -> Result<(Vec<BlobPlacement>, u64), WriteError> {
    let mut total_length = metadata_length;
    let mut blobs = Vec::with_capacity(lengths.len());
    for length in lengths {
        let address = total_length.next_multiple_of(BLOB_ALIGNMENT);
        blobs.push(BlobPlacement {
            address,
            length: *length,
        });
        if *length > 0 {
            total_length = address + length;
        }
        if total_length > MAX_ADDRESS {
            return Err(WriteError::TooLarge {
                what: "data",
                limit: MAX_ADDRESS,
            });
        }
    }
    Ok((blobs, total_length))
}

/// Sets the block number of a layout, which is known only after all inodes were placed.
fn settle_block(layout: &mut Layout, kind: &Kind, first_block: u64, blobs: &[BlobPlacement]) {
    match (layout, kind) {
        (Layout::Plain { block }, Kind::File { extents, .. }) => {
            let data = extents.first().map_or(0, |extent| {
                blobs[extent.blob as usize].address + extent.data_offset
            });
            *block = (data >> BLOCK_BITS) as u32;
        }
        (
            Layout::Plain { block } | Layout::Inline { block },
            Kind::Directory { .. } | Kind::Symlink { .. },
        ) => {
            *block += first_block as u32;
        }
        _ => {}
    }
}

/// Visits the tree breadth-first, counting links.
fn visit(tree: &Tree) -> Result<(Vec<InodeIndex>, Vec<Option<Place>>), WriteError> {
    let fresh = |inode: &Inode, parent| Place {
        offset: 0,
        is_extended: true,
        size: match &inode.kind {
            Kind::File { size, .. } => *size,
            Kind::Symlink { target } => target.len() as u64,
            _ => 0,
        },
        nlink: 1,
        parent,
        layout: Layout::Plain { block: 0 },
    };
    let mut places: Vec<Option<Place>> = vec![None; tree.inodes.len()];
    let root = tree
        .inodes
        .first()
        .ok_or(WriteError::Malformed("there is no root"))?;
    if tree.entries(Tree::ROOT).is_none() {
        return Err(WriteError::Malformed("the root is not a directory"));
    }
    places[Tree::ROOT as usize] = Some(Place {
        nlink: 2,
        ..fresh(root, Tree::ROOT)
    });
    let mut order = vec![Tree::ROOT];
    let mut next = 0;
    while let Some(directory) = order.get(next).copied() {
        next += 1;
        let mut subdirectories = 0;
        for (name, index) in tree.entries(directory).into_iter().flatten() {
            if name.is_empty() || name.len() > 255 || name.iter().any(|byte| matches!(byte, 0 | b'/')) {
                return Err(WriteError::Malformed(
                    "a name is empty, longer than 255 bytes, or has a NUL or slash",
                ));
            }
            if matches!(&**name, b"." | b"..") {
                return Err(WriteError::Malformed("a name is '.' or '..'"));
            }
            let inode = tree
                .inodes
                .get(*index as usize)
                .ok_or(WriteError::Malformed("a name of no inode"))?;
            let is_directory = matches!(inode.kind, Kind::Directory { .. });
            match &mut places[*index as usize] {
                Some(_) if is_directory => return Err(WriteError::Malformed("a directory has two names")),
                Some(place) => place.nlink += 1,
                empty => {
                    let nlink = if is_directory { 2 } else { 1 };
                    *empty = Some(Place {
                        nlink,
                        ..fresh(inode, directory)
                    });
                    order.push(*index);
                }
            }
            subdirectories += u32::from(is_directory);
        }
        if let Some(place) = &mut places[directory as usize] {
            place.nlink += subdirectories;
        }
    }
    Ok((order, places))
}

/// Checks that file extents lie in their blob, on page boundaries and in order.
fn check_blobs(tree: &Tree, blob_lengths: &[u64]) -> Result<(), WriteError> {
    if blob_lengths.iter().any(|length| !length.is_multiple_of(BLOCK)) {
        return Err(WriteError::Malformed(
            "a data file's length is not a multiple of 4096",
        ));
    }
    for inode in &tree.inodes {
        if inode.attributes.mtime.nanoseconds >= 1_000_000_000 {
            return Err(WriteError::Malformed(
                "a timestamp has more than 999,999,999 nanoseconds",
            ));
        }
        let (size, extents) = match &inode.kind {
            Kind::File { size, extents } => (*size, extents),
            Kind::Symlink { target } if !(1..=4095).contains(&target.len()) => {
                return Err(WriteError::Malformed(
                    "a symbolic link's target is empty or longer than 4095 bytes",
                ));
            }
            _ => continue,
        };
        if size > MAX_FILE {
            return Err(WriteError::TooLarge {
                what: "file",
                limit: MAX_FILE,
            });
        }
        let mut end = 0;
        for extent in extents {
            let BlobExtent {
                file_offset,
                blob,
                data_offset,
                length,
            } = *extent;
            let available = *blob_lengths.get(blob as usize).ok_or(WriteError::Malformed(
                "a file's data is in a data file that is not given",
            ))?;
            let is_aligned = (file_offset | data_offset | length).is_multiple_of(BLOCK) && length > 0;
            let fits = |start: u64, limit: u64| start.checked_add(length).is_some_and(|end| end <= limit);
            if !is_aligned
                || file_offset < end
                || !fits(file_offset, size.next_multiple_of(BLOCK))
                || !fits(data_offset, available)
            {
                return Err(WriteError::Malformed(
                    "a file's extents are out of order, unaligned or out of bounds",
                ));
            }
            end = file_offset + length;
        }
    }
    Ok(())
}

/// The offset at which an inode with `head` bytes and a tail lies in one block. `None` if the tail wastes less space in a block of its own.
fn inline_offset(cursor: u64, head: u64, tail: u64) -> Option<u64> {
    let length = head + tail;
    let left = BLOCK - cursor % BLOCK;
    if length <= left {
        return Some(cursor);
    }
    // The rest of this block would be wasted. That must not be more than the tail would waste in its own block.
    (length <= BLOCK && left <= BLOCK - tail).then(|| cursor.next_multiple_of(BLOCK))
}

/// A file in one piece is plain. One with gaps or several pieces has chunks, as large as its pieces allow.
fn file_layout(size: u64, extents: &[BlobExtent]) -> Layout {
    let end = size.next_multiple_of(BLOCK);
    match extents {
        [] if size == 0 => return Layout::Plain { block: 0 },
        [only] if only.file_offset == 0 && only.length == end => return Layout::Plain { block: 0 },
        _ => {}
    }
    let boundaries = extents
        .iter()
        .flat_map(|extent| [extent.file_offset, extent.file_offset + extent.length]);
    let common = boundaries
        .filter(|boundary| *boundary < end)
        .fold(0, |bits, boundary| bits | boundary);
    let enough = end.next_power_of_two().trailing_zeros();
    let bits = common
        .trailing_zeros()
        .min(enough)
        .min(BLOCK_BITS + u32::from(CHUNK_BITS_MASK));
    Layout::Chunks { bits }
}

fn needs_extended(inode: &Inode, place: &Place, build_time: Timestamp) -> bool {
    let attributes = &inode.attributes;
    // A directory's size is not known yet; none with 16-bit link counts comes near 32 bits of it, but its names may.
    let has_small_size = match &inode.kind {
        Kind::Directory { entries } => entries.len() < 1 << 20,
        _ => u32::try_from(place.size).is_ok(),
    };
    let is_small = |id: u32| u16::try_from(id).is_ok();
    !(has_small_size
        && is_small(attributes.uid)
        && is_small(attributes.gid)
        && is_small(place.nlink)
        && attributes.mtime == build_time)
}

fn most_frequent_time<'a>(inodes: impl Iterator<Item = &'a Inode>) -> Timestamp {
    let mut counts: HashMap<Timestamp, u64> = HashMap::new();
    for inode in inodes {
        *counts.entry(inode.attributes.mtime).or_default() += 1;
    }
    // The smallest of equally frequent times, so that the result does not depend on the map's order.
    let most = counts
        .into_iter()
        .max_by_key(|(time, count)| (*count, std::cmp::Reverse(*time)));
    most.map_or(Timestamp::default(), |(time, _)| time)
}
