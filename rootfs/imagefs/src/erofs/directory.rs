//! Directory content: blocks of entries followed by their names, in byte order of the names.

use crate::tree::{InodeIndex, Kind, Tree};

use super::format::{BLOCK, DIRENT};

/// A name and its inode.
pub type Named<'a> = (&'a [u8], InodeIndex);

/// All entries of a directory in EROFS's order, including `.` and `..`.
pub fn sorted_entries(tree: &Tree, directory: InodeIndex, parent: InodeIndex) -> Vec<Named<'_>> {
    let Kind::Directory { entries } = &tree.inode(directory).kind else {
        return Vec::new();
    };
    let mut sorted: Vec<Named> = Vec::with_capacity(entries.len() + 2);
    sorted.extend(entries.iter().map(|(name, index)| (&**name, *index)));
    for dots in [(&b"."[..], directory), (&b".."[..], parent)] {
        let place = sorted.partition_point(|(name, _)| *name < dots.0);
        sorted.insert(place, dots);
    }
    sorted
}

/// Divides entries into blocks as full as possible.
pub fn blocks<'a, 'b>(mut entries: &'b [Named<'a>]) -> impl Iterator<Item = &'b [Named<'a>]> {
    std::iter::from_fn(move || {
        let mut used = 0;
        let fits = |(name, _): &&Named| {
            used += DIRENT + name.len();
            used <= BLOCK as usize
        };
        let (block, rest) = entries.split_at(entries.iter().take_while(fits).count());
        entries = rest;
        (!block.is_empty()).then_some(block)
    })
}

/// Bytes of a block's entries and names.
pub fn used(block: &[Named]) -> usize {
    block.iter().map(|(name, _)| DIRENT + name.len()).sum()
}

/// Bytes of a directory. All blocks but the last count as full.
pub fn size(entries: &[Named]) -> u64 {
    let (count, last) = blocks(entries).fold((0, 0), |(count, _), block| (count + 1, used(block)));
    (count as u64).saturating_sub(1) * BLOCK + last as u64
}

/// Writes one block. `describe` gives an inode's number and file type.
pub fn encode(block: &[Named], out: &mut [u8], describe: impl Fn(InodeIndex) -> (u64, u8)) {
    let mut name_offset = block.len() * DIRENT;
    for (index, (name, inode)) in block.iter().enumerate() {
        let (nid, file_type) = describe(*inode);
        let entry = &mut out[index * DIRENT..][..DIRENT];
        entry[..8].copy_from_slice(&nid.to_le_bytes());
        entry[8..10].copy_from_slice(&(name_offset as u16).to_le_bytes());
        entry[10] = file_type;
        out[name_offset..name_offset + name.len()].copy_from_slice(name);
        name_offset += name.len();
    }
}
