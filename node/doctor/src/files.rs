//! Checks of Thaw's own files: binaries, guest kernel, guest image, image store.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use thaw_sandbox::paths::Paths;

use super::Check;

pub(super) fn checks(paths: &Paths) -> Vec<Check> {
    vec![
        vmm(),
        share(),
        kernel(&paths.kernel),
        guest_image(&paths.guest_image),
        mkfs(),
        store(&paths.data),
    ]
}

fn vmm() -> Check {
    const NAME: &str = "thaw-vmm";
    match thaw_pools::vmm::find() {
        Ok(path) => Check::ok(NAME, path.display().to_string()),
        Err(e) => Check::missing(
            NAME,
            e.to_string(),
            "no sandbox can run",
            "put thaw-vmm beside thaw, or name it in THAW_VMM",
        ),
    }
    .essential()
}

fn share() -> Check {
    const NAME: &str = "thaw-share";
    match thaw_pools::share::find() {
        Ok(path) => Check::ok(NAME, path.display().to_string()),
        Err(e) => Check::missing(
            NAME,
            e.to_string(),
            "no sandbox can have volumes",
            "put thaw-share beside thaw, or name it in THAW_SHARE",
        ),
    }
}

fn kernel(path: &Path) -> Check {
    const NAME: &str = "guest kernel";
    let fix = "run guest-kernel-config/build, or name a vmlinux in THAW_KERNEL";
    let mut magic = [0u8; 4];
    match File::open(path).and_then(|mut f| f.read_exact(&mut magic)) {
        Ok(()) if magic == *b"\x7fELF" => Check::ok(NAME, path.display().to_string()),
        Ok(()) => Check::missing(
            NAME,
            format!("{} is not an ELF file", path.display()),
            "no sandbox can run",
            fix,
        ),
        Err(e) => Check::missing(
            NAME,
            format!("{}: {e}", path.display()),
            "no sandbox can run",
            fix,
        ),
    }
    .essential()
}

fn guest_image(path: &Path) -> Check {
    const NAME: &str = "guest image";
    match fs::metadata(path) {
        Ok(m) if m.is_file() && m.len() > 0 => {
            Check::ok(NAME, format!("{} ({} KiB)", path.display(), m.len() / 1024))
        }
        Ok(_) => Check::missing(
            NAME,
            format!("{} is empty", path.display()),
            "no sandbox can run",
            "make it again",
        ),
        Err(e) => Check::missing(
            NAME,
            format!("{}: {e}", path.display()),
            "no sandbox can run",
            "put guest.erofs beside thaw, or name it in THAW_GUEST_IMAGE",
        ),
    }
    .essential()
}

fn mkfs() -> Check {
    const NAME: &str = "mkfs.ext4";
    let places = [
        "/usr/sbin",
        "/sbin",
        "/usr/bin",
        "/bin",
        "/usr/local/sbin",
        "/usr/local/bin",
    ];
    match places
        .iter()
        .map(|p| Path::new(p).join(NAME))
        .find(|p| p.exists())
    {
        Some(path) => Check::ok(NAME, path.display().to_string()),
        None => Check::missing(
            NAME,
            "not installed",
            "no writable layer can be made",
            "apt-get install e2fsprogs",
        ),
    }
    .essential()
}

fn store(data: &Path) -> Check {
    const NAME: &str = "store";
    let place = nearest_existing(data);
    let Ok(mut from) = tempfile_in(&place) else {
        let fix = format!(
            "make {} writable for this user, or point THAW_DATA elsewhere",
            data.display()
        );
        return Check::missing(
            NAME,
            format!("{} is not writable", place.display()),
            "no image can be kept",
            fix,
        )
        .essential();
    };
    let free = rustix::fs::fstatvfs(&from)
        .map(|s| s.f_bavail.saturating_mul(s.f_frsize) >> 20)
        .unwrap_or(0);
    let found = format!("{}, {free} MiB free", data.display());
    if free < 512 {
        return Check::warn(
            NAME,
            found,
            "images may not fit",
            "free space, or point THAW_DATA elsewhere",
        );
    }
    let reflink = std::io::Write::write_all(&mut from, &[1u8; 4096])
        .and_then(|()| tempfile_in(&place))
        .is_ok_and(|to| rustix::fs::ioctl_ficlone(&to, &from).is_ok());
    if reflink {
        return Check::ok(NAME, format!("{found}, reflinks"));
    }
    Check::warn(
        NAME,
        format!("{found}, no reflinks"),
        "a freeze copies the data on a sandbox's disk, or what a thawed sandbox has written to it, while the sandbox is stopped",
        "put THAW_DATA on XFS or btrfs",
    )
}

/// A file without a name, so that a check leaves nothing.
fn tempfile_in(directory: &Path) -> std::io::Result<File> {
    use rustix::fs::{Mode, OFlags};
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    Ok(rustix::fs::open(directory, flags, Mode::RUSR | Mode::WUSR)?.into())
}

fn nearest_existing(path: &Path) -> PathBuf {
    path.ancestors()
        .find(|p| p.is_dir())
        .unwrap_or(Path::new("/"))
        .to_owned()
}

#[cfg(test)]
mod tests {
    use super::super::State;
    use super::*;

    #[test]
    fn a_kernel_must_be_an_elf_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("vmlinux");
        assert_eq!(kernel(&path).state, State::Missing);
        fs::write(&path, b"MZ bzImage").unwrap();
        assert!(kernel(&path).found.contains("not an ELF"));
        fs::write(&path, b"\x7fELF....").unwrap();
        assert_eq!(kernel(&path).state, State::Ok);
    }

    #[test]
    fn store_is_checked_where_it_would_be_and_not_created() {
        let directory = tempfile::tempdir().unwrap();
        let check = store(&directory.path().join("not/yet/there"));
        assert_ne!(check.state, State::Missing, "{check:?}");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    }
}
