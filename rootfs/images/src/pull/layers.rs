//! Making the layers of an image that the store does not have, a few at a time.
//!
//! Invariant: all layers are made, or the pull fails: after the first failure the others are cancelled and awaited.

use std::collections::HashSet;
use std::sync::Arc;

use futures_util::StreamExt;
use tokio_util::sync::CancellationToken;

use crate::blocking::blocking;
use crate::error::Error;
use crate::form::Form;
use crate::formats::{BoundLayers, warn_unusable};
use crate::progress::{Event, Progress};
use crate::source::{Descriptor, LayerSource, Resolved, Source};
use crate::store::{LayerRecord, Lock, Origin, Store};

/// Layers unpacked at a time.
const CONCURRENT_LAYERS: usize = 3;

/// The context in which the layers of one image are made.
pub(super) struct Pulling<'a> {
    pub source: &'a dyn Source,
    pub bound: Option<BoundLayers>,
    /// Keeps the store from being collected.
    pub making: Arc<Lock>,
    pub progress: Arc<dyn Progress>,
}

impl Store {
    /// Makes all layers or none: after the first failure it stops the others and waits for them. Returns them bottom first.
    pub(super) async fn make_layers(
        &self,
        pulling: &Pulling<'_>,
        resolved: &Resolved,
    ) -> Result<Vec<LayerRecord>, Error> {
        let cancelled = CancellationToken::new();
        // A pull that is dropped stops its threads too.
        let _stop = cancelled.clone().drop_guard();
        let mut seen = HashSet::new();
        let layers: Vec<(LayerSource, Option<Descriptor>)> = resolved
            .layers
            .iter()
            .enumerate()
            .filter(|(_, layer)| seen.insert(layer.diff_id))
            .map(|(at, layer)| (layer.clone(), resolved.descriptors.get(at).cloned()))
            .collect();
        let mut jobs = futures_util::stream::iter(layers)
            .map(|(layer, descriptor)| async {
                let diff_id = layer.diff_id;
                let made = self.make_layer(pulling, layer, descriptor, &cancelled).await;
                made.map(|record| (diff_id, record))
            })
            .buffer_unordered(CONCURRENT_LAYERS);
        let mut made = Vec::new();
        let mut failed = None;
        while let Some(layer) = jobs.next().await {
            match layer {
                Ok(layer) => made.push(layer),
                Err(error) => {
                    failed.get_or_insert(error);
                    cancelled.cancel();
                }
            }
        }
        drop(jobs);
        if let Some(error) = failed {
            return Err(error);
        }
        let record = |layer: &LayerSource| {
            let found = made.iter().find(|(diff_id, _)| *diff_id == layer.diff_id);
            found.map(|(_, record)| record.clone()).ok_or(Error::Cancelled)
        };
        resolved.layers.iter().map(record).collect()
    }

    /// Makes sure that the store has a layer, in the cheapest possible way.
    pub(super) async fn make_layer(
        &self,
        pulling: &Pulling<'_>,
        layer: LayerSource,
        descriptor: Option<Descriptor>,
        cancelled: &CancellationToken,
    ) -> Result<LayerRecord, Error> {
        if cancelled.is_cancelled() {
            return Err(Error::Cancelled);
        }
        let record = |form, key| LayerRecord {
            key,
            form,
            origin: Origin::Layer(layer.clone()),
        };
        let (store, diff_id) = (self.clone(), layer.diff_id);
        if blocking(move || store.has_layer(&diff_id)).await? {
            pulling.progress.event(Event::Cached { layer: diff_id });
            return Ok(record(Form::Tar, diff_id));
        }
        if let (Some(bound), Some(descriptor)) = (&pulling.bound, &descriptor) {
            let found = tokio::select! {
                biased;
                () = cancelled.cancelled() => return Err(Error::Cancelled),
                found = bound.layer(&layer, descriptor) => found,
            };
            match found {
                Ok(Some(found)) => {
                    let key = found.key();
                    let (store, form, making) = (self.clone(), found.form, pulling.making.clone());
                    let fetched = found.fetched;
                    blocking(move || store.place_layer(&found, making)).await?;
                    pulling.progress.event(Event::Lazy {
                        layer: diff_id,
                        form,
                        fetched,
                    });
                    return Ok(record(form, key));
                }
                Ok(None) => {}
                Err(error) => warn_unusable(&diff_id, &error),
            }
        }
        let (progress, making) = (pulling.progress.clone(), pulling.making.clone());
        self.stream_layer(pulling.source, &layer, making, progress, cancelled)
            .await?;
        Ok(record(Form::Tar, diff_id))
    }
}
