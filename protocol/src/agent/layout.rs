//! Where a guest has its images, its disk and its containers' roots, and what to ask the agent to mount for that: the same
//! whoever asks (docs/agent-api.md, "A container's life").

use super::agent::{Device, Storage};
use crate::share::TAG;

/// The root device.
pub const IMAGES: &str = "/run/thaw/images";
/// The device of what is shared with the host.
pub const SHARED: &str = "/run/thaw/shared";
/// Below it, what of that containers have.
const SHARES: &str = "/run/thaw/shares";
/// Below it are the containers.
const CONTAINERS: &str = "/run/thaw/containers";
/// Below it are the files copied for each container.
const FILES: &str = "/run/thaw/files";
const PIDS: &str = "ns/pid";
/// The sandbox's disk.
const DISK: &str = "/run/thaw/disk";
/// Driver option that names a directory the agent makes before it mounts the overlay.
const CREATE_DIRECTORY: &str = "io.katacontainers.volume.overlayfs.create_directory";
/// Driver option of a `bind`: what the guest's kernel mounted at the source by itself goes with it.
pub const RELEASE_SOURCE: &str = "release-source";

/// Where container `id` has its root.
pub fn root_path(id: &str) -> String {
    format!("{CONTAINERS}/{id}/rootfs")
}

/// Where the files are that container `id` has copies of, for as long as it is there.
pub fn files_of(id: &str) -> String {
    format!("{FILES}/{id}")
}

/// The PID namespace of container `id`, for another to join.
pub fn pids_of(id: &str) -> String {
    format!("{CONTAINERS}/{id}/{PIDS}")
}

/// Of which container a path is the PID namespace, as [`pids_of`] names it.
pub fn whose_pids(path: &str) -> Option<&str> {
    path.strip_prefix(CONTAINERS)?
        .strip_prefix('/')?
        .strip_suffix(PIDS)?
        .strip_suffix('/')
}

/// The root device, with a directory for each image.
pub fn images() -> Storage {
    Storage {
        driver: "virtio-fs".into(),
        source: "thaw".into(),
        fstype: "virtiofs".into(),
        // Files the device says so of are mapped, the others read.
        options: vec!["ro".into(), "dax=inode".into()],
        mount_point: IMAGES.into(),
        ..Default::default()
    }
}

/// What is shared with the host, with an entry for each share.
pub fn shared() -> Storage {
    Storage {
        driver: "virtio-fs".into(),
        source: TAG.into(),
        fstype: "virtiofs".into(),
        // What a program of it may become is as with any other container's files.
        options: vec!["nodev".into()],
        mount_point: SHARED.into(),
        ..Default::default()
    }
}

/// Where containers have the share of this name.
pub fn share_path(name: &str) -> String {
    format!("{SHARES}/{name}")
}

/// A share, for as long as a container has it: after that the guest keeps nothing of it, in memory or open.
pub fn share(name: &str) -> Storage {
    Storage {
        driver: "bind".into(),
        driver_options: vec![RELEASE_SOURCE.into()],
        source: format!("{SHARED}/{name}"),
        mount_point: share_path(name),
        ..Default::default()
    }
}

/// The type of a device of a container that is a block device of the host.
pub const HOST_DISK: &str = "thaw-disk";
/// Option of such a device.
pub const READ_ONLY: &str = "ro";

/// The block device of the host in the slot of this number, as the one the specification has at `path` of the container.
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

/// The disk all containers write to.
pub fn disk() -> Storage {
    Storage {
        driver: "mmioblk".into(),
        // It may have been given more room than what is on it was made for.
        driver_options: vec!["fill-disk".into()],
        source: "/dev/vda".into(),
        fstype: "ext4".into(),
        options: vec!["noatime".into()],
        mount_point: DISK.into(),
        ..Default::default()
    }
}

/// The root of container `id`: a directory of the disk over `lower`.
pub fn root(id: &str, lower: &str) -> Storage {
    let (upper, work) = (format!("{DISK}/{id}/upper"), format!("{DISK}/{id}/work"));
    Storage {
        driver: "overlayfs".into(),
        driver_options: [&upper, &work]
            .map(|path| format!("{CREATE_DIRECTORY}={path}"))
            .into(),
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
