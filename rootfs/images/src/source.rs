//! Sources of images: registries, OCI layout directories and archives, behind one trait.
//!
//! A [`Source`] yields documents (manifests, configs) and layers. [`resolve`] finds one platform's image for a
//! reference and verifies every document on the way. A layer is verified by the code that reads it: its stored form
//! against the descriptor's digest, its tar against the DiffID.

pub(crate) mod archive;
mod fallback;
pub(crate) mod layout;
pub mod push;
mod referrers;
mod registry;
mod resolve;
pub(crate) mod section;

use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use oci_spec::image::ImageConfiguration;
use serde::{Deserialize, Serialize};
use thaw_imagefs::digest::Digest;
use tokio::task::AbortHandle;

use crate::error::Error;
use crate::manifest;
use crate::progress::Progress;
use crate::reference::ImageRef;
use crate::registry::Client;

pub use crate::manifest::{Descriptor, Document, OCI_CONFIG, OCI_MANIFEST, Platform};
pub use crate::registry::{Credentials, Retry};
pub use fallback::{Fallback, Sender};
pub use push::{Push, Upload};
pub use referrers::{Referrer, referrers};
pub use resolve::resolve;

/// The target of a reference, before a platform is chosen.
pub enum Root {
    /// A manifest or an index, its bytes verified if the reference had a digest.
    Document {
        media_type: Option<String>,
        bytes: Vec<u8>,
    },
    /// Several manifests, of which the platform selects one.
    Choice(Vec<Descriptor>),
    /// A form without manifests: it names the parts directly. `manifest` is a synthetic one, for identity.
    Parts {
        manifest: Vec<u8>,
        config: Vec<u8>,
        layers: Vec<LayerSource>,
    },
}

/// One layer as its source stores it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerSource {
    /// SHA-256 of the uncompressed tar.
    pub diff_id: Digest,
    /// SHA-256 of the stored form; unknown in forms without manifests.
    pub digest: Option<Digest>,
    /// Bytes of the stored form, if known.
    pub size: Option<u64>,
    /// Other addresses of the layer (foreign layers).
    #[serde(default)]
    pub urls: Vec<String>,
    /// The member of an archive that holds it.
    #[serde(default)]
    pub member: Option<String>,
}

impl LayerSource {
    /// How messages name it.
    pub fn name(&self) -> String {
        format!("layer {}", self.digest.unwrap_or(self.diff_id))
    }
}

/// One platform's image, verified down to its config.
#[derive(Debug)]
pub struct Resolved {
    /// Digest of the manifest: the image's identity.
    pub digest: Digest,
    /// The manifest as it was read.
    pub manifest: Vec<u8>,
    /// The config as it was read.
    pub config_bytes: Vec<u8>,
    pub config: ImageConfiguration,
    /// Bottom first; as many as the config has DiffIDs. Empty if the layers are not tars.
    pub layers: Vec<LayerSource>,
    /// The manifest's layers with their annotations; empty for forms without manifests.
    pub descriptors: Vec<Descriptor>,
    pub kind: manifest::Kind,
    /// The manifest it refers to: of a converted image, the original's.
    pub subject: Option<Descriptor>,
    /// The manifest's.
    pub annotations: std::collections::BTreeMap<String, String>,
}

impl Resolved {
    /// The digest of every layer, in the manifest's order.
    pub fn layer_digests(&self) -> Vec<Digest> {
        match self.descriptors.as_slice() {
            [] => self
                .layers
                .iter()
                .map(|layer| layer.digest.unwrap_or(layer.diff_id))
                .collect(),
            descriptors => descriptors.iter().map(|layer| layer.digest).collect(),
        }
    }
}

/// A source of images.
#[async_trait]
pub trait Source: Send + Sync {
    /// Reads the target of the reference.
    async fn root(&self) -> Result<Root, Error>;

    /// A manifest or an index by its descriptor, verified.
    async fn manifest(&self, descriptor: &Descriptor) -> Result<Vec<u8>, Error>;

    /// A config by its descriptor, verified.
    async fn config(&self, descriptor: &Descriptor) -> Result<Vec<u8>, Error>;

    /// Opens a layer's stored form, unverified, at the first place that has it, beginning with `place`. Errors of its reader may contain an
    /// [`Error`]. See [`Fallback`].
    async fn open(&self, layer: &LayerSource, place: usize) -> Result<LayerBody, Error>;
}

/// A layer's stored form as it arrives.
pub struct LayerBody {
    /// May block, so use it on a blocking thread.
    pub reader: Box<dyn Read + Send>,
    /// The task that receives it, if it comes over a network. Aborting the task makes the reader fail at once.
    pub transfer: Option<AbortHandle>,
    pub sender: Sender,
}

/// Ends a transfer when the pull is cancelled or dropped, which wakes the thread that waits for its bytes.
pub struct AbortOnDrop(pub Option<AbortHandle>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.iter().for_each(AbortHandle::abort);
    }
}

impl LayerBody {
    /// The body of a file at `place`.
    fn local(reader: impl Read + Send + 'static, place: &Path) -> Self {
        Self {
            reader: Box::new(reader),
            transfer: None,
            sender: Sender::only(place.display().to_string()),
        }
    }
}

/// How to reach registries.
#[derive(Clone)]
pub struct SourceOptions {
    /// HTTP without TLS, for every registry. It is used for loopback addresses in any case, and for the registries
    /// that the environment variable `THAW_PLAIN_HTTP` lists, separated by commas.
    pub plain_http: bool,
    pub credentials: Credentials,
    pub retry: Retry,
    /// Directory in which a compressed archive is expanded, as an unnamed file.
    pub scratch: PathBuf,
    /// A shared client, whose mirrors are asked for whole layers before the registry. If absent, a new one is created.
    pub client: Option<Arc<Client>>,
}

impl Default for SourceOptions {
    fn default() -> Self {
        Self {
            plain_http: false,
            credentials: Credentials::default(),
            retry: Retry::default(),
            scratch: std::env::temp_dir(),
            client: None,
        }
    }
}

impl SourceOptions {
    /// The options that registries need.
    pub fn registry(&self) -> crate::registry::Options {
        crate::registry::Options {
            plain_http: self.plain_http,
            credentials: self.credentials.clone(),
            retry: self.retry,
        }
    }

    /// The client to share, or a new one.
    pub(crate) fn client(&self) -> Result<Arc<Client>, Error> {
        match &self.client {
            Some(client) => Ok(client.clone()),
            None => Client::new(Default::default()),
        }
    }
}

/// Opens the source a reference names. Nothing is transferred yet.
///
/// # Errors
/// `NotFound` if the directory or file does not exist, `Malformed` if it is not an image, `Credentials`.
pub async fn open(
    reference: &ImageRef,
    options: &SourceOptions,
    progress: Arc<dyn Progress>,
) -> Result<Box<dyn Source>, Error> {
    match reference {
        ImageRef::Layout { directory, tag } => {
            Ok(Box::new(layout::Layout::open(directory.clone(), tag.clone())?))
        }
        ImageRef::Archive { file, tag } => {
            let (file, tag, scratch) = (file.clone(), tag.clone(), options.scratch.clone());
            let opened =
                tokio::task::spawn_blocking(move || archive::Archive::open(file, tag, &scratch)).await;
            Ok(Box::new(opened.map_err(|_| Error::Cancelled)??))
        }
        ImageRef::Registry(reference) => Ok(Box::new(
            registry::Registry::open(reference.clone(), options, progress).await?,
        )),
    }
}

/// Compares a document with its descriptor.
fn verify(what: &str, bytes: Vec<u8>, descriptor: &Descriptor) -> Result<Vec<u8>, Error> {
    if (bytes.len() as u64) < descriptor.size {
        let (expected, got) = (descriptor.size, bytes.len() as u64);
        return Err(Error::TruncatedLayer {
            what: format!("{what} {}", descriptor.digest),
            expected,
            got,
        });
    }
    let got = Digest::of(&bytes);
    if got != descriptor.digest {
        return Err(Error::DigestMismatch {
            what: what.into(),
            expected: descriptor.digest,
            got,
        });
    }
    Ok(bytes)
}

#[cfg(test)]
pub(crate) mod fixture;
#[cfg(test)]
#[path = "source_test.rs"]
mod tests;
