//! What is mounted in the guest for its containers: image slots, disks, overlays, tmpfs. A storage is mounted once and
//! counted; the last container that names it takes it away.
//!
//! Drivers, as Kata names them:
//!
//! | driver | source |
//! |---|---|
//! | `virtio-fs` | tag of a virtio-fs device |
//! | `mmioblk`, `blk` | path of a block device in the guest, `/dev/vdX`; with the driver option `fill-disk`, ext4 on it is grown to its end |
//! | `pmem`, `nvdimm` | `/dev/pmemX` |
//! | `overlayfs` | nothing; directories named by the driver option `io.katacontainers.volume.overlayfs.create_directory=PATH` are made first |
//! | `ephemeral` | a tmpfs shared by the sandbox's containers; of type `hugetlbfs`, huge pages of the size its option `pagesize=` says: as many as `size=` says, set aside, or what is used |
//! | `local` | a directory, made here; option `mode=0755` |
//! | `bind` | a path of the guest; with the driver option `release-source`, what the kernel mounted there by itself goes with it |

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, chown};
use std::path::{Component, Path, PathBuf};
use std::sync::Mutex;

use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};
use thaw_protocol::agent::layout::RELEASE_SOURCE;
use thaw_sys::lock::Lock;

use crate::error::{Error, For, Result};
use crate::ext4;
use crate::huge_pages::{self, Reservation};
use crate::mount_options::MountOptions;
use crate::warning;

const CREATE_DIRECTORY: &str = "io.katacontainers.volume.overlayfs.create_directory=";

/// The file system type of huge pages.
const HUGETLBFS: &str = "hugetlbfs";

/// Asks for an ext4 that is as large as its disk.
const FILL_DISK: &str = "fill-disk";

/// The drivers of this agent.
pub const DRIVERS: &[&str] = &[
    "virtio-fs",
    "mmioblk",
    "blk",
    "pmem",
    "nvdimm",
    "overlayfs",
    "ephemeral",
    "local",
    "bind",
];

/// Something to mount: `grpc.Storage`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Storage {
    pub driver: String,
    pub driver_options: Vec<String>,
    pub source: String,
    pub kind: String,
    pub options: Vec<String>,
    pub mount_point: PathBuf,
    /// Group the files shall have; `true`: only if the root has another.
    pub group: Option<(u32, bool)>,
}

/// Everything mounted by request, with how many containers use it.
#[derive(Debug, Default)]
pub struct Storages {
    mounted: Mutex<BTreeMap<PathBuf, Mounted>>,
}

#[derive(Debug)]
struct Mounted {
    storage: Storage,
    users: usize,
    /// Made by `local`: a directory, not a mount.
    directory: bool,
    /// What it may hold, where that is huge pages.
    _pages: Option<Reservation>,
}

impl Storages {
    /// Mounts `storages` in order; on failure those of them already mounted are let go. Returns their mount points.
    pub fn acquire_all(&self, storages: &[Storage]) -> Result<Vec<PathBuf>> {
        let mut done = Vec::new();
        for storage in storages {
            match self.acquire(storage) {
                Ok(()) => done.push(storage.mount_point.clone()),
                Err(e) => {
                    self.release_all(&done);
                    return Err(e);
                }
            }
        }
        Ok(done)
    }

    fn acquire(&self, storage: &Storage) -> Result<()> {
        check_guest_path(&storage.mount_point)?;
        let mut mounted = self.mounted.locked();
        if let Some(there) = mounted.get_mut(&storage.mount_point) {
            if there.storage != *storage {
                return Err(Error::State(format!(
                    "something else is mounted at {}",
                    storage.mount_point.display()
                )));
            }
            there.users += 1;
            return Ok(());
        }
        let pages = match is_of_huge_pages(storage) {
            true => Some(huge_pages::of_options(&storage.options)?),
            false => None,
        };
        mount_storage(storage)?;
        let directory = storage.driver == "local";
        mounted.insert(
            storage.mount_point.clone(),
            Mounted {
                storage: storage.clone(),
                users: 1,
                directory,
                _pages: pages,
            },
        );
        Ok(())
    }

    /// Lets go of `mount_points`, last first; what nobody uses any more is unmounted.
    pub fn release_all(&self, mount_points: &[PathBuf]) {
        let mut mounted = self.mounted.locked();
        for path in mount_points.iter().rev() {
            let Some(there) = mounted.get_mut(path) else {
                continue;
            };
            there.users -= 1;
            if there.users > 0 {
                continue;
            }
            let outcome = if there.directory {
                fs::remove_dir_all(path).for_(|| format!("remove {}", path.display()))
            } else {
                take_away(path)
            };
            if let Err(e) = outcome {
                warning!("{e}");
            }
            release_source(&there.storage);
            mounted.remove(path);
        }
    }
}

/// Unmounts, or, where something still holds the file system, takes it out of the tree.
fn take_away(path: &Path) -> Result<()> {
    if unmount(path, UnmountFlags::NOFOLLOW).is_err() {
        unmount(path, UnmountFlags::NOFOLLOW | UnmountFlags::DETACH)
            .for_(|| format!("unmount {}", path.display()))?;
    }
    let _ = match fs::symlink_metadata(path) {
        Ok(found) if found.is_dir() => fs::remove_dir(path),
        // A file that something was bound to.
        _ => fs::remove_file(path),
    };
    Ok(())
}

/// Unmounts what virtio-fs mounted at the source of a bind because it is a mount of the host's: what was written goes there now, and the
/// guest remembers none of its files. They are held open at the other end for as long as it does.
fn release_source(storage: &Storage) {
    let asked = storage.driver == "bind" && storage.driver_options.iter().any(|o| o == RELEASE_SOURCE);
    if !asked {
        return;
    }
    match unmount(&storage.source, UnmountFlags::NOFOLLOW) {
        // A file is no mount of its own.
        Ok(()) | Err(Errno::INVAL) => {}
        // Something else still uses it: it goes with the device.
        Err(e) => warning!("cannot let go of {}: {e}", storage.source),
    }
}

/// Absolute, without `.` or `..`, and not the root.
pub fn check_guest_path(path: &Path) -> Result<()> {
    let mut parts = path.components();
    let absolute = parts.next() == Some(Component::RootDir);
    if !absolute || path == Path::new("/") || !parts.all(|c| matches!(c, Component::Normal(_))) {
        return Err(Error::Invalid(format!(
            "{:?} is not an absolute path without '..'",
            path.display().to_string()
        )));
    }
    Ok(())
}

fn mount_storage(s: &Storage) -> Result<()> {
    let at = s.mount_point.display().to_string();
    let mut options = MountOptions::parse(s.options.iter().map(String::as_str))?;
    match s.driver.as_str() {
        "virtio-fs" => mount_new(s, &s.source, "virtiofs", &options),
        "mmioblk" | "blk" | "pmem" | "nvdimm" => {
            let is_block = fs::metadata(&s.source)
                .map(|m| m.file_type().is_block_device())
                .unwrap_or(false);
            if !s.source.starts_with("/dev/") || !is_block {
                return Err(Error::Invalid(format!(
                    "storage at {at}: {:?} is not a block device of this guest; a {} storage names one, as /dev/vda (there is no PCI)",
                    s.source, s.driver
                )));
            }
            if s.kind.is_empty() {
                return Err(Error::Invalid(format!("storage at {at}: no file system type")));
            }
            mount_new(s, &s.source, &s.kind, &options)?;
            match s.kind == "ext4" && s.driver_options.iter().any(|o| o == FILL_DISK) {
                true => ext4::fill_disk(&s.source, &s.mount_point).inspect_err(|_| {
                    let _ = unmount(&s.mount_point, UnmountFlags::DETACH);
                }),
                false => Ok(()),
            }
        }
        "overlayfs" => {
            for dir in s
                .driver_options
                .iter()
                .filter_map(|o| o.strip_prefix(CREATE_DIRECTORY))
            {
                check_guest_path(Path::new(dir))?;
                fs::create_dir_all(dir).for_(|| format!("create {dir}"))?;
            }
            mount_new(s, "overlay", "overlay", &options)
        }
        "ephemeral" if is_of_huge_pages(s) => mount_new(s, HUGETLBFS, HUGETLBFS, &options),
        "ephemeral" => mount_new(s, "tmpfs", "tmpfs", &options),
        "local" => {
            fs::create_dir_all(&s.mount_point).for_(|| format!("create {at}"))?;
            let mode = options
                .take_data("mode")
                .and_then(|m| u32::from_str_radix(&m, 8).ok())
                .unwrap_or(0o755);
            fs::set_permissions(&s.mount_point, fs::Permissions::from_mode(mode & 0o7777))
                .for_(|| format!("chmod {at}"))
        }
        "bind" => {
            check_guest_path(Path::new(&s.source))?;
            prepare_target(s)?;
            options.bind = options.bind.or(Some(true));
            options.bind(&s.source, &s.mount_point)?;
            options.finish(&s.mount_point)
        }
        other => Err(Error::Unsupported(format!(
            "storage at {at}: driver {other:?} is not supported; supported are {}",
            DRIVERS.join(", ")
        ))),
    }?;
    match s.group {
        Some((group, only_if_root_differs)) => give_group(&s.mount_point, group, only_if_root_differs),
        None => Ok(()),
    }
}

fn is_of_huge_pages(s: &Storage) -> bool {
    s.driver == "ephemeral" && s.kind == HUGETLBFS
}

fn prepare_target(s: &Storage) -> Result<()> {
    let at = s.mount_point.display();
    let is_file = s.driver == "bind" && fs::metadata(&s.source).map(|m| !m.is_dir()).unwrap_or(false);
    if !is_file {
        return fs::create_dir_all(&s.mount_point).for_(|| format!("create {at}"));
    }
    if let Some(parent) = s.mount_point.parent() {
        fs::create_dir_all(parent).for_(|| format!("create {}", parent.display()))?;
    }
    fs::File::options()
        .append(true)
        .create(true)
        .open(&s.mount_point)
        .for_(|| format!("create {at}"))?;
    Ok(())
}

fn mount_new(s: &Storage, source: &str, kind: &str, options: &MountOptions) -> Result<()> {
    prepare_target(s)?;
    options.mount(source, &s.mount_point, kind)?;
    options.finish(&s.mount_point)
}

/// Changes the group of a volume's files and lets the group write, as Kubernetes' fsGroup asks.
fn give_group(root: &Path, group: u32, only_if_root_differs: bool) -> Result<()> {
    let top = fs::metadata(root).for_(|| format!("stat {}", root.display()))?;
    if only_if_root_differs && top.gid() == group {
        return Ok(());
    }
    let mut pending = vec![root.to_owned()];
    while let Some(path) = pending.pop() {
        let found = fs::symlink_metadata(&path).for_(|| format!("stat {}", path.display()))?;
        if found.is_symlink() {
            continue;
        }
        chown(&path, None, Some(group)).for_(|| format!("chgrp {}", path.display()))?;
        let extra = if found.is_dir() { 0o2070 } else { 0o060 };
        let mode = fs::Permissions::from_mode(found.mode() & 0o7777 | extra);
        fs::set_permissions(&path, mode).for_(|| format!("chmod {}", path.display()))?;
        if found.is_dir() {
            for entry in fs::read_dir(&path).for_(|| format!("read {}", path.display()))? {
                pending.push(entry.for_(|| format!("read {}", path.display()))?.path());
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_that_climb_or_are_relative_are_refused() {
        for bad in ["", "/", "a", "/a/../b", "../a"] {
            assert!(check_guest_path(Path::new(bad)).is_err(), "{bad:?}");
        }
        assert!(check_guest_path(Path::new("/run/thaw/images")).is_ok());
    }

    #[test]
    fn a_storage_is_made_once_and_taken_away_by_its_last_user() {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().join("shared");
        let local = Storage {
            driver: "local".into(),
            options: vec!["mode=0700".into()],
            mount_point: at.clone(),
            ..Default::default()
        };
        let storages = Storages::default();
        let first = storages.acquire_all(std::slice::from_ref(&local)).unwrap();
        assert_eq!(fs::metadata(&at).unwrap().mode() & 0o777, 0o700);
        let second = storages.acquire_all(std::slice::from_ref(&local)).unwrap();
        let other = Storage {
            driver: "ephemeral".into(),
            ..local
        };
        assert!(matches!(storages.acquire_all(&[other]), Err(Error::State(_))));
        storages.release_all(&first);
        assert!(at.exists());
        storages.release_all(&second);
        assert!(!at.exists());
    }

    #[test]
    fn missing_device_and_unknown_driver_are_named() {
        let storages = Storages::default();
        let mut s = Storage {
            driver: "mmioblk".into(),
            source: "/dev/null".into(),
            mount_point: "/run/x".into(),
            kind: "ext4".into(),
            ..Default::default()
        };
        assert!(
            storages
                .acquire_all(&[s.clone()])
                .unwrap_err()
                .to_string()
                .contains("/dev/null")
        );
        s.driver = "9p".into();
        assert!(matches!(storages.acquire_all(&[s]), Err(Error::Unsupported(_))));
    }
}
