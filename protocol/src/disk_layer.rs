//! The private layer of a disk over a base that other sandboxes may share: a file that thawd makes and reads, and that thaw-vmm writes.
//!
//! | offset | bytes | what |
//! |---|---|---|
//! | 0 | size of the disk, rounded up to 4096 | the disk's blocks of 4096 bytes, each in its place |
//! | after them | one bit for each block, rounded up to 4096 bytes | the marks: that of block *n* is bit *n* mod 8, from the lowest on, of byte *n* / 8. Other bits are zero |
//!
//! A block with a mark is the layer's, also where the file has a hole: the block is zero there. Any other block is the base's, whatever the
//! file has in its place. The disk has the size of the base, without a last part of a sector of 512 bytes.
//!
//! A block has the size of a file system's block. So a guest mostly writes whole blocks, and the rest of a block seldom has to be copied. The
//! marks of a disk of 1 GiB take 32 KiB.

use std::ops::Range;

/// Bytes of a block.
pub const BLOCK: u64 = 4096;
/// Bytes of a sector, the unit of a disk's size.
const SECTOR: u64 = 512;

/// Number of blocks of a disk over a base of this size, of which the last may be shorter.
const fn blocks(base_bytes: u64) -> u64 {
    (base_bytes / SECTOR).div_ceil(BLOCK / SECTOR)
}

/// Offset of the marks in a layer over a base of this size.
pub const fn marks_offset(base_bytes: u64) -> u64 {
    blocks(base_bytes) * BLOCK
}

/// Bytes of the marks of a layer over a base of this size.
pub const fn marks_bytes(base_bytes: u64) -> u64 {
    blocks(base_bytes).div_ceil(8).next_multiple_of(BLOCK)
}

/// Size of the file of a layer over a base of this size.
pub const fn file_bytes(base_bytes: u64) -> u64 {
    marks_offset(base_bytes) + marks_bytes(base_bytes)
}

/// Which blocks a layer has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Marks {
    bits: Vec<u8>,
    blocks: u64,
}

impl Marks {
    /// No marks, for a layer over a base of this size.
    pub fn none(base_bytes: u64) -> Marks {
        Marks {
            bits: vec![0; usize::try_from(marks_bytes(base_bytes)).unwrap_or(usize::MAX)],
            blocks: blocks(base_bytes),
        }
    }

    /// The marks in a layer's file. `None` if these are not as many bytes as a layer over a base of this size has.
    pub fn from_bytes(base_bytes: u64, bits: Vec<u8>) -> Option<Marks> {
        (bits.len() as u64 == marks_bytes(base_bytes)).then(|| Marks {
            bits,
            blocks: blocks(base_bytes),
        })
    }

    /// Number of blocks of the disk.
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Whether a block is the layer's.
    pub fn has(&self, block: u64) -> bool {
        (self.byte(block) >> (block % 8)) & 1 == 1
    }

    /// Whether `block` is the layer's, and the end of the blocks from there on, before `end`, of which the same is true.
    pub fn run(&self, block: u64, end: u64) -> (bool, u64) {
        let has = self.has(block);
        let alike = match has {
            true => u8::MAX,
            false => 0,
        };
        let mut at = block + 1;
        while at < end {
            if at.is_multiple_of(8) && end - at >= 8 && self.byte(at) == alike {
                at += 8;
            } else if self.has(at) == has {
                at += 1;
            } else {
                break;
            }
        }
        (has, at)
    }

    /// Marks these blocks.
    pub fn mark(&mut self, blocks: Range<u64>) {
        let (first, marked) = self.marked(blocks);
        let place = usize::try_from(first)
            .ok()
            .and_then(|first| self.bits.get_mut(first..));
        if let Some(place) = place {
            place
                .iter_mut()
                .zip(marked)
                .for_each(|(byte, marked)| *byte = marked);
        }
    }

    /// The bytes of the marks that change if these blocks are marked: the place of the first among the marks, and what they are then.
    pub fn marked(&self, blocks: Range<u64>) -> (u64, Vec<u8>) {
        let blocks = blocks.start..blocks.end.min(self.blocks);
        let bytes = blocks.start / 8..blocks.end.div_ceil(8);
        let marked = bytes.clone().map(|byte| {
            let (first, end) = (blocks.start.max(byte * 8), blocks.end.min(byte * 8 + 8));
            let ones = (u32::from(u8::MAX) << (first % 8)) & (u32::from(u8::MAX) >> (byte * 8 + 8 - end));
            self.byte(byte * 8) | ones as u8
        });
        (bytes.start, marked.collect())
    }

    /// The byte that has the mark of this block.
    fn byte(&self, block: u64) -> u8 {
        let place = usize::try_from(block / 8).ok();
        place.and_then(|place| self.bits.get(place)).copied().unwrap_or(0)
    }
}

#[cfg(test)]
#[path = "disk_layer_test.rs"]
mod tests;
