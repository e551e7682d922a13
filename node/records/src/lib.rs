//! Records on disk: JSON objects with a version.
//!
//! Invariants: the version is read first, so a record of a newer version is reported as such and never half read. A record
//! without a version has version [`FIRST`], which the release before versions wrote. A version is raised only if an older reader
//! would misunderstand the record. Readers ignore unknown fields, so a new field needs no new version, and a node can go back one
//! release.

#![cfg_attr(test, allow(clippy::unwrap_used))]

use std::io;
use std::path::Path;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Version of a record that names none.
pub const FIRST: u32 = 1;
/// Version of all records this release writes.
pub const VERSION: u32 = 2;

/// Why a record cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    #[error("it is not there")]
    Missing,
    #[error("{0}")]
    Io(io::Error),
    #[error(
        "it is of version {found}, and this thaw reads versions up to {VERSION}: a later release wrote it"
    )]
    Newer { found: u64 },
    #[error("it is damaged: {0}")]
    Malformed(serde_json::Error),
}

impl From<RecordError> for io::Error {
    fn from(error: RecordError) -> io::Error {
        match error {
            RecordError::Io(error) => error,
            RecordError::Missing => io::Error::new(io::ErrorKind::NotFound, error),
            other => io::Error::new(io::ErrorKind::InvalidData, other),
        }
    }
}

/// Reads the record in a file.
///
/// # Errors
/// See [`RecordError`].
pub fn read<T: DeserializeOwned>(path: &Path) -> Result<T, RecordError> {
    match std::fs::read(path) {
        Ok(bytes) => decode(&bytes),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Err(RecordError::Missing),
        Err(e) => Err(RecordError::Io(e)),
    }
}

/// Reads a record's bytes.
///
/// # Errors
/// [`RecordError::Newer`], [`RecordError::Malformed`].
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, RecordError> {
    #[derive(Deserialize)]
    struct Header {
        #[serde(default = "first")]
        version: u64,
    }
    let Header { version } = serde_json::from_slice(bytes).map_err(RecordError::Malformed)?;
    if version > u64::from(VERSION) {
        return Err(RecordError::Newer { found: version });
    }
    serde_json::from_slice(bytes).map_err(RecordError::Malformed)
}

/// A record's bytes, its version first.
///
/// # Errors
/// Errors of serde, for values that are not plain data.
pub fn encode<T: Serialize>(record: &T) -> io::Result<Vec<u8>> {
    #[derive(Serialize)]
    struct Versioned<'a, T> {
        version: u32,
        #[serde(flatten)]
        record: &'a T,
    }
    let versioned = Versioned {
        version: VERSION,
        record,
    };
    Ok(serde_json::to_vec_pretty(&versioned)?)
}

fn first() -> u64 {
    FIRST.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Thing {
        size: u32,
    }

    #[test]
    fn record_is_read_whatever_older_version_wrote_it() {
        let thing = Thing { size: 7 };
        let written = encode(&thing).unwrap();
        assert!(written.starts_with(b"{\n  \"version\": 2"));
        assert_eq!(decode::<Thing>(&written).unwrap(), thing);
        assert_eq!(decode::<Thing>(br#"{"size": 7}"#).unwrap(), thing);
        let with_more = br#"{"version": 2, "size": 7, "colour": "unknown here"}"#;
        assert_eq!(decode::<Thing>(with_more).unwrap(), thing);
        // As the release before read it: it knew no version.
        assert_eq!(serde_json::from_slice::<Thing>(&written).unwrap(), thing);
    }

    #[test]
    fn newer_version_is_named_before_its_fields_are_read() {
        let newer = decode::<Thing>(br#"{"version": 3, "size": {"of": "another shape"}}"#).unwrap_err();
        assert!(matches!(newer, RecordError::Newer { found: 3 }), "{newer}");
        assert!(newer.to_string().contains("version 3"), "{newer}");
        for damaged in [&b""[..], b"{", b"[]", b"7", br#"{"version": -1, "size": 7}"#] {
            let error = decode::<Thing>(damaged).unwrap_err();
            assert!(matches!(error, RecordError::Malformed(_)), "{error}");
        }
    }
}
