//! Repairing a layer: chunks whose bits are unset are compared with their digests, and if some differ, the layer is unpacked
//! again from the source its image was pulled from.

use std::io::Read;
use std::sync::Arc;

use thaw_imagefs::blob::BlobWriter;
use thaw_imagefs::digest::Digest;
use tokio_util::sync::CancellationToken;

use crate::blocking::blocking;
use crate::error::Error;
use crate::progress::{Event, Progress};
use crate::source::{self, Fallback, LayerSource, SourceOptions};

use super::Store;
use super::layer::{self, Job};
use super::record::{Origin, Record};

impl Store {
    /// Makes `offset..offset + length` of a layer's file data ready to be served, and returns once its bits are set.
    ///
    /// Bits are unset after a reboot of the host: then the chunks are compared with their digests. Those that differ were
    /// torn by a crash; the layer is unpacked again, from where its image was pulled, and every missing chunk with it.
    ///
    /// # Errors
    /// `NotFound` for a layer the store does not have, and errors of the source if it is needed.
    pub async fn repair(
        &self,
        diff_id: &Digest,
        offset: u64,
        length: u64,
        options: &SourceOptions,
        progress: Arc<dyn Progress>,
    ) -> Result<(), Error> {
        let (store, diff_id) = (self.clone(), *diff_id);
        if blocking(move || store.verify_range(&diff_id, offset, length)).await? {
            return Ok(());
        }
        progress.event(Event::Repairing { layer: diff_id });
        // One process repairs; the others then find it done.
        let store = self.clone();
        let _lock = blocking(move || store.lock_exclusive(&format!("layer-{}", diff_id.hex()))).await?;
        let store = self.clone();
        if blocking(move || store.verify_range(&diff_id, offset, length)).await? {
            return Ok(());
        }
        self.unpack_in_place(&diff_id, options, progress).await
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
    async fn unpack_in_place(
        &self,
        diff_id: &Digest,
        options: &SourceOptions,
        progress: Arc<dyn Progress>,
    ) -> Result<(), Error> {
        let (store, diff_id) = (self.clone(), *diff_id);
        let (record, at) = blocking(move || store.origin(&diff_id)).await?;
        let mut options = options.clone();
        options.plain_http |= record.plain_http;
        let source = source::open(&record.reference.parse()?, &options, progress.clone()).await?;
        let Origin::Layer(layer) = record.layers[at].origin.clone() else {
            return Err(Error::NotFound {
                what: format!("the index of layer {diff_id}"),
                place: self.root.display().to_string(),
                advice: "remove the image and pull it again".into(),
            });
        };
        let mut fallback = Fallback::new(&*source, &layer);
        loop {
            let body = fallback.open().await?.reader;
            match self.unpack_again(&layer, body, progress.clone()).await {
                Err(error) => fallback.failed(error)?,
                Ok(()) => return Ok(()),
            };
        }
    }

    async fn unpack_again(
        &self,
        layer: &LayerSource,
        body: Box<dyn Read + Send>,
        progress: Arc<dyn Progress>,
    ) -> Result<(), Error> {
        let (store, layer, diff_id) = (self.clone(), layer.clone(), layer.diff_id);
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
    fn origin(&self, key: &Digest) -> Result<(Record, usize), Error> {
        let mut found = self.records_with(key)?;
        found.retain(|(record, at)| matches!(record.layers[*at].origin, Origin::Layer(_)));
        found.into_iter().next().ok_or_else(|| Error::NotFound {
            what: format!("an image with layer {key}"),
            place: self.root.display().to_string(),
            advice: "pull it again".into(),
        })
    }
}
