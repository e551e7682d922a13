//! How the agent builds the root filesystem: the read-only image below, over virtio-fs or as a disk with EROFS; the sandbox's
//! disk above; an overlay of both. A sandbox has one disk, and a container has one directory on it.

use serde::{Deserialize, Serialize};
use thaw_protocol::agent::agent::Storage;
use thaw_protocol::agent::layout;
use thaw_protocol::control::DeviceId;

/// The slot of the root device the sandbox's image is shown in.
pub const IMAGE_SLOT: u16 = 1;
/// In place of a slot, of an image that is a disk: the root device's slot 0 is its own.
pub const IMAGE_DISK_SLOT: u16 = 0;
/// The disk that holds it, the last one: volumes count from the first after the writable layer.
pub const IMAGE_DISK: DeviceId = DeviceId::Blk3;
/// Its name in the guest.
const IMAGE_DISK_PATH: &str = "/dev/vdd";

/// Where the guest has an image that is a disk.
const IMAGE: &str = "/run/thaw/image";

/// How the guest gets its image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RootServing {
    /// As files, over virtio-fs: what clones read is once in the host's memory.
    #[default]
    Virtiofs,
    /// As a read-only disk with EROFS on it, which the guest mounts itself.
    Erofs,
}

/// The image's directory in the root device.
pub fn image_name(slot: u16) -> String {
    slot.to_string()
}

/// What to mount before the container is made, in this order.
pub fn storages(id: &str, root: RootServing) -> Vec<Storage> {
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
    vec![images, layout::disk(), layout::root(id, &lower)]
}
