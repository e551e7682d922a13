//! Where file data of a layer goes: pages appended to one data file, zeros left out.

use std::fs::File;
use std::io::{self, BufWriter, Seek, SeekFrom, Write};

/// Takes the bytes of a layer's data file, first to last.
pub trait DataSink {
    /// Appends bytes.
    ///
    /// # Errors
    /// What the storage says, e.g. that it is full.
    fn append(&mut self, bytes: &[u8]) -> io::Result<()>;

    /// Appends `length` zeros, which need not be stored.
    ///
    /// # Errors
    /// What the storage says.
    fn skip(&mut self, length: u64) -> io::Result<()>;
}

impl DataSink for Vec<u8> {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.extend_from_slice(bytes);
        Ok(())
    }

    fn skip(&mut self, length: u64) -> io::Result<()> {
        let length = usize::try_from(length).map_err(|_| io::ErrorKind::OutOfMemory)?;
        self.resize(self.len() + length, 0);
        Ok(())
    }
}

/// An empty file that becomes a data file; zeros become holes.
pub struct FileSink {
    file: BufWriter<File>,
    length: u64,
}

impl FileSink {
    /// Writes from the start of `file`, which must be empty.
    pub fn new(file: File) -> FileSink {
        FileSink {
            file: BufWriter::with_capacity(1 << 20, file),
            length: 0,
        }
    }

    /// Writes what is buffered and gives the file its length, holes at its end included.
    ///
    /// # Errors
    /// What the file system says, e.g. that it is full.
    pub fn finish(self) -> io::Result<File> {
        let file = self.file.into_inner().map_err(io::IntoInnerError::into_error)?;
        file.set_len(self.length)?;
        Ok(file)
    }
}

impl DataSink for FileSink {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.length += bytes.len() as u64;
        self.file.write_all(bytes)
    }

    fn skip(&mut self, length: u64) -> io::Result<()> {
        self.length += length;
        self.file.seek(SeekFrom::Start(self.length)).map(drop)
    }
}
