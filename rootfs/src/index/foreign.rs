//! A layer's tree from another document than its tar stream.
//!
//! Invariant: what the tar stream would be refused for, the document is refused for, by the same rules; and what it makes
//! of a name is what unpacking makes of it.

use crate::index::form::FormError;
use crate::index::{Content, LayerIndex, Piece, Pieces};
use crate::layer::rules::{self, Place};
use crate::layer::{LayerError, Limits, MAX_FILE_SIZE};
use crate::span::SpanTable;
use crate::tree::{Attributes, Change, Extent, LayerEntry, LayerTree, Leaf, PAGE, Timestamp};

/// One entry as a document describes it.
pub struct Entry<'a> {
    /// Where it is, for messages.
    pub at: u64,
    /// As in the tar stream, perhaps with a slash at its end.
    pub name: &'a [u8],
    pub what: What<'a>,
    pub owner: Owner,
    /// Extended attributes, by full name; names given twice count the last time.
    pub xattrs: Vec<(&'a [u8], &'a [u8])>,
}

/// What every inode has, but for the extended attributes.
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
    /// A regular file whose bytes stand at `stream_offset`.
    File {
        size: u64,
        stream_offset: u64,
    },
    Symlink(&'a [u8]),
    HardLink(&'a [u8]),
    Device {
        is_char: bool,
        major: u32,
        minor: u32,
    },
    Fifo,
}

/// Takes entries in the order of the tar stream.
pub struct Builder<'a> {
    form: &'static str,
    limits: &'a Limits,
    entries: Vec<LayerEntry>,
    pieces: Vec<Piece>,
    data_length: u64,
    tree_bytes: u64,
}

impl<'a> Builder<'a> {
    pub fn new(form: &'static str, limits: &'a Limits) -> Builder<'a> {
        Builder {
            form,
            limits,
            entries: Vec::new(),
            pieces: Vec::new(),
            data_length: 0,
            tree_bytes: 0,
        }
    }

    fn refused(&self, source: LayerError) -> FormError {
        FormError::Layer {
            form: self.form,
            source,
        }
    }

    /// The next entry.
    pub fn push(&mut self, entry: &Entry<'_>) -> Result<(), FormError> {
        let form = self.form;
        let limit = |what, limit| FormError::Layer {
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

    fn bad(&self, entry: &Entry<'_>, why: &'static str) -> FormError {
        self.refused(LayerError::bad_header(entry.at, entry.name, why))
    }

    fn change(&mut self, entry: &Entry<'_>) -> Result<Change, FormError> {
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
            What::File { .. } if entry.name.ends_with(b"/") => return Ok(Change::Directory(attributes)),
            What::File { size, stream_offset } => self.file(entry, size, stream_offset)?,
            What::Symlink(target) => rules::symlink(target).map_err(|why| self.bad(entry, why))?,
            What::HardLink(target) => {
                return rules::hard_link(entry.at, entry.name, target).map_err(|error| self.refused(error));
            }
            What::Device { is_char, major, minor } => {
                rules::device(is_char, major, minor).map_err(|why| self.bad(entry, why))?
            }
            What::Fifo => Leaf::Fifo,
        };
        Ok(Change::Leaf(attributes, leaf))
    }

    /// A file in one piece and one extent: where its zeros are, only its bytes say.
    fn file(&mut self, entry: &Entry<'_>, size: u64, stream_offset: u64) -> Result<Leaf, FormError> {
        if size > MAX_FILE_SIZE {
            let error = LayerError::limit(entry.at, "bytes of one file", MAX_FILE_SIZE);
            return Err(self.refused(error));
        }
        if size == 0 {
            return Ok(Leaf::File {
                size,
                extents: Vec::new(),
            });
        }
        let data_offset = self.data_length;
        let length = size.next_multiple_of(PAGE);
        self.data_length += length;
        if self.data_length > self.limits.data_bytes {
            let error = LayerError::limit(entry.at, "bytes of file data", self.limits.data_bytes);
            return Err(self.refused(error));
        }
        self.pieces.push(Piece {
            data_offset,
            length: size,
            stream_offset,
        });
        Ok(Leaf::File {
            size,
            extents: vec![Extent {
                file_offset: 0,
                data_offset,
                length,
            }],
        })
    }

    /// The index, checked: every piece is in a span.
    pub fn finish(mut self, spans: SpanTable) -> Result<LayerIndex, FormError> {
        self.entries.shrink_to_fit();
        let content = Content::new(self.data_length, Pieces::Map(self.pieces), spans)
            .map_err(|error| FormError::malformed(self.form, error.to_string()))?;
        Ok(LayerIndex {
            tree: LayerTree {
                entries: self.entries,
                data_length: self.data_length,
            },
            content,
        })
    }
}

/// Numbers as documents have them, and as an inode has them.
pub fn owner(mode: i64, uid: u32, gid: u32, mtime: Timestamp) -> Owner {
    Owner {
        mode: (mode & 0o7777) as u16,
        uid,
        gid,
        mtime,
    }
}
