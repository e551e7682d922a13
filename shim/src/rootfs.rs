//! The container's root file system: what containerd tells to mount, and what the guest mounts instead.
//!
//! Nothing is mounted on the host. An image in Thaw's store is shown in the pod's root device; the guest lays a directory of
//! the pod's disk over it.

use thaw_protocol::agent::agent::Storage;
use thaw_protocol::agent::layout;
use thaw_protocol::shim::mount::Mount;

use crate::error::{Error, Result};

/// What thawd's snapshotter puts before the manifest's digest, as the source of its one mount (docs/images.md).
const IMAGE: &str = "thaw:";

/// Where a container's files come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rootfs {
    /// An image in the store, by its manifest's digest.
    Image { digest: String },
}

impl Rootfs {
    /// What the mounts of a task are.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for anything that is not Thaw's snapshotter's.
    pub fn of(mounts: &[Mount]) -> Result<Rootfs> {
        let other = |what: String| {
            Error::Unsupported(format!(
                "{what}; this microVM takes images of Thaw's snapshotter only: pull the image with it (docs/shim.md)"
            ))
        };
        match mounts {
            [mount] => match mount.source.strip_prefix(IMAGE) {
                Some(digest) => Ok(Rootfs::Image {
                    digest: digest.to_owned(),
                }),
                None => Err(other(format!(
                    "the root file system is a mount of type {:?}",
                    mount.type_
                ))),
            },
            [] => Err(other("the root file system is a directory of the host".into())),
            many => Err(other(format!("the root file system is {} mounts", many.len()))),
        }
    }
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
            ..Default::default()
        }
    }

    #[test]
    fn an_image_of_the_store_is_known_by_its_source_and_all_else_is_refused_by_name() {
        let image = [mount("overlay", "thaw:sha256:ab")];
        let digest = "sha256:ab".to_owned();
        assert_eq!(Rootfs::of(&image).unwrap(), Rootfs::Image { digest });
        for (mounts, word) in [
            (vec![mount("overlay", "overlay")], "\"overlay\""),
            (vec![], "directory"),
            (vec![mount("a", "b"), mount("c", "d")], "2 mounts"),
        ] {
            let error = Rootfs::of(&mounts).unwrap_err().to_string();
            assert!(error.contains(word) && error.contains("snapshotter"), "{error}");
        }
    }
}
