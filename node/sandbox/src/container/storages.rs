//! How the agent builds the root filesystem: the read-only image below, over virtio-fs or as an EROFS disk; the sandbox's disk above; an
//! overlay of both. A sandbox has one disk, and a container has one directory on it.

use serde::{Deserialize, Serialize};
use thaw_protocol::agent::agent::Storage;
use thaw_protocol::agent::layout;
use thaw_protocol::control::DeviceId;

use super::settings::{AnonymousVolume, anonymous_volume};

/// The slot of the root device that shows the sandbox's image.
pub const IMAGE_SLOT: u16 = 1;
/// Stands for the slot of an image that is a disk: the root device uses slot 0 for itself.
pub const IMAGE_DISK_SLOT: u16 = 0;
/// The slot of the image disk. It is the last one, because volumes count from the first after the writable layer.
pub const IMAGE_DISK: DeviceId = DeviceId::Blk3;
/// The image disk's device in the guest.
const IMAGE_DISK_PATH: &str = "/dev/vdd";

/// Where the guest mounts an image disk.
const IMAGE: &str = "/run/thaw/image";

/// How the guest gets its image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RootServing {
    /// As files, over virtio-fs: the host's memory holds one copy of what all clones read.
    #[default]
    Virtiofs,
    /// As a read-only EROFS disk, which the guest mounts itself.
    Erofs,
}

/// The image's directory in the root device.
pub fn image_name(slot: u16) -> String {
    slot.to_string()
}

/// The mounts to make before the container is created, in this order. The last one is its root, which makes the directories of its volumes.
pub fn storages(id: &str, root: RootServing, volumes: &[AnonymousVolume]) -> Vec<Storage> {
    let (images, lower) = match root {
        RootServing::Virtiofs => (
            layout::images(),
            format!("{}/{}", layout::IMAGES, image_name(IMAGE_SLOT)),
        ),
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
    let mut root = layout::root(id, &lower);
    let directories = anonymous_volume::directories(id, volumes);
    root.driver_options
        .extend(directories.map(|path| layout::create_directory(&path)));
    vec![images, layout::disk(), root]
}
