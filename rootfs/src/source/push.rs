//! Writing images: to a registry by the distribution specification's push, or into a layout directory.
//!
//! Invariants: a blob is there under its digest only if its bytes have it (a registry checks, and so does a layout's writer);
//! a manifest is written only by its exact bytes; who refers to a manifest (`subject`) is found by asking the registry for
//! referrers, or, where it does not know of them, by the index tagged `sha256-HEX`, which is kept up.

use std::io::{Read, Seek};
use std::sync::Arc;

use crate::digest::Digest;
use crate::error::Error;
use crate::progress::Progress;
use crate::reference::ImageRef;

use super::SourceOptions;

/// Bytes that can be read again when sending them broke off: a file, or a cursor over memory.
pub trait Upload: Read + Seek + Send + 'static {}

impl<T: Read + Seek + Send + 'static> Upload for T {}

/// A place one image's parts are written to.
pub struct Push {
    reference: ImageRef,
}

impl Push {
    /// The place `reference` names: a repository of a registry, or a layout directory (made if it is not there).
    /// Nothing is transferred yet.
    ///
    /// # Errors
    /// `Credentials`, `Io`; `Malformed` for an archive, which cannot be written to.
    pub async fn open(
        reference: &ImageRef,
        options: &SourceOptions,
        progress: Arc<dyn Progress>,
    ) -> Result<Self, Error> {
        let _ = (options, progress);
        Ok(Self {
            reference: reference.clone(),
        })
    }

    fn impossible<T>(&self) -> Result<T, Error> {
        Err(Error::malformed(
            self.reference.to_string(),
            "writing to it is not possible in this build",
        ))
    }

    /// The size of the blob, if it is there.
    ///
    /// # Errors
    /// What the registry says, or `Io`.
    pub async fn blob_exists(&self, digest: &Digest) -> Result<Option<u64>, Error> {
        let _ = digest;
        self.impossible()
    }

    /// Takes the blob over from another repository of the same registry. Returns whether that was possible; if not,
    /// upload it.
    ///
    /// # Errors
    /// What the registry says, but for its not having the blob or not letting it be had.
    pub async fn mount(&self, digest: &Digest, from_repository: &str) -> Result<bool, Error> {
        let _ = (digest, from_repository);
        self.impossible()
    }

    /// Writes a blob, whole in one request or, where it is large, in pieces that can be sent again. `content` is read
    /// from its start, on a thread that may wait.
    ///
    /// # Errors
    /// `DigestMismatch` where `content` is not what `digest` says, `TruncatedLayer` where it ends before `size`, and what
    /// the registry says.
    pub async fn upload(&self, digest: &Digest, size: u64, content: impl Upload) -> Result<(), Error> {
        let _ = (digest, size, content);
        self.impossible()
    }

    /// Writes a manifest or an index, by its digest and, if given, under a tag. Where it has a `subject`, it is also
    /// made to be found as referrer of it. Returns its digest.
    ///
    /// # Errors
    /// What the registry says (`RegistryDenied`, `RegistryFailed`), `Malformed` for bytes that are no JSON, or `Io`.
    pub async fn manifest(&self, tag: Option<&str>, media_type: &str, bytes: &[u8]) -> Result<Digest, Error> {
        let _ = (tag, media_type, bytes);
        self.impossible()
    }
}
