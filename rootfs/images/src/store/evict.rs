//! Eviction: frees space by removing the data of unused layers, then unused images.
//!
//! Invariants: data that a sandbox may use is never touched. A layer is emptied only while the leases of all images that have it are held
//! exclusively. An emptied layer is a new directory in place of the old one, with the same tree, index and digests. A process that still
//! has the old files open keeps them, unlinked and unchanged.

use std::collections::HashSet;
use std::fs::File;
use std::path::Path;

use rustix::fs::{CWD, RenameFlags};
use thaw_failpoint::{Failpoint, reach};
use thaw_imagefs::blob::ReadyFile;
use thaw_imagefs::digest::Digest;

use crate::error::Error;
use crate::index::kept::INDEX;

use super::lock::Lock;
use super::make::Partial;
use super::manage::Standing;
use super::record::{self, Record};
use super::{Store, layer, sync_parent};

/// The result of a removal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pruned {
    /// Images removed altogether.
    pub images: u64,
    /// Layers emptied.
    pub layers: u64,
    /// Bytes on the disk.
    pub bytes: u64,
}

impl Store {
    /// Removes the data of an image's layers and keeps their trees and indexes, so that the next start reads lazily. Layers that an image
    /// in use shares are left alone.
    ///
    /// # Errors
    /// `InUse` while a sandbox holds a lease, `NotFound`, `Io`. Waits for running pulls.
    pub fn evict(&self, digest: &Digest) -> Result<Pruned, Error> {
        let _store = self.lock_exclusive("store")?;
        let image = self.standing_of(digest)?;
        if image.leased {
            return Err(Error::InUse { digest: *digest });
        }
        let mut pruned = Pruned::default();
        self.empty_layers(&image, &mut pruned)?;
        Ok(pruned)
    }

    /// Removes what no sandbox uses: with `keep_indexes` the data of the layers, without it the whole images (except those assembled from
    /// layers, which their owner removes).
    ///
    /// # Errors
    /// `Io`. Waits for running pulls.
    pub fn prune(&self, keep_indexes: bool) -> Result<Pruned, Error> {
        let _store = self.lock_exclusive("store")?;
        let before = self.usage()?.stored;
        let mut pruned = Pruned::default();
        for image in self.standing()?.iter().filter(|image| !image.leased) {
            if keep_indexes || image.record.pinned {
                self.empty_layers(image, &mut pruned)?;
            } else if self.remove_unused(&image.digest)? {
                pruned.images += 1;
            }
        }
        self.collect()?;
        pruned.bytes = before.saturating_sub(self.usage()?.stored);
        Ok(pruned)
    }

    /// Evicts images, the least recently leased first, then removes them in the same order, until the store occupies at most `limit` bytes
    /// of disk or everything left is in use. Does nothing while a pull runs.
    ///
    /// # Errors
    /// `Io`.
    pub fn collect_to(&self, limit: u64) -> Result<Pruned, Error> {
        let mut pruned = Pruned::default();
        let Some(_store) = self.try_lock("store")? else {
            return Ok(pruned);
        };
        let before = self.usage()?.stored;
        let mut images = self.standing()?;
        images.retain(|image| !image.leased);
        images.sort_by_key(|image| image.used);
        let mut left = before;
        for image in &images {
            if left <= limit {
                break;
            }
            let mut step = Pruned::default();
            self.empty_layers(image, &mut step)?;
            pruned.layers += step.layers;
            left = left.saturating_sub(step.bytes);
        }
        for image in images.iter().filter(|image| !image.record.pinned) {
            if self.usage()?.stored <= limit {
                break;
            }
            if self.remove_unused(&image.digest)? {
                pruned.images += 1;
                self.collect()?;
            }
        }
        pruned.bytes = before.saturating_sub(self.usage()?.stored);
        Ok(pruned)
    }

    /// Removes an image unless it has come into use. Its layers are left for the collection.
    fn remove_unused(&self, digest: &Digest) -> Result<bool, Error> {
        let directory = self.image_directory(digest);
        let lease = directory.join(record::LEASE);
        let free = Lock::try_exclusive(&lease).map_err(|error| Error::io(&lease, error))?;
        if free.is_none() {
            return Ok(false);
        }
        self.remove_directory(&directory)?;
        Ok(true)
    }

    fn empty_layers(&self, image: &Standing, pruned: &mut Pruned) -> Result<(), Error> {
        let mut seen = HashSet::new();
        for layer in image.record.layers.iter().filter(|layer| seen.insert(layer.key)) {
            let before = self.taken(&layer.key)?;
            if before.data == 0 {
                continue;
            }
            let Some(_unused) = self.hold_unused(&layer.key)? else {
                continue;
            };
            if self.empty_layer(&layer.key)? {
                pruned.layers += 1;
                pruned.bytes += before.disk.saturating_sub(self.taken(&layer.key)?.disk);
            }
        }
        Ok(())
    }

    /// Locks all images that have a layer against leases; `None` if one is leased.
    pub(super) fn hold_unused(&self, key: &Digest) -> Result<Option<Vec<Lock>>, Error> {
        let mut held = Vec::new();
        for digest in self.names("images")? {
            let directory = self.image_directory(&digest);
            let has = |record: Record| record.layers.iter().any(|layer| layer.key == *key);
            if !Record::read(&directory)?.is_some_and(has) {
                continue;
            }
            let lease = directory.join(record::LEASE);
            match Lock::try_exclusive(&lease).map_err(|error| Error::io(&lease, error))? {
                Some(lock) => held.push(lock),
                None => return Ok(None),
            }
        }
        Ok(Some(held))
    }

    /// Replaces a layer with an empty one. Returns whether there was a readable layer.
    fn empty_layer(&self, key: &Digest) -> Result<bool, Error> {
        let _lock = self.lock_exclusive(&format!("layer-{}", key.hex()))?;
        let target = self.layer_directory(key);
        let open = |path: &Path| File::options().read(true).write(true).open(path);
        let Some(old) = open(&target.join(layer::READY))
            .ok()
            .and_then(|file| ReadyFile::open(file).ok())
        else {
            return Ok(false);
        };
        let partial = Partial::create(&target)?;
        let create = |name: &str| {
            let path = partial.path.join(name);
            let file = File::options()
                .read(true)
                .write(true)
                .create_new(true)
                .open(&path);
            file.map_err(|error| Error::io(&path, error))
        };
        let data = create(layer::DATA)?;
        data.set_len(old.length())
            .map_err(|error| Error::io(&partial.path, error))?;
        reach(Failpoint::EvictDataMade);
        old.write_emptied(create(layer::READY)?, self.boot)
            .and_then(|ready| ready.stamp(&data))
            .map_err(|error| Error::blob(*key, &partial.path, error))?;
        reach(Failpoint::EvictReadyWritten);
        for name in [layer::TREE, INDEX] {
            let (from, to) = (target.join(name), partial.path.join(name));
            match std::fs::hard_link(&from, &to) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(Error::io(&to, error));
                }
                _ => reach(Failpoint::EvictLinked),
            }
        }
        exchange(partial, &target)?;
        Ok(true)
    }
}

/// Replaces a directory by another: at every moment one of the two is there.
fn exchange(partial: Partial, target: &Path) -> Result<(), Error> {
    let failed = |error: std::io::Error| Error::io(target, error);
    let exchanged = File::open(&partial.path)
        .and_then(|directory| directory.sync_all())
        .and_then(|()| {
            Ok(rustix::fs::renameat_with(
                CWD,
                &partial.path,
                CWD,
                target,
                RenameFlags::EXCHANGE,
            )?)
        });
    exchanged.map_err(failed)?;
    reach(Failpoint::EvictExchanged);
    // The partial is the old one now, and is removed as one.
    drop(partial);
    reach(Failpoint::EvictOldRemoved);
    sync_parent(target).map_err(failed)
}
