//! Little-endian documents: a cursor that never runs past its end.

use crate::error::Error;

/// Bytes of a page; see [`thaw_imagefs::tree::PAGE`].
pub const PAGE: u64 = thaw_imagefs::tree::PAGE;
/// Flag of a stored length whose bytes are one zstd frame; otherwise they are plain.
pub const ZSTD: u32 = 1 << 31;

/// Reads a document from its start. `what` names the document in messages.
pub struct Cursor<'a> {
    what: &'a str,
    left: &'a [u8],
}

impl<'a> Cursor<'a> {
    pub fn new(what: &'a str, bytes: &'a [u8]) -> Self {
        Self { what, left: bytes }
    }

    pub fn malformed(&self, problem: &str) -> Error {
        Error::malformed(self.what, problem)
    }

    pub fn bytes(&mut self, length: usize) -> Result<&'a [u8], Error> {
        let (taken, left) = self
            .left
            .split_at_checked(length)
            .ok_or_else(|| self.malformed("it ends too early"))?;
        self.left = left;
        Ok(taken)
    }

    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], Error> {
        let mut array = [0; N];
        array.copy_from_slice(self.bytes(N)?);
        Ok(array)
    }

    pub fn u32(&mut self) -> Result<u32, Error> {
        self.array().map(u32::from_le_bytes)
    }

    pub fn u64(&mut self) -> Result<u64, Error> {
        self.array().map(u64::from_le_bytes)
    }

    /// Magic number and version, which every document begins with.
    pub fn head(&mut self, magic: &[u8; 8], version: u32) -> Result<(), Error> {
        if self.array::<8>()? != *magic {
            return Err(self.malformed("it does not begin with its magic number"));
        }
        match self.u32()? {
            found if found == version => Ok(()),
            found => Err(self.malformed(&format!("it has version {found}, this build reads {version}"))),
        }
    }

    /// Bytes that must be zero.
    pub fn zeros(&mut self, length: usize) -> Result<(), Error> {
        match self.bytes(length)?.iter().all(|byte| *byte == 0) {
            true => Ok(()),
            false => Err(self.malformed("a reserved field is not zero")),
        }
    }

    /// Reads the number of entries of `size` bytes each and checks that the document contains all of them, so that nothing is allocated for
    /// missing ones.
    pub fn count(&self, count: u32, size: usize) -> Result<usize, Error> {
        let count = count as usize;
        match count.checked_mul(size) {
            Some(bytes) if bytes <= self.left.len() => Ok(count),
            _ => Err(self.malformed("it ends before the entries it counts")),
        }
    }

    /// The remaining bytes.
    pub fn rest(&self) -> &'a [u8] {
        self.left
    }
}

/// Compresses `data` into one zstd frame if that saves at least a sixteenth; otherwise leaves it plain. The bytes depend only on `data`,
/// `level` and the release of the zstd library.
pub fn compress(data: Vec<u8>, level: i32) -> std::io::Result<(u32, Vec<u8>)> {
    let packed = zstd::bulk::compress(&data, level)?;
    let (stored, flag) = match packed.len() <= data.len() - data.len() / 16 && packed.len() < data.len() {
        true => (packed, ZSTD),
        false => (data, 0),
    };
    Ok((stored.len() as u32 | flag, stored))
}

/// Appends little-endian numbers.
pub trait Put {
    fn put_u32(&mut self, value: u32);
    fn put_u64(&mut self, value: u64);
}

impl Put for Vec<u8> {
    fn put_u32(&mut self, value: u32) {
        self.extend_from_slice(&value.to_le_bytes());
    }

    fn put_u64(&mut self, value: u64) {
        self.extend_from_slice(&value.to_le_bytes());
    }
}
