//! The name of an entry in an archive.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use crate::{Error, Result};

/// Longest name, bytes: the kernel's limit for a path.
const MAX_NAME: usize = 4096;

/// A name as a relative path without `.` and `..`. A leading `/` is dropped, as tar does; the archive's top is the empty path.
pub fn relative(name: &[u8]) -> Result<PathBuf> {
    let path = Path::new(OsStr::from_bytes(name));
    if name.len() > MAX_NAME || name.contains(&0) {
        return Err(Error::Refused(format!(
            "the archive has a name of {} bytes, which is too long or contains a zero",
            name.len()
        )));
    }
    let mut relative = PathBuf::new();
    for part in path.components() {
        match part {
            Component::Normal(part) => relative.push(part),
            Component::RootDir | Component::CurDir => {}
            Component::ParentDir | Component::Prefix(_) => {
                return Err(Error::Refused(format!(
                    "the archive has the name {}, which leads out of its directory",
                    path.display()
                )));
            }
        }
    }
    Ok(relative)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stay_below_their_directory() {
        for (name, path) in [
            ("a", "a"),
            ("./a//b/", "a/b"),
            ("/etc/passwd", "etc/passwd"),
            (".", ""),
            ("/", ""),
            ("", ""),
        ] {
            assert_eq!(relative(name.as_bytes()).unwrap(), Path::new(path), "{name}");
        }
        assert_eq!(relative(b"a\xff").unwrap().as_os_str().as_bytes(), b"a\xff");
        for name in ["..", "../a", "a/../b", "/..", "a/..", "a\0b", &"x/".repeat(2049)] {
            assert!(relative(name.as_bytes()).is_err(), "{name}");
        }
    }
}
