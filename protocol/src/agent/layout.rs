//! Paths of a guest's images, disk and container roots, and the mounts of them that a caller requests from
//! the agent (docs/agent-api.md, "A container's life").

use super::agent::{Device, Storage};
use crate::share::TAG;

/// Mount point of the root device, which has a directory for each image.
pub const IMAGES: &str = "/run/thaw/images";
/// Mount point of the device with the host's shared directories.
pub const SHARED: &str = "/run/thaw/shared";
/// The file whose content changes at every thaw, in the guest and in containers.
pub const GENERATION: &str = "/run/thaw/generation";
/// Directory of the shares that containers use.
const SHARES: &str = "/run/thaw/shares";
/// Directory of the containers.
const CONTAINERS: &str = "/run/thaw/containers";
/// Directory of the files copied for each container.
const FILES: &str = "/run/thaw/files";
const PIDS: &str = "ns/pid";
/// Mount point of the sandbox's disk.
const DISK: &str = "/run/thaw/disk";
/// Kata's driver option that names a directory to create before the overlay is mounted.
const CREATE_DIRECTORY: &str = "io.katacontainers.volume.overlayfs.create_directory";
/// Driver option of a `bind` mount: unmounting it also unmounts what the guest's kernel automounted at its
/// source.
pub const RELEASE_SOURCE: &str = "release-source";

/// Driver option of a `virtio-fs` mount: the KiB that the guest's kernel may read ahead in a file.
pub const READ_AHEAD: &str = "read-ahead-kib";
/// The read-ahead of shares: the data of one FUSE READ ([`crate::share::REPLY`]). Their bytes are on the host, so reading too many costs a
/// copy. The root device keeps the kernel's 128 KiB: the kernel reads as much around each page fault, and there that may fetch bytes
/// from a registry.
const SHARED_READ_AHEAD_KIB: u32 = 1024;

/// Device nodes of every container, by name and number (runtime-spec, config-linux.md, "Default Devices"). They
/// are the same on every Linux, so a container gets the guest's instead of the host's.
pub const DEFAULT_DEVICES: [(&str, u32, u32); 6] = [
    ("null", 1, 3),
    ("zero", 1, 5),
    ("full", 1, 7),
    ("random", 1, 8),
    ("urandom", 1, 9),
    ("tty", 5, 0),
];

/// Path of container `id`'s root file system.
pub fn root_path(id: &str) -> String {
    format!("{CONTAINERS}/{id}/rootfs")
}

/// Directory of the files copied for container `id`. It is removed with the container.
pub fn files_path(id: &str) -> String {
    format!("{FILES}/{id}")
}

/// Path of container `id`'s PID namespace, which another container can join.
pub fn pid_namespace_path(id: &str) -> String {
    format!("{CONTAINERS}/{id}/{PIDS}")
}

/// The container whose PID namespace `path` is, the inverse of [`pid_namespace_path`]. `None` if it is not such a path.
pub fn container_of_pid_namespace(path: &str) -> Option<&str> {
    path.strip_prefix(CONTAINERS)?
        .strip_prefix('/')?
        .strip_suffix(PIDS)?
        .strip_suffix('/')
}

/// Mount of the root device.
pub fn images() -> Storage {
    Storage {
        driver: "virtio-fs".into(),
        source: "thaw".into(),
        fstype: "virtiofs".into(),
        // The device decides per file whether the guest maps it (DAX) or reads it.
        options: vec!["ro".into(), "dax=inode".into()],
        mount_point: IMAGES.into(),
        ..Default::default()
    }
}

/// Mount of the shared directories, with an entry for each share.
pub fn shared() -> Storage {
    Storage {
        driver: "virtio-fs".into(),
        driver_options: vec![format!("{READ_AHEAD}={SHARED_READ_AHEAD_KIB}")],
        source: TAG.into(),
        fstype: "virtiofs".into(),
        // Set-user-ID stays in force, as for any other file of a container.
        options: vec!["nodev".into()],
        mount_point: SHARED.into(),
        ..Default::default()
    }
}

/// Path at which containers use the share `name`.
pub fn share_path(name: &str) -> String {
    format!("{SHARES}/{name}")
}

/// Mount of one share, for as long as a container has it. Afterwards the guest caches nothing of it and has
/// no file of it open.
pub fn share(name: &str) -> Storage {
    Storage {
        driver: "bind".into(),
        driver_options: vec![RELEASE_SOURCE.into()],
        source: format!("{SHARED}/{name}"),
        mount_point: share_path(name),
        ..Default::default()
    }
}

/// `Device.type` of a block device of the host.
pub const HOST_DISK: &str = "thaw-disk";
/// Option of such a device.
pub const READ_ONLY: &str = "ro";

/// The block device of the host in slot `slot`, which the container has at `path`.
pub fn host_disk(slot: &str, path: &str, read_only: bool) -> Device {
    let options = read_only.then(|| READ_ONLY.to_owned());
    Device {
        id: slot.into(),
        type_: HOST_DISK.into(),
        container_path: path.into(),
        options: options.into_iter().collect(),
        ..Default::default()
    }
}

/// Mount of the disk that all containers write to.
pub fn disk() -> Storage {
    Storage {
        driver: "mmioblk".into(),
        // The disk may be larger than the file system that was made for it: grow it.
        driver_options: vec!["fill-disk".into()],
        source: "/dev/vda".into(),
        fstype: "ext4".into(),
        options: vec!["noatime".into()],
        mount_point: DISK.into(),
        ..Default::default()
    }
}

/// A directory of the disk for container `id`.
pub fn disk_directory(id: &str, name: &str) -> String {
    format!("{DISK}/{id}/volumes/{name}")
}

/// Driver option of a container's root ([`root`]): this directory of the disk is created before the root is mounted, unless it exists. The
/// root's end does not remove it.
pub fn create_directory(path: &str) -> String {
    format!("{CREATE_DIRECTORY}={path}")
}

/// Root of container `id`: an overlay over `lower` that writes to a directory of the disk.
pub fn root(id: &str, lower: &str) -> Storage {
    let (upper, work) = (format!("{DISK}/{id}/upper"), format!("{DISK}/{id}/work"));
    Storage {
        driver: "overlayfs".into(),
        driver_options: [&upper, &work].map(|path| create_directory(path)).into(),
        source: "overlay".into(),
        fstype: "overlay".into(),
        options: vec![
            format!("lowerdir={lower}"),
            format!("upperdir={upper}"),
            format!("workdir={work}"),
        ],
        mount_point: root_path(id),
        ..Default::default()
    }
}
