//! Builds the provenance of a sandbox ([`Provenance`]) from its parts, and finds the parts from it.

use std::fs::File;
use std::io;

use thaw_pools::disk::Disk;
use thaw_pools::process::ProcessRecord;

use super::{Node, Origin, Resources, Shown};
use crate::error::{Error, ErrorKind};
use crate::state::{FileIdentity, Provenance, ShownRecord};
use thaw_sys::lock::Lock;

impl Provenance {
    /// The provenance of a complete sandbox. `None` for a booted one, which cannot be frozen.
    pub(super) fn of(resources: &Resources, origin: Option<&Origin>) -> io::Result<Option<Provenance>> {
        let (Some(origin), Some(disk)) = (origin, &resources.disk) else {
            return Ok(None);
        };
        let (images, last_slot) = shown(resources);
        Ok(Some(Provenance {
            snapshot: origin.directory.clone(),
            manifest: origin.manifest,
            images,
            last_slot,
            disk: FileIdentity::of(&File::from(disk.file.try_clone()?).metadata()?),
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

    /// The snapshot it was thawed from, if that still exists unchanged.
    pub(super) fn origin(&self, node: &Node) -> Result<Origin, Error> {
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
        self.disk
            .opened_from(vmm.pid)
            .and_then(Disk::of)
            .map_err(|e| Error::system("cannot reopen the sandbox's disk", &e))
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
