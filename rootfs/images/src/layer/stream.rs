//! The byte stream in blocks of 512. Every error has an offset, and a truncated stream is never mistaken for the archive's end.

use std::io::{self, Read};

use super::LayerError;

pub const BLOCK: usize = 512;

/// Bytes that are passed on at a time.
const BUFFER: usize = 256 << 10;

pub struct TarStream<R> {
    source: R,
    buffer: Box<[u8]>,
    /// Unread part of `buffer`.
    start: usize,
    end: usize,
    /// Bytes of the stream consumed.
    offset: u64,
}

impl<R: Read> TarStream<R> {
    pub fn new(source: R) -> TarStream<R> {
        TarStream {
            source,
            buffer: vec![0; BUFFER].into_boxed_slice(),
            start: 0,
            end: 0,
            offset: 0,
        }
    }

    /// Bytes consumed.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Up to `most` unread bytes, consumed; empty only at the end of the stream.
    fn some(&mut self, most: u64, what: &'static str) -> Result<&[u8], LayerError> {
        while self.start == self.end {
            match self.source.read(&mut self.buffer) {
                Ok(0) => return Ok(&[]),
                Ok(read) => (self.start, self.end) = (0, read),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(LayerError::read(self.offset, what, error)),
            }
        }
        let length = ((self.end - self.start) as u64).min(most) as usize;
        let bytes = &self.buffer[self.start..self.start + length];
        self.start += length;
        self.offset += length as u64;
        Ok(bytes)
    }

    /// One block; `None` if the stream ends here.
    fn block_or_end(&mut self, what: &'static str) -> Result<Option<[u8; BLOCK]>, LayerError> {
        let mut block = [0; BLOCK];
        let mut filled = 0;
        while filled < BLOCK {
            let bytes = self.some((BLOCK - filled) as u64, what)?;
            if bytes.is_empty() {
                return match filled {
                    0 => Ok(None),
                    _ => Err(LayerError::truncated(self.offset, what)),
                };
            }
            block[filled..filled + bytes.len()].copy_from_slice(bytes);
            filled += bytes.len();
        }
        Ok(Some(block))
    }

    /// One block.
    pub fn block(&mut self, what: &'static str) -> Result<[u8; BLOCK], LayerError> {
        self.block_or_end(what)?
            .ok_or(LayerError::truncated(self.offset, what))
    }

    /// The next header block; `None` at the end of the archive, which is two blocks of zeros or the end of the stream.
    pub fn header_block(&mut self) -> Result<Option<[u8; BLOCK]>, LayerError> {
        let Some(block) = self.block_or_end("a header")? else {
            return Ok(None);
        };
        if block != [0; BLOCK] {
            return Ok(Some(block));
        }
        let offset = self.offset;
        match self.block_or_end("the end marker")? {
            Some(second) if second != [0; BLOCK] => Err(LayerError::bad_header(
                offset,
                b"",
                "half an end marker, and then a header",
            )),
            _ => Ok(None),
        }
    }

    /// Passes on the next `length` bytes, which the stream must have.
    pub fn bytes(
        &mut self,
        length: u64,
        what: &'static str,
        mut take: impl FnMut(&[u8]) -> Result<(), LayerError>,
    ) -> Result<(), LayerError> {
        let mut left = length;
        while left > 0 {
            let bytes = self.some(left, what)?;
            if bytes.is_empty() {
                return Err(LayerError::truncated(self.offset, what));
            }
            left -= bytes.len() as u64;
            take(bytes)?;
        }
        Ok(())
    }

    /// Skips the padding up to the next block.
    pub fn padding(&mut self, what: &'static str) -> Result<(), LayerError> {
        let padding = self.offset.next_multiple_of(BLOCK as u64) - self.offset;
        self.bytes(padding, what, |_| Ok(()))
    }

    /// Passes on an entry's content and skips its padding.
    pub fn content(
        &mut self,
        length: u64,
        what: &'static str,
        take: impl FnMut(&[u8]) -> Result<(), LayerError>,
    ) -> Result<(), LayerError> {
        self.bytes(length, what, take)?;
        self.padding(what)
    }

    /// Reads the data after the end marker, at most `most` bytes.
    pub fn drain(&mut self, most: u64) -> Result<(), LayerError> {
        let begin = self.offset;
        while !self.some(u64::MAX, "the padding after its end")?.is_empty() {
            if self.offset - begin > most {
                return Err(LayerError::limit(begin, "bytes after its end", most));
            }
        }
        Ok(())
    }
}
