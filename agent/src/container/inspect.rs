//! Describes files of a container to the host: their kind, size, mode and times. It does not open a file to read it.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;

use rustix::fs::{Dir, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;
use thaw_protocol::agent::MessageField;
use thaw_protocol::agent::files::{FileInfo, ListRequest, ListResponse, StatRequest, StatResponse};

use super::files::{checked_bytes, refused, resolve};
use crate::error::{Result, WithContext};

/// Most entries of one answer.
const MAX_PAGE: usize = 1000;
/// Most bytes of one answer: the host takes no larger one.
const MAX_BYTES: usize = 200 << 10;
/// Bytes of an entry besides its name and target, at most.
const FIXED: usize = 64;

/// Looks at one file.
pub fn stat(root: impl AsFd, r: &StatRequest) -> Result<StatResponse> {
    let path = checked_bytes(&r.path)?;
    let flags = match r.follow {
        true => OFlags::empty(),
        false => OFlags::NOFOLLOW,
    };
    let found = resolve(root.as_fd(), path, flags)?;
    let stat = rustix::fs::fstat(&found).with_context(|| format!("stat {}", path.display()))?;
    let target = target(&found, &stat).map_err(|e| refused("read", path, e.into()))?;
    Ok(StatResponse {
        info: MessageField::some(info(path.file_name().unwrap_or_default(), &stat, target)),
        ..Default::default()
    })
}

/// Lists a directory in the order of names, a page at a time.
pub fn list(root: impl AsFd, r: &ListRequest) -> Result<ListResponse> {
    let path = checked_bytes(&r.path)?;
    let found = resolve(root.as_fd(), path, OFlags::DIRECTORY)?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let listed = rustix::fs::openat(&found, ".", flags, Mode::empty()).and_then(Dir::new);
    let listed = listed.map_err(|e| refused("list", path, e.into()))?;
    // Only the first names after the last page are held, however many there are.
    let mut names = BTreeSet::new();
    let mut more = false;
    let limit = (r.limit as usize).clamp(1, MAX_PAGE);
    for entry in listed {
        let entry = entry.map_err(|e| refused("list", path, e.into()))?;
        let name = entry.file_name().to_bytes();
        if name == b"." || name == b".." || name <= r.after.as_slice() {
            continue;
        }
        names.insert(name.to_vec());
        if names.len() > limit {
            names.pop_last();
            more = true;
        }
    }
    let mut answer = ListResponse::default();
    let mut bytes = 0;
    for name in names {
        let name = OsStr::from_bytes(&name);
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let looked = rustix::fs::openat(&found, name, flags, Mode::empty()).and_then(|object| {
            let stat = rustix::fs::fstat(&object)?;
            let target = target(&object, &stat)?;
            Ok(info(name, &stat, target))
        });
        let looked = match looked {
            // It was removed meanwhile.
            Err(Errno::NOENT) => continue,
            looked => looked.map_err(|e| refused("read", path, e.into()))?,
        };
        bytes += FIXED + looked.name.len() + looked.target.len();
        if bytes > MAX_BYTES {
            more = true;
            break;
        }
        answer.entries.push(looked);
    }
    answer.more = more;
    Ok(answer)
}

/// Where an opened link leads; empty for what is not a link.
fn target(found: &OwnedFd, stat: &Stat) -> Result<Vec<u8>, rustix::io::Errno> {
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::Symlink => Ok(rustix::fs::readlinkat(found, "", Vec::new())?.into_bytes()),
        _ => Ok(Vec::new()),
    }
}

fn info(name: &OsStr, stat: &Stat, target: Vec<u8>) -> FileInfo {
    FileInfo {
        name: name.as_bytes().to_vec(),
        mode: stat.st_mode,
        size: u64::try_from(stat.st_size).unwrap_or(0),
        uid: stat.st_uid,
        gid: stat.st_gid,
        modified_s: stat.st_mtime,
        modified_ns: u32::try_from(stat.st_mtime_nsec).unwrap_or(0),
        target,
        ..Default::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::{fs, path::Path};

    #[test]
    fn stat_tells_of_links_and_what_they_lead_to() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("d")).unwrap();
        fs::write(dir.path().join("d/f"), "12345").unwrap();
        fs::set_permissions(dir.path().join("d/f"), fs::Permissions::from_mode(0o4751)).unwrap();
        symlink("/d/f", dir.path().join("l")).unwrap();
        let root = OwnedFd::from(fs::File::open(dir.path()).unwrap());
        let ask = |path: &str, follow| {
            let path = path.as_bytes().to_vec();
            let request = StatRequest {
                path,
                follow,
                ..Default::default()
            };
            stat(&root, &request).map(|answer| answer.info.unwrap())
        };
        let file = ask("/l", true).unwrap();
        assert_eq!((file.mode, file.size), (0o104_751, 5));
        let link = ask("/l", false).unwrap();
        assert_eq!((link.mode & 0o170_000, link.name), (0o120_000, b"l".to_vec()));
        assert_eq!(Path::new(OsStr::from_bytes(&link.target)), Path::new("/d/f"));
        // As for the kernel, a slash at the end asks for a directory.
        assert!(ask("/d/f/", false).is_err() && ask("/d/", false).is_ok() && ask("/", false).is_ok());
        assert!(ask("d", false).is_err() && ask("/d/../d", false).is_err() && ask("/x", false).is_err());
    }

    #[test]
    fn directory_is_listed_in_pages_in_order() {
        let dir = tempfile::tempdir().unwrap();
        let root = OwnedFd::from(fs::File::open(dir.path()).unwrap());
        fs::create_dir(dir.path().join("d")).unwrap();
        for n in 0..25 {
            fs::write(dir.path().join(format!("d/{n:02}")), vec![0; n]).unwrap();
        }
        symlink("x".repeat(4000), dir.path().join("d/link")).unwrap();
        let page = |after: &[u8], limit| {
            let request = ListRequest {
                path: b"/d".to_vec(),
                after: after.to_vec(),
                limit,
                ..Default::default()
            };
            list(&root, &request).unwrap()
        };
        let (mut after, mut names) = (Vec::new(), Vec::new());
        loop {
            let answer = page(&after, 10);
            assert!(answer.entries.len() <= 10);
            names.extend(answer.entries.iter().map(|e| e.name.clone()));
            after = names.last().unwrap().clone();
            if !answer.more {
                break;
            }
        }
        let expected = (0..25).map(|n| format!("{n:02}").into_bytes());
        assert_eq!(names, expected.chain([b"link".to_vec()]).collect::<Vec<_>>());
        assert_eq!(page(b"link", 10).entries.len(), 0);
        assert_eq!(page(b"", 0).entries.len(), 1);
        assert!(
            list(
                &root,
                &ListRequest {
                    path: b"/d/01".to_vec(),
                    ..Default::default()
                }
            )
            .is_err()
        );
    }

    #[test]
    fn answer_about_long_links_stays_small() {
        let dir = tempfile::tempdir().unwrap();
        let root = OwnedFd::from(fs::File::open(dir.path()).unwrap());
        for n in 0..100 {
            symlink("x".repeat(4000), dir.path().join(format!("{n:0200}"))).unwrap();
        }
        let request = ListRequest {
            path: b"/".to_vec(),
            limit: 1000,
            ..Default::default()
        };
        let answer = list(&root, &request).unwrap();
        assert!(answer.more && answer.entries.len() > 10);
        let size = thaw_protocol::agent::Message::compute_size(&answer);
        assert!(
            size <= thaw_protocol::agent::answers::MAX_RESPONSE.into(),
            "{size}"
        );
    }
}
