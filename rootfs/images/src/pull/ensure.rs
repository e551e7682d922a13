//! Pulling a single layer of an image, for snapshotters.

use std::sync::Arc;

use thaw_imagefs::digest::Digest;
use tokio_util::sync::CancellationToken;

use crate::blocking::blocking;
use crate::error::Error;
use crate::progress::Progress;
use crate::reference::ImageRef;
use crate::source::{LayerSource, Platform};
use crate::store::{Store, StoredLayer};

use super::{Pull, PullOptions};

/// Which layer of an image is wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WhichLayer {
    /// The one its manifest names by this digest of its stored form.
    Stored(Digest),
    /// The one with this DiffID.
    Diff(Digest),
}

impl Store {
    /// Makes sure that one layer of an image is in the store, lazily if possible.
    ///
    /// # Errors
    /// Those of [`Store::pull`]; `NotFound` if the image has no such layer; images without tar layers have none.
    pub async fn ensure_layer(
        &self,
        reference: &ImageRef,
        platform: &Platform,
        layer: &WhichLayer,
        options: &PullOptions,
        progress: Arc<dyn Progress>,
    ) -> Result<StoredLayer, Error> {
        let pull = Pull::new(self, reference, platform, options, progress)?;
        let store = self.clone();
        let making = Arc::new(blocking(move || store.lock_shared("store")).await?);
        let (source, resolved) = pull.resolve().await?;
        let wanted = |it: &LayerSource| match layer {
            WhichLayer::Stored(digest) => it.digest == Some(*digest),
            WhichLayer::Diff(diff_id) => it.diff_id == *diff_id,
        };
        let at = resolved.layers.iter().position(wanted).ok_or_else(|| {
            let (WhichLayer::Stored(digest) | WhichLayer::Diff(digest)) = layer;
            Error::NotFound {
                what: format!("layer {digest}"),
                place: format!("image {}", pull.reference),
                advice: "pull the image whole".into(),
            }
        })?;
        let pulling = pull.pulling(&*source, &resolved, making.clone()).await;
        // Dropped, it stops its threads.
        let cancelled = CancellationToken::new();
        let _stop = cancelled.clone().drop_guard();
        let descriptor = resolved.descriptors.get(at).cloned();
        let source = resolved.layers[at].clone();
        let diff_id = source.diff_id;
        let record = self.make_layer(&pulling, source, descriptor, &cancelled).await?;
        Ok(StoredLayer::new(diff_id, record, making))
    }
}
