//! An OCI image layout directory (image-spec, `image-layout.md`): `index.json` and `blobs/sha256/`.

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use serde::Deserialize;
use thaw_imagefs::digest::Digest;

use crate::error::Error;
use crate::manifest::{Document, MAX_CONFIG, MAX_MANIFEST};

use super::section::{Section, read_limited};
use super::{Descriptor, LayerBody, LayerSource, Root, Source, verify};

const REF_NAME: &str = "org.opencontainers.image.ref.name";
const IMAGE_NAME: &str = "io.containerd.image.name";

pub struct Layout {
    directory: PathBuf,
    tag: Option<String>,
}

impl Layout {
    pub fn open(directory: PathBuf, tag: Option<String>) -> Result<Self, Error> {
        let missing = |what: &str, advice: &str| Error::NotFound {
            what: what.into(),
            place: directory.display().to_string(),
            advice: advice.into(),
        };
        match std::fs::metadata(&directory) {
            Ok(metadata) if metadata.is_dir() => {}
            Ok(_) => {
                return Err(missing(
                    "a directory",
                    "for a file that `docker save` wrote, say docker-archive:FILE",
                ));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(missing("the directory", "check the path"));
            }
            Err(error) => return Err(Error::io(&directory, error)),
        }
        if !directory.join("index.json").is_file() {
            return Err(missing(
                "index.json",
                "this is no OCI image layout; make one with skopeo, umoci or buildah",
            ));
        }
        Ok(Self { directory, tag })
    }

    /// A blob's bytes in place.
    pub(crate) fn section(&self, digest: &Digest) -> Result<Section, Error> {
        let file = self.open_blob("blob", digest)?;
        let metadata = file
            .metadata()
            .map_err(|error| Error::io(&self.blob(digest), error))?;
        Ok(Section {
            at: 0,
            end: metadata.len(),
            file: Arc::new(file),
        })
    }

    pub(crate) fn blob(&self, digest: &Digest) -> PathBuf {
        self.directory.join("blobs/sha256").join(digest.hex())
    }

    fn open_blob(&self, what: &str, digest: &Digest) -> Result<File, Error> {
        let path = self.blob(digest);
        File::open(&path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => Error::NotFound {
                what: format!("{what} {digest}"),
                place: self.directory.display().to_string(),
                advice: "the layout is incomplete: copy the image again".into(),
            },
            _ => Error::io(&path, error),
        })
    }

    pub(super) fn document(&self, what: &str, descriptor: &Descriptor, limit: u64) -> Result<Vec<u8>, Error> {
        let file = self.open_blob(what, &descriptor.digest)?;
        let bytes = read_limited(what, &self.blob(&descriptor.digest), file, limit)?;
        verify(what, bytes, descriptor)
    }

    /// The index's name and bytes.
    pub(super) fn index(&self) -> Result<(String, Vec<u8>), Error> {
        let path = self.directory.join("index.json");
        let file = File::open(&path).map_err(|error| Error::io(&path, error))?;
        let what = path.display().to_string();
        let bytes = read_limited(&what, &path, file, MAX_MANIFEST)?;
        Ok((what, bytes))
    }

    /// The manifests with the tag, or all manifests if there is no tag.
    fn select(&self, descriptors: Vec<Descriptor>) -> Result<Vec<Descriptor>, Error> {
        let names: std::collections::BTreeSet<_> = descriptors
            .iter()
            .filter_map(|it| it.annotation(REF_NAME))
            .map(str::to_owned)
            .collect();
        let wanted = match &self.tag {
            Some(tag) => tag.as_str(),
            None if names.len() <= 1 => return Ok(descriptors),
            None => "latest",
        };
        let chosen: Vec<_> = descriptors
            .into_iter()
            .filter(|it| names_it(it, wanted))
            .collect();
        if chosen.is_empty() {
            let names: Vec<_> = names.into_iter().collect();
            return Err(Error::NotFound {
                what: format!("tag {wanted:?}"),
                place: self.directory.display().to_string(),
                advice: match names.as_slice() {
                    [] => "the layout has no tags: leave it out".into(),
                    names => format!("it has: {}", names.join(", ")),
                },
            });
        }
        Ok(chosen)
    }
}

/// Leaves out referrers (an index of an image's layers, its converted form), which are listed without a name, because a reference without a
/// tag means an image. If only referrers are listed, they stay.
fn images(descriptors: Vec<Descriptor>, index: &[u8]) -> Vec<Descriptor> {
    #[derive(Deserialize)]
    struct Index {
        manifests: Vec<Entry>,
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Entry {
        artifact_type: Option<String>,
    }
    let Ok(Index { manifests }) = serde_json::from_slice(index) else {
        return descriptors;
    };
    let is_image = |(descriptor, entry): (&Descriptor, &Entry)| {
        entry.artifact_type.is_none() || descriptor.annotation(REF_NAME).is_some()
    };
    let images: Vec<_> = descriptors
        .iter()
        .zip(&manifests)
        .filter(|pair| is_image(*pair))
        .map(|(descriptor, _)| descriptor.clone())
        .collect();
    if images.is_empty() { descriptors } else { images }
}

/// Tools write the bare tag, `name:tag`, or both.
fn names_it(descriptor: &Descriptor, tag: &str) -> bool {
    [REF_NAME, IMAGE_NAME]
        .iter()
        .filter_map(|name| descriptor.annotation(name))
        .any(|name| {
            name == tag
                || name
                    .strip_suffix(tag)
                    .is_some_and(|rest| rest.ends_with(':') || rest.ends_with('/'))
        })
}

#[async_trait]
impl Source for Layout {
    async fn root(&self) -> Result<Root, Error> {
        let (what, bytes) = self.index()?;
        match Document::parse(&what, &bytes, None)? {
            Document::Index(descriptors) => Ok(Root::Choice(self.select(images(descriptors, &bytes))?)),
            Document::Manifest(_) => Err(Error::malformed(what, "it is a manifest, not an index")),
        }
    }

    async fn manifest(&self, descriptor: &Descriptor) -> Result<Vec<u8>, Error> {
        self.document("manifest", descriptor, MAX_MANIFEST)
    }

    async fn config(&self, descriptor: &Descriptor) -> Result<Vec<u8>, Error> {
        self.document("config", descriptor, MAX_CONFIG)
    }

    async fn open(&self, layer: &LayerSource, _place: usize) -> Result<LayerBody, Error> {
        let blob = self.open_blob("layer", &layer.digest.unwrap_or(layer.diff_id))?;
        Ok(LayerBody::local(blob, &self.directory))
    }
}
