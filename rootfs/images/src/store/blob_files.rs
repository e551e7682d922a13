//! The cache files of a layer, opened for [`crate::fill`], and the places to read the layer from.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use thaw_imagefs::blob::ReadyFile;
use thaw_imagefs::digest::Digest;

use crate::error::Error;
use crate::form::Form;
use crate::index::kept::{self, INDEX, Kept, KeptError};
use crate::ranges::StoredBlob;
use crate::reference::ImageRef;

use super::Store;
use super::layer;
use super::make::all_verified;
use super::record::Record;

/// A blob's files, and how to fill them.
pub(crate) struct BlobFiles {
    pub data: File,
    pub ready: ReadyFile,
    /// The layer's.
    pub directory: PathBuf,
    /// `None` if the layer can only be unpacked again as a whole.
    pub kept: Option<Kept>,
}

/// A place that has a blob.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BlobOrigin {
    pub reference: ImageRef,
    pub plain_http: bool,
    pub stored: StoredBlob,
}

impl Store {
    pub(super) fn layer_file(&self, diff_id: &Digest, name: &str) -> Result<File, Error> {
        let path = self.layer_directory(diff_id).join(name);
        File::options()
            .read(true)
            .write(true)
            .open(&path)
            .map_err(|error| match error.kind() {
                std::io::ErrorKind::NotFound => Error::NotFound {
                    what: format!("layer {diff_id}"),
                    place: self.root.display().to_string(),
                    advice: "pull its image again".into(),
                },
                _ => Error::io(&path, error),
            })
    }

    pub(super) fn ready_file(&self, diff_id: &Digest) -> Result<ReadyFile, Error> {
        let file = self.layer_file(diff_id, layer::READY)?;
        ReadyFile::open(file).map_err(|error| Error::blob(*diff_id, &self.layer_directory(diff_id), error))
    }

    /// The images that have a layer, and its index in each.
    pub(super) fn records_with(&self, key: &Digest) -> Result<Vec<(Record, usize)>, Error> {
        let mut found = Vec::new();
        for digest in self.names("images")? {
            let Some(record) = Record::read(&self.image_directory(&digest))? else {
                continue;
            };
            if let Some(at) = record.layers.iter().position(|layer| layer.key == *key) {
                found.push((record, at));
            }
        }
        Ok(found)
    }

    /// The form in which an image has a layer.
    pub(crate) fn form(&self, key: &Digest) -> Result<Option<Form>, Error> {
        let found = self.records_with(key)?;
        Ok(found.first().map(|(record, at)| record.layers[*at].form))
    }

    /// Opens a blob's files and index. Makes its bits valid for this boot and sets the length of its data file.
    ///
    /// # Errors
    /// `NotFound` for a blob that the store lacks, `Io`.
    pub(crate) fn blob_files(&self, key: &Digest) -> Result<BlobFiles, Error> {
        if !self.layer_is_whole(key)? {
            return Err(Error::NotFound {
                what: format!("layer {key}"),
                place: self.root.display().to_string(),
                advice: "pull its image again".into(),
            });
        }
        let ready = self.ready_file(key)?;
        let directory = self.layer_directory(key);
        let index = directory.join(INDEX);
        let kept = match std::fs::read(&index) {
            Ok(bytes) => self.usable(key, &ready, kept::decode(&bytes)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            Err(error) => return Err(Error::io(&index, error)),
        };
        Ok(BlobFiles {
            data: self.layer_file(key, layer::DATA)?,
            ready,
            directory,
            kept,
        })
    }

    fn usable(&self, key: &Digest, ready: &ReadyFile, kept: Result<Kept, KeptError>) -> Option<Kept> {
        let why = match kept {
            Err(error) => error.to_string(),
            Ok(kept) if kept.content.data_length != ready.length() => {
                "it is of a blob of another length".to_owned()
            }
            Ok(kept) if ready.is_learned() && !all_verified(&kept.content) => {
                "it has spans without digests".to_owned()
            }
            Ok(kept) => return Some(kept),
        };
        tracing::warn!(layer = %key, why, "a kept index cannot be used");
        None
    }

    /// Where a layer stored as `stored` can be read in ranges.
    ///
    /// # Errors
    /// `Io`.
    pub(crate) fn blob_origins(&self, key: &Digest, stored: &Digest) -> Result<Vec<BlobOrigin>, Error> {
        let mut origins: Vec<BlobOrigin> = Vec::new();
        for (record, at) in self.records_with(key)? {
            let Some(blob) = record.layers[at].origin.stored() else {
                continue;
            };
            if blob.digest != *stored {
                continue;
            }
            let Ok(reference) = record.reference.parse() else {
                continue;
            };
            let origin = BlobOrigin {
                reference,
                plain_http: record.plain_http,
                stored: blob,
            };
            if !origins.contains(&origin) {
                origins.push(origin);
            }
        }
        Ok(origins)
    }

    /// Which ready file is a blob's now: its device and inode. It is another one once the blob was emptied.
    pub(crate) fn blob_identity(&self, key: &Digest) -> Option<(u64, u64)> {
        let path = self.layer_directory(key).join(layer::READY);
        std::fs::metadata(path).ok().map(|it| (it.dev(), it.ino()))
    }

    /// Gives a blob's data file its length again, if it was cut while its bits were set. Returns whether it was.
    pub(crate) fn restore_data(&self, key: &Digest, files: &BlobFiles) -> Result<bool, Error> {
        let io = |error| Error::io(&files.directory.join(layer::DATA), error);
        if files.data.metadata().map_err(io)?.len() >= files.ready.length() {
            return Ok(false);
        }
        let _lock = self.lock_exclusive(&format!("layer-{}", key.hex()))?;
        let failed = |error| Error::blob(*key, &files.directory, error);
        let restored = files.ready.restore_length(&files.data).map_err(failed)?;
        if restored {
            tracing::warn!(layer = %key, "a cache file was cut short; what is gone is fetched again");
        }
        Ok(restored)
    }
}
