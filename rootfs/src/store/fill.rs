//! Making bytes of a layer ready: comparing chunks with their digests, and unpacking the layer again where they differ.

use std::fs::File;
use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use crate::blob::{BlobWriter, ReadyFile};
use crate::digest::Digest;
use crate::error::Error;
use crate::progress::{Event, Progress};
use crate::source::{self, LayerBody};

use super::Store;
use super::form::Origin;
use super::layer::{self, Job};
use super::pull::{PullOptions, blocking};
use super::record::Record;

impl Store {
    /// Makes `offset..offset + length` of a layer's file data ready to be served, and returns once its bits are set.
    ///
    /// Bits are unset after a reboot of the host: then the chunks are compared with their digests. Those that differ were
    /// torn by a crash; the layer is unpacked again, from where its image was pulled, and every missing chunk with it.
    ///
    /// # Errors
    /// `NotFound` for a layer the store has not got, and what the source says when it is needed.
    pub async fn fill(
        &self,
        diff_id: &Digest,
        offset: u64,
        length: u64,
        options: &PullOptions,
        progress: Arc<dyn Progress>,
    ) -> Result<(), Error> {
        let (store, diff_id) = (self.clone(), *diff_id);
        if blocking(move || store.verify_range(&diff_id, offset, length)).await? {
            return Ok(());
        }
        progress.event(Event::Repairing { layer: diff_id });
        // One repairs, the others find it done.
        let store = self.clone();
        let _lock = blocking(move || store.lock_exclusive(&format!("layer-{}", diff_id.hex()))).await?;
        let store = self.clone();
        if blocking(move || store.verify_range(&diff_id, offset, length)).await? {
            return Ok(());
        }
        self.repair(&diff_id, options, progress).await
    }

    fn layer_file(&self, diff_id: &Digest, name: &str) -> Result<File, Error> {
        let path = self.layer_directory(diff_id).join(name);
        File::options()
            .read(true)
            .write(true)
            .open(&path)
            .map_err(|error| match error.kind() {
                std::io::ErrorKind::NotFound => Error::NotFound {
                    what: format!("layer {diff_id}"),
                    place: self.root.display().to_string(),
                    advice: "pull its image again".into(),
                },
                _ => Error::io(&path, error),
            })
    }

    fn ready_file(&self, diff_id: &Digest) -> Result<ReadyFile, Error> {
        let file = self.layer_file(diff_id, layer::READY)?;
        ReadyFile::open(file).map_err(|error| Error::blob(*diff_id, &self.layer_directory(diff_id), error))
    }

    /// Compares the chunks of a range whose bits are unset. Returns whether all are ready now.
    fn verify_range(&self, diff_id: &Digest, offset: u64, length: u64) -> Result<bool, Error> {
        let ready = self.ready_file(diff_id)?;
        let data = self.layer_file(diff_id, layer::DATA)?;
        let failed = |error| Error::blob(*diff_id, &self.layer_directory(diff_id), error);
        let mut buffer = Vec::new();
        let mut whole = true;
        for chunk in ready.chunks_of(offset, length) {
            whole &= ready.verify(&data, chunk, &mut buffer).map_err(failed)?;
        }
        Ok(whole)
    }

    /// Unpacks a layer again over its cache file. The layer's lock is held.
    async fn repair(
        &self,
        diff_id: &Digest,
        options: &PullOptions,
        progress: Arc<dyn Progress>,
    ) -> Result<(), Error> {
        let (store, diff_id) = (self.clone(), *diff_id);
        let (record, at) = blocking(move || store.origin(&diff_id)).await?;
        let mut options = self.source_options(options);
        options.plain_http |= record.plain_http;
        let source = source::open(&record.reference.parse()?, &options, progress.clone()).await?;
        let Origin::Layer(layer) = record.layers[at].origin.clone() else {
            return Err(Error::NotFound {
                what: format!("the index of layer {diff_id}"),
                place: self.root.display().to_string(),
                advice: "remove the image and pull it again".into(),
            });
        };
        let LayerBody { reader: body, .. } = source.open(&layer).await?;
        let store = self.clone();
        blocking(move || {
            let path = store.layer_directory(&diff_id);
            let mut writer = BlobWriter::refill(
                store.layer_file(&diff_id, layer::DATA)?,
                store.ready_file(&diff_id)?,
            );
            let cancelled = CancellationToken::new();
            layer::run(
                Job {
                    layer,
                    body,
                    progress,
                    cancelled,
                },
                &mut writer,
                &path,
            )?;
            let summary = writer
                .finish_refill()
                .map_err(|error| Error::blob(diff_id, &path, error))?;
            tracing::info!(layer = %diff_id, chunks = summary.repaired, "repaired from its source");
            Ok(())
        })
        .await
    }

    /// An image that has the layer, and which of its layers that is.
    fn origin(&self, diff_id: &Digest) -> Result<(Record, usize), Error> {
        for digest in self.names("images")? {
            let Some(record) = Record::read(&self.image_directory(&digest))? else {
                continue;
            };
            if let Some(at) = record.layers.iter().position(|layer| layer.key == *diff_id) {
                return Ok((record, at));
            }
        }
        Err(Error::NotFound {
            what: format!("an image with layer {diff_id}"),
            place: self.root.display().to_string(),
            advice: "pull it again".into(),
        })
    }
}
