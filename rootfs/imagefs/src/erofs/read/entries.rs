//! Reads directories: searches by name, and lists from a position.

use std::cmp::Ordering;

use super::super::format::{BLOCK, DIRENT};
use super::{FileType, Inode, Nid, ReadError, Reader, u16_at, u64_at};

/// One entry of a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectoryEntry<'a> {
    pub nid: Nid,
    /// `None` if the image does not state it.
    pub file_type: Option<FileType>,
    pub name: &'a [u8],
    /// Position from which the entries after this one are read. Never 0.
    pub next: u64,
}

/// One block of a directory.
#[derive(Clone, Copy)]
struct Block<'a> {
    bytes: &'a [u8],
    count: usize,
    /// Position of its first entry.
    position: u64,
    directory: Nid,
}

impl<'a> Block<'a> {
    fn corrupt(&self) -> ReadError {
        ReadError::Corrupt {
            what: "directory block",
            nid: self.directory,
        }
    }

    /// The offset of the first name, which follows the last entry, gives the number of entries.
    fn new(bytes: &'a [u8], position: u64, directory: Nid) -> Result<Block<'a>, ReadError> {
        let mut block = Block {
            bytes,
            count: 0,
            position,
            directory,
        };
        if bytes.len() < DIRENT {
            return Err(block.corrupt());
        }
        let names = usize::from(u16_at(bytes, 8));
        if names < DIRENT || !names.is_multiple_of(DIRENT) || names >= bytes.len() {
            return Err(block.corrupt());
        }
        block.count = names / DIRENT;
        Ok(block)
    }

    fn name(&self, index: usize) -> Result<&'a [u8], ReadError> {
        let offset = |index: usize| usize::from(u16_at(self.bytes, index * DIRENT + 8));
        let is_last = index + 1 == self.count;
        let end = if is_last {
            self.bytes.len()
        } else {
            offset(index + 1)
        };
        let start = offset(index);
        let name = match self.bytes.get(start..end) {
            // The last name ends at the end of the block or at a NUL.
            Some(rest) if is_last => rest.split(|byte| *byte == 0).next().unwrap_or(rest),
            Some(name) => name,
            None => return Err(self.corrupt()),
        };
        let is_sound = (1..=255).contains(&name.len())
            && start >= self.count * DIRENT
            && !name.iter().any(|byte| matches!(byte, 0 | b'/'));
        if is_sound { Ok(name) } else { Err(self.corrupt()) }
    }

    fn entry(&self, index: usize) -> Result<DirectoryEntry<'a>, ReadError> {
        let name = self.name(index)?;
        let file_type = match self.bytes[index * DIRENT + 10] {
            1 => Some(FileType::File),
            2 => Some(FileType::Directory),
            3 => Some(FileType::CharDevice),
            4 => Some(FileType::BlockDevice),
            5 => Some(FileType::Fifo),
            6 => Some(FileType::Socket),
            7 => Some(FileType::Symlink),
            _ => None,
        };
        let next = self.position + ((index + 1) * DIRENT) as u64;
        Ok(DirectoryEntry {
            nid: u64_at(self.bytes, index * DIRENT),
            file_type,
            name,
            next,
        })
    }
}

/// The entries of a directory, from a position on.
pub struct Entries<'a, B> {
    reader: &'a Reader<B>,
    directory: Inode,
    block: Option<Block<'a>>,
    /// Position of the next entry: its block's start plus twelve times its index in the block.
    position: u64,
    failed: bool,
}

impl<'a, B: AsRef<[u8]>> Iterator for Entries<'a, B> {
    type Item = Result<DirectoryEntry<'a>, ReadError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.failed {
            return None;
        }
        let result = self.advance().transpose();
        self.failed = matches!(result, Some(Err(_)));
        result
    }
}

impl<'a, B: AsRef<[u8]>> Entries<'a, B> {
    fn advance(&mut self) -> Result<Option<DirectoryEntry<'a>>, ReadError> {
        loop {
            if self.position >= self.directory.size {
                return Ok(None);
            }
            let start = self.position - self.position % BLOCK;
            let block = match self.block {
                Some(block) if block.position == start => block,
                _ => self.reader.directory_block(&self.directory, start / BLOCK)?,
            };
            self.block = Some(block);
            // Only a guest can pass a position between entries. It continues with the next one.
            let index = ((self.position - start) as usize).div_ceil(DIRENT);
            if index < block.count {
                let entry = block.entry(index)?;
                self.position = entry.next;
                return Ok(Some(entry));
            }
            self.position = start + BLOCK;
        }
    }
}

impl<B: AsRef<[u8]>> Reader<B> {
    fn directory_block(&self, directory: &Inode, index: u64) -> Result<Block<'_>, ReadError> {
        Block::new(self.block(directory, index)?, index * BLOCK, directory.nid)
    }

    /// All entries from `position` on, including `.` and `..`. `position` is 0 or an entry's `next`.
    ///
    /// # Errors
    /// If the inode is not a directory. Corruption is returned as the last item.
    pub fn entries(&self, directory: &Inode, position: u64) -> Result<Entries<'_, B>, ReadError> {
        self.expect(directory, FileType::Directory, "directory")?;
        Ok(Entries {
            reader: self,
            directory: *directory,
            block: None,
            position,
            failed: false,
        })
    }

    /// The entry with a name. A binary search finds the block, and another the entry in it.
    ///
    /// # Errors
    /// If the inode is not a directory, or a block on the way is corrupt.
    pub fn lookup(&self, directory: &Inode, name: &[u8]) -> Result<Option<DirectoryEntry<'_>>, ReadError> {
        self.expect(directory, FileType::Directory, "directory")?;
        let (mut low, mut high) = (0, directory.size.div_ceil(BLOCK));
        // Invariant: blocks below `low` begin with `name` or a smaller one, blocks from `high` on with a larger one.
        let mut candidate = None;
        while low < high {
            let middle = low + (high - low) / 2;
            let block = self.directory_block(directory, middle)?;
            match block.name(0)?.cmp(name) {
                Ordering::Equal => return block.entry(0).map(Some),
                Ordering::Less => {
                    candidate = Some(block);
                    low = middle + 1;
                }
                Ordering::Greater => high = middle,
            }
        }
        let Some(block) = candidate else { return Ok(None) };
        let (mut low, mut high) = (1, block.count);
        while low < high {
            let middle = low + (high - low) / 2;
            match block.name(middle)?.cmp(name) {
                Ordering::Equal => return block.entry(middle).map(Some),
                Ordering::Less => low = middle + 1,
                Ordering::Greater => high = middle,
            }
        }
        Ok(None)
    }
}
