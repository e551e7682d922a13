//! Compares files with a manifest.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::contents::{data_pages, hash_whole, scan};
use super::hash::Hash;
use super::manifest::{CHUNK, ChunkedFile, WholeFile};

/// Why a file is refused.
#[derive(Debug)]
pub(super) enum CheckError {
    Io(io::Error),
    /// The region that differs.
    Damaged(String),
}

impl From<io::Error> for CheckError {
    fn from(error: io::Error) -> CheckError {
        CheckError::Io(error)
    }
}

/// Refuses a file of another size without reading it.
pub(super) fn check_size(name: &str, file: &File, bytes: u64) -> Result<(), CheckError> {
    match file.metadata()?.len() {
        found if found == bytes => Ok(()),
        found => Err(CheckError::Damaged(format!(
            "{name} ({found} bytes instead of {bytes})"
        ))),
    }
}

/// Compares a small file with its hash.
pub(super) fn check_whole(name: &str, file: &File, expected: &WholeFile) -> Result<(), CheckError> {
    check_size(name, file, expected.bytes)?;
    match hash_whole(file)? == *expected {
        true => Ok(()),
        false => Err(CheckError::Damaged(name.to_owned())),
    }
}

/// Compares a file by chunks. Copies the compared non-zero pages to `copy`, if given.
pub(super) fn check_chunks(
    name: &str,
    file: &File,
    expected: &ChunkedFile,
    copy: Option<&File>,
) -> Result<(), CheckError> {
    check_size(name, file, expected.bytes)?;
    let hashes = expected.by_chunk();
    let compared = scan(file, expected.bytes, |number, data| {
        if data.map(Hash::of) != hashes.get(number as usize).copied().flatten() {
            let at = (number * CHUNK) >> 20;
            return Err(CheckError::Damaged(format!(
                "{name}: chunk {number} (at {at} MiB)"
            )));
        }
        if let (Some(copy), Some(data)) = (copy, data) {
            for range in data_pages(data) {
                copy.write_all_at(&data[range.clone()], number * CHUNK + range.start as u64)?;
            }
        }
        Ok(None::<()>)
    });
    compared.map(drop)
}
