//! What a later owner needs to freeze a sandbox: its disk and images, and what it was thawed from.
//!
//! The disk has no name. It is found by its recorded identity among the descriptors of the VMM, so no other file is mistaken for it.

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::snapshot::Hash;

/// The provenance in a record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Provenance {
    /// The snapshot that the sandbox was thawed from, and the hash of its manifest.
    pub(crate) snapshot: PathBuf,
    pub(crate) manifest: Hash,
    pub(crate) images: Vec<ShownRecord>,
    /// The last slot in which the VMM was asked to show an image, whether it succeeded or not. 0 in a record from before this field.
    #[serde(default)]
    pub(crate) last_slot: u16,
    /// Its disk. A disk of `layers` has the identity of no file here, so that a release that does not know them finds no disk, instead of a part
    /// of one.
    pub(crate) disk: FileIdentity,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) layers: Option<DiskLayers>,
    /// Whether the sandbox has a network interface in use.
    pub network: bool,
}

/// An image that is shown to the guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShownRecord {
    pub(crate) slot: u16,
    pub(crate) name: String,
    pub(crate) digest: String,
}

/// The files of a disk that is a layer over a base.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskLayers {
    pub(crate) base: FileIdentity,
    pub(crate) layer: FileIdentity,
}

/// Identifies a file for as long as any process has it open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileIdentity {
    device: u64,
    inode: u64,
}

impl Provenance {
    /// The highest slot that may hold an image in the VMM.
    pub(crate) fn last_slot(&self) -> u16 {
        let recorded = self.images.iter().map(|image| image.slot);
        recorded.max().unwrap_or(0).max(self.last_slot)
    }

    /// The directory of the snapshot that the sandbox was thawed from.
    pub(crate) fn snapshot(&self) -> &std::path::Path {
        &self.snapshot
    }
}

impl FileIdentity {
    pub(crate) fn of(metadata: &fs::Metadata) -> FileIdentity {
        FileIdentity {
            device: metadata.dev(),
            inode: metadata.ino(),
        }
    }

    /// No file has this one.
    pub(crate) fn of_no_file() -> FileIdentity {
        FileIdentity { device: 0, inode: 0 }
    }

    /// Opens this file for reading and writing through a process that has it open.
    pub(crate) fn opened_from(self, pid: i32) -> io::Result<OwnedFd> {
        self.opened(pid, File::options().read(true).write(true))
    }

    /// The same, for reading.
    pub(crate) fn opened_for_reading(self, pid: i32) -> io::Result<OwnedFd> {
        self.opened(pid, File::options().read(true))
    }

    fn opened(self, pid: i32, options: &fs::OpenOptions) -> io::Result<OwnedFd> {
        for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
            let path = entry?.path();
            // Check before opening: opening something that is not a file may have side effects.
            if !fs::metadata(&path).is_ok_and(|m| FileIdentity::of(&m) == self) {
                continue;
            }
            let file = options.open(&path)?;
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
    fn last_asked_slot_counts_with_or_without_recorded_image() {
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
                layers: None,
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
    fn nameless_file_is_found_by_identity_in_its_holder() {
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
        let read_only = File::from(identity.opened_for_reading(pid).unwrap());
        read_only.read_exact_at(&mut bytes, 0).unwrap();
        read_only.write_all_at(b"ours", 0).unwrap_err();
        FileIdentity::of_no_file().opened_from(pid).unwrap_err();
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
