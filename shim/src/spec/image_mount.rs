//! Mounts of images from Thaw's snapshotter on the host, which CRI makes for a pod's image volumes. On the
//! host such a mount has only a few of the image's files, so the guest is shown the image itself.

use std::path::Path;

use crate::error::{Error, Result, WithContext};
use crate::rootfs::IMAGE;

/// The file system type of such a mount, and its magic number (linux/magic.h).
const OVERLAY: &str = "overlay";
pub const OVERLAY_MAGIC: u64 = 0x794c_7630;

/// A path of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImagePath {
    /// Digest of the image's manifest.
    pub digest: String,
    /// Path below the image's root: empty, or starting with a slash.
    pub path: String,
}

/// The image to which a host path belongs, if any.
pub fn find(path: &Path) -> Result<Option<ImagePath>> {
    let what = || format!("look for the mount of {}", path.display());
    let path = path.canonicalize().with_context(what)?;
    let mounts = std::fs::read("/proc/self/mountinfo").with_context(what)?;
    let Some(path) = path.to_str() else {
        return Err(Error::Unsupported(format!(
            "{} is on an overlay of the host, and its name is not UTF-8: rename it",
            path.display()
        )));
    };
    Ok(image_at(path, &String::from_utf8_lossy(&mounts)))
}

/// Searches a text in the format of mountinfo, proc(5), for the nearest mount above the path. Of several at
/// one mount point the last is on top.
fn image_at(path: &str, mounts: &str) -> Option<ImagePath> {
    let above = mounts.lines().filter_map(|line| {
        let (mount, system) = line.split_once(" - ")?;
        let mut words = mount.split(' ').skip(3);
        let (root, place) = (unescape(words.next()?), unescape(words.next()?));
        let rest = path.strip_prefix(place.trim_end_matches('/'))?;
        let is_above = rest.is_empty() || rest.starts_with('/');
        is_above.then_some((place.len(), root, rest, system))
    });
    let (_, root, rest, system) = above.max_by_key(|(length, ..)| *length)?;
    let (kind, system) = system.split_once(' ')?;
    let digest = system.split(' ').next()?.strip_prefix(IMAGE)?;
    (kind == OVERLAY).then(|| ImagePath {
        digest: digest.into(),
        path: format!("{}{rest}", root.trim_end_matches('/')),
    })
}

/// Replaces the octal escapes of a field.
fn unescape(word: &str) -> String {
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
    fn image_is_found_by_the_nearest_mount() {
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
            let expected = found.map(|path| ImagePath {
                digest: "sha256:ab".into(),
                path: path.into(),
            });
            assert_eq!(image_at(path, MOUNTS), expected, "{path}");
        }
    }
}
