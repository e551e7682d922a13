//! The rules for entries, for tar streams and tables of contents alike.

use thaw_imagefs::tree::{Attributes, Xattr};

use crate::layer::tree::{Change, Leaf};

use super::{LayerError, path};

pub use path::Place;

/// Longest symbolic link target: Linux's PATH_MAX less the final NUL.
const MAX_SYMLINK: usize = 4095;
/// Longest extended attribute name and value (Linux's XATTR_NAME_MAX; EROFS counts a value's bytes in 16 bits).
const MAX_XATTR_NAME: usize = 255;
const MAX_XATTR_VALUE: usize = u16::MAX as usize;

/// The place of an entry; `None` for one that is left out.
pub fn place(offset: u64, name: &[u8]) -> Result<Option<Place>, LayerError> {
    Place::of(name).map_err(|flaw| flaw.into_error(offset, name))
}

/// A symbolic link.
pub fn symlink(target: &[u8]) -> Result<Leaf, &'static str> {
    match target.len() {
        1..=MAX_SYMLINK if !target.contains(&0) => Ok(Leaf::Symlink {
            target: target.to_vec(),
        }),
        _ => Err("a symbolic link's target must have 1 to 4095 bytes, none of them NUL"),
    }
}

/// A device node. Linux has 12 bits of major and 20 of minor number.
pub fn device(is_char: bool, major: u32, minor: u32) -> Result<Leaf, &'static str> {
    match (is_char, major, minor) {
        (_, 0x1000.., _) | (_, _, 0x10_0000..) => Err("the device number is beyond Linux's 12 and 20 bits"),
        (true, ..) => Ok(Leaf::CharDevice { major, minor }),
        (false, ..) => Ok(Leaf::BlockDevice { major, minor }),
    }
}

/// A hard link, which stays in the tree.
pub fn hard_link(offset: u64, name: &[u8], target: &[u8]) -> Result<Change, LayerError> {
    match path::clean(target) {
        Ok(clean) if !clean.is_empty() => Ok(Change::HardLink { target: clean }),
        _ => Err(LayerError::unsafe_hard_link(offset, name, target)),
    }
}

/// Extended attributes that are kept, each name once: the last counts.
pub fn xattrs<'a>(found: impl Iterator<Item = (&'a [u8], &'a [u8])>) -> Result<Vec<Xattr>, &'static str> {
    let mut xattrs: Vec<Xattr> = Vec::new();
    for (name, value) in found.filter(|(name, _)| is_kept_xattr(name)) {
        if name.len() > MAX_XATTR_NAME || name.contains(&0) || value.len() > MAX_XATTR_VALUE {
            return Err("an extended attribute is larger than Linux allows");
        }
        xattrs.push(Xattr {
            name: name.to_vec(),
            value: value.to_vec(),
        });
    }
    // A stable sort keeps their order, and the later of two neighbours stays.
    xattrs.sort_by(|one, other| one.name.cmp(&other.name));
    xattrs.reverse();
    xattrs.dedup_by(|later, earlier| later.name == earlier.name);
    xattrs.reverse();
    Ok(xattrs)
}

/// Whether Linux supports the attribute and the image may set it. Others are dropped, as other runtimes drop attributes that the file
/// system refuses. `trusted.overlay.` belongs to the overlay on which the image was made; if kept, it would affect ours.
fn is_kept_xattr(name: &[u8]) -> bool {
    let in_namespace = |namespace: &[u8]| name.len() > namespace.len() && name.starts_with(namespace);
    let is_acl = name == b"system.posix_acl_access" || name == b"system.posix_acl_default";
    is_acl
        || in_namespace(b"user.")
        || in_namespace(b"security.")
        || (in_namespace(b"trusted.") && !name.starts_with(b"trusted.overlay."))
}

/// Bytes that an entry keeps in memory, for comparison with [`super::LayerLimits::tree_bytes`].
pub fn kept_bytes(path: &[u8], change: &Change) -> u64 {
    let xattr_bytes = |attributes: &Attributes| -> usize {
        attributes
            .xattrs
            .iter()
            .map(|xattr| 48 + xattr.name.len() + xattr.value.len())
            .sum()
    };
    let kept = match change {
        Change::Directory(attributes) => xattr_bytes(attributes),
        Change::Leaf(attributes, leaf) => {
            xattr_bytes(attributes)
                + match leaf {
                    Leaf::File { extents, .. } => size_of_val(extents.as_slice()),
                    Leaf::Symlink { target } => target.len(),
                    _ => 0,
                }
        }
        Change::HardLink { target } => target.len(),
        Change::Whiteout | Change::Opaque => 0,
    };
    (path.len() + kept) as u64
}
