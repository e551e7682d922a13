//! What can go wrong with an archive.

use std::io;
use std::path::Path;

/// The error of packing or unpacking.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file system refused an operation on one file.
    #[error("cannot {doing} {name}: {source}")]
    File {
        doing: &'static str,
        name: String,
        source: io::Error,
    },
    /// The archive cannot be read, or contains what may not be unpacked.
    #[error("{0}")]
    Refused(String),
}

impl Error {
    /// An operation on a file failed.
    pub(crate) fn file(doing: &'static str, name: &Path, source: impl Into<io::Error>) -> Error {
        let name = match name.as_os_str().is_empty() {
            true => ".".into(),
            false => name.display().to_string(),
        };
        let source = source.into();
        Error::File { doing, name, source }
    }

    /// The archive's stream broke off, or is no archive.
    pub(crate) fn stream(source: &io::Error) -> Error {
        Error::Refused(format!("the archive cannot be read: {source}"))
    }

    /// The error number, if the file system refused.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Error::File { source, .. } => source.raw_os_error(),
            Error::Refused(_) => None,
        }
    }
}
