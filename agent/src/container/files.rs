//! Reads and writes files of a container for the host, as the container's root user sees them.
//!
//! Invariants: no path leads out of the container's root, whatever links it contains (`openat2`,
//! RESOLVE_IN_ROOT). Only regular files are opened, so nothing blocks and no device is touched. No state is
//! kept between two requests: an upload grows in a hidden file beside its target, and replaces the target when
//! it is complete.

use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Component, Path};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;
use thaw_archive::{Links, Root};
use thaw_protocol::agent::files::{ReadFileRequest, ReadFileResponse, WriteFileRequest};

use crate::error::{Error, Result, WithContext};
use crate::storage::check_guest_path;

/// Most bytes of one answer.
const MAX_READ: usize = 256 << 10;
/// Largest file that can be written.
const MAX_FILE_SIZE: u64 = 1 << 30;
/// Longest path, in bytes.
const MAX_PATH: usize = 4096;
/// Longest name of an upload, a transfer or a watch.
const MAX_UPLOAD_NAME: usize = 64;
/// What the name of an unfinished upload begins with.
pub(super) const UPLOAD_PREFIX: &str = ".thaw-";

/// Reads a part of a file.
pub fn read(root: impl AsFd, r: &ReadFileRequest) -> Result<ReadFileResponse> {
    let path = checked(&r.path)?;
    let found = resolve(root.as_fd(), path, OFlags::empty())?;
    let stat = rustix::fs::fstat(&found).with_context(|| format!("stat {}", r.path))?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(Error::Invalid(format!("{} is not a regular file", r.path)));
    }
    if r.identity != 0 && r.identity != identity(&stat) {
        return Err(Error::State(format!("{} was replaced while it was read", r.path)));
    }
    // Opens the same file that was checked.
    let file =
        File::open(format!("/proc/self/fd/{}", found.as_raw_fd())).map_err(|e| refused("open", path, e))?;
    let mut data = vec![0; MAX_READ.min(r.length as usize)];
    let mut length = 0;
    while length < data.len() {
        let at = r.offset.checked_add(length as u64);
        let at = at
            .filter(|at| i64::try_from(*at).is_ok())
            .ok_or_else(|| Error::Invalid(format!("no file has bytes at {}", r.offset)))?;
        match file.read_at(&mut data[length..], at) {
            Ok(0) => break,
            Ok(n) => length += n,
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(e) => return Err(refused("read", path, e)),
        }
    }
    data.truncate(length);
    Ok(ReadFileResponse {
        data,
        size: stat.st_size.max(0) as u64,
        mode: stat.st_mode & 0o7777,
        identity: identity(&stat),
        ..Default::default()
    })
}

/// Appends a part to an upload. The last part makes the upload replace the file.
pub fn write(root: impl AsFd, r: &WriteFileRequest) -> Result<()> {
    let path = checked(&r.path)?;
    check_name(&r.upload)?;
    if r.offset
        .checked_add(r.data.len() as u64)
        .is_none_or(|end| end > MAX_FILE_SIZE)
    {
        return Err(Error::Invalid(format!(
            "a file has at most {MAX_FILE_SIZE} bytes"
        )));
    }
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(Error::Invalid(format!("{} is not the path of a file", r.path)));
    };
    let directory = resolve(root.as_fd(), parent, OFlags::DIRECTORY)?;
    let upload = format!("{UPLOAD_PREFIX}{}", r.upload);
    let forget = || rustix::fs::unlinkat(&directory, &upload, AtFlags::empty());
    if r.abandon {
        return match forget() {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(e) => Err(refused("discard an upload to", path, e.into())),
        };
    }
    let before = rustix::fs::statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW).ok();
    if before.is_some_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Directory) {
        return Err(Error::Invalid(format!("{} is a directory", r.path)));
    }
    let written = add(&directory, &upload, r).and_then(|file| match r.last {
        true => {
            own(&file, before, r.mode)?;
            rustix::fs::renameat(&directory, &upload, &directory, name)?;
            Ok(())
        }
        false => Ok(()),
    });
    written.map_err(|e| {
        // A part out of order is another caller's mistake, and does not end this upload.
        if e.raw_os_error() != Some(libc::ESTALE) {
            let _ = forget();
        }
        refused("write", path, e)
    })
}

/// Checks the name of an upload, a transfer or a watch.
pub(super) fn check_name(name: &str) -> Result<()> {
    let plain = name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
    match plain && (1..=MAX_UPLOAD_NAME).contains(&name.len()) {
        true => Ok(()),
        false => Err(Error::Invalid(format!(
            "{name:?} is not 1 to {MAX_UPLOAD_NAME} of a-z and 0-9"
        ))),
    }
}

/// Appends a part to the upload's file.
fn add(directory: &OwnedFd, upload: &str, r: &WriteFileRequest) -> std::io::Result<File> {
    let begin = match r.offset {
        0 => OFlags::CREATE | OFlags::EXCL,
        _ => OFlags::empty(),
    };
    let flags = OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC | begin;
    let file = File::from(rustix::fs::openat(
        directory,
        upload,
        flags,
        Mode::RUSR | Mode::WUSR,
    )?);
    let metadata = file.metadata()?;
    if !metadata.is_file() || metadata.len() != r.offset {
        return Err(std::io::Error::from_raw_os_error(libc::ESTALE));
    }
    file.write_all_at(&r.data, r.offset)?;
    Ok(file)
}

/// Gives the new file the owner and permissions of the file it replaces.
fn own(file: &File, before: Option<Stat>, mode: u32) -> std::io::Result<()> {
    let mode = match before {
        Some(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile => {
            std::os::unix::fs::fchown(file, Some(stat.st_uid), Some(stat.st_gid))?;
            stat.st_mode
        }
        _ => mode,
    };
    rustix::fs::fchmod(file, Mode::from_raw_mode(mode & 0o7777))?;
    Ok(())
}

/// Finds a path within a root, and follows links there. Opens nothing.
pub(super) fn resolve(root: BorrowedFd<'_>, path: &Path, flags: OFlags) -> Result<OwnedFd> {
    let opened = Root::new(root, Links::WithinRoot).open(path, OFlags::PATH | flags);
    opened.map_err(|e| refused("find", path, e.into()))
}

fn checked(path: &str) -> Result<&Path> {
    if path.len() > MAX_PATH || path.contains('\0') || path.ends_with('/') {
        let what =
            format!("a file's path has at most {MAX_PATH} bytes, none of them 0, and no '/' at its end");
        return Err(Error::Invalid(what));
    }
    check_guest_path(Path::new(path))?;
    Ok(Path::new(path))
}

/// A path of a file or a directory, `/` too, which need not be UTF-8.
pub(super) fn checked_bytes(path: &[u8]) -> Result<&Path> {
    let text = Path::new(OsStr::from_bytes(path));
    let mut parts = text.components();
    let is_absolute = parts.next() == Some(Component::RootDir);
    if path.len() > MAX_PATH || path.contains(&0) || !is_absolute || parts.any(|p| p == Component::ParentDir)
    {
        return Err(Error::Invalid(format!(
            "{:?} is not an absolute path of at most {MAX_PATH} bytes without '..'",
            text.display().to_string()
        )));
    }
    Ok(text)
}

/// A number that differs between two files that exist at the same time. Never 0.
fn identity(stat: &Stat) -> u64 {
    (stat.st_dev.rotate_left(32) ^ stat.st_ino) | 1 << 63
}

/// An error from the container's file system is not a failure of the agent.
pub(super) fn refused(doing: &str, path: &Path, error: std::io::Error) -> Error {
    let what = format!("cannot {doing} {}: {error}", path.display());
    match error.raw_os_error() {
        Some(libc::ENOENT | libc::ENOTDIR) => Error::NoFile(what),
        Some(libc::ELOOP | libc::ENAMETOOLONG | libc::EISDIR) => Error::Invalid(what),
        Some(libc::ENOSPC) | None => Error::System { what, source: error },
        Some(_) => Error::State(what),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    /// A root with a secret beside it.
    fn root() -> (tempfile::TempDir, OwnedFd) {
        let outer = tempfile::tempdir().unwrap();
        fs::write(outer.path().join("secret"), "secret").unwrap();
        let inner = outer.path().join("root");
        fs::create_dir_all(inner.join("etc")).unwrap();
        fs::write(inner.join("etc/file"), "0123456789").unwrap();
        fs::set_permissions(inner.join("etc/file"), fs::Permissions::from_mode(0o750)).unwrap();
        let root = OwnedFd::from(File::open(&inner).unwrap());
        (outer, root)
    }

    fn get(root: &OwnedFd, path: &str) -> Result<ReadFileResponse> {
        let request = ReadFileRequest {
            path: path.into(),
            length: 100,
            ..Default::default()
        };
        read(root, &request)
    }

    fn put(path: &str, offset: u64, data: &str, last: bool) -> WriteFileRequest {
        WriteFileRequest {
            path: path.into(),
            upload: "u1".into(),
            offset,
            data: data.into(),
            last,
            mode: 0o640,
            ..Default::default()
        }
    }

    #[test]
    fn file_is_read_in_parts_until_it_is_replaced() {
        let (outer, root) = root();
        let mut request = ReadFileRequest {
            path: "/etc/file".into(),
            length: 4,
            ..Default::default()
        };
        let first = read(&root, &request).unwrap();
        assert_eq!(
            (first.data.as_slice(), first.size, first.mode),
            (&b"0123"[..], 10, 0o750)
        );
        (request.offset, request.identity) = (8, first.identity);
        assert_eq!(read(&root, &request).unwrap().data, b"89");
        request.offset = 10;
        assert_eq!(read(&root, &request).unwrap().data, b"");
        for far in [i64::MAX as u64, i64::MAX as u64 + 1, u64::MAX] {
            request.offset = far;
            if let Ok(answer) = read(&root, &request) {
                assert!(answer.data.is_empty());
            }
        }
        let other = outer.path().join("root/other");
        fs::write(&other, "x").unwrap();
        fs::rename(&other, outer.path().join("root/etc/file")).unwrap();
        request.offset = 0;
        assert!(matches!(read(&root, &request), Err(Error::State(_))));
    }

    #[test]
    fn links_do_not_lead_out_and_only_files_are_opened() {
        let (outer, root) = root();
        let inner = outer.path().join("root");
        symlink("../../secret", inner.join("up")).unwrap();
        symlink(outer.path().join("secret"), inner.join("absolute")).unwrap();
        symlink("/etc", inner.join("link")).unwrap();
        symlink("loop", inner.join("loop")).unwrap();
        symlink("/proc/self/root/etc", inner.join("magic")).unwrap();
        rustix::fs::mkfifoat(rustix::fs::CWD, inner.join("fifo"), Mode::RUSR).unwrap();
        assert_eq!(get(&root, "/link/file").unwrap().data, b"0123456789");
        for path in ["/up", "/absolute", "/magic/passwd", "/nothing", "/etc/file/x"] {
            assert!(matches!(get(&root, path), Err(Error::NoFile(_))), "{path}");
            let refused = write(&root, &put(&format!("{path}/x"), 0, "x", true));
            assert!(matches!(refused, Err(Error::NoFile(_))), "{path}: {refused:?}");
        }
        for path in [
            "/loop",
            "/etc",
            "/fifo",
            "etc/file",
            "/../secret",
            "/etc/../etc/file",
            "/",
            "",
            "/etc/file/",
            "/a\0b",
        ] {
            assert!(matches!(get(&root, path), Err(Error::Invalid(_))), "{path}");
        }
        // A link that is written is replaced, not followed.
        write(&root, &put("/absolute", 0, "new", true)).unwrap();
        assert_eq!(fs::read(inner.join("absolute")).unwrap(), b"new");
        assert_eq!(fs::read(outer.path().join("secret")).unwrap(), b"secret");
    }

    #[test]
    fn file_appears_whole_and_replaces_no_open_one() {
        let (outer, root) = root();
        let inner = outer.path().join("root");
        write(&root, &put("/etc/new", 0, "hello ", false)).unwrap();
        assert!(!inner.join("etc/new").exists());
        assert!(matches!(
            write(&root, &put("/etc/new", 3, "x", true)),
            Err(Error::State(_))
        ));
        write(&root, &put("/etc/new", 6, "world", true)).unwrap();
        assert_eq!(fs::read(inner.join("etc/new")).unwrap(), b"hello world");
        let mode = |name: &str| fs::metadata(inner.join(name)).unwrap().permissions().mode() & 0o7777;
        assert_eq!(mode("etc/new"), 0o640);
        write(&root, &put("/etc/file", 0, "", true)).unwrap();
        assert_eq!(
            (fs::read(inner.join("etc/file")).unwrap(), mode("etc/file")),
            (vec![], 0o750)
        );
        assert!(matches!(
            write(&root, &put("/etc", 0, "x", true)),
            Err(Error::Invalid(_))
        ));
        write(&root, &put("/etc/gone", 0, "x", false)).unwrap();
        let abandon = WriteFileRequest {
            abandon: true,
            ..put("/etc/gone", 0, "", false)
        };
        write(&root, &abandon).unwrap();
        write(&root, &abandon).unwrap();
        for bad in ["", "A", "../x", "a/b", &"x".repeat(65)] {
            let request = WriteFileRequest {
                upload: bad.into(),
                ..put("/etc/x", 0, "x", true)
            };
            assert!(matches!(write(&root, &request), Err(Error::Invalid(_))), "{bad}");
        }
        let far = put("/etc/x", u64::MAX, "x", true);
        assert!(matches!(write(&root, &far), Err(Error::Invalid(_))));
        let mut left: Vec<_> = fs::read_dir(inner.join("etc"))
            .unwrap()
            .map(|e| e.unwrap().file_name())
            .collect();
        left.sort();
        assert_eq!(left, ["file", "new"]);
    }

    proptest! {
        #[test]
        fn no_request_reads_a_file_outside_the_root(path in "[/.a-z\\PC]{0,40}", upload in "\\PC{0,8}", offset: u64) {
            let (outer, root) = root();
            symlink("../..", outer.path().join("root/a")).unwrap();
            for path in [path.clone(), format!("/a/{path}"), format!("/a/../{path}secret")] {
                if let Ok(answer) = get(&root, &path) {
                    prop_assert!(answer.data != b"secret");
                }
                let request = WriteFileRequest { upload: upload.clone(), ..put(&path, offset % 2, "x", true) };
                let _ = write(&root, &request);
            }
            prop_assert_eq!(fs::read(outer.path().join("secret")).unwrap(), b"secret");
            prop_assert_eq!(fs::read_dir(outer.path()).unwrap().count(), 2);
        }
    }
}
