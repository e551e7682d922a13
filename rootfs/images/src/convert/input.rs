//! The tree and the file data that a conversion starts from.

use std::fs::File;

use thaw_imagefs::blob::BlobFile;
use thaw_imagefs::erofs::{self, BlobPlacement, Reader};
use thaw_imagefs::tree::{Kind, Tree};

use crate::error::Error;
use crate::load_order::LoadOrder;
use crate::store::Image;

use super::chunks::SourceBlob;

/// The input of a conversion.
pub struct Input {
    pub tree: Tree,
    /// In the order of the indexes in the tree's extents.
    pub blobs: Vec<SourceBlob>,
    /// The data that a run of the image read. It is laid out first, in that order, and recorded in the converted image for readers.
    pub load_order: Option<LoadOrder>,
}

impl Input {
    /// Bytes of file data, holes apart.
    pub(super) fn bytes(&self) -> u64 {
        let lengths = self.tree.inodes.iter().flat_map(|inode| match &inode.kind {
            Kind::File { extents, .. } => &extents[..],
            _ => &[],
        });
        lengths.map(|extent| extent.length).sum()
    }
    /// An image of the store with all its file data.
    ///
    /// # Errors
    /// `NotFound` if file data is missing: pull the full image first. `Malformed`, `Io`.
    pub fn of_image(image: &Image, load_order: Option<LoadOrder>) -> Result<Self, Error> {
        let metadata = std::fs::read(&image.metadata).map_err(|error| Error::io(&image.metadata, error))?;
        let mut placements = Vec::with_capacity(image.blobs.len());
        let mut blobs = Vec::with_capacity(image.blobs.len());
        for blob in &image.blobs {
            let open = |path: &std::path::Path| File::open(path).map_err(|error| Error::io(path, error));
            let cached = BlobFile::open(open(&blob.data)?, open(&blob.ready)?)
                .map_err(|error| Error::blob(blob.id, &blob.ready, error))?;
            if !cached.is_ready(0, blob.length) {
                return Err(Error::NotFound {
                    what: format!("a part of the file data of layer {}", blob.id),
                    place: "the store".into(),
                    advice: "pull the image whole before it is converted".into(),
                });
            }
            placements.push(BlobPlacement {
                address: blob.address,
                length: blob.length,
            });
            blobs.push(SourceBlob {
                id: blob.id,
                layer: None,
                length: blob.length,
                data: Box::new(open(&blob.data)?),
            });
        }
        let tree = Reader::new(&metadata[..])
            .and_then(|reader| erofs::read_tree(&reader, &placements))
            .map_err(|error| Error::malformed(image.metadata.display().to_string(), error))?;
        Ok(Self {
            tree,
            blobs,
            load_order,
        })
    }
}
