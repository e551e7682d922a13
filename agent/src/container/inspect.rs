//! Tells the host about files of a container. Opens none of them.

use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;

use rustix::fs::{FileType, OFlags, Stat};
use thaw_protocol::agent::MessageField;
use thaw_protocol::agent::files::{FileInfo, StatRequest, StatResponse};

use super::files::{checked_bytes, refused, resolve};
use crate::error::{Result, WithContext};

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
}
