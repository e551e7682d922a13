//! An image of Thaw's snapshotter that is mounted on the host, as CRI does for a pod's image volumes: there it has but a few of its
//! files, so the guest is shown the image itself.

use std::path::Path;

use crate::error::{Error, For, Result};
use crate::rootfs::IMAGE;

/// The file system type of such a mount, and its number (linux/magic.h).
const OVERLAY: &str = "overlay";
pub const OVERLAY_MAGIC: u64 = 0x794c_7630;

/// A path of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OfAnImage {
    /// Of its manifest.
    pub digest: String,
    /// Below its root: empty, or beginning with a slash.
    pub path: String,
}

/// Of which image a path of the host is, if it is of one.
pub fn find(path: &Path) -> Result<Option<OfAnImage>> {
    let what = || format!("look for the mount of {}", path.display());
    let path = path.canonicalize().for_(what)?;
    let mounts = std::fs::read("/proc/self/mountinfo").for_(what)?;
    let Some(path) = path.to_str() else {
        return Err(Error::Unsupported(format!(
            "{} is on an overlay of the host, and its name is not UTF-8: rename it",
            path.display()
        )));
    };
    Ok(of(path, &String::from_utf8_lossy(&mounts)))
}

/// Of a text as proc(5) has it: the mount nearest to the path, and of those at one place the last, which is on top.
fn of(path: &str, mounts: &str) -> Option<OfAnImage> {
    let above = mounts.lines().filter_map(|line| {
        let (mount, system) = line.split_once(" - ")?;
        let mut words = mount.split(' ').skip(3);
        let (root, place) = (plain(words.next()?), plain(words.next()?));
        let rest = path.strip_prefix(place.trim_end_matches('/'))?;
        let is_above = rest.is_empty() || rest.starts_with('/');
        is_above.then_some((place.len(), root, rest, system))
    });
    let (_, root, rest, system) = above.max_by_key(|(length, ..)| *length)?;
    let (kind, system) = system.split_once(' ')?;
    let digest = system.split(' ').next()?.strip_prefix(IMAGE)?;
    (kind == OVERLAY).then(|| OfAnImage {
        digest: digest.into(),
        path: format!("{}{rest}", root.trim_end_matches('/')),
    })
}

/// A word without its octal numbers, which stand for what would end it.
fn plain(word: &str) -> String {
    let word = word.replace("\\040", " ").replace("\\011", "\t");
    word.replace("\\012", "\n").replace("\\134", "\\")
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "22 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n\
                          30 22 0:50 / /run/image\\040volumes/a rw shared:9 - overlay thaw:sha256:ab rw,lowerdir=/f\n\
                          31 22 0:51 / /run/other ro - overlay overlay ro\n\
                          32 22 0:52 / /run/covered ro - overlay thaw:sha256:cd ro\n\
                          33 32 0:53 / /run/covered rw - tmpfs tmpfs rw\n\
                          34 22 0:50 /etc /run/bound ro - overlay thaw:sha256:ab ro\n\
                          35 30 0:54 / /run/image\\040volumes/a/in rw - tmpfs thaw:sha256:ef rw\n";

    #[test]
    fn an_image_is_known_by_the_mount_nearest_to_a_path() {
        for (path, found) in [
            ("/run/image volumes/a", Some("")),
            ("/run/image volumes/a/models/x", Some("/models/x")),
            ("/run/bound/ssl", Some("/etc/ssl")),
            ("/run/image volumes/ab", None),
            ("/run/image volumes/a/in", None),
            ("/run/other", None),
            ("/run/covered", None),
            ("/run", None),
        ] {
            let expected = found.map(|path| OfAnImage {
                digest: "sha256:ab".into(),
                path: path.into(),
            });
            assert_eq!(of(path, MOUNTS), expected, "{path}");
        }
    }
}
