//! Why a snapshot is refused.

use std::io;
use std::path::{Path, PathBuf};

use rustix::io::Errno;

use super::hash::Hash;
use crate::error::{Error, ErrorKind, is_full};

/// Why a snapshot cannot be used or made.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    #[error("cannot {what} {}: {source}", place.display())]
    Io {
        what: &'static str,
        place: PathBuf,
        source: io::Error,
    },
    /// There is no directory, or no manifest in it.
    #[error("there is no snapshot at {}", directory.display())]
    NotFound { directory: PathBuf },
    /// A file is missing or has wrong contents.
    #[error("the snapshot at {} is damaged: {region} is not what the manifest says", directory.display())]
    Damaged { directory: PathBuf, region: String },
    /// The manifest itself cannot be read.
    #[error("the snapshot at {} is damaged: manifest.json: {reason}", directory.display())]
    Manifest { directory: PathBuf, reason: String },
    /// The snapshot is of another version, or for another machine or node.
    #[error("the snapshot at {} does not fit: {reason}", directory.display())]
    Incompatible { directory: PathBuf, reason: String },
    /// Signatures are required, and no trusted key has signed it.
    #[error("the snapshot at {} is refused: {reason}", directory.display())]
    Signature { directory: PathBuf, reason: String },
    /// A delta's base was removed.
    #[error("the snapshot at {} lies on {}, which is not there", directory.display(), base.display())]
    NoBase { directory: PathBuf, base: PathBuf },
    /// A delta's base is not the snapshot that the delta was made from.
    #[error("the snapshot at {} lies on {wanted}, and {} is {found}", directory.display(), base.display())]
    OtherBase {
        directory: PathBuf,
        base: PathBuf,
        wanted: Hash,
        found: Hash,
    },
    /// A key file does not contain a key.
    #[error("{} is no Ed25519 key: {reason}", place.display())]
    Key { place: PathBuf, reason: &'static str },
    /// A snapshot of that name exists.
    #[error("there is something at {} already", directory.display())]
    Exists { directory: PathBuf },
}

impl SnapshotError {
    /// Whether files of an existing snapshot are missing or have wrong contents.
    pub fn is_damage(&self) -> bool {
        matches!(
            self,
            SnapshotError::Damaged { .. } | SnapshotError::Manifest { .. } | SnapshotError::NotFound { .. }
        )
    }

    /// Whether it says nothing of the snapshot, which this process could not open now.
    pub(crate) fn is_passing(&self) -> bool {
        matches!(self, SnapshotError::Io { source, .. } if is_passing(source))
    }

    pub(super) fn io(what: &'static str, place: &Path) -> impl FnOnce(io::Error) -> SnapshotError {
        let place = place.to_owned();
        move |source| SnapshotError::Io { what, place, source }
    }
}

/// Whether a file was not opened because of this process or its host: the file may be whole.
pub(super) fn is_passing(e: &io::Error) -> bool {
    let passing = [
        Errno::ACCESS,
        Errno::PERM,
        Errno::MFILE,
        Errno::NFILE,
        Errno::NOMEM,
    ];
    Errno::from_io_error(e).is_some_and(|e| passing.contains(&e))
}

impl From<SnapshotError> for Error {
    fn from(error: SnapshotError) -> Error {
        let kind = match &error {
            SnapshotError::Io { source, .. } if is_full(source) => ErrorKind::DiskFull,
            SnapshotError::Io { .. } | SnapshotError::Key { .. } | SnapshotError::Exists { .. } => {
                ErrorKind::Runtime
            }
            SnapshotError::NotFound { .. } | SnapshotError::NoBase { .. } => ErrorKind::SnapshotNotFound,
            SnapshotError::Damaged { .. } | SnapshotError::Manifest { .. } => ErrorKind::SnapshotDamaged,
            SnapshotError::Incompatible { .. } | SnapshotError::OtherBase { .. } => {
                ErrorKind::SnapshotIncompatible
            }
            SnapshotError::Signature { .. } => ErrorKind::SnapshotSignature,
        };
        Error::new(kind, error.to_string())
    }
}
