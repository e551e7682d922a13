//! Layers that are in the image store instead of a directory: what containerd's labels ask for, and whether the store's
//! image really has it.
//!
//! Before containerd fetches a layer it prepares a snapshot for it, with labels that name the image. If the answer is that
//! the snapshot exists already, the layer is never fetched. So the first layer's labels have the store pull the image (lazily,
//! where it can be), and every layer is answered so.

use std::sync::Arc;

use async_trait::async_trait;
use thaw_imagefs::Digest;
use thaw_images::progress::Silent;
use thaw_images::store::Lease;
use thaw_sandbox::error::{Error, ErrorKind};
use thaw_sandbox::images::part::Part;
use thaw_sandbox::images::{Images, Pull};

/// The chain ID of the snapshot that is wanted (containerd `pkg/snapshotters`, `core/snapshots`).
pub const TARGET: &str = "containerd.io/snapshot.ref";
/// The image's reference.
const IMAGE: &str = "containerd.io/snapshot/cri.image-ref";
/// The digest of its manifest for this platform.
const MANIFEST: &str = "containerd.io/snapshot/cri.manifest-digest";

/// Files that are larger than this are left out by [`Layers::file`].
pub const LARGEST_FILE: u64 = 1 << 20;

/// A layer containerd wants a snapshot of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// The snapshot's chain ID, which is also its name.
    pub target: String,
    /// The image, pinned to its manifest where that is known.
    pub reference: String,
}

impl Wanted {
    /// What the labels ask for; nothing where they name no image.
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

/// Whether containerd may have what the store could not get: it has the login of a pod's `imagePullSecrets`, and mirrors, proxies
/// and authorities of its own. Some registries say of what one may not see that it is not there.
pub fn is_kept_from_us(failure: &Error) -> bool {
    matches!(
        failure.kind,
        ErrorKind::RegistryDenied | ErrorKind::ImageNotFound | ErrorKind::RegistryUnreachable
    )
}

/// An image in the store, as far as a snapshotter needs to know it.
#[derive(Clone, Debug)]
pub struct Pulled {
    /// Of its manifest.
    pub digest: Digest,
    /// Of its layers, the bottom first.
    pub diff_ids: Vec<Digest>,
    /// Keeps it there.
    pub lease: Option<Arc<Lease>>,
}

impl Pulled {
    /// Which layer has the chain ID `target`: 0 is the bottom.
    ///
    /// # Errors
    /// When none has: containerd and the store do not mean the same image.
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

/// Of each layer with those below it (image-spec, config.md, "Layer ChainID").
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

/// Where images come from.
#[async_trait]
pub trait Layers: Send + Sync + 'static {
    /// Makes sure an image is in the store.
    async fn pull(&self, reference: &str) -> Result<Pulled, Error>;

    /// An image that is in the store.
    async fn stored(&self, digest: &str) -> Result<Pulled, Error>;

    /// The image of the lowest `count` layers of a stored one, made if need be.
    async fn lowest(&self, digest: &str, count: usize) -> Result<Pulled, Error>;

    /// A file of an image, if it is one of no more than [`LARGEST_FILE`] bytes.
    async fn file(&self, digest: &str, path: &str) -> Result<Option<Vec<u8>>, Error>;

    /// What an image has where its config declares volumes.
    async fn volumes(&self, digest: &str) -> Result<Part, Error>;

    /// All of an image.
    async fn whole(&self, digest: &str) -> Result<Part, Error>;

    /// Bytes of a layer that are on this host.
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
        lease: Some(Arc::new(lease)),
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
