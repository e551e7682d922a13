//! The container's root file system: what containerd tells to mount, and what the guest has instead.
//!
//! Nothing is mounted in the host's tree. An image in Thaw's store is shown in the pod's root device; the guest lays a directory of
//! the pod's disk over it. Of any other snapshotter thawd makes the mount, for this microVM alone, and shares it: what is
//! written is in the snapshot, where containerd looks for it.

use std::path::Path;

use thaw_protocol::agent::agent::Storage;
use thaw_protocol::agent::layout;
use thaw_protocol::shim::mount::Mount;

use crate::error::{Error, Result};
use crate::share::Source;

/// What thawd's snapshotter puts before the manifest's digest, as the source of its one mount (docs/images.md).
pub const IMAGE: &str = "thaw:";

/// Where a container's files come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rootfs {
    /// An image in the store, by its manifest's digest.
    Image { digest: String },
    /// A directory of the host, or a file system it makes.
    Host(Source),
}

impl Rootfs {
    /// What the mounts of a task are; without any it is the directory `root`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for what is more than one mount.
    pub fn of(mounts: &[Mount], root: &Path) -> Result<Rootfs> {
        match mounts {
            [mount] => match mount.source.strip_prefix(IMAGE) {
                Some(digest) => Ok(Rootfs::Image {
                    digest: digest.to_owned(),
                }),
                None if mount.target.is_empty() => Ok(Rootfs::Host(Source {
                    kind: mount.type_.clone(),
                    source: mount.source.clone(),
                    options: mount.options.clone(),
                })),
                None => Err(several()),
            },
            [] => Ok(Rootfs::Host(Source {
                kind: "bind".into(),
                source: root.display().to_string(),
                options: vec!["rbind".into()],
            })),
            _ => Err(several()),
        }
    }
}

fn several() -> Error {
    Error::Unsupported(
        "the root file system is several mounts over one another, which cannot be shared with a microVM: use a \
         snapshotter whose snapshots are one mount (docs/shim.md)"
            .into(),
    )
}

/// What the agent mounts for container `id`, in this order: the image shown as `image`, below a directory of the pod's disk.
pub fn storages(id: &str, image: &str) -> Vec<Storage> {
    let lower = format!("{}/{image}", layout::IMAGES);
    vec![layout::images(), layout::disk(), layout::root(id, &lower)]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mount(kind: &str, source: &str) -> Mount {
        Mount {
            type_: kind.into(),
            source: source.into(),
            options: vec!["index=off".into()],
            ..Default::default()
        }
    }

    #[test]
    fn rootfs_mount_of_our_snapshotter_is_an_image_else_the_hosts() {
        let of = |mounts: &[Mount]| Rootfs::of(mounts, Path::new("/bundle/rootfs"));
        let digest = "sha256:ab".to_owned();
        assert_eq!(
            of(&[mount("overlay", "thaw:sha256:ab")]).unwrap(),
            Rootfs::Image { digest }
        );
        let Rootfs::Host(overlay) = of(&[mount("overlay", "overlay")]).unwrap() else {
            panic!("no image")
        };
        assert_eq!(
            (overlay.kind.as_str(), overlay.options[0].as_str()),
            ("overlay", "index=off")
        );
        let Rootfs::Host(directory) = of(&[]).unwrap() else {
            panic!("no image")
        };
        assert_eq!(
            (directory.kind.as_str(), directory.source.as_str()),
            ("bind", "/bundle/rootfs")
        );
        let error = of(&[mount("a", "b"), mount("c", "d")]).unwrap_err().to_string();
        assert!(error.contains("several mounts"), "{error}");
    }
}
