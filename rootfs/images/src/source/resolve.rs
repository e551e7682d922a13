//! Resolving a reference to one platform's image.

use std::collections::{BTreeMap, BTreeSet};

use oci_spec::image::ImageConfiguration;
use thaw_imagefs::digest::Digest;

use crate::error::Error;
use crate::manifest::{Document, Kind, MAX_LAYERS, Manifest};

use super::{Descriptor, LayerSource, Platform, Resolved, Root, Source};

/// How deep indexes may nest, and how many documents without a platform are looked into.
const MAX_DEPTH: usize = 4;
const MAX_DOCUMENTS: usize = 64;

/// Finds the image for `platform` and reads and verifies everything except its layers.
///
/// # Errors
/// `WrongArchitecture` with the available platforms, `UnknownMediaType`, `Malformed`, `DigestMismatch`, and those of the source.
pub async fn resolve(source: &dyn Source, platform: &Platform) -> Result<Resolved, Error> {
    let mut walk = Walk {
        source,
        platform,
        available: BTreeSet::new(),
        documents: 0,
    };
    let found = match source.root().await? {
        Root::Document { media_type, bytes } => {
            walk.document("the image's manifest", bytes, media_type.as_deref())
                .await?
        }
        Root::Choice(descriptors) => walk.choose(descriptors).await?,
        Root::Parts {
            manifest,
            config,
            layers,
        } => walk.parts(manifest, config, layers)?,
    };
    found.ok_or_else(|| Error::WrongArchitecture {
        wanted: platform.to_string(),
        available: walk.available.into_iter().collect(),
    })
}

struct Walk<'a> {
    source: &'a dyn Source,
    platform: &'a Platform,
    available: BTreeSet<String>,
    documents: usize,
}

impl Walk<'_> {
    async fn document(
        &mut self,
        what: &str,
        bytes: Vec<u8>,
        media_type: Option<&str>,
    ) -> Result<Option<Resolved>, Error> {
        match Document::parse(what, &bytes, media_type)? {
            Document::Manifest(manifest) => self.image(bytes, *manifest).await,
            Document::Index(descriptors) => self.choose(descriptors).await,
        }
    }

    /// Searches an index and nested ones depth-first. Entries that name a matching platform precede those without a platform.
    async fn choose(&mut self, descriptors: Vec<Descriptor>) -> Result<Option<Resolved>, Error> {
        let mut pending = self.candidates(descriptors, 0);
        let mut unknown = None;
        while let Some((descriptor, depth)) = pending.pop() {
            self.documents += 1;
            if self.documents > MAX_DOCUMENTS {
                return Err(Error::malformed("the image index", "it nests too many documents"));
            }
            let bytes = self.source.manifest(&descriptor).await?;
            let what = format!("manifest {}", descriptor.digest);
            let parsed = Document::parse(&what, &bytes, Some(&descriptor.media_type));
            let document = match parsed {
                // Indexes also list documents about an image: signatures, SOCI indexes.
                Err(error @ Error::UnknownMediaType { .. }) => {
                    unknown.get_or_insert(error);
                    continue;
                }
                parsed => parsed?,
            };
            match document {
                Document::Manifest(manifest) => {
                    if let Some(found) = self.image(bytes, *manifest).await? {
                        return Ok(Some(found));
                    }
                }
                Document::Index(_) if depth + 1 >= MAX_DEPTH => {
                    return Err(Error::malformed(what, "indexes are nested too deeply"));
                }
                Document::Index(nested) => pending.extend(self.candidates(nested, depth + 1)),
            }
        }
        match unknown {
            Some(error) if self.available.is_empty() => Err(error),
            _ => Ok(None),
        }
    }

    /// The entries that may match, best last.
    fn candidates(&mut self, descriptors: Vec<Descriptor>, depth: usize) -> Vec<(Descriptor, usize)> {
        let mut silent = Vec::new();
        let mut fitting = Vec::new();
        for descriptor in descriptors {
            match &descriptor.platform {
                None => silent.push((descriptor, depth)),
                Some(platform) if platform.fits(self.platform) => fitting.push((descriptor, depth)),
                // Attestations, which are no images, are listed so.
                Some(platform) if platform.os == "unknown" => {}
                Some(platform) => {
                    self.available.insert(platform.to_string());
                }
            }
        }
        silent.reverse();
        fitting.reverse();
        silent.append(&mut fitting);
        silent
    }

    async fn image(&mut self, bytes: Vec<u8>, manifest: Manifest) -> Result<Option<Resolved>, Error> {
        let config = self.source.config(&manifest.config).await?;
        let Some((config, config_bytes)) = self.config(config)? else {
            return Ok(None);
        };
        let found = |layers, descriptors| {
            let (digest, manifest_bytes) = (Digest::of(&bytes), bytes);
            Ok(Some(Resolved {
                digest,
                manifest: manifest_bytes,
                config_bytes,
                layers,
                descriptors,
                kind: manifest.kind.clone(),
                subject: manifest.subject.clone(),
                annotations: manifest.annotations.clone(),
                config: config.clone(),
            }))
        };
        if manifest.kind != Kind::Layers {
            return found(Vec::new(), manifest.layers.clone());
        }
        let diff_ids = diff_ids(&config)?;
        if diff_ids.len() != manifest.layers.len() {
            let problem = format!(
                "the config has {} DiffIDs for {} layers",
                diff_ids.len(),
                manifest.layers.len()
            );
            return Err(Error::malformed("the image", problem));
        }
        let layers = manifest
            .layers
            .iter()
            .zip(diff_ids)
            .map(|(layer, diff_id)| LayerSource {
                diff_id,
                digest: Some(layer.digest),
                size: Some(layer.size),
                urls: layer.urls.clone(),
                member: None,
            });
        found(layers.collect(), manifest.layers.clone())
    }

    fn parts(
        &mut self,
        manifest: Vec<u8>,
        config: Vec<u8>,
        layers: Vec<LayerSource>,
    ) -> Result<Option<Resolved>, Error> {
        let Some((config, config_bytes)) = self.config(config)? else {
            return Ok(None);
        };
        Ok(Some(Resolved {
            digest: Digest::of(&manifest),
            manifest,
            config_bytes,
            config,
            layers,
            descriptors: Vec::new(),
            kind: Kind::Layers,
            subject: None,
            annotations: BTreeMap::new(),
        }))
    }

    /// The config, if the image it describes runs here.
    fn config(&mut self, bytes: Vec<u8>) -> Result<Option<(ImageConfiguration, Vec<u8>)>, Error> {
        let config: ImageConfiguration =
            serde_json::from_slice(&bytes).map_err(|error| Error::malformed("the image's config", error))?;
        let platform = Platform {
            os: config.os().to_string(),
            architecture: config.architecture().to_string(),
            variant: config.variant().clone(),
        };
        if !platform.fits(self.platform) {
            self.available.insert(platform.to_string());
            return Ok(None);
        }
        Ok(Some((config, bytes)))
    }
}

/// The config's DiffIDs, bottom first.
pub(super) fn diff_ids(config: &ImageConfiguration) -> Result<Vec<Digest>, Error> {
    let ids = config.rootfs().diff_ids();
    if ids.len() > MAX_LAYERS {
        return Err(Error::malformed(
            "the image's config",
            format!("it has more than {MAX_LAYERS} layers"),
        ));
    }
    ids.iter()
        .map(|id| {
            id.parse()
                .map_err(|error| Error::malformed("the image's config", error))
        })
        .collect()
}
