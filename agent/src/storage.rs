//! Mounts storages for containers: image slots, disks, overlays, tmpfs. A storage is mounted once and counted;
//! its last user unmounts it.
//!
//! Drivers, with Kata's names:
//!
//! | driver | source |
//! |---|---|
//! | `virtio-fs` | tag of a virtio-fs device; with the driver option `read-ahead-kib=1024`, the kernel reads ahead up to 1024 KiB in a file |
//! | `mmioblk`, `blk` | path of a block device in the guest, `/dev/vdX`; with the driver option `fill-disk`, its ext4 is grown to the end of the disk |
//! | `pmem`, `nvdimm` | `/dev/pmemX` |
//! | `overlayfs` | none; directories named by the driver option `io.katacontainers.volume.overlayfs.create_directory=PATH` are created first |
//! | `ephemeral` | a tmpfs that the sandbox's containers share; with type `hugetlbfs`, huge pages of the size in its option `pagesize=`: the option `size=` reserves that much, otherwise they are allocated on demand |
//! | `local` | a new directory; option `mode=0755` |
//! | `bind` | a path of the guest; with the driver option `release-source`, what the kernel mounted there by itself is unmounted too |

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, chown};
use std::path::{Component, Path, PathBuf};
use std::sync::Mutex;

use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};
use thaw_protocol::agent::layout::RELEASE_SOURCE;
use thaw_sys::lock::Lock;

use crate::error::{Error, Result, WithContext};
use crate::ext4;
use crate::huge_pages::{self, Reservation};
use crate::mount_options::MountOptions;
use crate::read_ahead;
use crate::warning;

const CREATE_DIRECTORY: &str = "io.katacontainers.volume.overlayfs.create_directory=";

/// The file system type of huge pages.
const HUGETLBFS: &str = "hugetlbfs";

/// Driver option: grow the ext4 to the size of its disk.
const FILL_DISK: &str = "fill-disk";

/// The drivers that this agent supports.
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

/// A storage to mount: `grpc.Storage`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Storage {
    pub driver: String,
    pub driver_options: Vec<String>,
    pub source: String,
    pub kind: String,
    pub options: Vec<String>,
    pub mount_point: PathBuf,
    /// The group that the files are given; `true`: only if the root directory has another.
    pub group: Option<(u32, bool)>,
}

/// All mounted storages, with their number of users.
#[derive(Debug, Default)]
pub struct Storages {
    mounted: Mutex<BTreeMap<PathBuf, Mounted>>,
}

#[derive(Debug)]
struct Mounted {
    storage: Storage,
    users: usize,
    /// Created by `local`: a directory instead of a mount.
    directory: bool,
    /// The huge pages that are reserved for it.
    _pages: Option<Reservation>,
}

impl Storages {
    /// Mounts `storages` in order, and returns their mount points. On failure those already mounted are
    /// released.
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

    /// Releases `mount_points`, last first, and unmounts those without users.
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
                fs::remove_dir_all(path).with_context(|| format!("remove {}", path.display()))
            } else {
                unmount_storage(path)
            };
            if let Err(e) = outcome {
                warning!("{e}");
            }
            release_source(&there.storage);
            mounted.remove(path);
        }
    }
}

/// Unmounts a path, lazily if the file system is still in use, and removes the mount point.
fn unmount_storage(path: &Path) -> Result<()> {
    if unmount(path, UnmountFlags::NOFOLLOW).is_err() {
        unmount(path, UnmountFlags::NOFOLLOW | UnmountFlags::DETACH)
            .with_context(|| format!("unmount {}", path.display()))?;
    }
    let _ = match fs::symlink_metadata(path) {
        Ok(found) if found.is_dir() => fs::remove_dir(path),
        // The target of a bind-mounted file.
        _ => fs::remove_file(path),
    };
    Ok(())
}

/// Unmounts the mount that virtio-fs made by itself at the source of a bind mount, because the source is a mount on the host. This writes
/// its data back, and makes the guest forget its files, which the host keeps open until then.
fn release_source(storage: &Storage) {
    let asked = storage.driver == "bind" && storage.driver_options.iter().any(|o| o == RELEASE_SOURCE);
    if !asked {
        return;
    }
    match unmount(&storage.source, UnmountFlags::NOFOLLOW) {
        // A file is not a mount point.
        Ok(()) | Err(Errno::INVAL) => {}
        // Still in use; it is unmounted with the device.
        Err(e) => warning!("cannot unmount {}: {e}", storage.source),
    }
}

/// Checks that a path is absolute, without `.` or `..`, and not the root.
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
        "virtio-fs" => mount_virtio_fs(s, &options),
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
                fs::create_dir_all(dir).with_context(|| format!("create {dir}"))?;
            }
            mount_new(s, "overlay", "overlay", &options)
        }
        "ephemeral" if is_of_huge_pages(s) => mount_new(s, HUGETLBFS, HUGETLBFS, &options),
        "ephemeral" => mount_new(s, "tmpfs", "tmpfs", &options),
        "local" => {
            fs::create_dir_all(&s.mount_point).with_context(|| format!("create {at}"))?;
            let mode = options
                .take_data("mode")
                .and_then(|m| u32::from_str_radix(&m, 8).ok())
                .unwrap_or(0o755);
            fs::set_permissions(&s.mount_point, fs::Permissions::from_mode(mode & 0o7777))
                .with_context(|| format!("chmod {at}"))
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
        return fs::create_dir_all(&s.mount_point).with_context(|| format!("create {at}"));
    }
    if let Some(parent) = s.mount_point.parent() {
        fs::create_dir_all(parent).with_context(|| format!("create {}", parent.display()))?;
    }
    fs::File::options()
        .append(true)
        .create(true)
        .open(&s.mount_point)
        .with_context(|| format!("create {at}"))?;
    Ok(())
}

fn mount_new(s: &Storage, source: &str, kind: &str, options: &MountOptions) -> Result<()> {
    prepare_target(s)?;
    options.mount(source, &s.mount_point, kind)?;
    options.finish(&s.mount_point)
}

fn mount_virtio_fs(s: &Storage, options: &MountOptions) -> Result<()> {
    let limit = read_ahead::of_options(&s.driver_options)?;
    mount_new(s, &s.source, "virtiofs", options)?;
    // Without it the files are only read in smaller pieces.
    if let Some(Err(e)) = limit.map(|kib| read_ahead::set(&s.mount_point, kib)) {
        warning!("{e}");
    }
    Ok(())
}

/// Changes the group of a volume's files and makes them writable for it, as the fsGroup of Kubernetes requires.
fn give_group(root: &Path, group: u32, only_if_root_differs: bool) -> Result<()> {
    let top = fs::metadata(root).with_context(|| format!("stat {}", root.display()))?;
    if only_if_root_differs && top.gid() == group {
        return Ok(());
    }
    let mut pending = vec![root.to_owned()];
    while let Some(path) = pending.pop() {
        let found = fs::symlink_metadata(&path).with_context(|| format!("stat {}", path.display()))?;
        if found.is_symlink() {
            continue;
        }
        chown(&path, None, Some(group)).with_context(|| format!("chgrp {}", path.display()))?;
        let extra = if found.is_dir() { 0o2070 } else { 0o060 };
        let mode = fs::Permissions::from_mode(found.mode() & 0o7777 | extra);
        fs::set_permissions(&path, mode).with_context(|| format!("chmod {}", path.display()))?;
        if found.is_dir() {
            for entry in fs::read_dir(&path).with_context(|| format!("read {}", path.display()))? {
                pending.push(entry.with_context(|| format!("read {}", path.display()))?.path());
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relative_paths_and_dot_dot_are_refused() {
        for bad in ["", "/", "a", "/a/../b", "../a"] {
            assert!(check_guest_path(Path::new(bad)).is_err(), "{bad:?}");
        }
        assert!(check_guest_path(Path::new("/run/thaw/images")).is_ok());
    }

    #[test]
    fn storage_is_made_once_and_removed_by_last_user() {
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
