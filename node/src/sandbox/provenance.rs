//! What is written down of a sandbox so that a later owner can freeze it: its disk and images, and what it was thawed
//! from.
//!
//! The disk has no name: it is found among the descriptors its VMM holds, by the identity that was written down, so no
//! other file is ever taken for it.

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use thaw_pools::disk::Disk;
use thaw_pools::process::ProcessRecord;

use super::{Node, Origin, Resources, Shown, locked};
use crate::exit::{ExitCode, Failure};
use crate::snapshot::Hash;

/// What a record has of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Provenance {
    /// The snapshot it was thawed from, and the hash of its manifest.
    snapshot: PathBuf,
    manifest: Hash,
    images: Vec<ShownRecord>,
    /// The last slot its VMM was asked to show an image in, whether it has or not. 0 where the record was written before there was
    /// such a number.
    #[serde(default)]
    last_slot: u16,
    disk: FileIdentity,
    /// Whether it has a network interface in use.
    pub network: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct ShownRecord {
    slot: u16,
    name: String,
    digest: String,
}

/// Which file, for as long as it is open somewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct FileIdentity {
    device: u64,
    inode: u64,
}

impl Provenance {
    /// Of a sandbox with all its parts. None for one that was booted, which cannot be frozen.
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

    /// The same, with the images there are now.
    pub(super) fn showing(self, resources: &Resources) -> Provenance {
        let (images, last_slot) = shown(resources);
        Provenance {
            images,
            last_slot,
            ..self
        }
    }

    /// The last slot an image may be in that its VMM has.
    pub(super) fn last_slot(&self) -> u16 {
        let recorded = self.images.iter().map(|image| image.slot);
        recorded.max().unwrap_or(0).max(self.last_slot)
    }

    /// The directory of the snapshot it was thawed from.
    pub(super) fn snapshot(&self) -> &std::path::Path {
        &self.snapshot
    }

    /// What it was thawed from, where that is still there unchanged.
    pub(super) fn origin(&self, node: &Node) -> Result<Origin, Failure> {
        let found = node.templates.registry().find(&self.snapshot)?;
        if found.hash() != self.manifest {
            let what = format!("{} is another snapshot now", self.snapshot.display());
            return Err(Failure::new(ExitCode::SnapshotNotFound, what));
        }
        Ok(Origin {
            subject: found.manifest().subject.clone(),
            manifest: self.manifest,
            directory: self.snapshot.clone(),
            _held: None,
        })
    }

    /// Its images, from the store: those that are there still, and what is wrong with the others.
    pub(super) fn images(&self, node: &Node) -> (Vec<Shown>, Option<Failure>) {
        let found = |record: &ShownRecord| {
            let image = node.images.by_digest(&record.digest)?.ok_or_else(|| {
                let what = format!("image {} is not in the store", record.digest);
                Failure::new(ExitCode::ImageNotStored, what)
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

    /// Its disk, as its VMM has it open.
    pub(super) fn disk(&self, vmm: ProcessRecord) -> Result<Disk, Failure> {
        self.disk
            .opened_from(vmm.pid)
            .and_then(Disk::of)
            .map_err(|e| Failure::system("cannot reopen the sandbox's disk", &e))
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
    (locked(&resources.images).iter().map(record).collect(), last_slot)
}

impl FileIdentity {
    pub(super) fn of(metadata: &fs::Metadata) -> FileIdentity {
        FileIdentity {
            device: metadata.dev(),
            inode: metadata.ino(),
        }
    }

    /// This file, open for reading and writing, had from a process that has it open.
    fn opened_from(self, pid: i32) -> io::Result<OwnedFd> {
        for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
            let path = entry?.path();
            // Looked at before it is opened: opening may have effects, where it is not a file.
            if !fs::metadata(&path).is_ok_and(|m| FileIdentity::of(&m) == self) {
                continue;
            }
            let file = File::options().read(true).write(true).open(&path)?;
            if FileIdentity::of(&file.metadata()?) == self {
                return Ok(file.into());
            }
        }
        Err(io::Error::new(
            io::ErrorKind::NotFound,
            "its VMM does not have it open",
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    #[test]
    fn a_slot_that_was_asked_for_is_the_last_whether_its_image_is_written_down_or_not() {
        let last_of = |last_slot: Option<u16>, images: &[u16]| {
            let images = images.iter().map(|slot| ShownRecord {
                slot: *slot,
                name: slot.to_string(),
                digest: "sha256:ab".into(),
            });
            let mut written = serde_json::to_value(Provenance {
                snapshot: "/snapshot".into(),
                manifest: Hash::of(b"manifest"),
                images: images.collect(),
                last_slot: last_slot.unwrap_or_default(),
                disk: FileIdentity { device: 1, inode: 2 },
                network: true,
            })
            .unwrap();
            if last_slot.is_none() {
                written.as_object_mut().unwrap().remove("last_slot").unwrap();
            }
            serde_json::from_value::<Provenance>(written).unwrap().last_slot()
        };
        assert_eq!(last_of(Some(3), &[1, 2]), 3);
        assert_eq!(last_of(Some(0), &[1, 2]), 2);
        assert_eq!(last_of(None, &[2, 1]), 2);
        assert_eq!(last_of(None, &[]), 0);
    }

    #[test]
    fn a_nameless_file_is_had_from_who_holds_it_and_no_other_is_taken_for_it() {
        let held = tempfile::tempfile().unwrap();
        held.write_all_at(b"theirs", 0).unwrap();
        let identity = FileIdentity::of(&held.metadata().unwrap());
        let mut holder = std::process::Command::new("sleep")
            .arg("60")
            .stdin(held)
            .spawn()
            .unwrap();
        let pid = holder.id() as i32;
        let ours = File::from(identity.opened_from(pid).unwrap());
        let mut bytes = [0; 6];
        ours.read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!(&bytes, b"theirs");
        let other = FileIdentity {
            inode: identity.inode + 1,
            ..identity
        };
        assert_eq!(
            other.opened_from(pid).unwrap_err().kind(),
            io::ErrorKind::NotFound
        );
        holder.kill().unwrap();
        holder.wait().unwrap();
        identity.opened_from(pid).unwrap_err();
    }
}
