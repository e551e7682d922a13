//! Inspection of the store for operators: its disk usage, and whether its content is undamaged.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::SystemTime;

use thaw_imagefs::blob::{BlobError, ReadyFile};
use thaw_imagefs::digest::Digest;

use crate::error::Error;
use crate::form::Form;
use crate::index::kept::INDEX;

use super::lock::Lock;
use super::record::{self, Record};
use super::{Store, layer};

/// The disk usage of one image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageUsage {
    pub digest: Digest,
    pub reference: String,
    /// See [`Inspection::pinned`].
    pub pinned: bool,
    /// Its layers, or data blobs.
    pub layers: usize,
    /// Bytes of file data a guest sees, holes included.
    pub logical: u64,
    /// Bytes on the disk: metadata, indexes and stored layer data.
    pub stored: u64,
    /// The part in layers that other images share.
    pub shared: u64,
    /// Whether a sandbox uses it.
    pub leased: bool,
}

/// The disk usage of the store.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub images: Vec<ImageUsage>,
    /// Bytes of file data, each layer counted once.
    pub logical: u64,
    /// Bytes on the disk, each layer counted once.
    pub stored: u64,
}

/// How one layer of an image stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerInspection {
    pub key: Digest,
    pub form: Form,
    /// The blob in the registry, if known.
    pub stored_digest: Option<Digest>,
    pub stored_size: Option<u64>,
    /// Bytes of file data.
    pub length: u64,
    pub chunks: u64,
    /// Chunks that may be served now.
    pub ready_chunks: u64,
    /// Bytes of its index; `None` if it has no index.
    pub index_bytes: Option<u64>,
    /// Spans of its index.
    pub spans: Option<u64>,
    /// Bytes of the cache file on the disk.
    pub disk: u64,
}

/// How an image stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inspection {
    pub digest: Digest,
    pub reference: String,
    /// Bytes of the EROFS metadata.
    pub metadata: u64,
    pub leased: bool,
    /// Assembled from layers for a caller that removes it itself ([`Store::assemble`]), not pulled by a user.
    pub pinned: bool,
    /// Bottom first.
    pub layers: Vec<LayerInspection>,
}

/// The result of the verification of an image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VerifyReport {
    /// Chunks compared with their digests.
    pub checked: u64,
    /// Chunks that were ready but do not match their digests: layer and chunk.
    pub bad: Vec<(Digest, u64)>,
    /// Layers whose files are damaged beyond their chunks (torn or truncated).
    pub damaged: Vec<Digest>,
    /// The bad chunks that are missing now and will be fetched again, because no sandbox uses the image.
    pub cleared: u64,
}

impl VerifyReport {
    /// Whether no defect was found.
    pub fn is_sound(&self) -> bool {
        self.bad.is_empty() && self.damaged.is_empty()
    }
}

impl Store {
    /// The disk usage of the store and of each image.
    ///
    /// # Errors
    /// `Io`.
    pub fn usage(&self) -> Result<Usage, Error> {
        let images = self.standing()?;
        let mut layers: HashMap<Digest, Taken> = HashMap::new();
        let mut users: HashMap<Digest, u64> = HashMap::new();
        for image in &images {
            for layer in image.record.distinct_layers() {
                if let Entry::Vacant(entry) = layers.entry(layer.key) {
                    entry.insert(self.taken(&layer.key)?);
                }
                *users.entry(layer.key).or_default() += 1;
            }
        }
        let mut usage = Usage {
            logical: layers.values().map(|taken| taken.logical).sum(),
            stored: layers.values().map(|taken| taken.disk).sum(),
            images: Vec::new(),
        };
        for image in images {
            let mut line = ImageUsage {
                digest: image.digest,
                reference: image.record.reference.clone(),
                pinned: image.record.pinned,
                layers: image.record.layers.len(),
                logical: 0,
                stored: directory_bytes(&self.image_directory(&image.digest))?,
                shared: 0,
                leased: image.leased,
            };
            usage.stored += line.stored;
            for layer in image.record.distinct_layers() {
                let taken = layers.get(&layer.key).copied().unwrap_or_default();
                line.logical += taken.logical;
                line.stored += taken.disk;
                if users.get(&layer.key).is_some_and(|users| *users > 1) {
                    line.shared += taken.disk;
                }
            }
            usage.images.push(line);
        }
        Ok(usage)
    }

    /// How an image stands.
    ///
    /// # Errors
    /// `NotFound`, `Io`.
    pub fn inspect(&self, digest: &Digest) -> Result<Inspection, Error> {
        let image = self.standing_of(digest)?;
        let mut layers = Vec::new();
        for layer in &image.record.layers {
            let files = self.blob_files(&layer.key)?;
            let stored = layer.origin.stored();
            let index = std::fs::metadata(files.directory.join(INDEX)).ok();
            layers.push(LayerInspection {
                key: layer.key,
                form: layer.form,
                stored_digest: stored.as_ref().map(|stored| stored.digest),
                stored_size: stored.as_ref().map(|stored| stored.size),
                length: files.ready.length(),
                chunks: files.ready.chunk_count(),
                ready_chunks: files.ready.ready_count(),
                index_bytes: index.map(|index| index.len()),
                spans: files.kept.map(|kept| kept.content.spans.spans().len() as u64),
                disk: self.taken(&layer.key)?.data,
            });
        }
        Ok(Inspection {
            digest: *digest,
            reference: image.record.reference,
            metadata: image.record.metadata_length,
            leased: image.leased,
            pinned: image.record.pinned,
            layers,
        })
    }

    /// Compares every ready chunk of an image with its digest. Bad chunks of layers that no sandbox uses are marked missing, so that they
    /// are fetched again at their next use; [`crate::fill::Filler::refetch`] replaces them at once.
    ///
    /// # Errors
    /// `NotFound`, `Io`.
    pub fn verify(&self, digest: &Digest) -> Result<VerifyReport, Error> {
        // Shared: no layer is removed or emptied meanwhile, but pulls continue.
        let _store = self.lock_shared("store")?;
        let image = self.standing_of(digest)?;
        let mut report = VerifyReport::default();
        let mut buffer = Vec::new();
        for layer in image.record.distinct_layers() {
            let directory = self.layer_directory(&layer.key);
            let files = match self.blob_whole(&layer.key) {
                Ok(files) => files,
                Err(BlobError::Io(error)) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(Error::io(&directory, error));
                }
                Err(_) => {
                    report.damaged.push(layer.key);
                    continue;
                }
            };
            let (data, ready) = files;
            let cut = data.metadata().map(|it| it.len() < ready.length());
            if cut.map_err(|error| Error::io(&directory, error))? {
                report.damaged.push(layer.key);
            }
            let mut bad = Vec::new();
            for chunk in (0..ready.chunk_count()).filter(|chunk| ready.is_ready(*chunk)) {
                report.checked += 1;
                let agrees = ready.agrees(&data, chunk, &mut buffer);
                if !agrees.map_err(|error| Error::blob(layer.key, &directory, error))? {
                    bad.push(chunk);
                }
            }
            if !bad.is_empty() {
                tracing::warn!(layer = %layer.key, chunks = bad.len(), "a cache file was changed behind the store's back");
                if let Some(_unused) = self.hold_unused(&layer.key)? {
                    bad.iter().for_each(|chunk| ready.clear(*chunk..chunk + 1));
                    report.cleared += bad.len() as u64;
                }
                report.bad.extend(bad.into_iter().map(|chunk| (layer.key, chunk)));
            }
        }
        Ok(report)
    }

    fn blob_whole(&self, key: &Digest) -> Result<(File, ReadyFile), BlobError> {
        let directory = self.layer_directory(key);
        let open = |name| File::options().read(true).write(true).open(directory.join(name));
        let ready = ReadyFile::open(open(layer::READY)?)?;
        if ready.id() != *key.bytes() {
            return Err(BlobError::Damaged("it belongs to another layer"));
        }
        Ok((open(layer::DATA)?, ready))
    }

    /// Every image, with whether it is in use.
    pub(super) fn standing(&self) -> Result<Vec<Standing>, Error> {
        let mut images = Vec::new();
        for digest in self.names("images")? {
            images.extend(self.stand(&digest)?);
        }
        Ok(images)
    }

    pub(super) fn standing_of(&self, digest: &Digest) -> Result<Standing, Error> {
        self.stand(digest)?.ok_or_else(|| Error::NotFound {
            what: format!("image {digest}"),
            place: self.root.display().to_string(),
            advice: "`thaw image ls` lists what there is".into(),
        })
    }

    fn stand(&self, digest: &Digest) -> Result<Option<Standing>, Error> {
        let directory = self.image_directory(digest);
        let Some(record) = Record::read(&directory)? else {
            return Ok(None);
        };
        let lease = directory.join(record::LEASE);
        let free = Lock::try_exclusive(&lease).map_err(|error| Error::io(&lease, error))?;
        let used = std::fs::metadata(&lease).and_then(|it| it.modified());
        Ok(Some(Standing {
            digest: *digest,
            record,
            leased: free.is_none(),
            used: used.unwrap_or(SystemTime::UNIX_EPOCH),
        }))
    }

    /// The disk usage of a layer.
    pub(super) fn taken(&self, key: &Digest) -> Result<Taken, Error> {
        let directory = self.layer_directory(key);
        let data = std::fs::metadata(directory.join(layer::DATA)).ok();
        Ok(Taken {
            logical: data.as_ref().map_or(0, std::fs::Metadata::len),
            data: data.as_ref().map_or(0, |data| data.blocks() * 512),
            disk: directory_bytes(&directory)?,
        })
    }
}

/// An image as it stands.
pub(super) struct Standing {
    pub digest: Digest,
    pub record: Record,
    pub leased: bool,
    /// When it was leased last.
    pub used: SystemTime,
}

/// The disk usage of a layer.
#[derive(Clone, Copy, Default)]
pub(super) struct Taken {
    pub logical: u64,
    /// Of the data file.
    pub data: u64,
    /// Of all its files.
    pub disk: u64,
}

/// Bytes a directory's files take on the disk.
pub(super) fn directory_bytes(path: &Path) -> Result<u64, Error> {
    let failed = |error| Error::io(path, error);
    let mut bytes = 0;
    let entries = match std::fs::read_dir(path) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
        Err(error) => return Err(failed(error)),
    };
    for entry in entries {
        match entry.map_err(failed)?.metadata() {
            Ok(entry) => bytes += entry.blocks() * 512,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(failed(error)),
        }
    }
    Ok(bytes)
}
