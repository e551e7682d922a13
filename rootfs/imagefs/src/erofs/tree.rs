//! Reads an image back into a [`Tree`]: checks a hostile image as a whole, and begins a conversion.
//!
//! Invariant: the cost of an image of n bytes is at most a fixed multiple of n, even if its inodes share directory blocks, chunk tables and
//! attributes. No honest image shares the first two, and shared attributes have a budget.

use std::collections::{BTreeMap, HashMap};

use crate::tree::{Attributes, BlobExtent, Inode as TreeInode, InodeIndex, Kind, Tree, Xattr};

use super::format::{BLOCK, DIRENT, INODE_COMPACT};
use super::read::{FileType, Inode, Nid, ReadError, Reader};
use super::{BlobPlacement, Mapping};

/// Most bytes of extended attributes in a tree. Inodes may share them.
const MAX_XATTRS: u64 = 256 << 20;

/// Reads a whole image. Its file data is in `blobs`, which must be sorted by address.
///
/// # Errors
/// `Corrupt` for trees that no writer makes: a directory with two names, a wrong order, data outside all blobs.
pub fn read_tree<B: AsRef<[u8]>>(reader: &Reader<B>, blobs: &[BlobPlacement]) -> Result<Tree, ReadError> {
    // Writers make chunk tables that do not overlap, and an entry has at least four bytes.
    let mut budget = reader.bytes().len() as u64 / 4;
    read_tree_with(reader, |inode| {
        let mut extents = Vec::new();
        budget = budget.checked_sub(inode.chunks()).ok_or(ReadError::Corrupt {
            what: "amount of chunks",
            nid: inode.nid,
        })?;
        for mapping in reader.mappings(inode, 0, inode.size) {
            place(inode.nid, mapping?, blobs, &mut extents)?;
        }
        Ok(extents)
    })
}

/// Appends a mapped piece of a file, split where one blob ends and another begins.
fn place(
    nid: Nid,
    mapping: Mapping,
    blobs: &[BlobPlacement],
    extents: &mut Vec<BlobExtent>,
) -> Result<(), ReadError> {
    let outside = ReadError::Corrupt {
        what: "data address",
        nid,
    };
    let Some(mut address) = mapping.address else {
        return Ok(());
    };
    let (mut file_offset, mut left) = (mapping.offset, mapping.length.next_multiple_of(BLOCK));
    while left > 0 {
        let blob = blobs
            .partition_point(|blob| blob.address <= address)
            .checked_sub(1)
            .ok_or(outside)?;
        let data_offset = address - blobs[blob].address;
        let length = blobs[blob].length.saturating_sub(data_offset).min(left);
        if length == 0 {
            return Err(outside);
        }
        extents.push(BlobExtent {
            file_offset,
            blob: blob as u32,
            data_offset,
            length,
        });
        address += length;
        file_offset += length;
        left -= length;
    }
    Ok(())
}

/// As [`read_tree`], but `extents` returns the places of a regular file's data. It must bound its own work.
///
/// # Errors
/// The errors of `extents`, and those of [`read_tree`].
pub fn read_tree_with<B: AsRef<[u8]>, E: From<ReadError>>(
    reader: &Reader<B>,
    mut extents: impl FnMut(&Inode) -> Result<Vec<BlobExtent>, E>,
) -> Result<Tree, E> {
    let size = reader.bytes().len() as u64;
    let mut entries_left = size / (DIRENT as u64 + 1);
    let mut inodes_left = size / INODE_COMPACT as u64;
    let mut xattrs_left = MAX_XATTRS;

    let root = reader.inode(reader.superblock().root)?;
    if root.file_type != FileType::Directory {
        return Err(E::from(corrupt("type of the root", &root)));
    }
    let mut tree = Tree::new(attributes(reader, &root, &mut xattrs_left)?);
    let mut indices: HashMap<Nid, InodeIndex> = HashMap::from([(root.nid, Tree::ROOT)]);
    let mut pending = vec![(root, Tree::ROOT)];
    while let Some((directory, index)) = pending.pop() {
        let mut entries: BTreeMap<Box<[u8]>, InodeIndex> = BTreeMap::new();
        let mut last: Option<&[u8]> = None;
        for entry in reader.entries(&directory, 0)? {
            let entry = entry?;
            entries_left = entries_left
                .checked_sub(1)
                .ok_or(corrupt("amount of entries", &directory))?;
            if last.is_some_and(|last| last >= entry.name) {
                return Err(E::from(corrupt("order of names", &directory)));
            }
            last = Some(entry.name);
            if matches!(entry.name, b"." | b"..") {
                continue;
            }
            let child = match indices.get(&entry.nid) {
                Some(known) if tree.entries(*known).is_some() => {
                    return Err(E::from(corrupt("second name of a directory", &directory)));
                }
                Some(known) => *known,
                None => {
                    inodes_left = inodes_left
                        .checked_sub(1)
                        .ok_or(corrupt("amount of inodes", &directory))?;
                    let inode = reader.inode(entry.nid)?;
                    let added = tree.inodes.len() as InodeIndex;
                    tree.inodes.push(TreeInode {
                        attributes: attributes(reader, &inode, &mut xattrs_left)?,
                        kind: kind(reader, &inode, &mut extents)?,
                    });
                    indices.insert(entry.nid, added);
                    if inode.file_type == FileType::Directory {
                        pending.push((inode, added));
                    }
                    added
                }
            };
            entries.insert(entry.name.into(), child);
        }
        tree.inodes[index as usize].kind = Kind::Directory { entries };
    }
    Ok(tree)
}

fn corrupt(what: &'static str, inode: &Inode) -> ReadError {
    ReadError::Corrupt { what, nid: inode.nid }
}

fn attributes<B: AsRef<[u8]>>(
    reader: &Reader<B>,
    inode: &Inode,
    left: &mut u64,
) -> Result<Attributes, ReadError> {
    if inode.mtime.nanoseconds >= 1_000_000_000 {
        return Err(corrupt("time", inode));
    }
    let mut xattrs = Vec::new();
    for xattr in reader.xattrs(inode)? {
        let xattr = xattr?;
        let name = [xattr.prefix, xattr.suffix].concat();
        let cost = (name.len() + xattr.value.len() + size_of::<Xattr>()) as u64;
        *left = left.checked_sub(cost).ok_or(corrupt("amount of xattrs", inode))?;
        xattrs.push(Xattr {
            name,
            value: xattr.value.to_vec(),
        });
    }
    xattrs.sort();
    if xattrs.windows(2).any(|pair| pair[0].name == pair[1].name) {
        return Err(corrupt("xattrs", inode));
    }
    Ok(Attributes {
        mode: inode.mode & 0o7777,
        uid: inode.uid,
        gid: inode.gid,
        mtime: inode.mtime,
        xattrs,
    })
}

fn kind<B: AsRef<[u8]>, E: From<ReadError>>(
    reader: &Reader<B>,
    inode: &Inode,
    extents: &mut impl FnMut(&Inode) -> Result<Vec<BlobExtent>, E>,
) -> Result<Kind, E> {
    // Linux's 32-bit device number.
    let (major, minor) = (
        (inode.device >> 8) & 0xfff,
        inode.device & 0xff | (inode.device >> 12) & 0xf_ff00,
    );
    Ok(match inode.file_type {
        FileType::Directory => Kind::Directory {
            entries: BTreeMap::new(),
        },
        FileType::File => Kind::File {
            size: inode.size,
            extents: match inode.size {
                0 => Vec::new(),
                _ => extents(inode)?,
            },
        },
        FileType::Symlink => Kind::Symlink {
            target: reader.read_link(inode)?,
        },
        FileType::CharDevice => Kind::CharDevice { major, minor },
        FileType::BlockDevice => Kind::BlockDevice { major, minor },
        FileType::Fifo => Kind::Fifo,
        FileType::Socket => Kind::Socket,
    })
}
