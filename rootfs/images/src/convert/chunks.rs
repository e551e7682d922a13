//! From files to distinct chunks: cutting, hashing, and finding chunks that exist already.

use std::collections::HashMap;
use std::io;
use std::os::unix::fs::FileExt;

use thaw_imagefs::digest::Digest;
use thaw_imagefs::tree::{InodeIndex, Kind, Tree};

use crate::error::Error;

use super::cut::Chunking;
use super::dictionary::Known;
use crate::accelerated::wire::PAGE;

/// Bytes between two reports of progress.
const REPORT: u64 = 4 << 20;

/// Bytes that can be read from several threads.
pub trait DataFile: Send + Sync {
    /// # Errors
    /// Those of the read, and `UnexpectedEof`.
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;
}

impl DataFile for std::fs::File {
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        FileExt::read_exact_at(self, buffer, offset)
    }
}

impl DataFile for Vec<u8> {
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let bytes = usize::try_from(offset)
            .ok()
            .and_then(|start| self.get(start..)?.get(..buffer.len()))
            .ok_or(io::ErrorKind::UnexpectedEof)?;
        buffer.copy_from_slice(bytes);
        Ok(())
    }
}

/// A data file of the image that is converted.
pub struct SourceBlob {
    /// Its name in the store, which load orders use.
    pub id: Digest,
    /// The DiffID of the layer whose files it holds, if they belong to one layer.
    pub layer: Option<Digest>,
    /// Bytes.
    pub length: u64,
    pub data: Box<dyn DataFile>,
}

impl SourceBlob {
    /// Reads bytes; an error names the blob.
    pub fn read(&self, buffer: &mut [u8], offset: u64) -> Result<(), Error> {
        self.data.read_exact_at(buffer, offset).map_err(|error| {
            let path = format!("the data file of layer {}", self.id);
            Error::io(path.as_ref(), error)
        })
    }
}

/// The place of a distinct chunk's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// It is in a blob of a dictionary.
    Known(Known),
    /// It is in a data file of the source and must be stored.
    Source { blob: u32, offset: u64 },
}

/// A distinct chunk.
#[derive(Clone, Copy, Debug)]
pub struct Distinct {
    pub digest: [u8; 32],
    pub length: u64,
    pub place: Place,
}

/// A chunk of a file.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    pub inode: InodeIndex,
    pub file_offset: u64,
    /// Index of the distinct chunk.
    pub chunk: u32,
    /// Its blob in the source, and its offset there.
    pub source: (u32, u64),
}

/// A tree's files in chunks.
#[derive(Debug, Default)]
pub struct Chunks {
    /// In order of first appearance.
    pub distinct: Vec<Distinct>,
    /// File by file in the order of their data, so that data that a layer stored together stays together.
    pub pieces: Vec<Piece>,
    pub files: u64,
    /// Bytes of file data. `zeros` of them are in chunks that contain only zeros, which become holes.
    pub bytes: u64,
    pub zeros: u64,
}

impl Chunks {
    /// Cuts all files of `tree`. `told` is called with the number of bytes done, from time to time.
    pub fn of(
        tree: &Tree,
        blobs: &[SourceBlob],
        chunking: Chunking,
        known: &HashMap<[u8; 32], Known>,
        told: &dyn Fn(u64),
    ) -> Result<Self, Error> {
        let mut files: Vec<(u32, u64, InodeIndex)> = (0..)
            .zip(&tree.inodes)
            .filter_map(|(index, inode)| match &inode.kind {
                Kind::File { extents, .. } => {
                    let first = extents.first()?;
                    Some((first.blob, first.data_offset, index))
                }
                _ => None,
            })
            .collect();
        files.sort_unstable();
        let mut chunks = Self {
            files: files.len() as u64,
            ..Self::default()
        };
        let mut by_digest: HashMap<[u8; 32], u32> = HashMap::new();
        let mut window = Window::new(chunking.max());
        let mut last_told = 0;
        for (_, _, inode) in files {
            let Kind::File { extents, .. } = &tree.inode(inode).kind else {
                continue;
            };
            if chunks.bytes - last_told >= REPORT {
                last_told = chunks.bytes;
                told(last_told);
            }
            for extent in extents {
                let blob = blobs.get(extent.blob as usize).ok_or_else(|| {
                    Error::malformed("the image", "a file's data is in a layer that is not there")
                })?;
                window.begin(extent.data_offset, extent.length);
                let mut file_offset = extent.file_offset;
                while let Some((offset, pages)) = window.pages(blob)? {
                    let length = chunking.cut(pages, file_offset);
                    let chunk = &pages[..length];
                    chunks.bytes += length as u64;
                    if chunk.iter().all(|byte| *byte == 0) {
                        chunks.zeros += length as u64;
                    } else {
                        let digest = *blake3::hash(chunk).as_bytes();
                        let source = (extent.blob, offset);
                        let index = chunks.find(&mut by_digest, digest, length as u64, source, known)?;
                        chunks.pieces.push(Piece {
                            inode,
                            file_offset,
                            chunk: index,
                            source,
                        });
                    }
                    file_offset += length as u64;
                    window.advance(length);
                }
            }
        }
        Ok(chunks)
    }

    /// The distinct chunk with this digest; a new one if it is the first with it.
    fn find(
        &mut self,
        by_digest: &mut HashMap<[u8; 32], u32>,
        digest: [u8; 32],
        length: u64,
        source: (u32, u64),
        known: &HashMap<[u8; 32], Known>,
    ) -> Result<u32, Error> {
        if let Some(index) = by_digest.get(&digest) {
            return Ok(*index);
        }
        let index = u32::try_from(self.distinct.len())
            .map_err(|_| Error::malformed("the image", "it has more than 2^32 distinct chunks"))?;
        let place = match known.get(&digest) {
            // A table may lie about lengths; its digests are checked whenever the bytes are read.
            Some(known) if known.length == length => Place::Known(*known),
            _ => Place::Source {
                blob: source.0,
                offset: source.1,
            },
        };
        self.distinct.push(Distinct {
            digest,
            length,
            place,
        });
        by_digest.insert(digest, index);
        Ok(index)
    }
}

/// Reads an extent so that the buffer has at least one chunk's worth of it.
struct Window {
    buffer: Vec<u8>,
    /// Most bytes that a cut needs.
    most: usize,
    /// Where the part of the buffer begins that is not cut yet.
    start: usize,
    end: usize,
    /// Offset in the data file of the buffer's end.
    offset: u64,
    /// Bytes of the extent that are not in the buffer yet.
    left: u64,
}

impl Window {
    fn new(most: u64) -> Self {
        let most = most as usize;
        Self {
            buffer: vec![0; most * 2],
            most,
            start: 0,
            end: 0,
            offset: 0,
            left: 0,
        }
    }

    fn begin(&mut self, offset: u64, length: u64) {
        (self.start, self.end) = (0, 0);
        (self.offset, self.left) = (offset, length);
    }

    /// The next bytes and their offset in the data file; `None` at the extent's end.
    fn pages(&mut self, blob: &SourceBlob) -> Result<Option<(u64, &[u8])>, Error> {
        let have = self.end - self.start;
        if have < self.most && self.left > 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, have);
            let room = (self.buffer.len() - have) as u64;
            let now = room.min(self.left) as usize;
            blob.read(&mut self.buffer[have..have + now], self.offset)?;
            self.end += now;
            self.offset += now as u64;
            self.left -= now as u64;
        }
        debug_assert!((self.end as u64).is_multiple_of(PAGE));
        if self.start == self.end {
            return Ok(None);
        }
        let here = self.offset - (self.end - self.start) as u64;
        let to = self.end.min(self.start + self.most);
        Ok(Some((here, &self.buffer[self.start..to])))
    }

    fn advance(&mut self, length: usize) {
        self.start += length;
    }
}
