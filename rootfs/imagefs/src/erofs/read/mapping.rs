//! Maps the bytes of a file to addresses in the image.

use super::super::format::{BLOCK_BITS, NULL_ADDRESS};
use super::{Inode, Layout, ReadError, Reader, u16_at, u32_at};

/// A piece of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// Offset in the file.
    pub offset: u64,
    /// Bytes; never 0.
    pub length: u64,
    /// Address in the image's address space; `None` for a hole. There may be no data at that address.
    pub address: Option<u64>,
}

/// The pieces of a range of a file, in order and without gaps. Adjacent pieces that continue each other are merged.
pub struct Mappings<'a, B> {
    reader: &'a Reader<B>,
    inode: Inode,
    position: u64,
    end: u64,
}

impl<B: AsRef<[u8]>> Iterator for Mappings<'_, B> {
    type Item = Result<Mapping, ReadError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.position >= self.end {
            return None;
        }
        let result = self.advance();
        match &result {
            Ok(mapping) => self.position += mapping.length,
            Err(_) => self.position = self.end,
        }
        Some(result)
    }
}

impl<B: AsRef<[u8]>> Mappings<'_, B> {
    fn advance(&self) -> Result<Mapping, ReadError> {
        let corrupt = ReadError::Corrupt {
            what: "data address",
            nid: self.inode.nid,
        };
        let (offset, left) = (self.position, self.end - self.position);
        let piece = |length, address| Mapping {
            offset,
            length,
            address,
        };
        match self.inode.layout {
            Layout::Plain { start } => Ok(piece(left, Some(start.checked_add(offset).ok_or(corrupt)?))),
            Layout::Inline { start } => {
                let tail = (self.inode.size - 1) >> BLOCK_BITS << BLOCK_BITS;
                if offset >= tail {
                    return Ok(piece(left, Some(self.inode.inline_start() + (offset - tail))));
                }
                Ok(piece(
                    left.min(tail - offset),
                    Some(start.checked_add(offset).ok_or(corrupt)?),
                ))
            }
            Layout::Chunks { bits, .. } => {
                let chunk_start = offset >> bits << bits;
                let within = offset - chunk_start;
                let first = self.chunk(offset >> bits)?;
                let address = first.map(|start| start + within);
                let mut length = left.min((1 << bits) - within);
                while length < left {
                    let next = self.chunk((offset + length) >> bits)?;
                    if next != address.map(|address| address + length) {
                        break;
                    }
                    length = left.min(length + (1 << bits));
                }
                Ok(piece(length, address))
            }
        }
    }

    /// The address of a chunk.
    fn chunk(&self, index: u64) -> Result<Option<u64>, ReadError> {
        let chunk = self.reader.chunk_index(&self.inode, index)?;
        Ok(chunk.block.map(|block| u64::from(block) << BLOCK_BITS))
    }
}

/// An entry of a chunk table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkIndex {
    /// 0 in tables without device numbers.
    pub device: u16,
    /// The chunk's first block on the device; `None` for a hole.
    pub block: Option<u32>,
}

impl<B: AsRef<[u8]>> Reader<B> {
    /// An entry of an inode's chunk table.
    ///
    /// # Errors
    /// `Corrupt` if it has no chunk table, or fewer entries.
    pub fn chunk_index(&self, inode: &Inode, index: u64) -> Result<ChunkIndex, ReadError> {
        let corrupt = || ReadError::Corrupt {
            what: "chunk table",
            nid: inode.nid,
        };
        let Layout::Chunks { has_indexes, .. } = inode.layout else {
            return Err(corrupt());
        };
        // An index has advice, a device number and the address; the other kind of entry has only the address.
        let unit: u64 = if has_indexes { 8 } else { 4 };
        let table = inode.inline_start().next_multiple_of(unit);
        let start = index
            .checked_mul(unit)
            .and_then(|offset| table.checked_add(offset))
            .ok_or(corrupt())?;
        let entry = self.slice(start, unit).ok_or(corrupt())?;
        let block = u32_at(entry, entry.len() - 4);
        Ok(ChunkIndex {
            device: if has_indexes { u16_at(entry, 2) } else { 0 },
            block: (block != NULL_ADDRESS).then_some(block),
        })
    }

    /// The places of `length` bytes from `offset`, limited to the file's size.
    pub fn mappings(&self, inode: &Inode, offset: u64, length: u64) -> Mappings<'_, B> {
        let end = offset.saturating_add(length).min(inode.size);
        Mappings {
            reader: self,
            inode: *inode,
            position: offset.min(end),
            end,
        }
    }
}
