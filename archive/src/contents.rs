//! The bytes of one regular file, to and from a stream.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;

/// Bytes that are copied at once. A piece of zeros becomes a hole.
const PIECE: usize = 32 << 10;

/// Exactly `left` bytes of a file: less is filled with zeros, as tar does for a file that shrinks while it is read.
#[derive(Debug)]
pub struct Exactly<'a> {
    pub file: &'a File,
    pub left: u64,
}

impl Read for Exactly<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let most = buffer.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
        let buffer = &mut buffer[..most];
        let mut read = self.file.read(buffer)?;
        if read == 0 {
            buffer.fill(0);
            read = most;
        }
        self.left -= read as u64;
        Ok(read)
    }
}

/// Writes `size` bytes to a new file. Zeros stay holes.
///
/// # Errors
/// The file system refuses, the stream breaks off, or (`UnexpectedEof`) it has fewer bytes.
pub fn write(file: &File, size: u64, mut from: impl Read) -> io::Result<()> {
    // First, because a file that no file system can hold must not be read to its end.
    file.set_len(size)?;
    let mut buffer = vec![0; PIECE];
    let mut at = 0;
    while at < size {
        let most = PIECE.min(usize::try_from(size - at).unwrap_or(PIECE));
        let piece = &mut buffer[..most];
        from.read_exact(piece)?;
        if piece.iter().any(|byte| *byte != 0) {
            file.write_all_at(piece, at)?;
        }
        at += most as u64;
    }
    Ok(())
}
