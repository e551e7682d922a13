use std::fs;
use std::os::fd::AsRawFd;
use std::path::PathBuf;

use rustix::thread::UnshareFlags;

use super::*;

/// The namespaces of the calling thread, as `/proc` names them.
fn own() -> Vec<PathBuf> {
    KINDS
        .iter()
        .map(|(name, _)| fs::read_link(format!("/proc/thread-self/ns/{name}")).unwrap())
        .collect()
}

/// The namespaces of a set, likewise.
fn names(set: &Namespaces) -> Vec<PathBuf> {
    let of = |fd: BorrowedFd<'_>| fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).unwrap();
    set.descriptors().map(of).collect()
}

#[test]
fn set_has_no_file_and_its_maker_stays_outside() {
    if !rustix::process::geteuid().is_root() {
        return thaw_test_skip::skip("without root this host grants no namespaces");
    }
    let before = own();
    let set = Namespaces::make().unwrap();
    assert_eq!(own(), before);
    let made = names(&set);
    assert!(
        made.iter().zip(&before).all(|(made, own)| made != own),
        "{made:?}"
    );
    let inside = move || {
        // A thread may enter mounts once it shares its root with no other.
        jail::unshare(UnshareFlags::FS).unwrap();
        set.enter().unwrap();
        let entries = ["/", "/..", "."].map(|path| fs::read_dir(path).unwrap().count());
        (entries, fs::File::create("/x").unwrap_err().raw_os_error())
    };
    let seen = std::thread::spawn(inside).join().unwrap();
    assert_eq!(seen, ([0; 3], Some(libc::EROFS)));
}

#[test]
fn inherited_set_is_the_one_that_was_made() {
    if !rustix::process::geteuid().is_root() {
        return thaw_test_skip::skip("without root this host grants no namespaces");
    }
    let set = Namespaces::make().unwrap();
    let copies: Vec<OwnedFd> = set
        .descriptors()
        .map(|fd| rustix::io::fcntl_dupfd_cloexec(fd, 500).unwrap())
        .collect();
    let first = copies[0].as_raw_fd();
    let consecutive = (first..)
        .zip(&copies)
        .all(|(number, fd)| fd.as_raw_fd() == number);
    assert!(consecutive, "{copies:?}");
    assert_eq!(names(&Namespaces::inherited(first).unwrap()), names(&set));
    drop(copies);
    assert!(Namespaces::inherited(first).is_err(), "they are closed");
}

#[test]
fn descriptor_that_is_no_namespace_is_not_entered() {
    let none = rustix::fs::memfd_create("none", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    assert!(Namespaces(vec![none]).enter().is_err());
}
