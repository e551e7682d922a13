//! Writing an image's directory: the metadata, merged from its layers' trees or ready-made, the config and the record.

use std::io::{BufWriter, Write};
use std::path::Path;

use thaw_failpoint::{Failpoint, reach};
use thaw_imagefs::digest::Digest;
use thaw_imagefs::erofs;

use crate::error::Error;
use crate::layer::tree::LayerTree;
use crate::lazy::LazyImage;
use crate::merge;

use super::layer;
use super::make::Partial;
use super::record::{self, BlobRecord, LayerRecord, Record};
use super::{Image, Store};

/// The parts of an image.
pub(crate) struct Parts {
    pub digest: Digest,
    pub reference: String,
    pub plain_http: bool,
    pub config: Vec<u8>,
    /// In the store, bottom first; for a ready-made image its data blobs.
    pub layers: Vec<LayerRecord>,
    pub ready_made: Option<LazyImage>,
    pub pinned: bool,
}

impl Store {
    /// Writes the image's directory, unless it exists, and makes its reference point to it.
    pub(crate) fn assemble_image(&self, parts: Parts) -> Result<Image, Error> {
        let reference = parts.reference.clone();
        let image = self.make_image_directory(parts)?;
        self.refer(&reference, image.digest)?;
        Ok(image)
    }

    /// Writes the image's directory, unless it is there.
    pub(super) fn make_image_directory(&self, parts: Parts) -> Result<Image, Error> {
        let digest = parts.digest;
        let _lock = self.lock_exclusive(&format!("image-{}", digest.hex()))?;
        if let Some(image) = self.image(&digest)? {
            return Ok(image);
        }
        self.write_image(parts)?;
        self.image(&digest)?.ok_or_else(|| {
            Error::malformed(format!("image {digest}"), "it cannot be read back from the store")
        })
    }

    fn write_image(&self, parts: Parts) -> Result<(), Error> {
        let directory = self.image_directory(&parts.digest);
        let partial = Partial::create(&directory)?;
        let mut record = Record::new(parts.digest, parts.reference, parts.plain_http, parts.layers);
        record.pinned = parts.pinned;
        let mut order = None;
        let path = partial.path.join(record::METADATA);
        let io = |error| Error::io(&path, error);
        let file = std::fs::File::create_new(&path).map_err(io)?;
        reach(Failpoint::ImageMetadataMade);
        let mut out = BufWriter::with_capacity(1 << 20, file);
        match parts.ready_made {
            None => self.merge_metadata(&mut record, &mut out, &path)?,
            Some(opened) => {
                out.write_all(&opened.metadata).map_err(io)?;
                let placed = record.layers.iter().zip(&opened.blobs);
                record.blobs = placed
                    .filter(|(_, blob)| blob.content.data_length > 0)
                    .map(|(layer, blob)| BlobRecord {
                        address: blob.address,
                        length: blob.content.data_length,
                        key: layer.key,
                    })
                    .collect();
                order = opened.load_order.map(|order| order.to_json()).transpose()?;
            }
        }
        let file = out.into_inner().map_err(|error| io(error.into_error()))?;
        file.sync_all().map_err(io)?;
        reach(Failpoint::ImageMetadataWritten);
        record.metadata_length = file.metadata().map_err(io)?.len();

        let malformed = |error| Error::malformed("the image's record", error);
        let bytes = serde_json::to_vec_pretty(&record).map_err(malformed)?;
        for (name, bytes) in [
            (record::CONFIG, &parts.config[..]),
            (record::LEASE, &[]),
            (record::RECORD, &bytes),
        ]
        .into_iter()
        .chain(order.as_deref().map(|order| (record::LOAD_ORDER, order)))
        {
            let path = partial.path.join(name);
            record::write_synced(&path, bytes).map_err(|error| Error::io(&path, error))?;
        }
        if directory.exists() {
            // It is there but not whole, as after a crash; no sandbox of this boot can have it.
            self.remove_directory(&directory)?;
        }
        partial.rename_to(&directory)
    }

    /// Merges the layers' trees, and places their data files past the metadata.
    fn merge_metadata(&self, record: &mut Record, out: &mut impl Write, path: &Path) -> Result<(), Error> {
        let mut trees = Vec::new();
        for layer in &record.layers {
            trees.push(self.layer_tree(&layer.key)?);
        }
        let lengths: Vec<u64> = trees.iter().map(|tree| tree.data_length).collect();
        let tree = merge::flatten(&trees)?;
        drop(trees);
        let summary = erofs::write(&tree, &lengths, out).map_err(|error| match error {
            erofs::WriteError::Io(error) => Error::io(path, error),
            other => Error::Metadata(other),
        })?;
        let placed = record
            .layers
            .iter()
            .zip(&summary.blobs)
            .filter(|(_, blob)| blob.length > 0);
        record.blobs = placed
            .map(|(layer, blob)| BlobRecord {
                address: blob.address,
                length: blob.length,
                key: layer.key,
            })
            .collect();
        Ok(())
    }

    pub(super) fn layer_tree(&self, key: &Digest) -> Result<LayerTree, Error> {
        let path = self.layer_directory(key).join(layer::TREE);
        let bytes = std::fs::read(&path).map_err(|error| Error::io(&path, error))?;
        LayerTree::from_bytes(&bytes).map_err(|error| Error::malformed(path.display().to_string(), error))
    }
}
