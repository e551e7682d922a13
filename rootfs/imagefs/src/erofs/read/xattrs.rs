//! Extended attributes of an inode: its own entries, then the shared ones it refers to.

use super::super::format::{XATTR_ENTRY, XATTR_HEADER, XATTR_PREFIXES};
use super::{Inode, ReadError, Reader, u16_at, u32_at};

/// One extended attribute. Its name is `prefix` followed by `suffix`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResolvedXattr<'a> {
    pub prefix: &'static [u8],
    pub suffix: &'a [u8],
    pub value: &'a [u8],
}

impl ResolvedXattr<'_> {
    /// Whether this attribute has this full name.
    pub fn is_named(&self, name: &[u8]) -> bool {
        name.strip_prefix(self.prefix) == Some(self.suffix)
    }
}

/// An inode's extended attributes.
pub struct Xattrs<'a, B> {
    reader: &'a Reader<B>,
    inode: Inode,
    /// Numbers of the shared entries that have not been returned yet.
    shared: &'a [u8],
    /// Entries in the inode that have not been returned yet.
    inline: &'a [u8],
}

impl<'a, B: AsRef<[u8]>> Iterator for Xattrs<'a, B> {
    type Item = Result<ResolvedXattr<'a>, ReadError>;

    fn next(&mut self) -> Option<Self::Item> {
        let result = self.advance().transpose();
        if matches!(result, Some(Err(_))) {
            (self.shared, self.inline) = (&[], &[]);
        }
        result
    }
}

impl<'a, B: AsRef<[u8]>> Xattrs<'a, B> {
    fn advance(&mut self) -> Result<Option<ResolvedXattr<'a>>, ReadError> {
        let corrupt = ReadError::Corrupt {
            what: "xattrs",
            nid: self.inode.nid,
        };
        while !self.inline.is_empty() {
            let (xattr, length) = decode(self.inline).ok_or(corrupt)?;
            self.inline = self
                .inline
                .get(length.next_multiple_of(XATTR_ENTRY)..)
                .unwrap_or(&[]);
            if let Some(xattr) = xattr {
                return Ok(Some(xattr));
            }
        }
        while let Some((number, rest)) = self.shared.split_at_checked(XATTR_ENTRY) {
            self.shared = rest;
            let offset = u64::from(u32_at(number, 0)) * XATTR_ENTRY as u64;
            let start =
                usize::try_from(self.reader.superblock.shared_xattrs + offset).map_err(|_| corrupt)?;
            let bytes = self.reader.bytes().get(start..).ok_or(corrupt)?;
            if let (Some(xattr), _) = decode(bytes).ok_or(corrupt)? {
                return Ok(Some(xattr));
            }
        }
        Ok(None)
    }
}

/// The entry at the start of `bytes`, and its length. The inner option is `None` if its namespace is unknown.
fn decode(bytes: &[u8]) -> Option<(Option<ResolvedXattr<'_>>, usize)> {
    let head = bytes.get(..XATTR_ENTRY)?;
    let names = XATTR_ENTRY + usize::from(head[0]);
    let end = names + usize::from(u16_at(head, 2));
    let (suffix, value) = (bytes.get(XATTR_ENTRY..names)?, bytes.get(names..end)?);
    let prefix = XATTR_PREFIXES
        .iter()
        .find(|(index, _)| *index == head[1])
        .map(|(_, prefix)| *prefix);
    // A NUL would end the name early when it is put in a list of names.
    if suffix.contains(&0) {
        return None;
    }
    Some((
        prefix.map(|prefix| ResolvedXattr {
            prefix,
            suffix,
            value,
        }),
        end,
    ))
}

impl<B: AsRef<[u8]>> Reader<B> {
    /// All extended attributes.
    ///
    /// # Errors
    /// If the area is not in the image, or is shorter than it states. Other corruption is returned as the last item.
    pub fn xattrs(&self, inode: &Inode) -> Result<Xattrs<'_, B>, ReadError> {
        let corrupt = || ReadError::Corrupt {
            what: "xattrs",
            nid: inode.nid,
        };
        let (mut shared, mut inline): (&[u8], &[u8]) = (&[], &[]);
        if inode.xattr_length > 0 {
            let area = self
                .slice(inode.xattr_start, inode.xattr_length)
                .ok_or(corrupt())?;
            let count = usize::from(*area.get(4).ok_or(corrupt())?);
            let body = area.get(XATTR_HEADER..).ok_or(corrupt())?;
            (shared, inline) = body.split_at_checked(count * XATTR_ENTRY).ok_or(corrupt())?;
        }
        Ok(Xattrs {
            reader: self,
            inode: *inode,
            shared,
            inline,
        })
    }

    /// The value of one extended attribute, by its full name.
    ///
    /// # Errors
    /// If the attributes before it are corrupt.
    pub fn xattr(&self, inode: &Inode, name: &[u8]) -> Result<Option<&[u8]>, ReadError> {
        for xattr in self.xattrs(inode)? {
            let xattr = xattr?;
            if xattr.is_named(name) {
                return Ok(Some(xattr.value));
            }
        }
        Ok(None)
    }
}
