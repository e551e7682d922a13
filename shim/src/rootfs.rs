//! A container's root file system: from the mounts containerd requests to the guest's storages.
//!
//! Nothing is mounted in the host's tree. An image in Thaw's store appears in the pod's root device, and the
//! guest mounts an overlay of it and a directory of the pod's disk. For any other snapshotter thawd makes the
//! mount, for this microVM only, and shares it; writes go to the snapshot, where containerd expects them.

use std::path::Path;

use thaw_protocol::agent::agent::Storage;
use thaw_protocol::agent::layout;
use thaw_protocol::shim::mount::Mount;

use crate::error::{Error, Result};
use crate::host_resource::Source;

/// Prefix of the manifest's digest in the source of the one mount that thawd's snapshotter returns
/// (docs/images.md).
pub const IMAGE: &str = "thaw:";

/// The source of a container's root file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rootfs {
    /// An image in the store, by its manifest's digest.
    Image { digest: String },
    /// A directory of the host, or a mount.
    Host(Source),
}

impl Rootfs {
    /// The source for a task's mounts. Without mounts it is the directory `root`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if there are several mounts.
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

/// The agent's storages for container `id`, in order: the image named `image` below a directory of the pod's
/// disk.
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
