//! The bases of a snapshot's disks that are layers. The base of a layer is the disk with the same name in the next snapshot below in which that
//! disk is whole.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;

use thaw_protocol::disk_layer::file_bytes;

use super::check::check_chunks;
use super::directory::{DISKS, SnapshotDir, read_only};
use super::error::SnapshotError;
use super::hash::Hash;
use super::manifest::DiskFile;

/// The verified whole disk below a layer.
#[derive(Debug)]
pub struct DiskBase {
    /// Name of the disk.
    pub id: String,
    /// Hash of the manifest of its snapshot.
    pub manifest: Hash,
    pub file: OwnedFd,
}

impl DiskBase {
    pub(super) fn try_clone(&self) -> io::Result<DiskBase> {
        Ok(DiskBase {
            id: self.id.clone(),
            manifest: self.manifest,
            file: self.file.try_clone()?,
        })
    }
}

/// A whole disk of a snapshot, not verified.
pub(super) struct Whole<'a> {
    of: &'a SnapshotDir,
    disk: &'a DiskFile,
    pub file: &'a File,
}

/// The disk of this name, if the snapshot has it whole.
pub(super) fn whole<'a>(of: &'a SnapshotDir, id: &str) -> Option<Whole<'a>> {
    let disks = of.manifest().files.disks.iter().zip(&of.files().disks);
    let mut whole = disks.filter(|(disk, _)| disk.id == id && !disk.layer);
    whole.next().map(|(disk, (_, file))| Whole { of, disk, file })
}

/// The whole disks below those of the first snapshot that are layers. The others are those that it lies on, from the highest down.
///
/// # Errors
/// [`SnapshotError::Incompatible`]: there is none, or it has another size.
pub(super) fn find(layers: &[SnapshotDir]) -> Result<Vec<Whole<'_>>, SnapshotError> {
    let Some((top, below)) = layers.split_first() else {
        return Ok(Vec::new());
    };
    let under = |disk: &DiskFile| {
        let found = below.iter().find_map(|layer| whole(layer, &disk.id));
        let fits = |found: &Whole<'_>| file_bytes(found.disk.contents.bytes) == disk.contents.bytes;
        found.filter(fits).ok_or_else(|| SnapshotError::Incompatible {
            directory: top.path().to_owned(),
            reason: format!(
                "its disk {} is a layer, and no snapshot below has its base",
                disk.id
            ),
        })
    };
    let layered = top.manifest().files.disks.iter().filter(|disk| disk.layer);
    layered.map(under).collect()
}

impl Whole<'_> {
    /// Name of the disk.
    pub fn id(&self) -> &str {
        &self.disk.id
    }

    /// Hash of the manifest of its snapshot.
    pub fn manifest(&self) -> Hash {
        self.of.hash()
    }

    /// Compares it with its manifest.
    pub fn verify(&self) -> Result<(), SnapshotError> {
        let name = format!("{DISKS}/{}", self.disk.id);
        self.of
            .check(|| check_chunks(&name, self.file, &self.disk.contents, None))
    }

    /// As the base of layers. `verified` is the same file, if it is open already. Otherwise it has been verified.
    pub fn open(&self, verified: Option<&OwnedFd>) -> Result<DiskBase, SnapshotError> {
        let file = verified.map_or_else(|| read_only(self.file), OwnedFd::try_clone);
        Ok(DiskBase {
            id: self.disk.id.clone(),
            manifest: self.of.hash(),
            file: file.map_err(SnapshotError::io("open a disk of", self.of.path()))?,
        })
    }
}
