//! The store's record of an image, and of the image that a reference named last.

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::time::{Duration, SystemTime};

use oci_spec::image::ImageConfiguration;
use serde::{Deserialize, Serialize};
use thaw_failpoint::{Failpoint, reach};
use thaw_imagefs::digest::Digest;

use crate::error::Error;
use crate::form::Form;
use crate::load_order::LoadOrder;
use crate::ranges::StoredBlob;
use crate::source::LayerSource;

use super::Store;

pub const RECORD: &str = "record.json";
pub const CONFIG: &str = "config.json";
pub const METADATA: &str = "metadata.erofs";
pub const LEASE: &str = "lease";
pub const LOAD_ORDER: &str = "load-order.json";

/// How exactly the time of an image's last lease is noted. Writing it for each of many creations would cost each of them a write to the
/// store's file system.
const NOTED_EVERY: Duration = Duration::from_secs(1);
/// Records of version 1, which had neither keys nor forms, count as absent: their images are created again.
const VERSION: u32 = 2;

/// `record.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    pub version: u32,
    pub digest: Digest,
    /// The reference it came from, with absolute paths. Layers are repaired from there.
    pub reference: String,
    pub plain_http: bool,
    /// Assembled from layers for a caller that removes it itself: eviction empties it, but never removes it.
    #[serde(default)]
    pub pinned: bool,
    /// Bottom first; for an image with ready-made metadata, its data blobs.
    pub layers: Vec<LayerRecord>,
    pub metadata_length: u64,
    pub blobs: Vec<BlobRecord>,
}

/// Where a layer's file data is in the address space.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlobRecord {
    pub address: u64,
    pub length: u64,
    pub key: Digest,
}

/// A layer, or a data blob, of an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerRecord {
    /// Its name in the store.
    pub key: Digest,
    pub form: Form,
    /// Where its bytes can be fetched again, within the record's reference.
    pub origin: Origin,
}

/// Where a layer's bytes can be fetched again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Origin {
    /// A layer that can be unpacked again, whole.
    Layer(LayerSource),
    /// A blob that is only read in ranges.
    Blob(StoredBlob),
}

impl Origin {
    /// The blob for reading ranges, if the source describes it completely.
    pub fn stored(&self) -> Option<StoredBlob> {
        match self {
            Self::Blob(stored) => Some(stored.clone()),
            Self::Layer(layer) => Some(StoredBlob {
                digest: layer.digest?,
                size: layer.size?,
                urls: layer.urls.clone(),
            }),
        }
    }
}

/// The load order that an image came with; `None` if it has none, or one that cannot be read.
pub fn read_load_order(directory: &Path) -> Result<Option<LoadOrder>, Error> {
    let bytes = read(&directory.join(LOAD_ORDER))?;
    Ok(bytes.and_then(|bytes| LoadOrder::from_json(&bytes).ok()))
}

/// A file under `refs/`.
#[derive(Serialize, Deserialize)]
struct Referred {
    reference: String,
    digest: Digest,
}

impl Record {
    pub fn new(digest: Digest, reference: String, plain_http: bool, layers: Vec<LayerRecord>) -> Self {
        Self {
            version: VERSION,
            digest,
            reference,
            plain_http,
            pinned: false,
            layers,
            metadata_length: 0,
            blobs: Vec::new(),
        }
    }

    /// The record in an image's directory; `None` if it is missing, of another version or damaged.
    pub fn read(directory: &Path) -> Result<Option<Self>, Error> {
        let path = directory.join(RECORD);
        let Some(bytes) = read(&path)? else {
            return Ok(None);
        };
        let record: Option<Self> = serde_json::from_slice(&bytes).ok();
        Ok(record.filter(|record| record.version == VERSION))
    }

    /// Layers, each once however often the image repeats it.
    pub fn distinct_layers(&self) -> impl Iterator<Item = &LayerRecord> {
        let mut seen = HashSet::new();
        self.layers.iter().filter(move |layer| seen.insert(layer.key))
    }
}

/// The image's config.
pub fn read_config(directory: &Path) -> Result<Option<ImageConfiguration>, Error> {
    let bytes = read(&directory.join(CONFIG))?;
    Ok(bytes.and_then(|bytes| serde_json::from_slice(&bytes).ok()))
}

fn read(path: &Path) -> Result<Option<Vec<u8>>, Error> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
            ) =>
        {
            Ok(None)
        }
        Err(error) => Err(Error::io(path, error)),
    }
}

/// Sets a file's modification time to now, unless it is less than [`NOTED_EVERY`] ago.
pub fn touch(path: &Path) -> io::Result<()> {
    let noted = std::fs::metadata(path)?.modified()?;
    if noted.elapsed().is_ok_and(|ago| ago < NOTED_EVERY) {
        return Ok(());
    }
    File::options()
        .write(true)
        .open(path)?
        .set_modified(SystemTime::now())
}

/// Writes a new file and flushes it to the disk.
pub fn write_synced(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = std::fs::File::create(path)?;
    reach(Failpoint::StoreFileMade);
    file.write_all(bytes)?;
    file.sync_all()?;
    reach(Failpoint::StoreFileWritten);
    Ok(())
}

impl Store {
    /// The image to which a reference last pointed.
    pub(super) fn referred(&self, reference: &str) -> Result<Option<Digest>, Error> {
        let path = self.reference_path(reference);
        let referred: Option<Referred> = read(&path)?.and_then(|bytes| serde_json::from_slice(&bytes).ok());
        Ok(referred
            .filter(|it| it.reference == reference)
            .map(|it| it.digest))
    }

    pub(crate) fn refer(&self, reference: &str, digest: Digest) -> Result<(), Error> {
        if self.referred(reference)? == Some(digest) {
            return Ok(());
        }
        let path = self.reference_path(reference);
        let bytes = serde_json::to_vec(&Referred {
            reference: reference.into(),
            digest,
        });
        self.write_atomically(
            &path,
            &bytes.map_err(|error| Error::malformed("the reference", error))?,
        )
    }

    fn reference_path(&self, reference: &str) -> std::path::PathBuf {
        self.root
            .join("refs")
            .join(Digest::of(reference.as_bytes()).hex())
    }

    /// The image in a file under `refs/`; `None` if the file is damaged.
    pub(super) fn reference_target(&self, name: &str) -> Result<Option<Digest>, Error> {
        let bytes = read(&self.root.join("refs").join(name))?;
        Ok(bytes
            .and_then(|bytes| serde_json::from_slice::<Referred>(&bytes).ok())
            .map(|it| it.digest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Written by the release before this one.
    const PREVIOUS: &[u8] = include_bytes!("fixtures/previous-record.json");

    fn read(bytes: &[u8]) -> Option<Record> {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join(RECORD), bytes).unwrap();
        Record::read(directory.path()).unwrap()
    }

    #[test]
    fn record_of_the_previous_release_is_read() {
        let record = read(PREVIOUS).unwrap();
        assert_eq!(record.reference, "oci:/srv/images:tiny");
        assert_eq!((record.layers.len(), record.blobs.len()), (1, 1));
        // The record that this release writes equals the one of that release.
        let written = serde_json::to_value(&record).unwrap();
        assert_eq!(
            written,
            serde_json::from_slice::<serde_json::Value>(PREVIOUS).unwrap()
        );
    }

    #[test]
    fn record_that_is_cut_or_newer_counts_as_absent() {
        for length in 0..PREVIOUS.len() {
            assert_eq!(read(&PREVIOUS[..length]), None, "cut to {length} bytes");
        }
        let newer = String::from_utf8_lossy(PREVIOUS).replace("\"version\": 2", "\"version\": 3");
        assert_eq!(read(newer.as_bytes()), None);
    }
}
