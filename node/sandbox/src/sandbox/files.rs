//! The files and devices a machine is made from. They are opened first, so that a missing one is reported before any work.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use crate::error::{Error, ErrorKind};
use crate::paths::Paths;

/// The files and devices, open and ready to be passed on.
#[derive(Debug)]
pub(super) struct MachineFiles {
    pub kvm: OwnedFd,
    pub kernel: OwnedFd,
    pub guest_image: OwnedFd,
}

impl MachineFiles {
    pub(super) fn open(paths: &Paths) -> Result<MachineFiles, Error> {
        let kvm = open_kvm(Path::new("/dev/kvm"))?;
        let kernel = open(&paths.kernel, ErrorKind::KernelMissing, "guest kernel")?;
        let guest_image = open_guest_image(paths)?;
        Ok(MachineFiles {
            kvm,
            kernel,
            guest_image,
        })
    }
}

pub(super) fn open_guest_image(paths: &Paths) -> Result<OwnedFd, Error> {
    open(&paths.guest_image, ErrorKind::GuestImageMissing, "guest image")
}

fn open(path: &Path, kind: ErrorKind, what: &str) -> Result<OwnedFd, Error> {
    let missing = |e: io::Error| Error::new(kind, format!("cannot open the {what}: {}: {e}", path.display()));
    let file = File::open(path).map_err(missing)?;
    if !file.metadata().map_err(missing)?.is_file() {
        return Err(Error::new(
            kind,
            format!("the {what} is not a file: {}", path.display()),
        ));
    }
    Ok(file.into())
}

pub(super) fn open_kvm(path: &Path) -> Result<OwnedFd, Error> {
    match OpenOptions::new().read(true).write(true).open(path) {
        Ok(kvm) => Ok(kvm.into()),
        Err(e) => {
            let kind = match e.kind() {
                io::ErrorKind::NotFound => ErrorKind::KvmMissing,
                io::ErrorKind::PermissionDenied => ErrorKind::KvmDenied,
                _ if e.raw_os_error() == Some(libc::ENODEV) || e.raw_os_error() == Some(libc::ENXIO) => {
                    ErrorKind::KvmMissing
                }
                _ => ErrorKind::KvmInadequate,
            };
            Err(Error::new(
                kind,
                format!("cannot open KVM: {}: {e}", path.display()),
            ))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_told_by_its_code() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(
            open_kvm(&directory.path().join("kvm")).unwrap_err().kind,
            ErrorKind::KvmMissing
        );
        if !Path::new("/dev/kvm").exists() {
            return thaw_test_skip::skip("the rest: no /dev/kvm");
        }
        let file = directory.path().join("k");
        std::fs::write(&file, b"x").unwrap();
        let paths = |kernel: &Path, guest: &Path| Paths {
            data: directory.path().into(),
            run: directory.path().into(),
            kernel: kernel.into(),
            guest_image: guest.into(),
        };
        let none = directory.path().join("none");
        let kind = |paths: Paths| MachineFiles::open(&paths).unwrap_err().kind;
        assert_eq!(kind(paths(&none, &file)), ErrorKind::KernelMissing);
        assert_eq!(kind(paths(directory.path(), &file)), ErrorKind::KernelMissing);
        assert_eq!(kind(paths(&file, &none)), ErrorKind::GuestImageMissing);
    }
}
