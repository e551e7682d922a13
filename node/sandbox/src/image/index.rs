//! `thaw image index`: a SOCI v2 index of an image, and the image bound to it, as AWS's `soci convert` pushes them.
//!
//! It writes a ztoc for each layer that is large enough, the SOCI index (a manifest whose layers are the ztocs), the image's
//! manifest with an annotation that names the index, and an OCI image index of both under the tag. The layers and the config
//! are the original's.
//!
//! Invariant: a ztoc is pushed only for a layer whose bytes had the digest in the image's manifest.

use std::io::BufReader;
use std::sync::Arc;

use serde::Serialize;
use serde_json::{Value, json};
use thaw_imagefs::digest::Digest;
use thaw_images::index::error::IndexError;
use thaw_images::index::soci::{self, Ztoc};
use thaw_images::layer::LayerLimits;
use thaw_images::manifest::{Kind, OCI_CONFIG, OCI_INDEX, OCI_MANIFEST};
use thaw_images::progress::{Event, Progress};
use thaw_images::reference::ImageRef;
use thaw_images::source::{self, Fallback, LayerSource, Platform, Push, Resolved, Source};

use super::destination::{self, Destination};
use crate::error::{Error, ErrorKind};
use crate::images::{Images, failure};

/// The name of the tool in the index.
const TOOL: &str = concat!("thaw ", env!("CARGO_PKG_VERSION"));
/// The annotation of an image's manifest that names its index. On the index's descriptor, the second one names the image.
const INDEX_DIGEST: &str = "com.amazon.soci.index-digest";
const IMAGE_DIGEST: &str = "com.amazon.soci.image-manifest-digest";
/// The type of the SOCI index.
const SOCI_INDEX: &str = "application/vnd.amazon.soci.index.v2+json";

/// The result of indexing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Indexed {
    /// The reference of the new image.
    pub reference: String,
    /// Digest of the image index under the tag.
    pub digest: Digest,
    /// Digest of the manifest bound to the SOCI index.
    pub image: Digest,
    /// Digest of the SOCI index.
    pub index: Digest,
    pub layers: Vec<IndexedLayer>,
    /// Number of bytes sent.
    pub pushed_bytes: u64,
}

/// The result for one layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct IndexedLayer {
    pub layer: Digest,
    /// Bytes as stored.
    pub size: u64,
    /// Size of its ztoc in bytes; `None` if it has none.
    pub ztoc: Option<u64>,
    /// Why it has no ztoc.
    pub why_not: Option<String>,
}

/// Which layers are indexed, and with which granularity.
#[derive(Clone, Copy, Debug)]
pub struct Cut {
    /// Minimum size of a layer to index, bytes as stored.
    pub least: u64,
    /// Minimum distance between two points of the tar at which reading can begin, bytes.
    pub span: u64,
}

/// Useful span sizes. With smaller spans the index is larger than the savings; a larger span is fetched whole for one page.
pub const SPANS: std::ops::RangeInclusive<u64> = 256 << 10..=8 << 20;

/// Makes the index of `reference` and pushes it to `destination`. Without one, pushes it beside the image, with `-soci` appended to its
/// tag.
pub async fn index(
    images: &Images,
    reference: &str,
    destination: Option<&str>,
    cut: Cut,
    plain_http: bool,
    progress: Arc<dyn Progress>,
) -> Result<Indexed, Error> {
    let from = destination::parse(reference)?;
    let to = match destination {
        Some(destination) => destination::parse(destination)?,
        None => beside(&from)?,
    };
    destination::check_writable(&to)?;
    let options = images.source_options(plain_http);
    let source = source::open(&from, &options, progress.clone())
        .await
        .map_err(failure)?;
    let resolved = source::resolve(&*source, &Platform::linux_amd64())
        .await
        .map_err(failure)?;
    if resolved.kind != Kind::Layers || matches!(from, ImageRef::Archive { .. }) {
        let what = format!("{from} has no layers that a SOCI index describes");
        return Err(Error::new(ErrorKind::NotIndexable, what).remedy("index the image it was made of"));
    }
    let (layers, ztocs) = ztocs(&*source, &resolved, cut, &progress).await?;
    if ztocs.is_empty() {
        let why: Vec<String> = layers
            .iter()
            .filter_map(|layer| Some(format!("{}: {}", layer.layer, layer.why_not.as_ref()?)))
            .collect();
        let what = format!("no layer of {from} can be indexed: {}", why.join(", "));
        return Err(Error::new(ErrorKind::NotIndexable, what));
    }
    let push = Push::open(&to, &options, progress.clone())
        .await
        .map_err(failure)?;
    let target = Destination::new(&push, &from, &to, progress, images);
    let mut pushed_bytes = target.copy_image(&*source, &resolved).await?;
    let described: Vec<Ztoc> = ztocs.iter().map(|(ztoc, _)| ztoc.clone()).collect();
    let soci_index = soci::index_manifest(&described, TOOL)
        .map_err(|e| Error::new(ErrorKind::NotIndexable, e.to_string()))?;
    for (ztoc, bytes) in ztocs {
        pushed_bytes += target.blob(&ztoc.digest, bytes).await?;
    }
    pushed_bytes += target
        .blob(&Digest::of(SOCI_CONFIG), SOCI_CONFIG.to_vec())
        .await?;
    let index_digest = push
        .manifest(None, OCI_MANIFEST, &soci_index)
        .await
        .map_err(failure)?;
    let bound = bound(&resolved.manifest, &index_digest)?;
    let image_digest = push.manifest(None, OCI_MANIFEST, &bound).await.map_err(failure)?;
    let top = top(
        &resolved,
        &image_digest,
        bound.len(),
        &index_digest,
        soci_index.len(),
    );
    let digest = push
        .manifest(destination::tag(&to), OCI_INDEX, &top)
        .await
        .map_err(failure)?;
    pushed_bytes += (soci_index.len() + bound.len() + top.len()) as u64;
    Ok(Indexed {
        reference: to.to_string(),
        digest,
        image: image_digest,
        index: index_digest,
        layers,
        pushed_bytes,
    })
}

/// The config of a SOCI index.
const SOCI_CONFIG: &[u8] = b"{}";

/// The image's name with `-soci` appended to its tag.
fn beside(from: &ImageRef) -> Result<ImageRef, Error> {
    let named = |tag: &Option<String>| match tag {
        Some(tag) => format!("{tag}-soci"),
        None => "soci".into(),
    };
    match from {
        ImageRef::Layout { directory, tag } => Ok(ImageRef::Layout {
            directory: directory.clone(),
            tag: Some(named(tag)),
        }),
        ImageRef::Registry(registry) => {
            let mut registry = registry.clone();
            registry.tag = Some(named(&registry.tag));
            registry.digest = None;
            Ok(ImageRef::Registry(registry))
        }
        ImageRef::Archive { .. } => {
            let what = format!("{from} cannot be written to");
            Err(Error::new(ErrorKind::PushRefused, what))
        }
    }
}

type Made = (Ztoc, Vec<u8>);

/// Makes a ztoc for each layer that gets one.
async fn ztocs(
    source: &dyn Source,
    resolved: &Resolved,
    cut: Cut,
    progress: &Arc<dyn Progress>,
) -> Result<(Vec<IndexedLayer>, Vec<Made>), Error> {
    let total = resolved.descriptors.iter().map(|layer| layer.size).sum();
    let (mut layers, mut ztocs, mut done) = (Vec::new(), Vec::<Made>::new(), 0);
    for (layer, descriptor) in resolved.layers.iter().zip(&resolved.descriptors) {
        let mut line = IndexedLayer {
            layer: descriptor.digest,
            size: descriptor.size,
            ztoc: None,
            why_not: None,
        };
        if ztocs.iter().any(|(ztoc, _)| ztoc.layer == descriptor.digest) {
            // The image repeats a layer.
            continue;
        }
        match descriptor.size < cut.least {
            true => line.why_not = Some("it is smaller than the least".into()),
            false => match ztoc(source, layer, cut.span).await? {
                Err(why) => line.why_not = Some(why),
                Ok(bytes) => {
                    line.ztoc = Some(bytes.len() as u64);
                    let ztoc = Ztoc {
                        layer: descriptor.digest,
                        layer_media_type: oci_layer_type(&descriptor.media_type).to_owned(),
                        digest: Digest::of(&bytes),
                        size: bytes.len() as u64,
                    };
                    ztocs.push((ztoc, bytes));
                }
            },
        }
        layers.push(line);
        done += descriptor.size;
        progress.event(Event::Converting { done, total });
    }
    Ok((layers, ztocs))
}

/// Reads a layer once, and makes its ztoc. The inner error is the reason why it gets none.
async fn ztoc(
    source: &dyn Source,
    layer: &LayerSource,
    span_size: u64,
) -> Result<Result<Vec<u8>, String>, Error> {
    let mut fallback = Fallback::new(source, layer);
    let made = loop {
        let body = fallback.open().await.map_err(failure)?;
        let layer = layer.clone();
        // The digest is checked whatever the indexing returned: if it differs, that is the error.
        let work = move || {
            destination::verified(body.reader, &layer, |reader| {
                let reader = BufReader::with_capacity(256 << 10, reader);
                soci::index_layer(reader, &LayerLimits::default(), span_size, TOOL)
            })
        };
        let read = tokio::task::spawn_blocking(work).await;
        match read.map_err(|e| Error::new(ErrorKind::Runtime, e.to_string()))? {
            Ok(made) => break made,
            Err(error) => fallback.failed(error).map_err(failure)?,
        };
    };
    match made {
        Ok(Some(bytes)) => Ok(Ok(bytes)),
        Ok(None) => Ok(Err("its compression has no places to begin at".into())),
        // The other layers can still have a ztoc.
        Err(IndexError::Unsupported { what, .. }) => Ok(Err(format!("it has what no ztoc can say: {what}"))),
        Err(e) => Err(Error::new(
            ErrorKind::NotIndexable,
            format!("{}: {e}", layer.name()),
        )),
    }
}

/// The image's manifest, bound to its index. A Docker manifest becomes an OCI one, because only those have annotations.
fn bound(manifest: &[u8], index: &Digest) -> Result<Vec<u8>, Error> {
    let malformed = |why: &str| Error::new(ErrorKind::ImageMalformed, format!("the image's manifest: {why}"));
    let mut manifest: Value = serde_json::from_slice(manifest).map_err(|e| malformed(&e.to_string()))?;
    let object = manifest
        .as_object_mut()
        .ok_or_else(|| malformed("it is no object"))?;
    object.insert("mediaType".into(), OCI_MANIFEST.into());
    if let Some(config) = object.get_mut("config").and_then(Value::as_object_mut) {
        config.insert("mediaType".into(), OCI_CONFIG.into());
    }
    for layer in object
        .get_mut("layers")
        .and_then(Value::as_array_mut)
        .into_iter()
        .flatten()
    {
        if let Some(kind) = layer.get_mut("mediaType")
            && let Some(known) = kind.as_str().map(oci_layer_type)
        {
            *kind = known.to_owned().into();
        }
    }
    match object.entry("annotations").or_insert_with(|| json!({})) {
        Value::Object(annotations) => {
            annotations.insert(INDEX_DIGEST.into(), index.to_string().into());
        }
        other => *other = json!({INDEX_DIGEST: index.to_string()}),
    }
    serde_json::to_vec(&manifest).map_err(|e| malformed(&e.to_string()))
}

/// The OCI media type of a Docker layer.
fn oci_layer_type(media_type: &str) -> &str {
    match media_type {
        "application/vnd.docker.image.rootfs.diff.tar" => "application/vnd.oci.image.layer.v1.tar",
        "application/vnd.docker.image.rootfs.diff.tar.gzip"
        | "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip" => {
            "application/vnd.oci.image.layer.v1.tar+gzip"
        }
        "application/vnd.docker.image.rootfs.diff.tar.zstd" => "application/vnd.oci.image.layer.v1.tar+zstd",
        other => other,
    }
}

/// The image index of both manifests.
fn top(resolved: &Resolved, image: &Digest, image_size: usize, index: &Digest, index_size: usize) -> Vec<u8> {
    let mut platform = json!({
        "architecture": resolved.config.architecture().to_string(),
        "os": resolved.config.os().to_string(),
    });
    if let Some(variant) = resolved.config.variant() {
        platform["variant"] = variant.clone().into();
    }
    json!({
        "schemaVersion": 2,
        "mediaType": OCI_INDEX,
        "manifests": [
            {
                "mediaType": OCI_MANIFEST,
                "digest": image.to_string(),
                "size": image_size,
                "annotations": {INDEX_DIGEST: index.to_string()},
                "platform": platform,
            },
            {
                "mediaType": OCI_MANIFEST,
                "artifactType": SOCI_INDEX,
                "digest": index.to_string(),
                "size": index_size,
                "annotations": {IMAGE_DIGEST: image.to_string()},
            },
        ],
    })
    .to_string()
    .into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_manifest_is_an_oci_one_and_differs_in_nothing_else() {
        let index = Digest::of(b"index");
        let docker = json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
            "config": {"mediaType": "application/vnd.docker.container.image.v1+json", "size": 2, "digest": "d"},
            "layers": [{"mediaType": "application/vnd.docker.image.rootfs.diff.tar.gzip", "size": 7, "digest": "l"}],
        });
        let bound: Value =
            serde_json::from_slice(&bound(docker.to_string().as_bytes(), &index).unwrap()).unwrap();
        assert_eq!(
            bound,
            json!({
                "schemaVersion": 2,
                "mediaType": OCI_MANIFEST,
                "config": {"mediaType": OCI_CONFIG, "size": 2, "digest": "d"},
                "layers": [{"mediaType": "application/vnd.oci.image.layer.v1.tar+gzip", "size": 7, "digest": "l"}],
                "annotations": {INDEX_DIGEST: index.to_string()},
            })
        );
    }

    #[test]
    fn an_annotation_is_added_to_those_there_are() {
        let index = Digest::of(b"index");
        for (before, after) in [
            (
                json!({"a": "b"}),
                json!({"a": "b", INDEX_DIGEST: index.to_string()}),
            ),
            (Value::Null, json!({INDEX_DIGEST: index.to_string()})),
        ] {
            let manifest = json!({"annotations": before}).to_string();
            let bound: Value = serde_json::from_slice(&bound(manifest.as_bytes(), &index).unwrap()).unwrap();
            assert_eq!(bound["annotations"], after);
        }
        assert!(bound(b"[]", &index).is_err());
        assert!(bound(b"{", &index).is_err());
    }

    #[test]
    fn an_index_lies_beside_its_image() {
        let name = |text: &str| beside(&text.parse().unwrap()).map(|it| it.to_string());
        assert_eq!(name("oci:/d:v1").unwrap(), "oci:/d:v1-soci");
        assert_eq!(name("registry:5000/a/b:v1").unwrap(), "registry:5000/a/b:v1-soci");
        assert!(name("docker-archive:/x.tar").is_err());
    }
}
