//! Pulling an image into the store: resolve its reference, make the layers the store does not have, write the metadata.
//!
//! A layer is made in the cheapest way: the store has it; or the image is bound to an index of the layer, so that only its
//! tree is made and its data is read in pieces; or it is streamed and unpacked whole. An index that cannot be read costs a
//! warning, and its layer is streamed.

mod ensure;
mod layers;

use std::collections::HashSet;
use std::sync::Arc;

use crate::blocking::blocking;
use crate::error::Error;
use crate::fetch::{self, FetchOptions};
use crate::fill::Filler;
use crate::form::Form;
use crate::formats::{BoundLayers, image_format, layer_formats, warn_unusable};
use crate::progress::{Event, Progress};
use crate::ranges::{Priority, Ranges};
use crate::reference::ImageRef;
use crate::registry::Client;
use crate::source::{self, Credentials, Platform, Resolved, Retry, Source, SourceOptions};
use crate::store::{Image, Lock, Parts, Store};

pub use ensure::WhichLayer;

use layers::Pulling;

/// When a pull asks the source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PullPolicy {
    /// Asks a registry only if the store does not have the reference; reads a directory or an archive always, which is
    /// cheap and notices changes.
    #[default]
    Missing,
    /// Always asks the source; layers that the store has are not transferred again.
    Always,
    /// Never asks the source: yields the image that the reference named last, or an error.
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
    /// Whether file data may stay in the registry until it is read. Otherwise the store has all of it after the pull.
    pub lazy: bool,
    /// The client of registries, whose limits and connections are shared; if absent, one is created for the pull.
    pub client: Option<Arc<Client>>,
}

impl Default for PullOptions {
    fn default() -> Self {
        Self {
            policy: PullPolicy::default(),
            plain_http: false,
            credentials: Credentials::default(),
            retry: Retry::default(),
            lazy: true,
            client: None,
        }
    }
}

impl Store {
    /// Makes sure that the image of a reference is in the store, and returns it.
    ///
    /// Layers are streamed: verified, decompressed and unpacked as they arrive, on threads of their own. Several processes may pull the
    /// same image: each layer is made once. A failed pull leaves nothing behind.
    ///
    /// # Errors
    /// Every variant of [`Error`] except `InUse`.
    pub async fn pull(
        &self,
        reference: &ImageRef,
        platform: &Platform,
        options: &PullOptions,
        progress: Arc<dyn Progress>,
    ) -> Result<Image, Error> {
        let pull = Pull::new(self, reference, platform, options, progress)?;
        // A complete image is asked for, or news of the source: both must be looked for.
        let may_be_known = options.lazy && options.policy != PullPolicy::Always;
        if may_be_known && let Some(image) = self.known(&pull.reference, platform) {
            return Ok(image);
        }
        let before = self.stamp(&pull.reference);
        let pulled = match pull.find_stored().await? {
            Some(image) => Ok(image),
            None => pull.make_from_source().await,
        };
        if let (Ok(image), true) = (&pulled, may_be_known) {
            self.keep_known(&pull.reference, platform, before, image);
        }
        if pulled.is_err() {
            let store = self.clone();
            // If this fails, the leftovers are removed when the store is next opened; the pull's error matters more.
            let _ = blocking(move || store.collect_if_idle()).await;
        }
        pulled
    }

    pub(crate) fn source_options(&self, options: &PullOptions) -> SourceOptions {
        SourceOptions {
            plain_http: options.plain_http,
            credentials: options.credentials.clone(),
            retry: options.retry,
            scratch: self.root().to_owned(),
            client: options.client.clone(),
        }
    }
}

/// One pull.
struct Pull<'a> {
    store: &'a Store,
    reference: ImageRef,
    platform: &'a Platform,
    options: &'a PullOptions,
    progress: Arc<dyn Progress>,
}

impl<'a> Pull<'a> {
    fn new(
        store: &'a Store,
        reference: &ImageRef,
        platform: &'a Platform,
        options: &'a PullOptions,
        progress: Arc<dyn Progress>,
    ) -> Result<Self, Error> {
        Ok(Self {
            store,
            reference: reference.absolute()?,
            platform,
            options,
            progress,
        })
    }

    /// The image that the reference named last, if the policy allows to use it.
    async fn find_stored(&self) -> Result<Option<Image>, Error> {
        let policy = self.options.policy;
        let is_local = !matches!(self.reference, ImageRef::Registry(_));
        if policy == PullPolicy::Always || (policy == PullPolicy::Missing && is_local) {
            return Ok(None);
        }
        let (store, wanted) = (self.store.clone(), self.reference.clone());
        let found = blocking(move || store.find(&wanted)).await?;
        match found.filter(|image| fits(image, self.platform)) {
            Some(image) => {
                if !self.options.lazy && policy != PullPolicy::Never {
                    self.complete(&image).await?;
                }
                Ok(Some(image))
            }
            None if policy == PullPolicy::Never => Err(Error::NotFound {
                what: format!("image {}", self.reference),
                place: self.store.root().display().to_string(),
                advice: "it may not be pulled here (policy never): pull it first".into(),
            }),
            None => Ok(None),
        }
    }

    async fn make_from_source(&self) -> Result<Image, Error> {
        // Shared: layers that are made but not yet part of an image are not collected.
        let store = self.store.clone();
        let making = Arc::new(blocking(move || store.lock_shared("store")).await?);
        let (source, resolved) = self.resolve().await?;
        let layers: HashSet<_> = resolved.layer_digests().into_iter().collect();
        self.progress.event(Event::Resolved {
            digest: resolved.digest,
            layers: layers.len(),
        });

        let (store, digest, name) = (self.store.clone(), resolved.digest, self.reference.to_string());
        let existing = blocking(move || match store.image(&digest)? {
            Some(image) => store.refer(&name, digest).map(|()| Some(image)),
            None => Ok(None),
        });
        let image = match existing.await? {
            Some(image) => {
                layers
                    .iter()
                    .for_each(|layer| self.progress.event(Event::Cached { layer: *layer }));
                image
            }
            None => self.make_image(&*source, &resolved, making).await?,
        };
        if !self.options.lazy {
            self.complete(&image).await?;
        }
        Ok(image)
    }

    async fn resolve(&self) -> Result<(Box<dyn Source>, Resolved), Error> {
        let options = self.store.source_options(self.options);
        let source = source::open(&self.reference, &options, self.progress.clone()).await?;
        let resolved = source::resolve(&*source, self.platform).await?;
        Ok((source, resolved))
    }

    async fn make_image(
        &self,
        source: &dyn Source,
        resolved: &Resolved,
        making: Arc<Lock>,
    ) -> Result<Image, Error> {
        let mut parts = Parts {
            digest: resolved.digest,
            reference: self.reference.to_string(),
            plain_http: self.options.plain_http,
            config: resolved.config_bytes.clone(),
            layers: Vec::new(),
            ready_made: None,
            pinned: false,
        };
        let store = self.store.clone();
        let Some(format) = image_format(&resolved.kind) else {
            let pulling = self.pulling(source, resolved, making).await;
            parts.layers = self.store.make_layers(&pulling, resolved).await?;
            self.progress.event(Event::Assembling);
            return blocking(move || store.assemble_image(parts)).await;
        };
        let ranges = self.ranges().await?;
        let image = format.open(&*ranges).await?;
        for (at, blob) in image.blobs.iter().enumerate() {
            self.progress.event(Event::Lazy {
                layer: blob.key(),
                form: format.form(),
                fetched: if at == 0 { format.document_bytes() } else { 0 },
            });
        }
        self.progress.event(Event::Assembling);
        blocking(move || {
            for blob in &image.blobs {
                parts.layers.push(store.place_blob(blob, making.clone())?);
            }
            parts.ready_made = Some(image);
            store.assemble_image(parts)
        })
        .await
    }

    /// The context in which the image's layers are made.
    async fn pulling<'s>(
        &self,
        source: &'s dyn Source,
        resolved: &Resolved,
        making: Arc<Lock>,
    ) -> Pulling<'s> {
        Pulling {
            source,
            bound: self.bound(source, resolved).await,
            making,
            progress: self.progress.clone(),
        }
    }

    /// The documents that let the image's layers be read in pieces. `None`, with a warning, if they cannot be read.
    async fn bound(&self, source: &dyn Source, resolved: &Resolved) -> Option<BoundLayers> {
        if !self.options.lazy {
            return None;
        }
        self.find_bound(source, resolved).await.unwrap_or_else(|error| {
            warn_unusable(&resolved.digest, &error);
            None
        })
    }

    async fn find_bound(
        &self,
        source: &dyn Source,
        resolved: &Resolved,
    ) -> Result<Option<BoundLayers>, Error> {
        let formats = layer_formats(source, resolved).await?;
        if formats.is_empty() {
            return Ok(None);
        }
        let ranges = self.ranges().await?;
        Ok(Some(BoundLayers { formats, ranges }))
    }

    /// A reader of the image's blobs.
    async fn ranges(&self) -> Result<Arc<dyn Ranges>, Error> {
        fetch::open(&self.reference, &self.fetch_options()?, self.progress.clone()).await
    }

    fn fetch_options(&self) -> Result<FetchOptions, Error> {
        let client = match &self.options.client {
            Some(client) => client.clone(),
            None => Client::new(crate::registry::Config::default())?,
        };
        Ok(FetchOptions {
            source: self.store.source_options(self.options),
            client,
        })
    }

    /// Makes every chunk of an image ready.
    async fn complete(&self, image: &Image) -> Result<(), Error> {
        let mut seen = HashSet::new();
        for blob in image.blobs.iter().filter(|blob| seen.insert(blob.id)) {
            let (store, id) = (self.store.clone(), blob.id);
            if blocking(move || store.form(&id)).await? == Some(Form::Tar) {
                // All data is needed, and one stream costs less than many ranges.
                let options = self.store.source_options(self.options);
                let progress = self.progress.clone();
                self.store
                    .repair(&blob.id, 0, u64::MAX, &options, progress)
                    .await?;
            } else {
                let filler = Filler::new(self.store.clone(), self.fetch_options()?);
                filler.fill(&blob.id, 0, u64::MAX, Priority::Demand).await?;
            }
        }
        Ok(())
    }
}

fn fits(image: &Image, platform: &Platform) -> bool {
    let own = Platform {
        os: image.config.os().to_string(),
        architecture: image.config.architecture().to_string(),
        variant: image.config.variant().clone(),
    };
    own.fits(platform)
}
