//! Directories of the sandbox's own disk that `--mount type=volume` mounts in a container: docker's anonymous volumes.
//!
//! The root is an overlay, and an overlay cannot be the upper layer of another. So programs that mount overlays themselves, as docker and
//! buildah do, need a directory of the disk itself.

use thaw_protocol::agent::agent::Storage;
use thaw_protocol::agent::{layout, oci};

/// An empty directory of the sandbox's disk. It is removed with the sandbox, and is part of what `thaw freeze` writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AnonymousVolume {
    path: String,
    read_only: bool,
}

impl AnonymousVolume {
    /// One at this path of the container.
    pub fn new(path: &str, read_only: bool) -> Result<AnonymousVolume, String> {
        Ok(AnonymousVolume {
            path: super::container_path(path)?,
            read_only,
        })
    }
}

/// The directories to make on the disk, which is mounted already.
pub(in crate::container) fn storages(id: &str, volumes: &[AnonymousVolume]) -> impl Iterator<Item = Storage> {
    (0..volumes.len()).map(move |position| layout::disk_directory(id, &position.to_string()))
}

/// The container's mounts of them.
pub(in crate::container) fn mounts(
    id: &str,
    volumes: &[AnonymousVolume],
) -> impl Iterator<Item = oci::Mount> {
    volumes
        .iter()
        .zip(storages(id, volumes))
        .map(|(volume, directory)| {
            let access = if volume.read_only { "ro" } else { "rw" };
            oci::Mount {
                destination: volume.path.clone(),
                type_: "bind".into(),
                source: directory.mount_point,
                options: ["rbind", access].map(String::from).into(),
                ..Default::default()
            }
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_volume_is_a_directory_of_the_disk() {
        let volumes = [
            AnonymousVolume::new("/var/lib/docker/", false).unwrap(),
            AnonymousVolume::new("/data", true).unwrap(),
        ];
        let directories: Vec<_> = storages("c", &volumes).map(|s| s.mount_point).collect();
        assert_eq!(
            directories,
            ["/run/thaw/disk/c/volumes/0", "/run/thaw/disk/c/volumes/1"]
        );
        let mounts: Vec<_> = mounts("c", &volumes).collect();
        assert_eq!(
            (mounts[0].source.as_str(), mounts[0].destination.as_str()),
            ("/run/thaw/disk/c/volumes/0", "/var/lib/docker")
        );
        assert_eq!(mounts[1].options, ["rbind", "ro"]);
        for wrong in ["data", "/", "/a/../b", ""] {
            assert!(AnonymousVolume::new(wrong, false).is_err(), "{wrong}");
        }
    }
}
