//! Directories of the sandbox's own disk that `--mount type=volume` mounts in a container: docker's anonymous volumes.
//!
//! The root is an overlay, and an overlay cannot be the upper layer of another. So programs that mount overlays themselves, as docker and
//! buildah do, need a directory of the disk itself.

use std::str::FromStr;

use thaw_protocol::agent::{layout, oci};

/// A directory of the sandbox's disk, empty at first. It keeps its files when the container starts again, is part of what `thaw freeze`
/// writes, and is removed with the sandbox.
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

impl FromStr for AnonymousVolume {
    type Err = String;

    /// Reads `PATH` or `PATH:ro`.
    fn from_str(text: &str) -> Result<AnonymousVolume, String> {
        match text.rsplit_once(':') {
            None | Some((_, "rw")) => AnonymousVolume::new(text.strip_suffix(":rw").unwrap_or(text), false),
            Some((path, "ro")) => AnonymousVolume::new(path, true),
            Some((_, access)) => Err(format!("{access:?} in {text:?} is neither ro nor rw")),
        }
    }
}

/// The directories of the disk, which must exist before the container is created.
pub(in crate::container) fn directories(
    id: &str,
    volumes: &[AnonymousVolume],
) -> impl Iterator<Item = String> {
    (0..volumes.len()).map(move |position| layout::disk_directory(id, &position.to_string()))
}

/// The container's mounts of them.
pub(in crate::container) fn mounts(
    id: &str,
    volumes: &[AnonymousVolume],
) -> impl Iterator<Item = oci::Mount> {
    volumes
        .iter()
        .zip(directories(id, volumes))
        .map(|(volume, directory)| {
            let access = if volume.read_only { "ro" } else { "rw" };
            oci::Mount {
                destination: volume.path.clone(),
                type_: "bind".into(),
                source: directory,
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
        let directories: Vec<_> = directories("c", &volumes).collect();
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
        assert_eq!("/data:ro".parse(), Ok(volumes[1].clone()));
        assert_eq!("/data:rw".parse(), AnonymousVolume::new("/data", false));
        assert_eq!("/data".parse(), AnonymousVolume::new("/data", false));
        let refused = "/srv:/data".parse::<AnonymousVolume>().unwrap_err();
        assert!(refused.contains("\"/data\" in \"/srv:/data\""), "{refused}");
        for wrong in ["data", "/", "/a/../b", ""] {
            assert!(AnonymousVolume::new(wrong, false).is_err(), "{wrong}");
        }
    }
}
