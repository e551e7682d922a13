//! Descriptions of stored images: for people in `thaw image`, for programs in `thaw image --json` and thawd's API.

use thaw_imagefs::blob::CHUNK_SIZE;
use thaw_images::form::Form;
use thaw_images::prefetch;
use thaw_images::store::{Image, Inspection, LayerInspection};
use thaw_protocol::api;

use super::{Images, failure, size};
use crate::error::{Error, ErrorKind};
use crate::human_bytes::HumanBytes;

/// A short description of an image.
pub fn image(images: &Images, image: &Image) -> Result<api::Image, Error> {
    let inspection = images.store.inspect(&image.digest).map_err(failure)?;
    let presence = Presence::of(&inspection);
    Ok(api::Image {
        digest: image.digest.to_string(),
        reference: image.reference.clone(),
        for_snapshot: inspection.pinned,
        bytes: size(image),
        layers: inspection.layers.len() as u32,
        form: forms(&inspection),
        present_bytes: presence.present,
        total_bytes: presence.total,
        in_use: inspection.leased,
    })
}

/// A description of an image with its layers.
pub fn detail(images: &Images, image: &Image) -> Result<api::ImageDetail, Error> {
    let inspection = images.store.inspect(&image.digest).map_err(failure)?;
    let presence = Presence::of(&inspection);
    let odd = |e: serde_json::Error| Error::new(ErrorKind::ImageMalformed, e.to_string());
    Ok(api::ImageDetail {
        digest: image.digest.to_string(),
        reference: image.reference.clone(),
        for_snapshot: inspection.pinned,
        form: forms(&inspection),
        in_use: inspection.leased,
        metadata_bytes: inspection.metadata,
        present_bytes: presence.present,
        total_bytes: presence.total,
        layers: inspection.layers.iter().map(layer).collect(),
        load_order: prefetch::find(image).map(|(order, whose)| api::LoadOrder {
            source: match whose {
                prefetch::Provenance::Recorded => "recorded".into(),
                prefetch::Provenance::Shipped => "shipped".into(),
            },
            runs: order.runs.len() as u64,
            bytes: order.bytes(),
            dropped: order.dropped,
        }),
        image_config: serde_json::to_string(&image.config).map_err(odd)?,
    })
}

fn layer(layer: &LayerInspection) -> api::ImageLayer {
    api::ImageLayer {
        key: layer.key.to_string(),
        form: form_name(layer).into(),
        stored_digest: layer.stored_digest.map(|digest| digest.to_string()),
        stored_bytes: layer.stored_size,
        bytes: layer.length,
        present_bytes: present(layer),
        chunks: layer.chunks,
        ready_chunks: layer.ready_chunks,
        index_bytes: layer.index_bytes,
        spans: layer.spans,
        disk_bytes: layer.disk,
    }
}

/// The name of a form. For a tar that was unpacked here, what counts is whether it has an index to read it by.
pub fn form_name(layer: &LayerInspection) -> &'static str {
    match layer.form {
        Form::Tar if layer.index_bytes.is_some() => "kept index",
        Form::Tar => "full",
        Form::Soci => "soci",
        Form::Estargz => "estargz",
        Form::Accelerated => "converted",
        Form::Nydus => "nydus",
    }
}

/// Bytes of a layer's file data that can be served now.
pub fn present(layer: &LayerInspection) -> u64 {
    match layer.ready_chunks == layer.chunks {
        true => layer.length,
        false => (layer.ready_chunks * CHUNK_SIZE).min(layer.length),
    }
}

/// How much of an image's file data is in the store.
pub struct Presence {
    pub present: u64,
    pub total: u64,
}

impl Presence {
    pub fn of(inspection: &Inspection) -> Presence {
        let mut seen = std::collections::HashSet::new();
        let distinct = inspection.layers.iter().filter(|layer| seen.insert(layer.key));
        distinct.fold(Presence { present: 0, total: 0 }, |sum, layer| Presence {
            present: sum.present + present(layer),
            total: sum.total + layer.length,
        })
    }

    fn is_whole(&self) -> bool {
        self.present == self.total
    }
}

impl std::fmt::Display for Presence {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.is_whole() {
            true => write!(f, "{}", HumanBytes(self.total)),
            false => write!(f, "{} of {}", HumanBytes(self.present), HumanBytes(self.total)),
        }
    }
}

/// The forms of an image's layers, each once. `full` if nothing is missing, whatever the forms.
pub fn forms(inspection: &Inspection) -> String {
    if Presence::of(inspection).is_whole() {
        return "full".into();
    }
    let mut names: Vec<&str> = Vec::new();
    for layer in inspection.layers.iter().filter(|layer| layer.length > 0) {
        // Complete layers are not listed beside incomplete ones.
        let name = form_name(layer);
        if present(layer) < layer.length && !names.contains(&name) {
            names.push(name);
        }
    }
    format!("lazy: {}", names.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use thaw_imagefs::digest::Digest;

    fn layer(form: Form, name: &[u8], chunks: u64, ready: u64, index: Option<u64>) -> LayerInspection {
        LayerInspection {
            key: Digest::of(name),
            form,
            stored_digest: None,
            stored_size: None,
            length: chunks * CHUNK_SIZE,
            chunks,
            ready_chunks: ready,
            index_bytes: index,
            spans: None,
            disk: 0,
        }
    }

    fn inspection(layers: Vec<LayerInspection>) -> Inspection {
        Inspection {
            digest: Digest::of(b"image"),
            reference: "x".into(),
            metadata: 0,
            leased: false,
            pinned: false,
            layers,
        }
    }

    #[test]
    fn a_form_is_told_only_of_what_is_not_whole() {
        let whole = inspection(vec![layer(Form::Soci, b"a", 8, 8, Some(1))]);
        assert_eq!(forms(&whole), "full");
        assert_eq!(Presence::of(&whole).to_string(), "1.00 MiB");
        let twice = layer(Form::Soci, b"b", 16, 1, Some(1));
        let partly = inspection(vec![
            layer(Form::Tar, b"a", 8, 8, Some(1)),
            twice.clone(),
            twice,
            layer(Form::Tar, b"c", 8, 0, Some(1)),
        ]);
        assert_eq!(forms(&partly), "lazy: soci, kept index");
        assert_eq!(Presence::of(&partly).to_string(), "1.12 MiB of 4.00 MiB");
    }
}
