//! Errors of images and of fetching them, each with a stable code.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use thaw_imagefs::blob::BlobError;
use thaw_imagefs::digest::Digest;
use thaw_imagefs::erofs::WriteError;

use crate::layer::LayerError;
use crate::merge::MergeError;

/// Why an image cannot be used. Each message gives the cause, the place and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{reference:?} is not an image reference: {problem}")]
    BadReference { reference: String, problem: String },

    #[error("{what} not found in {place}; {advice}")]
    NotFound {
        what: String,
        place: String,
        advice: String,
    },

    #[error(
        "{what} has digest {got} instead of {expected}: it was damaged or exchanged. Fetch it again, and if it stays so, tell whoever publishes it"
    )]
    DigestMismatch {
        what: String,
        expected: Digest,
        got: Digest,
    },

    #[error("{what} ends after {got} of {expected} bytes: it is truncated. Fetch it again")]
    TruncatedLayer { what: String, expected: u64, got: u64 },

    #[error("{what} has media type {media_type:?}, which Thaw cannot read; {advice}")]
    UnknownMediaType {
        what: String,
        media_type: String,
        advice: String,
    },

    #[error(
        "the image is not for {wanted}; there is: {}. Use an image built for {wanted}",
        list(available)
    )]
    WrongArchitecture { wanted: String, available: Vec<String> },

    #[error("image refused, layer {layer}: {reason}")]
    UnsafePath { layer: Digest, reason: String },

    #[error("registry {registry} cannot be reached: {reason}; {advice}")]
    RegistryUnreachable {
        registry: String,
        reason: String,
        advice: String,
    },

    #[error(
        "registry {registry} refuses access ({status}) to {what}: {reason}; log in (docker login {registry}) or check the name: private and missing images look alike"
    )]
    RegistryDenied {
        registry: String,
        status: u16,
        what: String,
        reason: String,
    },

    #[error("registry {registry} has no {what} (404); check the name and the tag")]
    RegistryNotFound { registry: String, what: String },

    #[error(
        "registry {registry} answers too many requests (429) for {what}{}; wait, or log in for a higher limit",
        after(retry_after)
    )]
    RegistryRateLimited {
        registry: String,
        what: String,
        /// The pause that the registry requests, in seconds.
        retry_after: Option<u64>,
    },

    #[error(
        "registry {registry} fails ({status}) on {what}: {reason}; it was asked {attempts} times, try later"
    )]
    RegistryFailed {
        registry: String,
        status: u16,
        what: String,
        reason: String,
        attempts: u32,
    },

    #[error("bytes {start} to {end} of blob {blob} cannot be read: {source}")]
    Unreadable {
        blob: Digest,
        start: u64,
        /// End of the range, exclusive.
        end: u64,
        source: Box<Error>,
    },

    #[error(
        "cannot get credentials for {registry}: {reason}; fix it or remove the entry from the Docker configuration"
    )]
    Credentials { registry: String, reason: String },

    #[error("disk full at {}; free space there, or choose another store directory", path.display())]
    DiskFull { path: PathBuf },

    #[error("{what} is malformed: {problem}; rebuild or fetch the image again")]
    Malformed { what: String, problem: String },

    #[error("layer {layer}: {source}")]
    Layer { layer: Digest, source: LayerError },

    #[error("the layers do not fit together: {0}; rebuild the image")]
    Merge(#[from] MergeError),

    #[error("the image's metadata cannot be written: {0}")]
    Metadata(WriteError),

    #[error("layer {layer}: {source}")]
    Blob { layer: Digest, source: BlobError },

    #[error(
        "bytes of blob {blob} at {offset}, as {place} has them, have another digest than when the layer was unpacked; fetch the image again, and if it stays so, tell whoever publishes it"
    )]
    ChunkDigest {
        blob: Digest,
        /// Within the cache file.
        offset: u64,
        place: String,
    },

    /// The error of another caller's read of the same bytes, which this caller joined.
    #[error(transparent)]
    Shared(Arc<Error>),

    #[error("image {digest} is in use by a running sandbox; stop it first")]
    InUse { digest: Digest },

    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },

    #[error("the pull was cancelled")]
    Cancelled,
}

fn list(available: &[String]) -> String {
    if available.is_empty() {
        "nothing".into()
    } else {
        available.join(", ")
    }
}

fn after(seconds: &Option<u64>) -> String {
    seconds
        .map(|seconds| format!(" and asks to wait {seconds} s"))
        .unwrap_or_default()
}

impl Error {
    /// A stable code of the error, for programs.
    pub fn code(&self) -> &'static str {
        match self {
            Self::BadReference { .. } => "bad_reference",
            Self::NotFound { .. } => "not_found",
            Self::DigestMismatch { .. } | Self::ChunkDigest { .. } => "digest_mismatch",
            Self::Shared(error) => error.code(),
            Self::TruncatedLayer { .. } => "truncated_layer",
            Self::UnknownMediaType { .. } => "unknown_media_type",
            Self::WrongArchitecture { .. } => "wrong_architecture",
            Self::UnsafePath { .. } => "unsafe_path",
            Self::RegistryUnreachable { .. } => "registry_unreachable",
            Self::RegistryDenied { .. } => "registry_denied",
            Self::RegistryNotFound { .. } => "registry_not_found",
            Self::RegistryRateLimited { .. } => "registry_rate_limited",
            Self::RegistryFailed { .. } => "registry_failed",
            Self::Unreadable { source, .. } => source.code(),
            Self::Credentials { .. } => "credentials",
            Self::DiskFull { .. } => "disk_full",
            Self::Layer {
                source: LayerError::TruncatedLayer { .. },
                ..
            } => "truncated_layer",
            Self::Malformed { .. } | Self::Merge(_) | Self::Layer { .. } => "malformed",
            Self::Metadata(_) | Self::Blob { .. } | Self::Io { .. } => "io",
            Self::InUse { .. } => "in_use",
            Self::Cancelled => "cancelled",
        }
    }

    /// The error itself, also if it is shared.
    pub fn inner(&self) -> &Self {
        match self {
            Self::Shared(error) => error.inner(),
            error => error,
        }
    }

    /// An I/O error on `path`; `DiskFull` for a full disk.
    pub fn io(path: &Path, source: io::Error) -> Self {
        if is_full(&source) {
            return Self::DiskFull { path: path.into() };
        }
        Self::Io {
            path: path.into(),
            source,
        }
    }

    /// Wraps an error of the blob cache at `path`.
    pub fn blob(layer: Digest, path: &Path, source: BlobError) -> Self {
        match source {
            BlobError::Io(source) => Self::io(path, source),
            source => Self::Blob { layer, source },
        }
    }

    /// Why a layer's tar was refused.
    pub fn layer(layer: Digest, source: LayerError) -> Self {
        match source {
            LayerError::UnsafePath { .. } | LayerError::UnsafeHardLink { .. } => Self::UnsafePath {
                layer,
                reason: source.to_string(),
            },
            source => Self::Layer { layer, source },
        }
    }

    pub(crate) fn malformed(what: impl Into<String>, problem: impl ToString) -> Self {
        Self::Malformed {
            what: what.into(),
            problem: problem.to_string(),
        }
    }
}

/// Whether the device or the user's share of it is full.
pub(crate) fn is_full(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
    )
}
