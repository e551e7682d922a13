//! The local store of images: a directory, no database, safe to kill at any point and to share between processes.
//!
//! ```text
//! layers/HEX/{data,ready,tree,index}               a layer: file data, tree, where it comes from (docs/blob-cache.md)
//! images/HEX/{record.json,config.json,metadata.erofs,lease}   an image, by its manifest's digest
//! refs/HEX                                         what a reference named last, by the reference's SHA-256
//! locks/NAME                                       flock files: store, layer-HEX, image-HEX
//! ```
//!
//! Invariants:
//! - A directory without `.partial` in its name is complete: it was written under that name, flushed and renamed. Only layer data is not
//!   flushed; its bits are valid for one boot, and its chunks have digests.
//! - A process that makes a layer or an image holds its lock exclusively, so it is made once. The next process that gets
//!   the lock removes the leftovers of a killed one.
//! - A process that makes anything holds the `store` lock shared; one that deletes holds it exclusively.
//! - A file a sandbox may map is unlinked, never truncated or punched. A leased image is not removed.
//!
//! Compressed layers are not kept: they are needed again only when a host crash tore a cache file, and then the layer
//! is unpacked again from the source its image was pulled from. Keeping them would double every image on disk.

mod assemble;
mod blob_files;
mod collect;
mod evict;
mod known;
mod layer;
mod lease;
mod lock;
mod make;
mod manage;
mod record;
mod repair;
mod stored_layer;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use oci_spec::image::ImageConfiguration;
use thaw_failpoint::{Failpoint, reach};
use thaw_imagefs::blob::{BlobError, BootId, ReadyFile};
use thaw_imagefs::digest::Digest;

use crate::error::Error;
use crate::load_order::LoadOrder;
use crate::reference::ImageRef;

pub(crate) use blob_files::{BlobFiles, BlobOrigin};
pub use evict::Pruned;
pub use lease::Lease;
pub use manage::{ImageUsage, Inspection, LayerInspection, Usage, VerifyReport};

pub(crate) use assemble::Parts;
pub(crate) use lock::Lock;
pub(crate) use record::{LayerRecord, Origin};
pub use stored_layer::StoredLayer;

use record::Record;

/// A store of images. Cheap to clone; holds no lock between calls.
#[derive(Clone, Debug)]
pub struct Store {
    root: PathBuf,
    boot: BootId,
    known: known::Known,
    leases: lease::Leases,
}

/// An image in the store.
#[derive(Clone, Debug)]
pub struct Image {
    /// Digest of its manifest: its identity.
    pub digest: Digest,
    /// The reference it was pulled by.
    pub reference: String,
    pub config: ImageConfiguration,
    /// The EROFS metadata.
    pub metadata: PathBuf,
    /// The ranges past the metadata, by address; layers without file data have none.
    pub blobs: Vec<ImageBlob>,
    directory: PathBuf,
    /// Those of its store.
    leases: lease::Leases,
}

/// One range of an image's address space and the cache file behind it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageBlob {
    /// First byte in the image's synthesized address space.
    pub address: u64,
    /// Bytes.
    pub length: u64,
    /// The blob: its layer's key.
    pub id: Digest,
    pub data: PathBuf,
    pub ready: PathBuf,
}

impl Image {
    /// Its configuration as it was pulled, JSON. It may have fields that [`Image::config`] lacks. Blocks.
    pub fn config_json(&self) -> std::io::Result<Vec<u8>> {
        std::fs::read(self.directory.join(record::CONFIG))
    }

    /// The load order that the image came with.
    ///
    /// # Errors
    /// `Io`.
    pub fn load_order(&self) -> Result<Option<LoadOrder>, Error> {
        record::read_load_order(&self.directory)
    }
}

/// Directories of the store.
const DIRECTORIES: [&str; 4] = ["layers", "images", "refs", "locks"];
/// The suffix of directories that are being written or removed.
const PARTIAL: &str = ".partial";
const REMOVED: &str = ".removed";

impl Store {
    /// Opens the store at `root`, creates the directory if it does not exist, and removes the leftovers of killed processes.
    ///
    /// # Errors
    /// `DiskFull`, or `Io` if the directories cannot be created.
    pub fn open(root: &Path) -> Result<Self, Error> {
        for name in DIRECTORIES {
            let path = root.join(name);
            std::fs::create_dir_all(&path).map_err(|error| Error::io(&path, error))?;
            reach(Failpoint::StoreDirectoryMade);
        }
        let root = root.canonicalize().map_err(|error| Error::io(root, error))?;
        let store = Self {
            root,
            boot: BootId::current(),
            known: known::Known::default(),
            leases: lease::Leases::default(),
        };
        store.collect_if_idle()?;
        Ok(store)
    }

    /// The store's directory.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The images, oldest name first.
    ///
    /// # Errors
    /// `Io`. Damaged records are skipped: the next pull replaces them.
    pub fn images(&self) -> Result<Vec<Image>, Error> {
        let mut images = Vec::new();
        for digest in self.names("images")? {
            images.extend(self.image(&digest)?);
        }
        Ok(images)
    }

    /// The image to which a reference pointed when it was last pulled, if the image is complete.
    ///
    /// # Errors
    /// `Io`.
    pub fn find(&self, reference: &ImageRef) -> Result<Option<Image>, Error> {
        match self.referred(&reference.to_string())? {
            Some(digest) => self.image(&digest),
            None => Ok(None),
        }
    }

    /// The image with this manifest digest, if it is complete. Its layers' bits are made valid for this boot.
    ///
    /// # Errors
    /// `Io`.
    pub fn image(&self, digest: &Digest) -> Result<Option<Image>, Error> {
        let directory = self.image_directory(digest);
        let Some(record) = Record::read(&directory)? else {
            return Ok(None);
        };
        let Some(config) = record::read_config(&directory)? else {
            return Ok(None);
        };
        let metadata = directory.join(record::METADATA);
        let size = std::fs::metadata(&metadata).map(|it| it.len());
        if !size.is_ok_and(|size| size == record.metadata_length) {
            return Ok(None);
        }
        for layer in record.distinct_layers() {
            if !self.layer_is_whole(&layer.key)? {
                return Ok(None);
            }
        }
        let blobs = record.blobs.iter().map(|blob| {
            let directory = self.layer_directory(&blob.key);
            ImageBlob {
                address: blob.address,
                length: blob.length,
                id: blob.key,
                data: directory.join(layer::DATA),
                ready: directory.join(layer::READY),
            }
        });
        let blobs = blobs.collect();
        Ok(Some(Image {
            digest: *digest,
            reference: record.reference,
            config,
            metadata,
            blobs,
            directory,
            leases: self.leases.clone(),
        }))
    }

    /// Removes an image, the references to it, and the layers that no other image has.
    ///
    /// # Errors
    /// `InUse` while a sandbox holds a lease, `NotFound`, `Io`. Waits for running pulls.
    pub fn remove(&self, digest: &Digest) -> Result<(), Error> {
        let _store = self.lock_exclusive("store")?;
        let directory = self.image_directory(digest);
        if !directory.exists() {
            return Err(Error::NotFound {
                what: format!("image {digest}"),
                place: self.root.display().to_string(),
                advice: "`thaw image ls` lists what there is".into(),
            });
        }
        let lease = directory.join(record::LEASE);
        let held = Lock::try_exclusive(&lease).map_err(|error| Error::io(&lease, error))?;
        if held.is_none() {
            return Err(Error::InUse { digest: *digest });
        }
        self.remove_directory(&directory)?;
        self.collect()
    }

    /// Whether the layer is complete. This detects damage after a crash; the layer then counts as absent.
    fn layer_is_whole(&self, key: &Digest) -> Result<bool, Error> {
        let path = self.layer_directory(key).join(layer::READY);
        if !path.exists() {
            return Ok(false);
        }
        // A repair holds the layer's lock for long, but has activated the layer before, so no caller waits here for a repair.
        let current = std::fs::File::options()
            .read(true)
            .write(true)
            .open(&path)
            .ok()
            .map(ReadyFile::open);
        if let Some(Ok(ready)) = current
            && ready.is_active(self.boot, key.bytes())
        {
            let data = self.layer_directory(key).join(layer::DATA);
            let look = || std::fs::metadata(&data);
            if look().is_ok_and(|data| data.len() >= ready.length()) {
                ready
                    .void_if_changed(look)
                    .map_err(|error| Error::blob(*key, &data, error))?;
                return Ok(true);
            }
        }
        let _lock = self.lock_exclusive(&format!("layer-{}", key.hex()))?;
        match self.activate(key) {
            Ok(_) => Ok(true),
            Err(BlobError::Io(error)) if error.kind() != io::ErrorKind::NotFound => {
                Err(Error::io(&path, error))
            }
            Err(error) => {
                tracing::warn!(layer = %key, %error, "a layer in the store is damaged and will be made again");
                Ok(false)
            }
        }
    }

    /// Opens a layer's ready file. Makes its bits valid for this boot and sets the length of its data file.
    fn activate(&self, key: &Digest) -> Result<ReadyFile, BlobError> {
        let directory = self.layer_directory(key);
        let writable = |name| {
            std::fs::File::options()
                .read(true)
                .write(true)
                .open(directory.join(name))
        };
        let mut ready = ReadyFile::open(writable(layer::READY)?)?;
        if ready.id() != *key.bytes() {
            return Err(BlobError::Damaged("it belongs to another layer"));
        }
        let data = writable(layer::DATA)?;
        ready.activate(self.boot)?;
        ready.void_if_changed(|| data.metadata())?;
        ready.restore_length(&data)?;
        Ok(ready)
    }

    fn layer_directory(&self, key: &Digest) -> PathBuf {
        self.root.join("layers").join(key.hex())
    }

    fn image_directory(&self, digest: &Digest) -> PathBuf {
        self.root.join("images").join(digest.hex())
    }

    fn lock_exclusive(&self, name: &str) -> Result<Lock, Error> {
        let path = self.root.join("locks").join(name);
        Lock::exclusive(&path).map_err(|error| Error::io(&path, error))
    }

    pub(crate) fn lock_shared(&self, name: &str) -> Result<Lock, Error> {
        let path = self.root.join("locks").join(name);
        Lock::shared(&path).map_err(|error| Error::io(&path, error))
    }

    fn try_lock(&self, name: &str) -> Result<Option<Lock>, Error> {
        let path = self.root.join("locks").join(name);
        Lock::try_exclusive(&path).map_err(|error| Error::io(&path, error))
    }

    /// The digests that name complete directories under `kind`, in order.
    fn names(&self, kind: &str) -> Result<Vec<Digest>, Error> {
        let mut digests = Vec::new();
        for name in self.entries(kind)? {
            digests.extend(Digest::from_hex(&name));
        }
        digests.sort();
        Ok(digests)
    }

    fn entries(&self, kind: &str) -> Result<Vec<String>, Error> {
        let path = self.root.join(kind);
        let read = std::fs::read_dir(&path).map_err(|error| Error::io(&path, error))?;
        let mut names = Vec::new();
        for entry in read {
            let entry = entry.map_err(|error| Error::io(&path, error))?;
            names.extend(entry.file_name().into_string());
        }
        Ok(names)
    }

    /// Writes a small file atomically, even if the host crashes.
    fn write_atomically(&self, path: &Path, bytes: &[u8]) -> Result<(), Error> {
        static COUNTER: AtomicU64 = AtomicU64::new(0);
        let number = COUNTER.fetch_add(1, Ordering::Relaxed);
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(format!(".{}-{number}{PARTIAL}", std::process::id()));
        let partial = path.with_file_name(name);
        let written = record::write_synced(&partial, bytes)
            .and_then(|()| std::fs::rename(&partial, path))
            .inspect(|()| reach(Failpoint::StoreFileRenamed))
            .and_then(|()| sync_parent(path));
        written.map_err(|error| {
            let _ = std::fs::remove_file(&partial);
            Error::io(path, error)
        })
    }
}

#[cfg(test)]
impl Store {
    /// The same store after a reboot of the host.
    pub(crate) fn after_boot(&self, boot: BootId) -> Self {
        Self { boot, ..self.clone() }
    }

    /// The same store as another process of this boot opens it.
    pub(crate) fn reopened(&self) -> Self {
        Self::open(&self.root).unwrap().after_boot(self.boot)
    }
}

/// Makes a rename last.
fn sync_parent(path: &Path) -> io::Result<()> {
    match path.parent() {
        Some(parent) => std::fs::File::open(parent)?.sync_all(),
        None => Ok(()),
    }
}

#[cfg(test)]
#[path = "store_test.rs"]
mod tests;
