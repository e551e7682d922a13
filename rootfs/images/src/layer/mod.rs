//! A layer: an uncompressed tar stream, read once, becomes a [`LayerTree`] and the bytes of a data file.
//!
//! Invariant: the stream is hostile. Every length in it is bounded by [`LayerLimits`] before memory is taken for it, every
//! name is checked before it is kept, and no path in the result has `.`, `..` or an empty component.
//!
//! Read: ustar, PAX (POSIX.1-2001 with `SCHILY.xattr.`), GNU long names, base-256 numbers, and GNU sparse files in all
//! four forms. As other runtimes do, a stream that ends between two entries without the end marker is accepted (the
//! layer's digest decides), global PAX headers are ignored, and AUFS's own `.wh..wh.` entries are left out.

mod data;
mod decimal;
mod error;
pub(crate) mod header;
mod path;
mod pax;
pub(crate) mod rules;
mod sparse;
mod stream;
pub mod tree;
pub(crate) mod walk;

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
#[path = "layer_test.rs"]
mod tests;

use std::io::Read;

pub use data::{DataSink, FileSink, Piece};
pub use error::LayerError;

use thaw_imagefs::tree::{Attributes, Timestamp};

use crate::layer::tree::{Change, Extent, LayerEntry, LayerTree, Leaf};

use data::FilePages;
use header::{Header, TypeFlag};
use path::Place;
use pax::Pax;
use sparse::Fragment;
use stream::TarStream;

/// Limits of a layer's content, beyond which it is refused.
#[derive(Clone, Copy, Debug)]
pub struct LayerLimits {
    /// Entries.
    pub entries: u64,
    /// Bytes of one PAX header, GNU long name or sparse map.
    pub header_bytes: u64,
    /// Bytes of all names, link targets, xattrs, extent lists and pieces together.
    pub tree_bytes: u64,
    /// Bytes of the data file.
    pub data_bytes: u64,
}

impl Default for LayerLimits {
    fn default() -> LayerLimits {
        LayerLimits {
            entries: 4 << 20,
            header_bytes: 8 << 20,
            tree_bytes: 1 << 30,
            data_bytes: 1 << 40,
        }
    }
}

const TREE_BYTES: &str = "bytes of names, links, xattrs and extents";
/// Largest file: 16 TiB, the limit of ext4 and of EROFS's 32-bit block numbers.
pub(crate) const MAX_FILE_SIZE: u64 = 1 << 44;
/// Reads an uncompressed tar stream to its end, padding included. File data goes to `data`, each file on a page of its own and padded with
/// zeros to a page; pages of zeros are skipped. A large enough run of zeros is not in the data file; it is a gap between two extents.
///
/// # Errors
/// See [`LayerError`]: the stream is truncated, malformed or unsafe, a limit is exceeded, or `data` cannot be written.
pub fn unpack(
    tar: impl Read,
    data: &mut impl DataSink,
    limits: &LayerLimits,
) -> Result<LayerTree, LayerError> {
    unpack_indexed(tar, data, limits).map(|unpacked| unpacked.tree)
}

/// The content of a layer's stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unpacked {
    pub tree: LayerTree,
    /// The positions in the stream of the data file's bytes. The data between the pieces is zeros.
    pub pieces: Vec<Piece>,
}

/// Like [`unpack`], and also returns the position in the stream of each part of the data file.
///
/// # Errors
/// Those of [`unpack`].
pub fn unpack_indexed(
    tar: impl Read,
    data: &mut impl DataSink,
    limits: &LayerLimits,
) -> Result<Unpacked, LayerError> {
    let mut unpacker = Unpacker {
        stream: TarStream::new(tar),
        data,
        limits,
        data_length: 0,
        tree_bytes: 0,
        entries: Vec::new(),
        pieces: Vec::new(),
    };
    while unpacker.next_entry()? {}
    unpacker.stream.drain(limits.data_bytes)?;
    Ok(Unpacked {
        tree: LayerTree {
            entries: unpacker.entries,
            data_length: unpacker.data_length,
        },
        pieces: unpacker.pieces,
    })
}

struct Unpacker<'a, R, D> {
    stream: TarStream<R>,
    data: &'a mut D,
    limits: &'a LayerLimits,
    data_length: u64,
    tree_bytes: u64,
    entries: Vec<LayerEntry>,
    pieces: Vec<Piece>,
}

/// One entry with its extension headers applied.
struct Described {
    offset: u64,
    /// The header as it is in the stream.
    block: [u8; stream::BLOCK],
    header: Header,
    pax: Pax,
    name: Vec<u8>,
    link: Vec<u8>,
}

impl Described {
    fn bad(&self, why: &'static str) -> LayerError {
        LayerError::bad_header(self.offset, &self.name, why)
    }
}

impl<R: Read, D: DataSink> Unpacker<'_, R, D> {
    /// Reads one entry with the extension headers before it. Returns false at the end of the archive.
    fn next_entry(&mut self) -> Result<bool, LayerError> {
        let Some(entry) = self.describe()? else {
            return Ok(false);
        };
        if self.entries.len() as u64 >= self.limits.entries {
            return Err(LayerError::limit(entry.offset, "entries", self.limits.entries));
        }
        let Some(place) =
            Place::of(&entry.name).map_err(|flaw| flaw.into_error(entry.offset, &entry.name))?
        else {
            self.skip_content(&entry)?;
            return Ok(true);
        };
        let (path, change) = match place {
            Place::Whiteout(path) => (path, self.skip_content(&entry).map(|()| Change::Whiteout)?),
            Place::Opaque(path) => (path, self.skip_content(&entry).map(|()| Change::Opaque)?),
            Place::Path(path) => {
                let change = self.change(&entry)?;
                if path.is_empty() && !matches!(change, Change::Directory(_)) {
                    return Err(entry.bad("the root is not a directory"));
                }
                (path, change)
            }
        };
        self.account(&entry, &path, &change)?;
        self.entries.push(LayerEntry { path, change });
        Ok(true)
    }

    /// Reads headers up to one that describes a file. `None` at the end of the archive.
    fn describe(&mut self) -> Result<Option<Described>, LayerError> {
        let mut pax = Pax::default();
        let mut long_name = None;
        let mut long_link = None;
        loop {
            let offset = self.stream.offset();
            let Some(block) = self.stream.header_block()? else {
                if pax.is_empty() && long_name.is_none() && long_link.is_none() {
                    return Ok(None);
                }
                return Err(LayerError::truncated(
                    offset,
                    "an extension header without its entry",
                ));
            };
            let header = Header::parse(block, offset)?;
            match header.type_flag {
                TypeFlag::PaxHeader => {
                    let records = self.extension(&header, offset, "a PAX header")?;
                    pax = Pax::parse(&records)
                        .map_err(|why| LayerError::bad_header(offset, &header.name, why))?;
                }
                TypeFlag::PaxGlobal => drop(self.extension(&header, offset, "a global PAX header")?),
                TypeFlag::GnuLongName => {
                    long_name = Some(until_nul(self.extension(&header, offset, "a long name")?));
                }
                TypeFlag::GnuLongLink => {
                    long_link = Some(until_nul(self.extension(&header, offset, "a long link name")?));
                }
                _ => {
                    let name = pax.sparse_name().or(pax.path()).map(<[u8]>::to_vec);
                    let link = pax.link_path().map(<[u8]>::to_vec);
                    return Ok(Some(Described {
                        offset,
                        block,
                        name: name.or(long_name).unwrap_or_else(|| header.name.clone()),
                        link: link.or(long_link).unwrap_or_else(|| header.link.clone()),
                        header,
                        pax,
                    }));
                }
            }
        }
    }

    /// The content of an extension header.
    fn extension(&mut self, header: &Header, offset: u64, what: &'static str) -> Result<Vec<u8>, LayerError> {
        if header.size > self.limits.header_bytes {
            return Err(LayerError::limit(
                offset,
                "bytes of one extension header",
                self.limits.header_bytes,
            ));
        }
        // Grows as bytes arrive, because a header may announce bytes that never come.
        let mut content = Vec::new();
        self.stream.content(header.size, what, |bytes| {
            content.extend_from_slice(bytes);
            Ok(())
        })?;
        Ok(content)
    }

    /// The change that the entry makes at its path; its content is read.
    fn change(&mut self, entry: &Described) -> Result<Change, LayerError> {
        let attributes = attributes(entry)?;
        let leaf = match entry.header.type_flag {
            // Before ustar, a directory was a file whose name ends in a slash.
            TypeFlag::Regular if entry.name.ends_with(b"/") => {
                self.skip_content(entry)?;
                return Ok(Change::Directory(attributes));
            }
            TypeFlag::Regular | TypeFlag::GnuSparse => self.file(entry)?,
            TypeFlag::Directory => return Ok(Change::Directory(attributes)),
            TypeFlag::HardLink => return hard_link(entry),
            TypeFlag::Symlink => rules::symlink(&entry.link).map_err(|why| entry.bad(why))?,
            TypeFlag::CharDevice | TypeFlag::BlockDevice => {
                let is_char = entry.header.type_flag == TypeFlag::CharDevice;
                let (major, minor) = (entry.header.device_major, entry.header.device_minor);
                rules::device(is_char, major, minor).map_err(|why| entry.bad(why))?
            }
            TypeFlag::Fifo => Leaf::Fifo,
            TypeFlag::Other(type_flag) => {
                return Err(LayerError::unsupported(entry.offset, &entry.name, type_flag));
            }
            TypeFlag::PaxHeader | TypeFlag::PaxGlobal | TypeFlag::GnuLongName | TypeFlag::GnuLongLink => {
                return Err(entry.bad("an extension header stands where an entry must"));
            }
        };
        Ok(Change::Leaf(attributes, leaf))
    }

    /// Copies a file's content to the data file.
    fn file(&mut self, entry: &Described) -> Result<Leaf, LayerError> {
        let stored = stored_size(entry)?;
        let mut map_bytes = 0;
        let (size, fragments) = if entry.header.type_flag == TypeFlag::GnuSparse {
            let map = self.gnu_sparse_map(entry)?;
            (entry.header.real_size, map)
        } else if let Some(map) = entry.pax.sparse().map_err(|why| entry.bad(why))? {
            let fragments = match map.fragments {
                Some(fragments) => fragments,
                None => {
                    let limit = self.limits.header_bytes.min(stored);
                    let (fragments, bytes) =
                        sparse::read_map(&mut self.stream, limit, entry.offset, &entry.name)?;
                    map_bytes = bytes;
                    fragments
                }
            };
            (map.size, fragments)
        } else {
            (
                stored,
                vec![Fragment {
                    offset: 0,
                    length: stored,
                }],
            )
        };
        if size > MAX_FILE_SIZE {
            return Err(LayerError::limit(
                entry.offset,
                "bytes of one file",
                MAX_FILE_SIZE,
            ));
        }
        sparse::check(&fragments, size, stored - map_bytes).map_err(|why| entry.bad(why))?;

        let mut pages = FilePages::new(self.data, self.data_length, size, self.limits.data_bytes);
        let mut sources = Vec::with_capacity(fragments.len());
        for fragment in &fragments {
            sources.push(self.stream.offset());
            pages
                .zeros_until(fragment.offset)
                .map_err(|error| error.at(entry.offset))?;
            self.stream.bytes(fragment.length, "a file", |bytes| {
                pages.write(bytes).map_err(|error| error.at(entry.offset))
            })?;
        }
        self.stream.padding("a file")?;
        let (extents, end) = pages.finish().map_err(|error| error.at(entry.offset))?;
        self.data_length = end;
        self.add_pieces(entry, &fragments, &sources, &extents)?;
        Ok(Leaf::File { size, extents })
    }

    /// Records the positions in the stream of a file's parts that are in the data file: fragment `i` at `sources[i]`.
    fn add_pieces(
        &mut self,
        entry: &Described,
        fragments: &[Fragment],
        sources: &[u64],
        extents: &[Extent],
    ) -> Result<(), LayerError> {
        let before = self.pieces.len();
        let mut extents = extents.iter().peekable();
        for (fragment, source) in fragments.iter().zip(sources) {
            let end = fragment.offset + fragment.length;
            while let Some(extent) = extents.peek() {
                let extent_end = extent.file_offset + extent.length;
                let from = fragment.offset.max(extent.file_offset);
                let to = end.min(extent_end);
                if from < to {
                    self.pieces.push(Piece {
                        data_offset: extent.data_offset + (from - extent.file_offset),
                        length: to - from,
                        stream_offset: source + (from - fragment.offset),
                    });
                }
                if extent_end > end {
                    break;
                }
                extents.next();
            }
        }
        self.grow(entry, ((self.pieces.len() - before) * size_of::<Piece>()) as u64)
    }

    /// The map of an old GNU sparse file: four fragments in the header, the others in blocks after it.
    fn gnu_sparse_map(&mut self, entry: &Described) -> Result<Vec<Fragment>, LayerError> {
        let mut fragments = entry.header.sparse.clone();
        let mut more = entry.header.sparse_continues;
        while more {
            if fragments.len() as u64 * 24 > self.limits.header_bytes {
                return Err(LayerError::limit(
                    entry.offset,
                    "bytes of one sparse map",
                    self.limits.header_bytes,
                ));
            }
            let block = self.stream.block("a sparse map")?;
            more = header::sparse_block(&block, &mut fragments).map_err(|why| entry.bad(why))?;
        }
        Ok(fragments)
    }

    /// Skips the content of an entry that is not kept.
    fn skip_content(&mut self, entry: &Described) -> Result<(), LayerError> {
        if entry.header.type_flag == TypeFlag::GnuSparse {
            self.gnu_sparse_map(entry)?;
        }
        if entry.header.type_flag.has_content() {
            let size = stored_size(entry)?;
            self.stream.content(size, "an entry", |_| Ok(()))?;
        }
        Ok(())
    }

    /// Counts the memory that the entry keeps.
    fn account(&mut self, entry: &Described, path: &[u8], change: &Change) -> Result<(), LayerError> {
        self.grow(entry, rules::kept_bytes(path, change))
    }

    /// Counts bytes of the tree, up to the limit.
    fn grow(&mut self, entry: &Described, bytes: u64) -> Result<(), LayerError> {
        self.tree_bytes += bytes;
        if self.tree_bytes > self.limits.tree_bytes {
            return Err(LayerError::limit(
                entry.offset,
                TREE_BYTES,
                self.limits.tree_bytes,
            ));
        }
        Ok(())
    }
}

/// Bytes of content that follow the header.
fn stored_size(entry: &Described) -> Result<u64, LayerError> {
    Ok(entry
        .pax
        .size()
        .map_err(|why| entry.bad(why))?
        .unwrap_or(entry.header.size))
}

fn hard_link(entry: &Described) -> Result<Change, LayerError> {
    rules::hard_link(entry.offset, &entry.name, &entry.link)
}

fn attributes(entry: &Described) -> Result<Attributes, LayerError> {
    let bad = |why| entry.bad(why);
    let header = &entry.header;
    let xattrs = rules::xattrs(entry.pax.xattrs()).map_err(bad)?;
    Ok(Attributes {
        mode: header.mode,
        uid: entry.pax.uid().map_err(bad)?.unwrap_or(header.uid),
        gid: entry.pax.gid().map_err(bad)?.unwrap_or(header.gid),
        mtime: entry.pax.mtime().map_err(bad)?.unwrap_or(Timestamp {
            seconds: header.mtime,
            nanoseconds: 0,
        }),
        xattrs,
    })
}

fn until_nul(mut bytes: Vec<u8>) -> Vec<u8> {
    if let Some(end) = bytes.iter().position(|byte| *byte == 0) {
        bytes.truncate(end);
    }
    bytes
}
