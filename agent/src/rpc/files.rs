//! `CopyFile`: copies small files of the host (configuration, secrets) into the guest, only below `/run`. A
//! file is sent in parts and renamed to its name when it is complete.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::{FileExt, PermissionsExt, lchown, symlink};
use std::path::{Path, PathBuf};

use thaw_protocol::agent::agent::CopyFileRequest;

use crate::error::{Error, Result, WithContext};
use crate::storage::check_guest_path;

/// The directory below which files can be copied.
const ROOT: &str = "/run/";
/// Largest file, in bytes.
const MAX_SIZE: i64 = 1 << 30;

pub fn copy(r: &CopyFileRequest) -> Result<()> {
    let path = Path::new(&r.path);
    check_guest_path(path)?;
    if !r.path.starts_with(ROOT) {
        return Err(Error::Invalid(format!(
            "{}: files can be copied below {ROOT} only",
            r.path
        )));
    }
    let parent = path.parent().unwrap_or(Path::new(ROOT));
    make_parents(parent, r.dir_mode)?;
    match r.file_mode & libc::S_IFMT {
        libc::S_IFDIR => copy_directory(path, r),
        libc::S_IFLNK => copy_link(path, r),
        _ => copy_piece(path, r),
    }
}

fn make_parents(dir: &Path, mode: u32) -> Result<()> {
    let missing: Vec<PathBuf> = dir
        .ancestors()
        .take_while(|d| !d.exists())
        .map(Path::to_owned)
        .collect();
    for d in missing.iter().rev() {
        fs::create_dir(d).with_context(|| format!("create {}", d.display()))?;
        if mode != 0 {
            fs::set_permissions(d, Permissions::from_mode(mode & 0o7777))
                .with_context(|| format!("chmod {}", d.display()))?;
        }
    }
    Ok(())
}

fn own(path: &Path, r: &CopyFileRequest) -> Result<()> {
    lchown(path, Some(r.uid as u32), Some(r.gid as u32)).with_context(|| format!("chown {}", path.display()))
}

fn copy_directory(path: &Path, r: &CopyFileRequest) -> Result<()> {
    fs::create_dir_all(path).with_context(|| format!("create {}", path.display()))?;
    fs::set_permissions(path, Permissions::from_mode(r.file_mode & 0o7777))
        .with_context(|| format!("chmod {}", path.display()))?;
    own(path, r)
}

fn copy_link(path: &Path, r: &CopyFileRequest) -> Result<()> {
    let target = std::str::from_utf8(&r.data)
        .map_err(|_| Error::Invalid(format!("{}: the link's target is not UTF-8", r.path)))?;
    let new = beside(path);
    let _ = fs::remove_file(&new);
    symlink(target, &new).with_context(|| format!("link {}", new.display()))?;
    own(&new, r)?;
    fs::rename(&new, path).with_context(|| format!("rename to {}", path.display()))
}

fn copy_piece(path: &Path, r: &CopyFileRequest) -> Result<()> {
    let end = r.offset.checked_add(r.data.len() as i64);
    let fits =
        r.offset >= 0 && (0..=MAX_SIZE).contains(&r.file_size) && end.is_some_and(|end| end <= r.file_size);
    if !fits {
        return Err(Error::Invalid(format!(
            "{}: {} bytes at {} do not fit in a file of {} bytes (limit {MAX_SIZE})",
            r.path,
            r.data.len(),
            r.offset,
            r.file_size
        )));
    }
    let new = beside(path);
    let what = || format!("write {}", new.display());
    let file = File::options()
        .write(true)
        .create(true)
        .truncate(r.offset == 0)
        .open(&new)
        .with_context(what)?;
    file.write_all_at(&r.data, r.offset as u64).with_context(what)?;
    if file.metadata().with_context(what)?.len() < r.file_size as u64 {
        return Ok(());
    }
    own(&new, r)?;
    fs::set_permissions(&new, Permissions::from_mode(r.file_mode & 0o7777)).with_context(what)?;
    fs::rename(&new, path).with_context(|| format!("rename to {}", path.display()))
}

/// The hidden file that grows in the same directory.
fn beside(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.copying"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    fn request(path: String, size: i64, offset: i64, data: &[u8]) -> CopyFileRequest {
        CopyFileRequest {
            path,
            file_size: size,
            file_mode: 0o640,
            dir_mode: 0o750,
            uid: -1,
            gid: -1,
            offset,
            data: data.to_vec(),
            ..Default::default()
        }
    }

    #[test]
    fn copied_file_appears_complete_and_only_below_run() {
        let Ok(dir) = tempfile::tempdir_in("/run") else {
            thaw_test_skip::skip("/run is not writable here");
            return;
        };
        let path = dir.path().join("a/b/file");
        let name = path.to_str().unwrap().to_owned();
        copy(&request(name.clone(), 10, 0, b"hello")).unwrap();
        assert!(!path.exists());
        copy(&request(name.clone(), 10, 5, b"world")).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"helloworld");
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o640);
        assert_eq!(
            fs::metadata(path.parent().unwrap()).unwrap().mode() & 0o777,
            0o750
        );
        // A shorter file must not keep the tail of the old one.
        copy(&request(name.clone(), 2, 0, b"hi")).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"hi");
        for bad in [
            request("/etc/passwd".into(), 1, 0, b"x"),
            request("/run/../etc/x".into(), 1, 0, b"x"),
            request(name.clone(), 1, 0, b"xx"),
            request(name.clone(), 9, -1, b"x"),
            request(name, i64::MAX, i64::MAX, b"x"),
        ] {
            assert!(matches!(copy(&bad), Err(Error::Invalid(_))), "{bad:?}");
        }
    }
}
