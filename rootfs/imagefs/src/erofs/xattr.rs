//! Extended attributes in EROFS: entries in the inode, or numbers of entries that many inodes share.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use crate::tree::{Inode, Xattr};

use super::WriteError;
use super::format::{XATTR_ENTRY, XATTR_HEADER, XATTR_PREFIXES};

/// Most shared xattrs of an inode: their count has eight bits.
const MOST_SHARED: usize = u8::MAX as usize;

/// Splits a name into its namespace's index and the rest. An ACL's name consists of the prefix alone.
fn split(name: &[u8]) -> Option<(u8, &[u8])> {
    XATTR_PREFIXES.iter().find_map(|(index, prefix)| {
        let rest = name.strip_prefix(*prefix)?;
        // A prefix that ends in a dot is a namespace, so a name must follow it; any other prefix is the whole name.
        (prefix.ends_with(b".") != rest.is_empty()).then_some((*index, rest))
    })
}

/// Appends an entry, padded to 4 bytes.
fn encode(xattr: &Xattr, out: &mut Vec<u8>) -> Result<(), WriteError> {
    let (index, name) = split(&xattr.name).ok_or(WriteError::Malformed(
        "an xattr is in a namespace EROFS does not have",
    ))?;
    let name_length =
        u8::try_from(name.len()).map_err(|_| WriteError::Malformed("an xattr's name is too long"))?;
    let value_length = u16::try_from(xattr.value.len())
        .map_err(|_| WriteError::Malformed("an xattr's value is too long"))?;
    out.extend_from_slice(&[name_length, index]);
    out.extend_from_slice(&value_length.to_le_bytes());
    out.extend_from_slice(name);
    out.extend_from_slice(&xattr.value);
    out.resize(out.len().next_multiple_of(XATTR_ENTRY), 0);
    Ok(())
}

/// The entries that several inodes share.
#[derive(Default)]
pub struct Shared<'a> {
    /// The shared area.
    pub area: Vec<u8>,
    /// The number of each entry: its offset in the area, in 4-byte units.
    numbers: HashMap<&'a Xattr, u32>,
}

impl<'a> Shared<'a> {
    /// Shares the attributes that at least two of the inodes have, in order of first appearance.
    pub fn of(inodes: impl Iterator<Item = &'a Inode>) -> Result<Shared<'a>, WriteError> {
        let mut seen: HashMap<&Xattr, bool> = HashMap::new();
        let mut order = Vec::new();
        for xattr in inodes.flat_map(|inode| &inode.attributes.xattrs) {
            match seen.entry(xattr) {
                Entry::Occupied(mut repeated) => *repeated.get_mut() = true,
                Entry::Vacant(first) => {
                    first.insert(false);
                    order.push(xattr);
                }
            }
        }
        let mut shared = Shared::default();
        for xattr in order.into_iter().filter(|xattr| seen[xattr]) {
            let number =
                u32::try_from(shared.area.len() / XATTR_ENTRY).map_err(|_| WriteError::TooLarge {
                    what: "shared xattrs",
                    limit: u64::from(u32::MAX) * 4,
                })?;
            shared.numbers.insert(xattr, number);
            encode(xattr, &mut shared.area)?;
        }
        Ok(shared)
    }

    /// The xattr area of an inode. Empty if it has no xattrs.
    pub fn inline_area(&self, xattrs: &[Xattr]) -> Result<Vec<u8>, WriteError> {
        if xattrs.is_empty() {
            return Ok(Vec::new());
        }
        let mut numbers = Vec::new();
        let mut entries = Vec::new();
        for xattr in xattrs {
            match self.numbers.get(xattr) {
                Some(number) if numbers.len() < MOST_SHARED => numbers.push(*number),
                _ => encode(xattr, &mut entries)?,
            }
        }
        let mut area = vec![0; XATTR_HEADER];
        area[4] = numbers.len() as u8;
        area.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
        area.append(&mut entries);
        count(area.len()).ok_or(WriteError::TooLarge {
            what: "xattrs of one inode",
            limit: 262_148,
        })?;
        Ok(area)
    }
}

/// The value of `i_xattr_icount` for an area of this many bytes.
pub fn count(area: usize) -> Option<u16> {
    match area {
        0 => Some(0),
        _ => u16::try_from((area - XATTR_HEADER) / XATTR_ENTRY + 1).ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::split;

    #[test]
    fn names_are_split_by_namespace() {
        assert_eq!(split(b"user.a.b"), Some((1, &b"a.b"[..])));
        assert_eq!(split(b"system.posix_acl_access"), Some((2, &b""[..])));
        assert_eq!(split(b"security.capability"), Some((6, &b"capability"[..])));
        for name in [
            &b"user."[..],
            b"system.posix_acl_accessible",
            b"system.nfs4_acl",
            b"plain",
            b"",
        ] {
            assert_eq!(split(name), None);
        }
    }
}
