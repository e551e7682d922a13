//! Writing images: pushing to a registry by the distribution specification, or writing into a layout directory.
//!
//! Invariants: a blob exists under its digest only if its bytes have that digest (a registry checks, and so does the
//! writer of a layout). A manifest is written byte by byte as given. Referrers of a manifest (`subject`) are found
//! through the registry's referrers API or, if it has none, through the index tagged `sha256-HEX`, which a push
//! updates.

mod content;
#[cfg(test)]
mod fake_registry;
mod layout;
mod registry;
#[cfg(test)]
#[path = "push_test.rs"]
mod tests;

use std::io::{Read, Seek};
use std::sync::Arc;

use serde::Deserialize;
use serde_json::{Value, json};
use thaw_imagefs::digest::Digest;

use crate::error::Error;
use crate::manifest::MAX_MANIFEST;
use crate::progress::Progress;
use crate::reference::ImageRef;

use super::SourceOptions;
use content::Content;

/// Bytes that can be read again when sending them broke off: a file, or a cursor over memory.
pub trait Upload: Read + Seek + Send + 'static {}

impl<T: Read + Seek + Send + 'static> Upload for T {}

/// A place one image's parts are written to.
pub struct Push(Target);

enum Target {
    Registry(Box<registry::Remote>),
    Layout(layout::Writer),
}

impl Push {
    /// Opens the destination to which `reference` points: a repository of a registry, or a layout directory, which is created if it does
    /// not exist. Nothing is transferred yet.
    ///
    /// # Errors
    /// `Credentials`, `Io`; `Malformed` for an archive, which cannot be written to.
    pub async fn open(
        reference: &ImageRef,
        options: &SourceOptions,
        progress: Arc<dyn Progress>,
    ) -> Result<Self, Error> {
        let target = match reference {
            ImageRef::Registry(reference) => {
                let remote = registry::Remote::open(reference.clone(), options, progress).await?;
                Target::Registry(Box::new(remote))
            }
            ImageRef::Layout { directory, .. } => {
                Target::Layout(layout::Writer::open(directory.clone()).await?)
            }
            ImageRef::Archive { file, .. } => {
                return Err(Error::malformed(
                    file.display().to_string(),
                    "an archive cannot be written to: write to oci:DIR or a registry",
                ));
            }
        };
        Ok(Self(target))
    }

    /// The size of the blob, if it exists.
    ///
    /// # Errors
    /// Those of the registry, or `Io`.
    pub async fn blob_exists(&self, digest: &Digest) -> Result<Option<u64>, Error> {
        match &self.0 {
            Target::Registry(remote) => remote.blob_exists(digest).await,
            Target::Layout(writer) => writer.blob_exists(digest),
        }
    }

    /// Mounts the blob from another repository of the same registry. Returns whether that was possible; if not, upload the blob.
    ///
    /// # Errors
    /// Those of the registry, except that the blob is missing there or access is denied.
    pub async fn mount(&self, digest: &Digest, from_repository: &str) -> Result<bool, Error> {
        match &self.0 {
            Target::Registry(remote) => remote.mount(digest, from_repository).await,
            Target::Layout(_) => Ok(false),
        }
    }

    /// Writes a blob in one request or, if that fails, in pieces that can be sent again. `content` is read from its start on a blocking
    /// thread.
    ///
    /// # Errors
    /// `DigestMismatch` if `content` does not have this digest, `TruncatedLayer` if it ends before `size`, and those of the registry.
    pub async fn upload(&self, digest: &Digest, size: u64, content: impl Upload) -> Result<(), Error> {
        let content = Content::new(*digest, size, content);
        match &self.0 {
            Target::Registry(remote) => remote.upload(&content).await,
            Target::Layout(writer) => writer.upload(content).await,
        }
    }

    /// Writes a manifest or an index under its digest and, if given, under a tag. If it has a `subject`, it is also registered as a
    /// referrer of it. Returns its digest.
    ///
    /// # Errors
    /// Those of the registry (`RegistryDenied`, `RegistryFailed`), `Malformed` if the bytes are not JSON, or `Io`.
    pub async fn manifest(&self, tag: Option<&str>, media_type: &str, bytes: &[u8]) -> Result<Digest, Error> {
        let document = Document::new(media_type, bytes)?;
        match &self.0 {
            Target::Registry(remote) => remote.manifest(tag, &document).await?,
            Target::Layout(writer) => writer.manifest(tag, &document).await?,
        }
        Ok(document.digest)
    }
}

/// A manifest or an index to be written.
#[derive(Clone)]
struct Document {
    media_type: String,
    bytes: bytes::Bytes,
    digest: Digest,
    subject: Option<Digest>,
    artifact_type: Option<String>,
    annotations: Option<Value>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Parts {
    subject: Option<Pointer>,
    artifact_type: Option<String>,
    config: Option<Pointer>,
    annotations: Option<Value>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Pointer {
    digest: Digest,
    media_type: Option<String>,
}

impl Document {
    fn new(media_type: &str, bytes: &[u8]) -> Result<Self, Error> {
        let digest = Digest::of(bytes);
        let what = format!("manifest {digest}");
        if bytes.len() as u64 > MAX_MANIFEST {
            let problem = format!("it is larger than the {MAX_MANIFEST} bytes a registry has to take");
            return Err(Error::malformed(what, problem));
        }
        let parts: Parts = serde_json::from_slice(bytes).map_err(|error| Error::malformed(what, error))?;
        let config = parts.config.and_then(|config| config.media_type);
        Ok(Self {
            media_type: media_type.to_owned(),
            bytes: bytes::Bytes::copy_from_slice(bytes),
            digest,
            subject: parts.subject.map(|subject| subject.digest),
            artifact_type: parts
                .artifact_type
                .or_else(|| config.filter(|_| media_type == crate::manifest::OCI_MANIFEST)),
            annotations: parts.annotations,
        })
    }

    /// The manifest as an index lists it. `referrer` adds the fields that a listing of referrers has.
    fn descriptor(&self, referrer: bool) -> Value {
        let mut descriptor =
            json!({"mediaType": self.media_type, "digest": self.digest, "size": self.bytes.len()});
        if let Some(artifact_type) = self.artifact_type.as_ref().filter(|_| referrer) {
            descriptor["artifactType"] = json!(artifact_type);
        }
        if let Some(annotations) = self.annotations.as_ref().filter(|_| referrer) {
            descriptor["annotations"] = annotations.clone();
        }
        descriptor
    }
}

/// The tag of the index that lists the referrers of `subject`, for registries without a referrers API.
pub(super) fn fallback_tag(subject: &Digest) -> String {
    format!("sha256-{}", subject.hex())
}

/// An index with one more manifest. `None` if it already has the manifest.
fn with_manifest(what: &str, index: Option<&[u8]>, descriptor: Value) -> Result<Option<Vec<u8>>, Error> {
    let mut index: Value = match index {
        None => json!({"schemaVersion": 2, "mediaType": crate::manifest::OCI_INDEX, "manifests": []}),
        Some(bytes) => serde_json::from_slice(bytes).map_err(|error| Error::malformed(what, error))?,
    };
    let Some(manifests) = index.get_mut("manifests").and_then(Value::as_array_mut) else {
        return Err(Error::malformed(what, "it is no index: it has no manifests"));
    };
    if manifests.iter().any(|it| it["digest"] == descriptor["digest"]) {
        return Ok(None);
    }
    manifests.push(descriptor);
    let bytes = serde_json::to_vec(&index).map_err(|error| Error::malformed(what, error))?;
    Ok(Some(bytes))
}
