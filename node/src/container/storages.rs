//! How the agent makes the root filesystem: the image below, read-only, over virtio-fs or as a disk with EROFS on it; the
//! sandbox's disk above; an overlay of both. One disk per sandbox, one directory per container.

use thaw_protocol::agent::agent::Storage;
use thaw_protocol::control::DeviceId;

use crate::sandbox::RootServing;

/// The slot of the root device the sandbox's image is shown in.
pub const IMAGE_SLOT: u16 = 1;
/// In place of a slot, of an image that is a disk: the root device's slot 0 is its own.
pub const IMAGE_DISK_SLOT: u16 = 0;
/// The disk that holds it, the last one: volumes count from the first after the writable layer.
pub const IMAGE_DISK: DeviceId = DeviceId::Blk3;
/// Its name in the guest.
const IMAGE_DISK_PATH: &str = "/dev/vdd";

/// Where the guest has the root device and the disk, whatever the container.
const IMAGES: &str = "/run/thaw/images";
const IMAGE: &str = "/run/thaw/image";
const DISK: &str = "/run/thaw/disk";
/// Driver option that names a directory the agent makes before it mounts the overlay.
const CREATE_DIRECTORY: &str = "io.katacontainers.volume.overlayfs.create_directory";

/// The image's directory in the root device.
pub fn image_name(slot: u16) -> String {
    slot.to_string()
}

/// Where container `id`'s root filesystem is, in the guest.
pub(super) fn root_path(id: &str) -> String {
    format!("/run/thaw/containers/{id}/rootfs")
}

/// What to mount before the container is made, in this order.
pub fn storages(id: &str, root: RootServing) -> Vec<Storage> {
    let (images, lower) = match root {
        RootServing::Virtiofs => {
            let images = Storage {
                driver: "virtio-fs".into(),
                source: "thaw".into(),
                fstype: "virtiofs".into(),
                // Files the device says so of are mapped, the others read.
                options: vec!["ro".into(), "dax=inode".into()],
                mount_point: IMAGES.into(),
                ..Default::default()
            };
            (images, format!("{IMAGES}/{}", image_name(IMAGE_SLOT)))
        }
        RootServing::Erofs => {
            let image = Storage {
                driver: "mmioblk".into(),
                source: IMAGE_DISK_PATH.into(),
                fstype: "erofs".into(),
                options: vec!["ro".into()],
                mount_point: IMAGE.into(),
                ..Default::default()
            };
            (image, IMAGE.into())
        }
    };
    let disk = Storage {
        driver: "mmioblk".into(),
        // It may have been given more room than what is on it was made for.
        driver_options: vec!["fill-disk".into()],
        source: "/dev/vda".into(),
        fstype: "ext4".into(),
        options: vec!["noatime".into()],
        mount_point: DISK.into(),
        ..Default::default()
    };
    let (upper, work) = (format!("{DISK}/{id}/upper"), format!("{DISK}/{id}/work"));
    let root = Storage {
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
    };
    vec![images, disk, root]
}
