//! The parts of a converted image: its manifest, and the blobs that the manifest refers to.

use std::collections::BTreeMap;

use thaw_imagefs::digest::Digest;

use crate::accelerated::metadata::{HEAD_ANNOTATION, ROOT_ANNOTATION};
use crate::error::Error;
use crate::manifest::{ConvertedManifest, Descriptor, LOAD_ORDER_TYPE, METADATA_TYPE};

use super::blobs::Blobs;
use super::body::Body;
use super::cut::Chunking;
use super::facts::Facts;
use super::original::Original;

/// A blob the manifest refers to.
pub struct Part {
    pub descriptor: Descriptor,
    pub body: Body,
}

/// A converted image, ready to be written.
pub struct Converted {
    pub manifest: Vec<u8>,
    pub digest: Digest,
    /// The config first.
    pub parts: Vec<Part>,
    pub facts: Facts,
}

/// The documents of a converted image other than its chunk tables.
pub struct Documents {
    pub metadata: Vec<u8>,
    /// Bytes of the metadata document's head.
    pub head: usize,
    pub load_order: Option<Vec<u8>>,
}

/// Writes the manifest and lists all it refers to.
pub fn assemble(
    original: &Original,
    chunking: Chunking,
    level: i32,
    blobs: Blobs,
    documents: Documents,
    mut facts: Facts,
) -> Result<Converted, Error> {
    let Documents {
        metadata: document,
        head,
        load_order,
    } = documents;
    let mut metadata = Descriptor::of(METADATA_TYPE, &document);
    metadata.annotations = Some(BTreeMap::from([
        (
            ROOT_ANNOTATION.into(),
            blake3::hash(&document[..head]).to_hex().to_string(),
        ),
        (HEAD_ANNOTATION.into(), head.to_string()),
    ]));
    let load_order = load_order.map(|document| (Descriptor::of(LOAD_ORDER_TYPE, &document), document));
    let manifest = ConvertedManifest {
        config: original.config_descriptor(),
        subject: original.subject.clone(),
        metadata: metadata.clone(),
        blobs: blobs.list.iter().map(|blob| blob.stored.clone()).collect(),
        load_order: load_order.as_ref().map(|(descriptor, _)| descriptor.clone()),
        chunking: Some(chunking.to_string()),
    };
    let bytes = manifest.encode(level)?;
    let mut parts = vec![
        Part {
            descriptor: manifest.config,
            body: Body::Bytes(original.config.clone()),
        },
        Part {
            descriptor: metadata,
            body: Body::Bytes(document),
        },
    ];
    for blob in blobs.list {
        let table_body = match blob.body {
            Body::Dictionary(dictionary) => Body::Dictionary(dictionary),
            Body::Bytes(_) | Body::File(_) => Body::Bytes(blob.document),
        };
        parts.push(Part {
            descriptor: blob.stored.table,
            body: table_body,
        });
        parts.push(Part {
            descriptor: blob.stored.data,
            body: blob.body,
        });
    }
    parts.extend(load_order.map(|(descriptor, document)| Part {
        descriptor,
        body: Body::Bytes(document),
    }));
    facts.push_bytes = bytes.len() as u64
        + parts
            .iter()
            .filter(|part| !matches!(part.body, Body::Dictionary(_)))
            .map(|part| part.descriptor.size)
            .sum::<u64>();
    Ok(Converted {
        digest: Digest::of(&bytes),
        manifest: bytes,
        parts,
        facts,
    })
}
