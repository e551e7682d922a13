//! Making a layer's directory: written under a temporary name, under the layer's lock, flushed, and renamed when it is
//! complete.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use thaw_failpoint::{Failpoint, reach};
use thaw_imagefs::blob::{Digests, ReadyFile};
use thaw_imagefs::digest::Digest;
use tokio_util::sync::CancellationToken;

use crate::error::Error;
use crate::index::Content;
use crate::index::kept::{self, INDEX, Kept};
use crate::layer::tree::LayerTree;
use crate::lazy::{LazyBlob, LazyLayer};
use crate::progress::{Event, Progress};
use crate::ranges::StoredBlob;
use crate::source::{AbortOnDrop, Fallback, LayerSource, Source};
use crate::span::SpanDigest;

use super::layer::{self, Job};
use super::lock::Lock;
use super::record::{LayerRecord, Origin, write_synced};
use super::{PARTIAL, Store, sync_parent};
use crate::blocking::blocking;

/// Whether all spans are verified, so that digests of the bytes may be learned.
pub(crate) fn all_verified(content: &Content) -> bool {
    let spans = content.spans.spans();
    spans.iter().all(|span| span.digest != SpanDigest::None)
}

impl Store {
    /// Whether the store has the layer, tree included.
    pub(crate) fn has_layer(&self, key: &Digest) -> Result<bool, Error> {
        Ok(self.layer_is_whole(key)? && self.layer_tree(key).is_ok())
    }

    /// Creates a layer that has only its tree so far.
    pub(crate) fn place_layer(&self, layer: &LazyLayer, making: Arc<Lock>) -> Result<(), Error> {
        let LazyLayer { stored, index, .. } = layer;
        self.place_content(&layer.key(), stored, &index.tree, &index.content, None, making)
    }

    /// Creates the layer of a ready-made image's data blob.
    pub(crate) fn place_blob(&self, blob: &LazyBlob, making: Arc<Lock>) -> Result<LayerRecord, Error> {
        let key = blob.key();
        let tree = LayerTree {
            entries: Vec::new(),
            data_length: blob.content.data_length,
        };
        let digests = blob.digests.as_deref();
        self.place_content(&key, &blob.stored, &tree, &blob.content, digests, making)?;
        Ok(LayerRecord {
            key,
            form: blob.form,
            origin: Origin::Blob(blob.stored.clone()),
        })
    }

    fn place_content(
        &self,
        key: &Digest,
        stored: &StoredBlob,
        tree: &LayerTree,
        content: &Content,
        digests: Option<&[[u8; 32]]>,
        making: Arc<Lock>,
    ) -> Result<(), Error> {
        let name = || format!("the index of {}", stored.digest);
        if tree.data_length != content.data_length {
            return Err(Error::malformed(name(), "its tree and its data differ in length"));
        }
        if digests.is_none() && !all_verified(content) {
            return Err(Error::malformed(name(), "it has spans without digests"));
        }
        let Some(making) = Making::begin(self, key, making)? else {
            return Ok(());
        };
        let create = |name: &str| {
            let path = making.path().join(name);
            let file = File::options()
                .read(true)
                .write(true)
                .create_new(true)
                .open(&path);
            file.map(|file| (file, path.clone()))
                .map_err(|error| Error::io(&path, error))
        };
        let (data, path) = create(layer::DATA)?;
        data.set_len(content.data_length)
            .map_err(|error| Error::io(&path, error))?;
        reach(Failpoint::LayerDataReserved);
        let (ready, path) = create(layer::READY)?;
        let digests = digests.map_or(Digests::Learned, Digests::Sealed);
        ReadyFile::create(
            ready,
            *key.bytes(),
            content.data_length,
            digests,
            false,
            self.boot,
        )
        .and_then(|ready| ready.stamp(&data))
        .map_err(|error| Error::blob(*key, &path, error))?;
        let kept = Kept {
            stored: stored.digest,
            stored_length: stored.size,
            content: content.clone(),
        };
        let index = kept::encode(&kept);
        let tree = tree.to_bytes().map_err(|error| Error::malformed(name(), error))?;
        for (name, bytes) in [(INDEX, index), (layer::TREE, tree)] {
            let path = making.path().join(name);
            write_synced(&path, &bytes).map_err(|error| Error::io(&path, error))?;
        }
        making.finish()
    }

    /// Streams a layer into its directory, unless another process has created it meanwhile. If a place sends wrong bytes, the next one is
    /// asked.
    pub(crate) async fn stream_layer(
        &self,
        source: &dyn Source,
        layer: &LayerSource,
        making: Arc<Lock>,
        progress: Arc<dyn Progress>,
        cancelled: &CancellationToken,
    ) -> Result<(), Error> {
        let mut fallback = Fallback::new(source, layer);
        loop {
            let streamed =
                self.stream_once(&mut fallback, layer, making.clone(), progress.clone(), cancelled);
            let Err(error) = streamed.await else {
                return Ok(());
            };
            let registry = fallback.failed(error)?;
            progress.event(Event::Retrying {
                registry,
                wait: Duration::ZERO,
                reason: format!("what it sent is not {}; another is asked", layer.name()),
            });
        }
    }

    async fn stream_once(
        &self,
        fallback: &mut Fallback<'_>,
        layer: &LayerSource,
        making: Arc<Lock>,
        progress: Arc<dyn Progress>,
        cancelled: &CancellationToken,
    ) -> Result<(), Error> {
        let (store, diff_id, layer) = (self.clone(), layer.diff_id, layer.clone());
        if cancelled.is_cancelled() {
            return Err(Error::Cancelled);
        }
        // Not raced with cancellation, because its directory must be removed before the pull reports its failure.
        let begun = blocking(move || Making::begin(&store, &diff_id, making)).await?;
        let Some(making) = begun else {
            progress.event(Event::Cached { layer: diff_id });
            return Ok(());
        };
        progress.event(Event::Started {
            layer: diff_id,
            total: layer.size,
        });
        let body = tokio::select! {
            biased;
            () = cancelled.cancelled() => Err(Error::Cancelled),
            body = fallback.open() => body,
        }?;
        let (body, transfer) = (body.reader, AbortOnDrop(body.transfer));
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
}

/// A layer in creation: holds its lock, and keeps the store from collecting it.
pub(super) struct Making {
    partial: Partial,
    target: PathBuf,
    _layer: Lock,
    _store: Arc<Lock>,
}

impl Making {
    /// Waits for the layer's lock. `None` if the layer exists, perhaps created by the process that held the lock.
    pub fn begin(store: &Store, key: &Digest, making: Arc<Lock>) -> Result<Option<Self>, Error> {
        let lock = store.lock_exclusive(&format!("layer-{}", key.hex()))?;
        let target = store.layer_directory(key);
        if target.exists() {
            if store.activate(key).is_ok() && store.layer_tree(key).is_ok() {
                return Ok(None);
            }
            // Torn by a crash: since activation fails, no process of this boot uses it.
            store.remove_directory(&target)?;
        }
        Ok(Some(Self {
            partial: Partial::create(&target)?,
            target,
            _layer: lock,
            _store: making,
        }))
    }

    /// Where its files are written.
    pub fn path(&self) -> &Path {
        &self.partial.path
    }

    /// Puts it in its place.
    pub fn finish(self) -> Result<(), Error> {
        self.partial.rename_to(&self.target)
    }
}

/// A directory that is being written next to its final place. It is removed unless it is moved there.
pub(super) struct Partial {
    pub path: PathBuf,
    kept: bool,
}

impl Partial {
    /// Creates it, and removes the leftovers of a killed process. The caller holds the lock of the final place.
    pub fn create(target: &Path) -> Result<Self, Error> {
        let mut name = target.file_name().unwrap_or_default().to_owned();
        name.push(PARTIAL);
        let path = target.with_file_name(name);
        if path.exists() {
            std::fs::remove_dir_all(&path).map_err(|error| Error::io(&path, error))?;
            reach(Failpoint::StorePartialCleared);
        }
        std::fs::create_dir(&path).map_err(|error| Error::io(&path, error))?;
        reach(Failpoint::StorePartialMade);
        Ok(Self { path, kept: false })
    }

    pub fn rename_to(mut self, target: &Path) -> Result<(), Error> {
        let io = |error| Error::io(target, error);
        std::fs::File::open(&self.path)
            .and_then(|directory| directory.sync_all())
            .map_err(io)?;
        std::fs::rename(&self.path, target).map_err(io)?;
        reach(Failpoint::StorePartialPlaced);
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
