//! Builds the provenance of a sandbox ([`Provenance`]) from its parts, and finds the parts from it.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use thaw_pools::disk::Disk;
use thaw_pools::process::ProcessRecord;

use super::{Node, Origin, Resources, Shown};
use crate::error::{Error, ErrorKind};
use crate::snapshot::{Hash, MANIFEST, Manifest, Subject};
use crate::state::{DiskLayers, FileIdentity, Provenance, ShownRecord};
use thaw_sys::lock::Lock;

/// The manifest of the snapshot that a sandbox was thawed from, in the sandbox's directory, if the snapshot is removed after the thaw, or
/// is still being fetched.
const ORIGIN: &str = "origin.json";

/// Keeps the manifest of a snapshot in the directory of a sandbox that is thawed from it.
pub(super) fn keep_manifest(snapshot: &Path, directory: &Path) -> Result<(), Error> {
    let kept = std::fs::copy(snapshot.join(MANIFEST), directory.join(ORIGIN));
    kept.map(drop)
        .map_err(|e| Error::system(format!("cannot copy the manifest of {}", snapshot.display()), &e))
}

/// Writes the manifest of a snapshot into the directory of a sandbox that is thawed from it.
pub(super) fn write_manifest(manifest: &[u8], directory: &Path) -> Result<(), Error> {
    let written = std::fs::write(directory.join(ORIGIN), manifest);
    written.map_err(|e| Error::system(format!("cannot write into {}", directory.display()), &e))
}

impl Provenance {
    /// The provenance of a complete sandbox. `None` for a booted one, which cannot be frozen.
    pub(super) fn of(resources: &Resources, origin: Option<&Origin>) -> io::Result<Option<Provenance>> {
        let (Some(origin), Some(disk)) = (origin, &resources.disk) else {
            return Ok(None);
        };
        let identity =
            |file: &OwnedFd| Ok::<_, io::Error>(FileIdentity::of(&File::from(file.try_clone()?).metadata()?));
        let file = identity(&disk.file)?;
        let layers = match &disk.base {
            Some(base) => Some(DiskLayers {
                base: identity(base)?,
                layer: file,
            }),
            None => None,
        };
        let (images, last_slot) = shown(resources);
        Ok(Some(Provenance {
            snapshot: origin.directory.clone(),
            manifest: origin.manifest,
            images,
            last_slot,
            disk: layers.map_or(file, |_| FileIdentity::of_no_file()),
            layers,
            network: resources.network.is_some(),
        }))
    }

    /// The same provenance with the current images.
    pub(super) fn showing(self, resources: &Resources) -> Provenance {
        let (images, last_slot) = shown(resources);
        Provenance {
            images,
            last_slot,
            ..self
        }
    }

    /// The snapshot it was thawed from, if that still exists unchanged or its manifest is in the sandbox's directory.
    pub(super) fn origin(&self, node: &Node, directory: &Path) -> Result<Origin, Error> {
        if let Some(manifest) = self.kept_manifest(directory) {
            return Ok(Origin {
                subject: manifest.subject,
                manifest: self.manifest,
                directory: self.snapshot.clone(),
                _held: None,
            });
        }
        let found = node.templates.registry().find(&self.snapshot)?;
        if found.hash() != self.manifest {
            let what = format!("{} is another snapshot now", self.snapshot.display());
            return Err(Error::new(ErrorKind::SnapshotNotFound, what));
        }
        Ok(Origin {
            subject: found.manifest().subject.clone(),
            manifest: self.manifest,
            directory: self.snapshot.clone(),
            _held: None,
        })
    }

    /// The manifest of that snapshot, if the sandbox's directory has it.
    pub(super) fn kept_manifest(&self, directory: &Path) -> Option<Manifest> {
        let bytes = std::fs::read(directory.join(ORIGIN)).ok()?;
        let is_it = Hash::of(&bytes) == self.manifest;
        Manifest::decode(&bytes).ok().filter(|_| is_it)
    }

    /// Its images that are still in the store, and an error if any is missing.
    pub(super) fn images(&self, node: &Node) -> (Vec<Shown>, Option<Error>) {
        let found = |record: &ShownRecord| {
            let image = node.images.by_digest(&record.digest)?.ok_or_else(|| {
                let what = format!("image {} is not in the store", record.digest);
                Error::new(ErrorKind::ImageNotStored, what)
            })?;
            Ok(Shown {
                slot: record.slot,
                name: record.name.clone(),
                image,
            })
        };
        let (mut shown, mut lost) = (Vec::new(), None);
        for record in &self.images {
            match found(record) {
                Ok(image) => shown.push(image),
                Err(e) => lost = Some(e),
            }
        }
        (shown, lost)
    }

    /// Its disk, found among the open files of its VMM.
    pub(super) fn disk(&self, vmm: ProcessRecord) -> Result<Disk, Error> {
        let opened = || match &self.layers {
            Some(DiskLayers { base, layer }) => {
                Disk::layered(base.opened_for_reading(vmm.pid)?, layer.opened_from(vmm.pid)?)
            }
            None => self.disk.opened_from(vmm.pid).and_then(Disk::of),
        };
        opened().map_err(|e| Error::system("cannot reopen the sandbox's disk", &e))
    }
}

/// The images, and the last slot.
fn shown(resources: &Resources) -> (Vec<ShownRecord>, u16) {
    let record = |shown: &Shown| ShownRecord {
        slot: shown.slot,
        name: shown.name.clone(),
        digest: shown.image.digest.to_string(),
    };
    let last_slot = resources.last_slot();
    (resources.images.locked().iter().map(record).collect(), last_slot)
}
/// The images that the guest had, with the same metadata, because the guest holds inode numbers of it.
pub(super) fn frozen_images(node: &Node, subject: &Subject) -> Result<Vec<Shown>, Error> {
    let stamps = node.templates.registry().stamps();
    let shown = subject.images.iter().map(|record| {
        let image = node.images.by_digest(&record.digest)?.ok_or_else(|| {
            let what = format!(
                "image {}, which the snapshot needs, is not in the store",
                record.digest
            );
            Error::new(ErrorKind::ImageNotStored, what)
        })?;
        let metadata = stamps.hash_file(&image.metadata)?;
        if metadata != record.metadata {
            let what = format!(
                "image {} has other metadata here than it was frozen with",
                record.digest
            );
            return Err(Error::new(ErrorKind::SnapshotIncompatible, what));
        }
        Ok(Shown {
            slot: record.slot,
            name: record.name.clone(),
            image,
        })
    });
    shown.collect()
}
