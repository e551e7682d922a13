//! Parts of local files: blobs of a layout and members of an archive, read in place.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use crate::error::Error;

/// A range of a file; reading moves its start.
#[derive(Clone)]
pub struct Section {
    pub file: Arc<File>,
    /// Offset of its first or next byte.
    pub at: u64,
    /// Offset of its end.
    pub end: u64,
}

impl Read for Section {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let wanted = buffer
            .len()
            .min(usize::try_from(self.end - self.at).unwrap_or(usize::MAX));
        let length = self.file.read_at(&mut buffer[..wanted], self.at)?;
        self.at += length as u64;
        Ok(length)
    }
}

/// Reads a whole file of bounded size.
pub fn read_limited(what: &str, path: &Path, from: impl Read, limit: u64) -> Result<Vec<u8>, Error> {
    let mut bytes = Vec::new();
    from.take(limit + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| Error::io(path, error))?;
    if bytes.len() as u64 > limit {
        return Err(Error::malformed(what, format!("it is larger than {limit} bytes")));
    }
    Ok(bytes)
}
