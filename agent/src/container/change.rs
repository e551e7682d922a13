//! Makes, moves and removes files and directories of a container.
//!
//! Invariants: the directory of each file is found within the container's root, and the file itself is never followed if it is a link;
//! removing a directory with what is in it follows no link either.

use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, RenameFlags};
use rustix::io::Errno;
use thaw_protocol::agent::files::{MakeDirectoryRequest, MoveRequest, RemoveRequest};

use super::files::{checked_bytes, refused, resolve};
use crate::error::{Error, Result};

/// Most directories within each other that are removed; each holds a descriptor.
const MAX_DEPTH: usize = 256;
/// How often a directory that gets new files while it is emptied is emptied again.
const ATTEMPTS: usize = 8;

/// Makes a directory.
pub fn make_directory(root: impl AsFd, r: &MakeDirectoryRequest) -> Result<()> {
    let path = checked_bytes(&r.path)?;
    if r.parents {
        let mut made = PathBuf::from("/");
        for part in path.parent().unwrap_or(Path::new("/")).components().skip(1) {
            made.push(part);
            make_one(root.as_fd(), &made, 0o755, true)?;
        }
    }
    make_one(root.as_fd(), path, r.mode, r.parents)
}

/// Makes a directory in one that exists. With `may_exist`, one that is there already stays as it is.
fn make_one(root: BorrowedFd<'_>, path: &Path, mode: u32, may_exist: bool) -> Result<()> {
    if may_exist && resolve(root, path, OFlags::DIRECTORY).is_ok() {
        return Ok(());
    }
    let (parent, name) = place(root, path)?;
    let made = rustix::fs::mkdirat(&parent, name, Mode::from_raw_mode(mode & 0o777)).and_then(|()| {
        // The agent's umask does not apply to it.
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let directory = rustix::fs::openat(&parent, name, flags, Mode::empty())?;
        rustix::fs::fchmod(directory, Mode::from_raw_mode(mode & 0o7777))
    });
    made.map_err(|e| refused("make", path, e.into()))
}

/// Renames a file or a directory.
pub fn move_file(root: impl AsFd, r: &MoveRequest) -> Result<()> {
    let (from, to) = (checked_bytes(&r.from)?, checked_bytes(&r.to)?);
    let (old, old_name) = place(root.as_fd(), from)?;
    let (new, new_name) = place(root.as_fd(), to)?;
    let flags = match r.replace {
        true => RenameFlags::empty(),
        false => RenameFlags::NOREPLACE,
    };
    let moved = rustix::fs::renameat_with(&old, old_name, &new, new_name, flags);
    moved.map_err(|e| match e {
        Errno::XDEV => Error::State(format!(
            "cannot move {} to {}: they are on different file systems; copy it and remove it",
            from.display(),
            to.display()
        )),
        Errno::EXIST => Error::State(format!("cannot move {}: {} exists", from.display(), to.display())),
        e => refused("move", from, e.into()),
    })
}

/// Removes a file or a directory.
pub fn remove(root: impl AsFd, r: &RemoveRequest) -> Result<()> {
    let path = checked_bytes(&r.path)?;
    let (parent, name) = place(root.as_fd(), path)?;
    let stat = rustix::fs::statat(&parent, name, AtFlags::SYMLINK_NOFOLLOW);
    let stat = stat.map_err(|e| refused("find", path, e.into()))?;
    let removed = match FileType::from_raw_mode(stat.st_mode) {
        FileType::Directory if r.recursive => remove_tree(&parent, name, MAX_DEPTH),
        FileType::Directory => rustix::fs::unlinkat(&parent, name, AtFlags::REMOVEDIR),
        _ => rustix::fs::unlinkat(&parent, name, AtFlags::empty()),
    };
    removed.map_err(|e| refused("remove", path, e.into()))
}

/// Removes a directory and what is in it, at most so deep.
fn remove_tree(parent: &OwnedFd, name: &OsStr, deep: usize) -> Result<(), Errno> {
    if deep == 0 {
        return Err(Errno::NAMETOOLONG);
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory = rustix::fs::openat(parent, name, flags, Mode::empty())?;
    for _ in 0..ATTEMPTS {
        let listing = rustix::fs::openat(&directory, ".", flags, Mode::empty())?;
        for entry in Dir::new(listing)? {
            let entry = entry?;
            let name = OsStr::from_bytes(entry.file_name().to_bytes());
            if name == "." || name == ".." {
                continue;
            }
            match rustix::fs::unlinkat(&directory, name, AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(Errno::ISDIR) => remove_tree(&directory, name, deep - 1)?,
                Err(e) => return Err(e),
            }
        }
        match rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR) {
            Ok(()) | Err(Errno::NOENT) => return Ok(()),
            Err(Errno::NOTEMPTY) => {}
            Err(e) => return Err(e),
        }
    }
    Err(Errno::NOTEMPTY)
}

/// The directory of a path, and the name in it.
fn place<'a>(root: BorrowedFd<'_>, path: &'a Path) -> Result<(OwnedFd, &'a OsStr)> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(Error::Invalid(format!(
            "{} is the root directory",
            path.display()
        )));
    };
    Ok((resolve(root, parent, OFlags::DIRECTORY)?, name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, File};
    use std::os::unix::fs::{PermissionsExt, symlink};

    /// A root with a secret directory beside it, and links that would lead there.
    fn root() -> (tempfile::TempDir, PathBuf, OwnedFd) {
        let outer = tempfile::tempdir().unwrap();
        fs::create_dir(outer.path().join("secret")).unwrap();
        fs::write(outer.path().join("secret/f"), "secret").unwrap();
        let inner = outer.path().join("root");
        fs::create_dir(&inner).unwrap();
        symlink("../secret", inner.join("out")).unwrap();
        symlink(outer.path().join("secret"), inner.join("absolute")).unwrap();
        let root = OwnedFd::from(File::open(&inner).unwrap());
        (outer, inner, root)
    }

    fn make(root: &OwnedFd, path: &str, parents: bool) -> Result<()> {
        let request = MakeDirectoryRequest {
            path: path.into(),
            mode: 0o2775,
            parents,
            ..Default::default()
        };
        make_directory(root, &request)
    }

    fn rename(root: &OwnedFd, from: &str, to: &str, replace: bool) -> Result<()> {
        let request = MoveRequest {
            from: from.into(),
            to: to.into(),
            replace,
            ..Default::default()
        };
        move_file(root, &request)
    }

    fn unlink(root: &OwnedFd, path: &str, recursive: bool) -> Result<()> {
        let request = RemoveRequest {
            path: path.into(),
            recursive,
            ..Default::default()
        };
        remove(root, &request)
    }

    #[test]
    fn directories_are_made_with_their_mode() {
        let (_outer, inner, root) = root();
        make(&root, "/a", false).unwrap();
        assert!(matches!(make(&root, "/a", false), Err(Error::State(_))));
        assert!(matches!(make(&root, "/x/y", false), Err(Error::NoFile(_))));
        make(&root, "/x/y/z", true).unwrap();
        make(&root, "/x/y/z", true).unwrap();
        let mode = |path: &str| fs::metadata(inner.join(path)).unwrap().permissions().mode() & 0o7777;
        assert_eq!((mode("a"), mode("x/y/z"), mode("x")), (0o2775, 0o2775, 0o755));
        fs::write(inner.join("f"), "f").unwrap();
        assert!(make(&root, "/f", true).is_err() && make(&root, "/f/g", true).is_err());
        assert!(matches!(make(&root, "/", false), Err(Error::Invalid(_))));
    }

    #[test]
    fn files_are_moved_and_replaced_only_on_request() {
        let (_outer, inner, root) = root();
        fs::write(inner.join("a"), "a").unwrap();
        fs::write(inner.join("b"), "b").unwrap();
        assert!(matches!(rename(&root, "/a", "/b", false), Err(Error::State(_))));
        rename(&root, "/a", "/b", true).unwrap();
        assert_eq!(fs::read(inner.join("b")).unwrap(), b"a");
        assert!(matches!(rename(&root, "/a", "/c", false), Err(Error::NoFile(_))));
        make(&root, "/d", false).unwrap();
        rename(&root, "/b", "/d/b", false).unwrap();
        assert!(rename(&root, "/d", "/d/b/c", false).is_err());
    }

    #[test]
    fn nothing_outside_is_made_moved_or_removed() {
        let (outer, inner, root) = root();
        for link in ["/out", "/absolute"] {
            assert!(make(&root, &format!("{link}/new"), true).is_err());
            assert!(rename(&root, &format!("{link}/f"), "/f", true).is_err());
            assert!(unlink(&root, &format!("{link}/f"), true).is_err());
        }
        make(&root, "/d/e", true).unwrap();
        fs::write(inner.join("d/e/f"), "f").unwrap();
        symlink("../../secret", inner.join("d/e/link")).unwrap();
        assert!(matches!(unlink(&root, "/d", false), Err(Error::State(_))));
        unlink(&root, "/d", true).unwrap();
        unlink(&root, "/out", true).unwrap();
        assert!(!inner.join("d").exists() && fs::symlink_metadata(inner.join("out")).is_err());
        assert!(matches!(unlink(&root, "/d", true), Err(Error::NoFile(_))));
        assert!(matches!(unlink(&root, "/", true), Err(Error::Invalid(_))));
        assert_eq!(fs::read(outer.path().join("secret/f")).unwrap(), b"secret");
        assert_eq!(fs::read_dir(outer.path().join("secret")).unwrap().count(), 1);
    }
}
