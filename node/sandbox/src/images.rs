//! The node's image store: the functions of `thaw-images` that sandboxes and misses need, with this crate's errors.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use thaw_imagefs::digest::Digest;
use thaw_images::fetch::FetchOptions;
use thaw_images::fill::Filler;
use thaw_images::prefetch::{self, Prefetch};
use thaw_images::progress::Progress;
use thaw_images::pull::{PullOptions, PullPolicy};
use thaw_images::ranges::Priority;
use thaw_images::reference::ImageRef;
use thaw_images::registry::Client;
use thaw_images::source::{Platform, SourceOptions};
use thaw_images::store::{Image, Store};
use thaw_protocol::control::{BlobRange, ImageSpec};
use thaw_sys::lock::Lock;

use crate::closest::closest;
use crate::config::Config;
use crate::error::{Error, ErrorKind};
use crate::miss_counts::MissCounts;

mod failure;
mod file;
pub mod part;
pub mod shown;

pub use failure::failure;

/// Maximum age of the reported size of the store.
const MEASURED_EVERY: Duration = Duration::from_secs(60);

/// The store, and the fetches into it. A process has one, so that limits hold and reads are shared. Each tenant with a separate store has
/// its own, which shares only the limits. Clones share everything.
#[derive(Clone)]
pub struct Images {
    pub store: Store,
    pub client: Arc<Client>,
    pub config: Arc<Config>,
    filler: Filler,
    size: Arc<Mutex<Option<Size>>>,
    misses: Arc<MissCounts>,
}

/// The size of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// Bytes on disk.
    pub stored: u64,
    /// Bytes of file data if all of it were present.
    pub logical: u64,
    pub images: usize,
}

impl Size {
    /// The sum of both.
    pub fn and(self, other: Size) -> Size {
        Size {
            stored: self.stored + other.stored,
            logical: self.logical + other.logical,
            images: self.images + other.images,
        }
    }
}

impl std::fmt::Debug for Images {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Images({})", self.store.root().display())
    }
}

/// When to pull an image from its source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pull {
    /// Only if it is not in the store.
    #[default]
    Missing,
    /// Each time. Data that the store has is not transferred again.
    Always,
    /// Never.
    Never,
}

/// An image's descriptors and specification, for a VMM's root device.
#[derive(Debug)]
pub struct Exported {
    pub spec: ImageSpec,
    /// The metadata, then data and ready bitmap of each blob.
    pub descriptors: Vec<OwnedFd>,
}

impl Images {
    /// Opens the store with the default configuration, and creates it if it is missing.
    pub fn open(directory: &Path) -> Result<Images, Error> {
        Images::open_with(directory, Config::default())
    }

    /// Opens the store, and creates it if it is missing.
    pub fn open_with(directory: &Path, config: Config) -> Result<Images, Error> {
        let store = Store::open(directory).map_err(failure)?;
        let client = Client::new(config.fetch.clone())
            .map_err(|e| Error::new(ErrorKind::ConfigInvalid, format!("[fetch]: {}", failure(e).what)))?;
        Ok(Images::over(store, client, Arc::new(config)))
    }

    /// Opens another store, and creates it if it is missing. It has the same configuration and shares the limits of fetching, but its
    /// contents and its counters are separate.
    pub fn beside(&self, directory: &Path) -> Result<Images, Error> {
        let store = Store::open(directory).map_err(failure)?;
        Ok(Images::over(store, self.client.clone(), self.config.clone()))
    }

    fn over(store: Store, client: Arc<Client>, config: Arc<Config>) -> Images {
        let options = FetchOptions {
            source: SourceOptions {
                scratch: store.root().to_owned(),
                ..SourceOptions::default()
            },
            client: client.clone(),
        };
        Images {
            filler: Filler::new(store.clone(), options),
            store,
            client,
            config,
            size: Arc::default(),
            misses: Arc::default(),
        }
    }

    /// The same store with a separate counter of fetched bytes, for one sandbox.
    pub fn counting_alone(&self) -> Images {
        Images {
            filler: self.filler.counting_alone(),
            ..self.clone()
        }
    }

    /// The options for reaching image sources.
    pub fn source_options(&self, plain_http: bool) -> SourceOptions {
        SourceOptions {
            plain_http,
            scratch: self.store.root().to_owned(),
            ..SourceOptions::default()
        }
    }

    /// The options for pulling with this process's limits and connections.
    pub fn pull_options(&self, pull: Pull, plain_http: bool) -> PullOptions {
        PullOptions {
            policy: match pull {
                Pull::Missing => PullPolicy::Missing,
                Pull::Always => PullPolicy::Always,
                Pull::Never => PullPolicy::Never,
            },
            plain_http,
            client: Some(self.client.clone()),
            ..PullOptions::default()
        }
    }

    /// Pulls an image, unless the store has it.
    pub async fn pull(
        &self,
        reference: &str,
        pull: Pull,
        plain_http: bool,
        progress: Arc<dyn Progress>,
    ) -> Result<Image, Error> {
        let reference: ImageRef = reference.parse().map_err(failure)?;
        let options = self.pull_options(pull, plain_http);
        self.pull_with(&reference, &options, progress).await
    }

    /// The same, with all options.
    pub async fn pull_with(
        &self,
        reference: &ImageRef,
        options: &PullOptions,
        progress: Arc<dyn Progress>,
    ) -> Result<Image, Error> {
        self.store
            .pull(reference, &Platform::linux_amd64(), options, progress)
            .await
            .map_err(|e| match e {
                thaw_images::Error::NotFound { .. } if options.policy == PullPolicy::Never => {
                    let closest = self.closest_reference(&reference.to_string());
                    let what = format!("image {reference} is not in the store{closest}");
                    Error::new(ErrorKind::ImageNotStored, what)
                }
                e => failure(e),
            })
    }

    /// An image of the lowest `count` layers of this one. Its config is the same without the layers above.
    pub async fn lowest_layers(&self, image: &Image, count: usize) -> Result<Image, Error> {
        let all = image.config.rootfs().diff_ids();
        if count == all.len() {
            return Ok(image.clone());
        }
        let gone = || {
            Error::new(
                ErrorKind::ImageNotStored,
                format!(
                    "the lowest {count} layers of image {} are not in the store",
                    image.digest
                ),
            )
            .remedy("pull it again")
        };
        let inspection = self.store.inspect(&image.digest).map_err(failure)?;
        let mut layers = Vec::new();
        for layer in inspection.layers.get(..count).ok_or_else(gone)? {
            layers.push(
                self.store
                    .stored_layer(&layer.key)
                    .map_err(failure)?
                    .ok_or_else(gone)?,
            );
        }
        let mut config = image.config.clone();
        let diff_ids = all.get(..count).ok_or_else(gone)?.to_vec();
        config.rootfs_mut().set_diff_ids(diff_ids);
        let reference: ImageRef = image.reference.parse().map_err(failure)?;
        self.store
            .assemble(&layers, &config, &reference, false)
            .await
            .map_err(failure)
    }

    /// Bytes of an image's layer that are on this host. Layers count from the bottom.
    pub fn layer_bytes(&self, image: &Image, layer: usize) -> Result<u64, Error> {
        use std::os::unix::fs::MetadataExt;
        let inspection = self.store.inspect(&image.digest).map_err(failure)?;
        let blob = inspection
            .layers
            .get(layer)
            .and_then(|layer| image.blobs.iter().find(|blob| blob.id == layer.key));
        Ok(blob
            .and_then(|blob| std::fs::metadata(&blob.data).ok())
            .map_or(0, |data| data.blocks() * 512))
    }

    /// Fetches bytes of a blob into its cache file, with priority: a guest waits for them.
    pub async fn fill(&self, blob: &Digest, offset: u64, length: u64) -> Result<(), thaw_images::Error> {
        self.filler.fill(blob, offset, length, Priority::Demand).await
    }

    /// The store on disk.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// The filler of cache files.
    pub fn filler(&self) -> &Filler {
        &self.filler
    }

    /// The counts of refused and delayed misses.
    pub fn miss_counts(&self) -> &MissCounts {
        &self.misses
    }

    /// Begins to read ahead the bytes that a recorded run of the image read. `None` if there is no recording or the configuration forbids
    /// it. Must be called within a tokio runtime. Stops when the returned value is dropped.
    pub fn prefetch(&self, image: &Image, progress: Arc<dyn Progress>) -> Option<Prefetch> {
        if !self.config.prefetch.enabled {
            return None;
        }
        let (order, whose) = prefetch::find(image)?;
        let pieces = prefetch::wanted(&order, image, self.config.prefetch.limit.0);
        if pieces.is_empty() {
            return None;
        }
        tracing::debug!(image = %image.digest, ?whose, pieces = pieces.len(), "reading ahead");
        let filler = self.filler.clone();
        Some(Prefetch::start(pieces, progress, move |wanted| {
            let filler = filler.clone();
            async move {
                filler
                    .fill(&wanted.blob, wanted.offset, wanted.length, Priority::Prefetch)
                    .await
            }
        }))
    }

    /// Evicts images on a blocking thread if the store exceeds its limit. Must be called within a tokio runtime.
    pub fn collect_in_background(&self) -> Option<tokio::task::JoinHandle<()>> {
        let limit = self.config.store.limit?;
        let store = self.store.clone();
        let collect = move || match store.collect_to(limit.0) {
            Ok(pruned) if pruned.bytes > 0 => {
                let (images, layers, bytes) = (pruned.images, pruned.layers, pruned.bytes);
                tracing::info!(images, layers, bytes, "the store was over its limit of {limit}");
            }
            Ok(_) => {}
            Err(error) => tracing::warn!("the store cannot be brought below its limit of {limit}: {error}"),
        };
        Some(tokio::task::spawn_blocking(collect))
    }

    /// The size at the last measurement, if there was one.
    pub fn size(&self) -> Option<Size> {
        *self.size.locked()
    }

    /// Measures the store now and every [`MEASURED_EVERY`], so that readers of its size never wait for the walk. Must be called within a
    /// tokio runtime; runs until it is dropped.
    pub async fn keep_measured(self) {
        let mut ticks = tokio::time::interval(MEASURED_EVERY);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let store = self.store.clone();
            match tokio::task::spawn_blocking(move || store.usage()).await {
                Ok(Ok(usage)) => {
                    let size = Size {
                        stored: usage.stored,
                        logical: usage.logical,
                        images: usage.images.len(),
                    };
                    *self.size.locked() = Some(size);
                }
                Ok(Err(error)) => tracing::warn!("the store cannot be measured: {error}"),
                // The runtime ends.
                Err(_) => return,
            }
        }
    }

    /// The images in the store.
    pub fn list(&self) -> Result<Vec<Image>, Error> {
        self.store.images().map_err(failure)
    }

    /// The image with this manifest digest.
    pub fn by_digest(&self, digest: &str) -> Result<Option<Image>, Error> {
        let digest: Digest = digest.parse().map_err(|_| {
            Error::new(
                ErrorKind::BadReference,
                format!("{digest:?} is not an image digest"),
            )
        })?;
        self.store.image(&digest).map_err(failure)
    }

    /// The image with this reference, digest or unambiguous prefix of a digest.
    pub fn named(&self, wanted: &str) -> Result<Image, Error> {
        let hex = wanted.strip_prefix("sha256:").unwrap_or(wanted);
        let by_digest: Vec<_> = match hex.len() >= 6 && hex.bytes().all(|b| b.is_ascii_hexdigit()) {
            true => self
                .list()?
                .into_iter()
                .filter(|i| i.digest.hex().starts_with(hex))
                .collect(),
            false => Vec::new(),
        };
        match by_digest.as_slice() {
            [one] => Ok(one.clone()),
            [] => {
                let reference: ImageRef = wanted.parse().map_err(failure)?;
                let reference = absolute(reference)?;
                self.store.find(&reference).map_err(failure)?.ok_or_else(|| {
                    let what = format!(
                        "no image {wanted} is in the store{}",
                        self.closest_reference(wanted)
                    );
                    Error::new(ErrorKind::ImageNotStored, what).remedy("see `thaw image ls`")
                })
            }
            _ => Err(Error::new(
                ErrorKind::BadReference,
                format!("more than one image begins with {wanted}"),
            )),
        }
    }

    /// The reference in the store that is closest to an unknown one, for errors.
    fn closest_reference(&self, wanted: &str) -> String {
        let images = self.list().unwrap_or_default();
        closest(wanted, images.iter().map(|image| image.reference.as_str()))
    }

    /// Removes the image with this reference, digest or unambiguous prefix of a digest. Returns its digest.
    pub fn remove(&self, wanted: &str) -> Result<String, Error> {
        let image = self.named(wanted)?;
        self.store.remove(&image.digest).map_err(failure)?;
        Ok(image.digest.to_string())
    }
}

/// A local reference with its path made absolute, as the store keeps it.
pub(crate) fn absolute(mut reference: ImageRef) -> Result<ImageRef, Error> {
    let path = match &mut reference {
        ImageRef::Layout { directory, .. } => directory,
        ImageRef::Archive { file, .. } => file,
        ImageRef::Registry(_) => return Ok(reference),
    };
    *path = std::path::absolute(&*path)
        .map_err(|e| Error::system(format!("cannot tell where {} is", path.display()), &e))?;
    Ok(reference)
}

/// Opens the files that a VMM needs to serve an image.
pub fn export(image: &Image, name: String) -> Result<Exported, Error> {
    let open = |path: &Path| -> Result<OwnedFd, Error> {
        let file =
            File::open(path).map_err(|e| Error::system(format!("cannot open {}", path.display()), &e))?;
        Ok(file.into())
    };
    let mut descriptors = vec![open(&image.metadata)?];
    let mut blobs = Vec::new();
    for blob in &image.blobs {
        descriptors.push(open(&blob.data)?);
        descriptors.push(open(&blob.ready)?);
        blobs.push(BlobRange {
            address: blob.address,
            length: blob.length,
            digest: *blob.id.bytes(),
        });
    }
    Ok(Exported {
        spec: ImageSpec { name, blobs },
        descriptors,
    })
}

/// Total size of an image's files, bytes.
pub fn size(image: &Image) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let files = image.blobs.iter().map(|b| &b.data).chain([&image.metadata]);
    files
        .filter_map(|path| std::fs::metadata(path).ok())
        .map(|m| m.blocks() * 512)
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use thaw_images::progress::Silent;

    #[tokio::test]
    async fn a_file_of_an_image_is_read_and_what_is_none_is_told_from_it() {
        let directory = tempfile::tempdir().unwrap();
        let layout = directory.path().join("layout");
        let content = vec![7; 9000];
        let reference = thaw_tiny_node::make_image(&layout, "etc/passwd", &content);
        let images = Images::open(&directory.path().join("store")).unwrap();
        let image = images
            .pull(&reference, Pull::Missing, false, Arc::new(Silent))
            .await
            .unwrap();
        let read = |path: &'static str, most| images.read_file(&image, path, most);
        assert_eq!(read("/etc/passwd", 9000).await.unwrap(), Some(content));
        for (path, most) in [
            ("/etc/passwd", 8999),
            ("/etc/group", 1),
            ("/etc", 1),
            ("/etc/passwd/x", 1),
        ] {
            assert_eq!(read(path, most).await.unwrap(), None, "{path}");
        }
    }

    #[tokio::test]
    async fn an_image_never_pulled_is_told_from_one_that_does_not_exist() {
        let directory = tempfile::tempdir().unwrap();
        let images = Images::open(directory.path()).unwrap();
        let never = images
            .pull("registry.invalid/x", Pull::Never, false, Arc::new(Silent))
            .await
            .unwrap_err();
        assert_eq!(never.kind, ErrorKind::ImageNotStored);
        let absent = images
            .pull("oci:/nowhere", Pull::Missing, false, Arc::new(Silent))
            .await
            .unwrap_err();
        assert_eq!(absent.kind, ErrorKind::ImageNotFound);
        let bad = images
            .pull("No Such!", Pull::Missing, false, Arc::new(Silent))
            .await
            .unwrap_err();
        assert_eq!(bad.kind, ErrorKind::BadReference);
        assert_eq!(
            images.remove("busybox").unwrap_err().kind,
            ErrorKind::ImageNotStored
        );
    }
}
