//! Getting an image: resolve, unpack the layers that are missing (a few at a time), write the metadata.

use std::collections::HashSet;
use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use futures_util::StreamExt;
use tokio::task::AbortHandle;
use tokio_util::sync::CancellationToken;

use crate::digest::Digest;
use crate::erofs;
use crate::error::Error;
use crate::fetch::Fetcher;
use crate::merge;
use crate::progress::{Event, Progress};
use crate::reference::ImageRef;
use crate::source::{self, Credentials, LayerSource, Platform, Resolved, Retry, Source, SourceOptions};
use crate::tree::LayerTree;

use super::form::{Form, Origin};
use super::layer::{self, Job};
use super::lock::Lock;
use super::record::{self, BlobRecord, LayerRecord, Record};
use super::{Image, PARTIAL, Store, sync_parent};

/// Layers unpacked at a time.
const CONCURRENT_LAYERS: usize = 3;

/// When to ask the source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PullPolicy {
    /// A registry only when the store has not got the reference; a directory or an archive always, which is cheap, and
    /// sees that it was changed.
    #[default]
    Missing,
    /// Always; layers the store has are not transferred again.
    Always,
    /// Never: what the reference named last, or an error.
    Never,
}

/// How to pull.
#[derive(Clone)]
pub struct PullOptions {
    pub policy: PullPolicy,
    /// See [`SourceOptions::plain_http`].
    pub plain_http: bool,
    pub credentials: Credentials,
    pub retry: Retry,
    /// Whether file data may stay in the registry until it is read. Without, all of it is in the store at the end.
    pub lazy: bool,
    /// What reads ranges, to share its limits and connections; without, one is made for the pull.
    pub fetcher: Option<Arc<Fetcher>>,
}

impl Default for PullOptions {
    fn default() -> Self {
        Self {
            policy: PullPolicy::default(),
            plain_http: false,
            credentials: Credentials::default(),
            retry: Retry::default(),
            lazy: true,
            fetcher: None,
        }
    }
}

impl Store {
    /// Makes sure the image a reference names is in the store, and returns it.
    ///
    /// Layers are streamed: verified, decompressed and unpacked as they arrive, on threads of their own. Several
    /// processes may pull the same image: each layer is made once. When it fails, nothing of it is left.
    ///
    /// # Errors
    /// Every variant of [`Error`] but `InUse`.
    pub async fn pull(
        &self,
        reference: &ImageRef,
        platform: &Platform,
        options: &PullOptions,
        progress: Arc<dyn Progress>,
    ) -> Result<Image, Error> {
        let reference = absolute(reference)?;
        let local = !matches!(reference, ImageRef::Registry(_));
        if options.policy == PullPolicy::Never || (options.policy == PullPolicy::Missing && !local) {
            let (store, wanted) = (self.clone(), reference.clone());
            let found = blocking(move || store.find(&wanted)).await?;
            match found.filter(|image| fits(image, platform)) {
                Some(image) => return Ok(image),
                None if options.policy == PullPolicy::Never => {
                    return Err(Error::NotFound {
                        what: format!("image {reference}"),
                        place: self.root.display().to_string(),
                        advice: "it may not be pulled here (policy never): pull it first".into(),
                    });
                }
                None => {}
            }
        }
        let pulled = self
            .pull_from_source(&reference, platform, options, progress)
            .await;
        if pulled.is_err() {
            let store = self.clone();
            // What could not be removed now is removed when the store is next opened; the pull's error matters more.
            let _ = blocking(move || store.collect_if_idle()).await;
        }
        pulled
    }

    async fn pull_from_source(
        &self,
        reference: &ImageRef,
        platform: &Platform,
        options: &PullOptions,
        progress: Arc<dyn Progress>,
    ) -> Result<Image, Error> {
        // Shared: nobody collects layers that are made but not yet part of an image.
        let store = self.clone();
        let making = Arc::new(blocking(move || store.lock_shared("store")).await?);
        let source = source::open(reference, &self.source_options(options), progress.clone()).await?;
        let resolved = source::resolve(&*source, platform).await?;
        let mut seen = HashSet::new();
        let layers: Vec<_> = resolved
            .layers
            .iter()
            .filter(|it| seen.insert(it.diff_id))
            .cloned()
            .collect();
        progress.event(Event::Resolved {
            digest: resolved.digest,
            layers: layers.len(),
        });

        let (store, digest, name) = (self.clone(), resolved.digest, reference.to_string());
        let existing = blocking({
            let name = name.clone();
            move || match store.image(&digest)? {
                Some(image) => store.refer(&name, digest).map(|()| Some(image)),
                None => Ok(None),
            }
        });
        if let Some(image) = existing.await? {
            layers
                .iter()
                .for_each(|layer| progress.event(Event::Cached { layer: layer.diff_id }));
            return Ok(image);
        }
        self.make_layers(&*source, layers, making.clone(), progress.clone())
            .await?;
        progress.event(Event::Assembling);
        let store = self.clone();
        let plain_http = options.plain_http;
        blocking(move || store.assemble_image(&resolved, name, plain_http)).await
    }

    pub(super) fn source_options(&self, options: &PullOptions) -> SourceOptions {
        SourceOptions {
            plain_http: options.plain_http,
            credentials: options.credentials.clone(),
            retry: options.retry,
            scratch: self.root.clone(),
        }
    }

    /// Makes all layers, or none: after the first failure the others are stopped, and waited for.
    async fn make_layers(
        &self,
        source: &dyn Source,
        layers: Vec<LayerSource>,
        making: Arc<Lock>,
        progress: Arc<dyn Progress>,
    ) -> Result<(), Error> {
        let cancelled = CancellationToken::new();
        // A pull that is dropped stops its threads too.
        let _stop = cancelled.clone().drop_guard();
        let mut jobs = futures_util::stream::iter(layers)
            .map(|layer| self.make_layer(source, layer, making.clone(), progress.clone(), &cancelled))
            .buffer_unordered(CONCURRENT_LAYERS);
        let mut first = Ok(());
        while let Some(made) = jobs.next().await {
            if made.is_err() && first.is_ok() {
                first = made;
                cancelled.cancel();
            }
        }
        first
    }

    async fn make_layer(
        &self,
        source: &dyn Source,
        layer: LayerSource,
        making: Arc<Lock>,
        progress: Arc<dyn Progress>,
        cancelled: &CancellationToken,
    ) -> Result<(), Error> {
        let (store, diff_id) = (self.clone(), layer.diff_id);
        if cancelled.is_cancelled() {
            return Err(Error::Cancelled);
        }
        // Not raced with cancellation: what it makes must be gone before the pull's failure is told.
        let begun = blocking(move || Making::begin(&store, &diff_id, making)).await?;
        let Some(making) = begun else {
            progress.event(Event::Cached { layer: diff_id });
            return Ok(());
        };
        progress.event(Event::Started {
            layer: diff_id,
            total: layer.size,
        });
        let source = tokio::select! {
            biased;
            () = cancelled.cancelled() => Err(Error::Cancelled),
            source = source.open(&layer) => source,
        }?;
        let (body, transfer) = (source.reader, AbortOnDrop(source.transfer));
        let (boot, stop) = (self.boot, cancelled.clone());
        let unpacking = blocking(move || {
            layer::unpack_into(
                Job {
                    layer,
                    body,
                    progress,
                    cancelled: stop,
                },
                &making.partial.path,
                boot,
            )?;
            making.finish()
        });
        tokio::pin!(unpacking);
        tokio::select! {
            unpacked = &mut unpacking => return unpacked,
            () = cancelled.cancelled() => {}
        }
        drop(transfer);
        unpacking.await
    }

    /// Writes the image's directory from its layers.
    fn assemble_image(
        &self,
        resolved: &Resolved,
        reference: String,
        plain_http: bool,
    ) -> Result<Image, Error> {
        let digest = resolved.digest;
        let _lock = self.lock_exclusive(&format!("image-{}", digest.hex()))?;
        let image = match self.image(&digest)? {
            Some(image) => image,
            None => {
                self.write_image(resolved, &reference, plain_http)?;
                self.image(&digest)?.ok_or_else(|| {
                    Error::malformed(format!("image {digest}"), "it cannot be read back from the store")
                })?
            }
        };
        self.refer(&reference, digest)?;
        Ok(image)
    }

    fn write_image(&self, resolved: &Resolved, reference: &str, plain_http: bool) -> Result<(), Error> {
        let directory = self.image_directory(&resolved.digest);
        let partial = Partial::create(&directory)?;
        let layers = resolved.layers.iter().map(|layer| LayerRecord {
            key: layer.diff_id,
            form: Form::Tar,
            origin: Origin::Layer(layer.clone()),
        });
        let layers = layers.collect();
        let mut record = Record::new(resolved.digest, reference.to_owned(), plain_http, layers);
        self.write_metadata(&mut record, &partial.path)?;
        let bytes = serde_json::to_vec_pretty(&record);
        let bytes = bytes.map_err(|error| Error::malformed("the image's record", error))?;
        for (name, bytes) in [
            (record::CONFIG, &resolved.config_bytes[..]),
            (record::LEASE, &[]),
            (record::RECORD, &bytes),
        ] {
            let path = partial.path.join(name);
            record::write_synced(&path, bytes).map_err(|error| Error::io(&path, error))?;
        }
        if directory.exists() {
            // It is there but not whole, as after a crash; no sandbox of this boot can have it.
            self.remove_directory(&directory)?;
        }
        partial.rename_to(&directory)
    }

    fn write_metadata(&self, record: &mut Record, directory: &Path) -> Result<(), Error> {
        let mut trees = Vec::new();
        for layer in &record.layers {
            trees.push(self.layer_tree(&layer.key)?);
        }
        let lengths: Vec<u64> = trees.iter().map(|tree| tree.data_length).collect();
        let tree = merge::flatten(&trees)?;
        drop(trees);
        let path = directory.join(record::METADATA);
        let io = |error| Error::io(&path, error);
        let file = std::fs::File::create_new(&path).map_err(io)?;
        let mut out = BufWriter::with_capacity(1 << 20, file);
        let summary = erofs::write(&tree, &lengths, &mut out).map_err(|error| match error {
            erofs::WriteError::Io(error) => io(error),
            other => Error::Metadata(other),
        })?;
        let file = out.into_inner().map_err(|error| io(error.into_error()))?;
        file.sync_all().map_err(io)?;
        record.metadata_length = file.metadata().map_err(io)?.len();
        let placed = record
            .layers
            .iter()
            .zip(&summary.blobs)
            .filter(|(_, blob)| blob.length > 0);
        record.blobs = placed
            .map(|(layer, blob)| BlobRecord {
                address: blob.address,
                length: blob.length,
                key: layer.key,
            })
            .collect();
        Ok(())
    }

    fn layer_tree(&self, diff_id: &Digest) -> Result<LayerTree, Error> {
        let path = self.layer_directory(diff_id).join(layer::TREE);
        let bytes = std::fs::read(&path).map_err(|error| Error::io(&path, error))?;
        LayerTree::from_bytes(&bytes).map_err(|error| Error::malformed(path.display().to_string(), error))
    }
}

/// Ends a transfer when the pull is cancelled or dropped, which wakes the thread that waits for its bytes.
struct AbortOnDrop(Option<AbortHandle>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.iter().for_each(AbortHandle::abort);
    }
}

/// A layer being made: its lock held, and the store kept from collecting it.
struct Making {
    partial: Partial,
    target: PathBuf,
    _layer: Lock,
    _store: Arc<Lock>,
}

impl Making {
    /// Waits for the layer's lock. None if the layer is there, perhaps because whoever held the lock has made it.
    fn begin(store: &Store, diff_id: &Digest, making: Arc<Lock>) -> Result<Option<Self>, Error> {
        let lock = store.lock_exclusive(&format!("layer-{}", diff_id.hex()))?;
        let target = store.layer_directory(diff_id);
        if target.exists() {
            if store.activate(diff_id).is_ok() && store.layer_tree(diff_id).is_ok() {
                return Ok(None);
            }
            // Torn by a crash: since activation fails, nobody of this boot was handed it.
            store.remove_directory(&target)?;
        }
        Ok(Some(Self {
            partial: Partial::create(&target)?,
            target,
            _layer: lock,
            _store: making,
        }))
    }

    fn finish(self) -> Result<(), Error> {
        self.partial.rename_to(&self.target)
    }
}

/// A directory being written beside its place; removed unless it gets there.
struct Partial {
    path: PathBuf,
    kept: bool,
}

impl Partial {
    /// Makes it, and removes what a dead process left. The lock of its place is held.
    fn create(target: &Path) -> Result<Self, Error> {
        let mut name = target.file_name().unwrap_or_default().to_owned();
        name.push(PARTIAL);
        let path = target.with_file_name(name);
        if path.exists() {
            std::fs::remove_dir_all(&path).map_err(|error| Error::io(&path, error))?;
        }
        std::fs::create_dir(&path).map_err(|error| Error::io(&path, error))?;
        Ok(Self { path, kept: false })
    }

    fn rename_to(mut self, target: &Path) -> Result<(), Error> {
        let io = |error| Error::io(target, error);
        std::fs::File::open(&self.path)
            .and_then(|directory| directory.sync_all())
            .map_err(io)?;
        std::fs::rename(&self.path, target).map_err(io)?;
        self.kept = true;
        sync_parent(target).map_err(io)
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        if !self.kept {
            let _ = std::fs::remove_dir_all(&self.path);
        }
    }
}

/// Local references by absolute path: they must mean the same from another directory.
fn absolute(reference: &ImageRef) -> Result<ImageRef, Error> {
    let mut reference = reference.clone();
    let path = match &mut reference {
        ImageRef::Layout { directory, .. } => directory,
        ImageRef::Archive { file, .. } => file,
        ImageRef::Registry(_) => return Ok(reference),
    };
    *path = std::path::absolute(&*path).map_err(|error| Error::io(path, error))?;
    Ok(reference)
}

fn fits(image: &Image, platform: &Platform) -> bool {
    let own = Platform {
        os: image.config.os().to_string(),
        architecture: image.config.architecture().to_string(),
        variant: image.config.variant().clone(),
    };
    own.fits(platform)
}

/// Runs work that reads, hashes or waits for locks on a thread of its own.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
        Err(_) => Err(Error::Cancelled),
    }
}
