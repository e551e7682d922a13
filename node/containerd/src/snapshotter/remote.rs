//! Layers that are in the image store instead of a directory: which image containerd's labels name, and which of its layers a snapshot is.
//!
//! Before containerd fetches a layer it prepares a snapshot for it, with labels that name the image. If the answer is that the snapshot
//! exists already, containerd does not fetch the layer. So the store pulls the image at its first layer (lazily, if possible), and each
//! layer gets that answer.

use std::sync::Arc;

use async_trait::async_trait;
use thaw_imagefs::Digest;
use thaw_images::progress::Silent;
use thaw_images::store::Lease;
use thaw_sandbox::error::{Error, ErrorKind};
use thaw_sandbox::images::part::Part;
use thaw_sandbox::images::{Images, Pull};

/// The label with the chain ID of the requested snapshot (containerd `pkg/snapshotters`, `core/snapshots`).
pub const TARGET: &str = "containerd.io/snapshot.ref";
/// The label with the image's reference.
const IMAGE: &str = "containerd.io/snapshot/cri.image-ref";
/// The label with the digest of its manifest for this platform.
const MANIFEST: &str = "containerd.io/snapshot/cri.manifest-digest";

/// Files that are larger than this are left out by [`Layers::file`].
pub const LARGEST_FILE: u64 = 1 << 20;

/// A layer of which containerd requests a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// The snapshot's chain ID, which is also its name.
    pub target: String,
    /// The image, pinned to its manifest if that is known.
    pub reference: String,
}

impl Wanted {
    /// The layer that the labels name; `None` if they name no image.
    pub fn from_labels<'a>(label: impl Fn(&str) -> Option<&'a String>) -> Option<Wanted> {
        let target = label(TARGET)?.clone();
        let reference = label(IMAGE)?;
        let reference = match label(MANIFEST) {
            Some(manifest) if !reference.contains('@') => format!("{reference}@{manifest}"),
            _ => reference.clone(),
        };
        Some(Wanted { target, reference })
    }
}

/// Whether containerd might be able to pull what the store could not: it has the credentials of a pod's `imagePullSecrets`, and mirrors,
/// proxies and authorities of its own. Some registries answer "not found" for images that a caller may not see.
pub fn is_kept_from_us(failure: &Error) -> bool {
    matches!(
        failure.kind,
        ErrorKind::RegistryDenied | ErrorKind::ImageNotFound | ErrorKind::RegistryUnreachable
    )
}

/// What the snapshotter needs of an image in the store.
#[derive(Clone, Debug)]
pub struct Pulled {
    /// The digest of its manifest.
    pub digest: Digest,
    /// The diff IDs of its layers, the lowest first.
    pub diff_ids: Vec<Digest>,
    /// Keeps it in the store.
    pub lease: Option<Lease>,
}

impl Pulled {
    /// The number of the layer with the chain ID `target`; 0 is the lowest.
    ///
    /// # Errors
    /// No layer has it: containerd and the store have different images.
    pub fn layer(&self, target: &str) -> Result<usize, Error> {
        chain_ids(&self.diff_ids)
            .iter()
            .position(|id| id.to_string() == target)
            .ok_or_else(|| {
                Error::new(
                    ErrorKind::ImageMalformed,
                    format!("image {} has no layers with chain ID {target}", self.digest),
                )
            })
    }
}

/// The chain ID of each layer (image-spec, config.md, "Layer ChainID").
fn chain_ids(diff_ids: &[Digest]) -> Vec<Digest> {
    let mut chain: Vec<Digest> = Vec::with_capacity(diff_ids.len());
    for diff_id in diff_ids {
        let id = match chain.last() {
            None => *diff_id,
            Some(below) => Digest::of(format!("{below} {diff_id}").as_bytes()),
        };
        chain.push(id);
    }
    chain
}

/// The image store, as the snapshotter uses it.
#[async_trait]
pub trait Layers: Send + Sync + 'static {
    /// Pulls an image unless it is in the store.
    async fn pull(&self, reference: &str) -> Result<Pulled, Error>;

    /// An image that is in the store.
    async fn stored(&self, digest: &str) -> Result<Pulled, Error>;

    /// An image of the lowest `count` layers of a stored one. Makes it if it is missing.
    async fn lowest(&self, digest: &str, count: usize) -> Result<Pulled, Error>;

    /// A regular file of an image, if it has at most [`LARGEST_FILE`] bytes.
    async fn file(&self, digest: &str, path: &str) -> Result<Option<Vec<u8>>, Error>;

    /// The contents of an image at the volumes of its config.
    async fn volumes(&self, digest: &str) -> Result<Part, Error>;

    /// All files of an image.
    async fn whole(&self, digest: &str) -> Result<Part, Error>;

    /// The bytes of a layer that are on this host.
    async fn bytes(&self, digest: &str, layer: usize) -> Result<u64, Error>;
}

#[async_trait]
impl Layers for Images {
    async fn pull(&self, reference: &str) -> Result<Pulled, Error> {
        let image = Images::pull(self, reference, Pull::Missing, false, Arc::new(Silent)).await?;
        pulled(&image)
    }

    async fn stored(&self, digest: &str) -> Result<Pulled, Error> {
        let image = self.by_digest(digest)?.ok_or_else(|| gone(digest))?;
        pulled(&image)
    }

    async fn lowest(&self, digest: &str, count: usize) -> Result<Pulled, Error> {
        let image = self.by_digest(digest)?.ok_or_else(|| gone(digest))?;
        pulled(&self.lowest_layers(&image, count).await?)
    }

    async fn file(&self, digest: &str, path: &str) -> Result<Option<Vec<u8>>, Error> {
        let image = self.by_digest(digest)?.ok_or_else(|| gone(digest))?;
        self.read_file(&image, path, LARGEST_FILE).await
    }

    async fn volumes(&self, digest: &str) -> Result<Part, Error> {
        let image = self.by_digest(digest)?.ok_or_else(|| gone(digest))?;
        Images::volumes(self, &image).await
    }

    async fn whole(&self, digest: &str) -> Result<Part, Error> {
        let image = self.by_digest(digest)?.ok_or_else(|| gone(digest))?;
        Images::whole(self, &image).await
    }

    async fn bytes(&self, digest: &str, layer: usize) -> Result<u64, Error> {
        let image = self.by_digest(digest)?.ok_or_else(|| gone(digest))?;
        self.layer_bytes(&image, layer)
    }
}

fn gone(digest: &str) -> Error {
    Error::new(
        ErrorKind::ImageNotStored,
        format!("image {digest} was removed from the store while a snapshot needs it"),
    )
    .remedy("pull it again")
}

fn diff_ids(image: &thaw_images::store::Image) -> Result<Vec<Digest>, Error> {
    let parse = |text: &String| {
        text.parse()
            .map_err(|error| Error::new(ErrorKind::ImageMalformed, format!("the image's config: {error}")))
    };
    image.config.rootfs().diff_ids().iter().map(parse).collect()
}

fn pulled(image: &thaw_images::store::Image) -> Result<Pulled, Error> {
    let lease = image.lease().map_err(thaw_sandbox::images::failure)?;
    Ok(Pulled {
        digest: image.digest,
        diff_ids: diff_ids(image)?,
        lease: Some(lease),
    })
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    #[test]
    fn labels_name_an_image_and_pin_it() {
        let wanted = |pairs: &[(&str, &str)]| {
            let labels: HashMap<_, _> = pairs.iter().map(|(k, v)| (*k, (*v).to_owned())).collect();
            Wanted::from_labels(|name| labels.get(name))
        };
        let all = [(TARGET, "sha256:t"), (IMAGE, "reg/a:1"), (MANIFEST, "sha256:m")];
        assert_eq!(wanted(&all).unwrap().reference, "reg/a:1@sha256:m");
        let pinned = [
            (TARGET, "sha256:t"),
            (IMAGE, "reg/a@sha256:x"),
            (MANIFEST, "sha256:m"),
        ];
        assert_eq!(wanted(&pinned).unwrap().reference, "reg/a@sha256:x");
        // Without an image there is nothing to pull: containerd unpacks by itself.
        assert_eq!(wanted(&all[..1]), None);
        assert_eq!(wanted(&all[1..]), None);
    }

    #[test]
    fn a_layer_is_known_by_its_chain_id() {
        let ids = [Digest::of(b"a"), Digest::of(b"b"), Digest::of(b"c")];
        let image = Pulled {
            digest: Digest::of(b"m"),
            diff_ids: ids.to_vec(),
            lease: None,
        };
        let second = Digest::of(format!("{} {}", ids[0], ids[1]).as_bytes());
        let third = Digest::of(format!("{second} {}", ids[2]).as_bytes());
        assert_eq!(image.layer(&ids[0].to_string()).unwrap(), 0);
        assert_eq!(image.layer(&second.to_string()).unwrap(), 1);
        assert_eq!(image.layer(&third.to_string()).unwrap(), 2);
        assert!(image.layer(&ids[1].to_string()).is_err());
    }
}
