//! A conversion from one reference to another, for `thaw image convert`.

use std::collections::HashMap;
use std::sync::Arc;

use serde::Serialize;
use thaw_imagefs::digest::Digest;

use crate::error::Error;
use crate::fetch::{self, FetchOptions};
use crate::load_order::LoadOrder;
use crate::progress::Progress;
use crate::pull::{PullOptions, PullPolicy};
use crate::reference::ImageRef;
use crate::registry::Client;
use crate::source::{self, Platform, Push, SourceOptions};
use crate::store::Store;

use super::dictionary::Dictionary;
use super::input::Input;
use super::original::Original;
use super::publish::{Pushed, find};
use super::{Facts, Options, convert};

/// A conversion: its source and destination.
pub struct Job<'a> {
    pub store: &'a Store,
    pub source: &'a ImageRef,
    pub destination: &'a ImageRef,
    pub platform: &'a Platform,
    /// Converted images whose chunks need not be stored again. The first image that has a chunk provides it.
    pub dictionaries: &'a [ImageRef],
    pub options: Options,
    /// The data that a run of the source read.
    pub load_order: Option<LoadOrder>,
    /// How to reach the source, the destination and the dictionaries.
    pub pull: PullOptions,
}

/// The result of a conversion.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Outcome {
    /// Digest of the source's manifest.
    pub source: Digest,
    /// Digest of the converted image's manifest.
    pub digest: Digest,
    pub facts: Facts,
    pub pushed: Pushed,
}

impl Job<'_> {
    /// Pulls the source whole, converts it, writes it to the destination.
    ///
    /// # Errors
    /// Those of a pull, of [`convert`] and of a push.
    pub async fn run(self, progress: Arc<dyn Progress>) -> Result<Outcome, Error> {
        let options = SourceOptions {
            plain_http: self.pull.plain_http,
            credentials: self.pull.credentials.clone(),
            retry: self.pull.retry,
            scratch: self.store.root().to_owned(),
            client: self.pull.client.clone(),
        };
        // Checked before the long work: whether the result can be written, and which dictionaries it uses.
        let push = Push::open(self.destination, &options, progress.clone()).await?;
        let dictionaries = self.dictionaries(&options, &progress).await?;

        let pull = PullOptions {
            policy: PullPolicy::Always,
            lazy: false,
            ..self.pull.clone()
        };
        let image = self
            .store
            .pull(self.source, self.platform, &pull, progress.clone())
            .await?;
        let lease = image.lease()?;
        let opened = source::open(self.source, &options, progress.clone()).await?;
        let resolved = source::resolve(&*opened, self.platform).await?;
        if resolved.digest != image.digest {
            return Err(Error::malformed(
                self.source.to_string(),
                "it was changed while it was pulled: try again",
            ));
        }
        let original = Original::of(&resolved, self.source);
        let layers = self.store.inspect(&image.digest)?.layers;
        let diff_ids: HashMap<Digest, Digest> = layers
            .iter()
            .map(|layer| layer.key)
            .zip(resolved.layers.iter().map(|layer| layer.diff_id))
            .collect();

        let scratch = self.store.root().to_owned();
        let (load_order, options) = (self.load_order, self.options);
        let told = progress.clone();
        let work = tokio::task::spawn_blocking(move || {
            let mut input = Input::of_image(&image, load_order)?;
            for blob in &mut input.blobs {
                blob.layer = diff_ids.get(&blob.id).copied();
            }
            let converted = convert(input, &original, &options, &dictionaries, &scratch, &*told)?;
            drop(lease);
            Ok::<_, Error>((converted, dictionaries))
        });
        let (converted, dictionaries) = match work.await {
            Ok(done) => done?,
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            Err(_) => return Err(Error::Cancelled),
        };
        let (digest, facts) = (converted.digest, converted.facts.clone());
        let tag = match self.destination {
            ImageRef::Layout { tag, .. } => tag.as_deref(),
            ImageRef::Registry(reference) => reference.tag.as_deref(),
            ImageRef::Archive { .. } => None,
        };
        let pushed = converted
            .push(&push, tag, &dictionaries, self.store.root())
            .await?;
        Ok(Outcome {
            source: resolved.digest,
            digest,
            facts,
            pushed,
        })
    }

    async fn dictionaries(
        &self,
        options: &SourceOptions,
        progress: &Arc<dyn Progress>,
    ) -> Result<Vec<Dictionary>, Error> {
        if self.dictionaries.is_empty() {
            return Ok(Vec::new());
        }
        let client = match &self.pull.client {
            Some(client) => client.clone(),
            None => Client::new(crate::registry::Config::default())?,
        };
        let fetching = FetchOptions {
            source: options.clone(),
            client,
        };
        let mut dictionaries = Vec::with_capacity(self.dictionaries.len());
        for reference in self.dictionaries {
            let source = source::open(reference, options, progress.clone()).await?;
            let manifest = find(&*source, &reference.to_string()).await?;
            let ranges = fetch::open(reference, &fetching, progress.clone()).await?;
            let mut dictionary = Dictionary::open(&manifest, ranges).await?;
            dictionary.repository = match (reference, self.destination) {
                (ImageRef::Registry(from), ImageRef::Registry(to)) if from.registry == to.registry => {
                    Some(from.repository.clone())
                }
                _ => None,
            };
            dictionaries.push(dictionary);
        }
        Ok(dictionaries)
    }
}

#[cfg(test)]
#[path = "job_test.rs"]
mod tests;
