//! Getting an image: resolve, make the layers that are missing (a few at a time), write the metadata.
//!
//! Of each layer the cheapest way is taken: the store has it; or an index the image is bound to lets it be read in
//! pieces, and only its tree is made; or it is streamed and unpacked whole. An index that cannot be read costs a warning
//! and is passed over: what it would have saved is lost, nothing else.

mod ensure;
mod indexes;
mod layers;

use std::collections::HashSet;
use std::sync::Arc;

use crate::blocking::blocking;
use crate::error::Error;
use crate::fetch::{self, FetchOptions};
use crate::fill::Filler;
use crate::form::Form;
use crate::lazy::{ImageFormat, LazyImage};
use crate::manifest;
use crate::progress::{Event, Progress};
use crate::ranges::{Priority, Ranges};
use crate::reference::ImageRef;
use crate::registry::Client;
use crate::source::{self, Credentials, Platform, Resolved, Retry, Source, SourceOptions};

use crate::store::{Image, Lock, Parts, Store};

pub use ensure::WhichLayer;
pub use indexes::indexes_passed_over;

use indexes::Indexes;
use layers::Pulling;

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
        let reference = reference.absolute()?;
        let local = !matches!(reference, ImageRef::Registry(_));
        if options.policy == PullPolicy::Never || (options.policy == PullPolicy::Missing && !local) {
            let (store, wanted) = (self.clone(), reference.clone());
            let found = blocking(move || store.find(&wanted)).await?;
            match found.filter(|image| fits(image, platform)) {
                Some(image) => {
                    if !options.lazy && options.policy != PullPolicy::Never {
                        self.complete(&image, options, &progress).await?;
                    }
                    return Ok(image);
                }
                None if options.policy == PullPolicy::Never => {
                    return Err(Error::NotFound {
                        what: format!("image {reference}"),
                        place: self.root().display().to_string(),
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
        let layers: HashSet<_> = resolved.layer_digests().into_iter().collect();
        progress.event(Event::Resolved {
            digest: resolved.digest,
            layers: layers.len(),
        });

        let (store, digest, name) = (self.clone(), resolved.digest, reference.to_string());
        let existing = blocking(move || match store.image(&digest)? {
            Some(image) => store.refer(&name, digest).map(|()| Some(image)),
            None => Ok(None),
        });
        let image = match existing.await? {
            Some(image) => {
                layers
                    .iter()
                    .for_each(|layer| progress.event(Event::Cached { layer: *layer }));
                image
            }
            None => {
                self.make_image(&*source, &resolved, reference, options, making, &progress)
                    .await?
            }
        };
        if !options.lazy {
            self.complete(&image, options, &progress).await?;
        }
        Ok(image)
    }

    async fn make_image(
        &self,
        source: &dyn Source,
        resolved: &Resolved,
        reference: &ImageRef,
        options: &PullOptions,
        making: Arc<Lock>,
        progress: &Arc<dyn Progress>,
    ) -> Result<Image, Error> {
        let mut parts = Parts {
            digest: resolved.digest,
            reference: reference.to_string(),
            plain_http: options.plain_http,
            config: resolved.config_bytes.clone(),
            layers: Vec::new(),
            ready_made: None,
            pinned: false,
        };
        let Some(format) = format(&resolved.form) else {
            let pulling = Pulling {
                source,
                indexes: self.indexes(source, resolved, reference, options, progress).await,
                making,
                progress: progress.clone(),
            };
            parts.layers = self.make_layers(&pulling, resolved).await?;
            progress.event(Event::Assembling);
            let store = self.clone();
            return blocking(move || store.assemble_image(parts)).await;
        };
        let ranges = self.ranges(reference, options, progress).await?;
        let opened = format.open(&*ranges).await?;
        for (at, blob) in opened.blobs.iter().enumerate() {
            progress.event(Event::Lazy {
                layer: blob.key(),
                form: format.form(),
                fetched: if at == 0 { format.document_bytes() } else { 0 },
            });
        }
        progress.event(Event::Assembling);
        let store = self.clone();
        blocking(move || store.place(parts, opened, making)).await
    }

    /// Makes an image whose metadata is ready-made.
    fn place(&self, mut parts: Parts, opened: LazyImage, making: Arc<Lock>) -> Result<Image, Error> {
        for blob in &opened.blobs {
            let record = self.place_blob(blob, making.clone())?;
            parts.layers.push(record);
        }
        parts.ready_made = Some(opened);
        self.assemble_image(parts)
    }

    /// What the image is bound to that lets its layers be read in pieces; none, with a warning, where it cannot be had.
    async fn indexes(
        &self,
        source: &dyn Source,
        resolved: &Resolved,
        reference: &ImageRef,
        options: &PullOptions,
        progress: &Arc<dyn Progress>,
    ) -> Option<Indexes> {
        if !options.lazy {
            return None;
        }
        let ranges = || self.ranges(reference, options, progress);
        Indexes::of(source, resolved, ranges)
            .await
            .unwrap_or_else(|error| {
                indexes::passed_over(&resolved.digest, &error);
                None
            })
    }

    /// A reader of an image's blobs.
    async fn ranges(
        &self,
        reference: &ImageRef,
        options: &PullOptions,
        progress: &Arc<dyn Progress>,
    ) -> Result<Arc<dyn Ranges>, Error> {
        fetch::open(reference, &self.fetch_options(options)?, progress.clone()).await
    }

    fn fetch_options(&self, options: &PullOptions) -> Result<FetchOptions, Error> {
        let client = match &options.client {
            Some(client) => client.clone(),
            None => Client::new(crate::registry::Config::default())?,
        };
        Ok(FetchOptions {
            source: self.source_options(options),
            client,
        })
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

    /// Makes every chunk of an image ready.
    async fn complete(
        &self,
        image: &Image,
        options: &PullOptions,
        progress: &Arc<dyn Progress>,
    ) -> Result<(), Error> {
        let mut seen = HashSet::new();
        for blob in image.blobs.iter().filter(|blob| seen.insert(blob.id)) {
            let (store, id) = (self.clone(), blob.id);
            let tar = blocking(move || store.form(&id)).await? == Some(Form::Tar);
            if tar {
                // All of it is wanted: one stream is less than many ranges.
                self.fill(
                    &blob.id,
                    0,
                    u64::MAX,
                    &self.source_options(options),
                    progress.clone(),
                )
                .await?;
            } else {
                let filler = Filler::new(self.clone(), self.fetch_options(options)?);
                filler.fill(&blob.id, 0, u64::MAX, Priority::Demand).await?;
            }
        }
        Ok(())
    }
}

/// The format of an image that is not made of tar layers.
fn format(form: &manifest::Form) -> Option<&dyn ImageFormat> {
    match form {
        manifest::Form::Layers => None,
        manifest::Form::Accelerated(manifest) => Some(&**manifest),
        manifest::Form::Nydus(manifest) => Some(&**manifest),
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
