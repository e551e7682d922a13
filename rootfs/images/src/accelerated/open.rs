//! Reads a converted image's documents: its metadata, the chunk table of each blob, and its load order.
//!
//! Invariant: the sizes that the manifest states are checked before a document is requested, and a document is used only if it has its
//! digest and agrees with the others.
//!
//! Bounds: an image has at most 256 blobs. The metadata document has at most 256 MiB and expands to at most 256 MiB; a chunk table has at
//! most 64 MiB, all tables of an image at most 128 MiB ([`MAX_TABLES`]), a load order at most 16 MiB. So an image's documents take at most
//! 400 MiB of memory as stored.

use std::collections::HashMap;

use async_trait::async_trait;
use thaw_imagefs::digest::Digest;
use thaw_imagefs::erofs::{self, BlobPlacement, Reader};

use crate::blocking::blocking;
use crate::error::Error;
use crate::fetch::document;
use crate::form::{Form, layer_key};
use crate::lazy::{ImageFormat, LazyBlob, LazyImage};
use crate::load_order::{LoadOrder, MAX_DOCUMENT};
use crate::manifest::{ConvertedManifest, Descriptor};
use crate::ranges::Ranges;

use super::metadata;
use super::table::{MAX_TABLE, Table};

/// Most bytes of all chunk tables of an image, which bounds the cost of opening it.
const MAX_TABLES: u64 = 128 << 20;

/// Reads metadata, chunk tables and load order, but no file data.
///
/// # Errors
/// Those of `ranges`; `DigestMismatch` or `Malformed` for documents that contradict the manifest.
pub async fn open(manifest: &ConvertedManifest, ranges: &dyn Ranges) -> Result<LazyImage, Error> {
    let documents = Documents::read(manifest, ranges).await?;
    blocking(move || documents.open()).await
}

#[async_trait]
impl ImageFormat for ConvertedManifest {
    fn form(&self) -> Form {
        Form::Accelerated
    }

    fn document_bytes(&self) -> u64 {
        self.metadata.size + self.blobs.iter().map(|blob| blob.table.size).sum::<u64>()
    }

    async fn open(&self, ranges: &dyn Ranges) -> Result<LazyImage, Error> {
        open(self, ranges).await
    }
}

/// The documents of a converted image, whose digests match the manifest; nothing else is checked yet.
pub struct Documents {
    pub metadata: (Descriptor, Vec<u8>),
    /// Table, its bytes, and the blob it describes.
    pub tables: Vec<(Descriptor, Vec<u8>, Descriptor)>,
    pub load_order: Option<(Descriptor, Vec<u8>)>,
}

impl Documents {
    pub(crate) async fn read(manifest: &ConvertedManifest, ranges: &dyn Ranges) -> Result<Self, Error> {
        let total = manifest
            .blobs
            .iter()
            .try_fold(0u64, |sum, blob| sum.checked_add(blob.table.size));
        if total.is_none_or(|total| total > MAX_TABLES) {
            return Err(Error::malformed(
                format!("converted image {}", manifest.metadata.digest),
                format!("its chunk tables have more than {MAX_TABLES} bytes"),
            ));
        }
        let (metadata, tables, load_order) = futures_util::future::try_join3(
            document(ranges, "metadata", &manifest.metadata, metadata::MAX_DOCUMENT),
            futures_util::future::try_join_all(
                manifest
                    .blobs
                    .iter()
                    .map(|blob| document(ranges, "chunk table", &blob.table, MAX_TABLE)),
            ),
            async {
                match &manifest.load_order {
                    Some(descriptor) => {
                        let bytes = document(ranges, "load order", descriptor, MAX_DOCUMENT as u64).await?;
                        Ok(Some((descriptor.clone(), bytes)))
                    }
                    None => Ok(None),
                }
            },
        )
        .await?;
        Ok(Self {
            metadata: (manifest.metadata.clone(), metadata),
            tables: manifest
                .blobs
                .iter()
                .zip(tables)
                .map(|(blob, bytes)| (blob.table.clone(), bytes, blob.data.clone()))
                .collect(),
            load_order,
        })
    }

    /// Decodes and checks all documents, and their consistency.
    ///
    /// # Errors
    /// `Malformed`.
    pub fn open(self) -> Result<LazyImage, Error> {
        let what = format!("metadata {}", self.metadata.0.digest);
        let (metadata, placed) = metadata::decode(&what, &self.metadata.1)?;
        let malformed = |problem: String| Error::malformed(&what, problem);
        if placed.len() != self.tables.len() {
            let problem = format!(
                "it places {} blobs, the manifest has {}",
                placed.len(),
                self.tables.len()
            );
            return Err(malformed(problem));
        }
        let mut blobs = Vec::with_capacity(placed.len());
        for (placed, (descriptor, bytes, data)) in placed.iter().zip(&self.tables) {
            let table = decode_table(descriptor, bytes, data)?;
            if placed.table != descriptor.digest || placed.length != table.data_length {
                return Err(malformed(format!(
                    "it was not made with chunk table {}",
                    descriptor.digest
                )));
            }
            blobs.push(LazyBlob {
                address: placed.address,
                form: Form::Accelerated,
                document: descriptor.digest,
                digests: None,
                content: table.content(&format!("chunk table {}", descriptor.digest))?,
                stored: data.stored(),
            });
        }
        let placements: Vec<_> = placed
            .iter()
            .map(|placed| BlobPlacement {
                address: placed.address,
                length: placed.length,
            })
            .collect();
        Reader::new(&metadata[..])
            .and_then(|reader| erofs::read_tree(&reader, &placements))
            .map_err(|error| malformed(error.to_string()))?;
        Ok(LazyImage {
            load_order: self
                .load_order
                .map(|(descriptor, bytes)| decode_order(&descriptor, &bytes, &blobs))
                .transpose()?,
            metadata,
            blobs,
        })
    }
}

/// A load order, checked to refer to these blobs.
fn decode_order(descriptor: &Descriptor, bytes: &[u8], blobs: &[LazyBlob]) -> Result<LoadOrder, Error> {
    let order = LoadOrder::from_json(bytes)?;
    let keys: HashMap<Digest, u64> = blobs
        .iter()
        .map(|blob| {
            let key = layer_key(blob.form, &blob.stored.digest, &blob.document);
            (key, blob.content.data_length)
        })
        .collect();
    match order
        .blobs
        .iter()
        .all(|blob| keys.get(&blob.digest) == Some(&blob.length))
    {
        true => Ok(order),
        false => Err(Error::malformed(
            format!("load order {}", descriptor.digest),
            "it is of blobs this image has not got",
        )),
    }
}

/// A table, checked to describe the blob that follows it.
pub fn decode_table(descriptor: &Descriptor, bytes: &[u8], data: &Descriptor) -> Result<Table, Error> {
    let what = format!("chunk table {}", descriptor.digest);
    let table = Table::decode(&what, bytes)?;
    if (table.blob, table.stored_length) != (data.digest, data.size) {
        return Err(Error::malformed(
            what,
            format!("it is not of blob {}", data.digest),
        ));
    }
    Ok(table)
}
