//! Building a layer's tree from a document other than its tar stream.
//!
//! Invariant: the rules are those of unpacking. A document is refused for the same reasons as a tar stream, and a name has the same
//! meaning.

use thaw_imagefs::tree::{Attributes, PAGE, Timestamp};

use crate::index::error::IndexError;
use crate::index::{Content, LayerIndex, Piece, Pieces};
use crate::layer::rules::{self, Place};
use crate::layer::tree::{Change, Extent, LayerEntry, LayerTree, Leaf};
use crate::layer::{LayerError, LayerLimits, MAX_FILE_SIZE};
use crate::span::SpanTable;

/// One entry as a document describes it.
pub struct Entry<'a> {
    /// Its offset, for messages.
    pub at: u64,
    /// As in the tar stream, possibly with a slash at its end.
    pub name: &'a [u8],
    pub what: What<'a>,
    pub owner: Owner,
    /// Extended attributes, by full name; if a name occurs twice, the last value counts.
    pub xattrs: Vec<(&'a [u8], &'a [u8])>,
}

/// The metadata of every inode, without extended attributes.
#[derive(Clone, Copy, Default)]
pub struct Owner {
    pub mode: u16,
    pub uid: u32,
    pub gid: u32,
    pub mtime: Timestamp,
}

/// The type of an entry.
pub enum What<'a> {
    Directory,
    /// A regular file, made of these parts from its start to its end.
    File(&'a [Part]),
    Symlink(&'a [u8]),
    HardLink(&'a [u8]),
    Device {
        is_char: bool,
        major: u32,
        minor: u32,
    },
    Fifo,
}

/// A part of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    pub length: u64,
    /// The offset in the stream; `None` for zeros, which are not in the stream.
    pub stream_offset: Option<u64>,
}

/// Takes entries in the order of the tar stream.
pub struct Builder<'a> {
    form: &'static str,
    limits: &'a LayerLimits,
    entries: Vec<LayerEntry>,
    pieces: Vec<Piece>,
    data_length: u64,
    tree_bytes: u64,
}

impl<'a> Builder<'a> {
    pub fn new(form: &'static str, limits: &'a LayerLimits) -> Builder<'a> {
        Builder {
            form,
            limits,
            entries: Vec::new(),
            pieces: Vec::new(),
            data_length: 0,
            tree_bytes: 0,
        }
    }

    fn refused(&self, source: LayerError) -> IndexError {
        IndexError::Layer {
            form: self.form,
            source,
        }
    }

    /// The next entry.
    pub fn push(&mut self, entry: &Entry<'_>) -> Result<(), IndexError> {
        let form = self.form;
        let limit = |what, limit| IndexError::Layer {
            form,
            source: LayerError::limit(entry.at, what, limit),
        };
        if self.entries.len() as u64 >= self.limits.entries {
            return Err(limit("entries", self.limits.entries));
        }
        let place = rules::place(entry.at, entry.name).map_err(|error| self.refused(error))?;
        let (path, change) = match place {
            None => return Ok(()),
            Some(Place::Whiteout(path)) => (path, Change::Whiteout),
            Some(Place::Opaque(path)) => (path, Change::Opaque),
            Some(Place::Path(path)) => {
                let change = self.change(entry)?;
                if path.is_empty() && !matches!(change, Change::Directory(_)) {
                    return Err(self.bad(entry, "the root is not a directory"));
                }
                (path, change)
            }
        };
        self.tree_bytes += rules::kept_bytes(&path, &change);
        if self.tree_bytes > self.limits.tree_bytes {
            return Err(limit("bytes of names, links and xattrs", self.limits.tree_bytes));
        }
        self.entries.push(LayerEntry { path, change });
        Ok(())
    }

    fn bad(&self, entry: &Entry<'_>, why: &'static str) -> IndexError {
        self.refused(LayerError::bad_header(entry.at, entry.name, why))
    }

    fn change(&mut self, entry: &Entry<'_>) -> Result<Change, IndexError> {
        let xattrs = rules::xattrs(entry.xattrs.iter().copied()).map_err(|why| self.bad(entry, why))?;
        let attributes = Attributes {
            mode: entry.owner.mode & 0o7777,
            uid: entry.owner.uid,
            gid: entry.owner.gid,
            mtime: entry.owner.mtime,
            xattrs,
        };
        let leaf = match entry.what {
            What::Directory => return Ok(Change::Directory(attributes)),
            // Before ustar, a directory was a file whose name ends in a slash.
            What::File(_) if entry.name.ends_with(b"/") => return Ok(Change::Directory(attributes)),
            What::File(parts) => self.file(entry, parts)?,
            What::Symlink(target) => rules::symlink(target).map_err(|why| self.bad(entry, why))?,
            What::HardLink(target) => {
                return rules::hard_link(entry.at, entry.name, target).map_err(|error| self.refused(error));
            }
            What::Device {
                is_char,
                major,
                minor,
            } => rules::device(is_char, major, minor).map_err(|why| self.bad(entry, why))?,
            What::Fifo => Leaf::Fifo,
        };
        Ok(Change::Leaf(attributes, leaf))
    }

    /// Adds a file of one extent, because only the bytes tell where its zeros are.
    fn file(&mut self, entry: &Entry<'_>, parts: &[Part]) -> Result<Leaf, IndexError> {
        let limit = |what, limit| self.refused(LayerError::limit(entry.at, what, limit));
        let size = parts
            .iter()
            .try_fold(0u64, |size, part| size.checked_add(part.length))
            .filter(|size| *size <= MAX_FILE_SIZE)
            .ok_or_else(|| limit("bytes of one file", MAX_FILE_SIZE))?;
        let (data_offset, length) = (self.data_length, size.next_multiple_of(PAGE));
        if data_offset + length > self.limits.data_bytes {
            return Err(limit("bytes of file data", self.limits.data_bytes));
        }
        let mut at = data_offset;
        for part in parts.iter().filter(|part| part.length > 0) {
            self.piece(at, part);
            at += part.length;
        }
        self.data_length = data_offset + length;
        let extent = Extent {
            file_offset: 0,
            data_offset,
            length,
        };
        Ok(Leaf::File {
            size,
            extents: if size > 0 { vec![extent] } else { Vec::new() },
        })
    }

    /// Records the place of a part. A part that continues another one in the stream is merged with it.
    fn piece(&mut self, data_offset: u64, part: &Part) {
        let Some(stream_offset) = part.stream_offset else {
            return;
        };
        if let Some(last) = self.pieces.last_mut()
            && last.data_offset + last.length == data_offset
            && last.stream_offset.checked_add(last.length) == Some(stream_offset)
        {
            last.length += part.length;
            return;
        }
        self.pieces.push(Piece {
            data_offset,
            length: part.length,
            stream_offset,
        });
    }

    /// The index, checked: every piece is in a span.
    pub fn finish(mut self, spans: SpanTable) -> Result<LayerIndex, IndexError> {
        self.entries.shrink_to_fit();
        let content = Content::new(self.data_length, Pieces::Map(self.pieces), spans)
            .map_err(|error| IndexError::malformed(self.form, error.to_string()))?;
        Ok(LayerIndex {
            tree: LayerTree {
                entries: self.entries,
                data_length: self.data_length,
            },
            content,
        })
    }
}

/// Converts an owner and mode from a document's numbers to an inode's.
pub fn owner(mode: i64, uid: u32, gid: u32, mtime: Timestamp) -> Owner {
    Owner {
        mode: (mode & 0o7777) as u16,
        uid,
        gid,
        mtime,
    }
}
