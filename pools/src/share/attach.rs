//! Shares that come and go while their guest runs.
//!
//! A mount is made in the namespace of who asks for it, whose paths those are, and moved into that of thaw-share, onto an entry
//! of its root. Both are entered by a thread that ends with that; this process's own namespace has none of it at any time.
//! What ends thaw-share takes all of its namespace along.

use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{
    MountAttrFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags, move_mount, open_tree, unmount,
};
use rustix::thread::{ThreadNameSpaceType, UnshareFlags, move_into_thread_name_spaces};
use thaw_protocol::share::is_good_name;
use thaw_sys::jail::unshare;
use thaw_sys::mount::{Attributes, set_attributes};

use super::error::AttachError;
use super::mount::{Detached, detached};
use super::source::Source;

fn step<T>(step: &'static str, result: Result<T, Errno>) -> Result<T, AttachError> {
    result.map_err(|e| AttachError::Step {
        step,
        source: e.into(),
    })
}

/// Makes `source` of what the process of `whose` sees, and shows it as the entry `name`. Both are pidfds; `share` is thaw-share's.
/// Blocks for as long as the file systems take.
///
/// # Errors
/// What of the source cannot be; otherwise all is as it was.
pub fn attach(
    share: BorrowedFd<'_>,
    whose: BorrowedFd<'_>,
    name: &str,
    source: &Source,
) -> Result<(), AttachError> {
    if !is_good_name(name) {
        return Err(AttachError::Name(name.into()));
    }
    on_a_thread(|| {
        enter(whose, "entering the caller's mount namespace")?;
        let made = detached(source)?;
        enter_share(share)?;
        mount_entry(name, &made)
    })
}

/// Takes the entry `name` away. What the guest has open of it stays for as long as it has; an entry that is not there is gone.
///
/// # Errors
/// [`AttachError::Step`].
pub fn detach(share: BorrowedFd<'_>, name: &str) -> Result<(), AttachError> {
    if !is_good_name(name) {
        return Err(AttachError::Name(name.into()));
    }
    on_a_thread(|| {
        match enter_share(share) {
            Err(AttachError::Ended) => return Ok(()),
            entered => entered?,
        }
        let at = format!("/{name}");
        match unmount(&at, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
            // Nothing is mounted, or nothing is there.
            Ok(()) | Err(Errno::INVAL | Errno::NOENT) => {}
            Err(e) => return step("unmounting it", Err(e)),
        }
        remove_entry(&writable_root()?, name)
    })
}

/// A thread of its own, with a working directory and root of its own, which ends: a namespace that was entered is not left.
fn on_a_thread<T: Send>(work: impl FnOnce() -> Result<T, AttachError> + Send) -> Result<T, AttachError> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("share".into());
        let started = thread.spawn_scoped(scope, || {
            step("leaving the others' working directory", unshare(UnshareFlags::FS))?;
            work()
        });
        let thread = started.map_err(|source| AttachError::Step {
            step: "starting a thread",
            source,
        })?;
        thread
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

fn enter(process: BorrowedFd<'_>, what: &'static str) -> Result<(), AttachError> {
    step(
        what,
        move_into_thread_name_spaces(process, ThreadNameSpaceType::MOUNT),
    )
}

fn enter_share(share: BorrowedFd<'_>) -> Result<(), AttachError> {
    match enter(share, "entering thaw-share's mount namespace") {
        Err(AttachError::Step { source, .. }) if source.raw_os_error() == Some(libc::ESRCH) => {
            Err(AttachError::Ended)
        }
        entered => entered,
    }
}

/// The root of the namespace, as a mount that is nowhere and can be written: the one that is there cannot.
fn writable_root() -> Result<OwnedFd, AttachError> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let root = step("copying the root", open_tree(CWD, "/", flags))?;
    let writable = Attributes {
        set: MountAttrFlags::empty(),
        clear: MountAttrFlags::MOUNT_ATTR_RDONLY,
        propagation: 0,
    };
    step(
        "making a root that can be written",
        set_attributes(&root, writable, false),
    )?;
    Ok(root)
}

/// Mounts it on a new entry. In thaw-share's namespace.
fn mount_entry(name: &str, made: &Detached) -> Result<(), AttachError> {
    let root = writable_root()?;
    let entry = match made.is_directory {
        true => rustix::fs::mkdirat(&root, name, Mode::from_raw_mode(0o755)),
        false => rustix::fs::openat(
            &root,
            name,
            OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC,
            Mode::from_raw_mode(0o644),
        )
        .map(drop),
    };
    match entry {
        Ok(()) => {}
        Err(Errno::EXIST) => return Err(AttachError::Name(name.into())),
        Err(Errno::NOSPC) => return Err(AttachError::Full),
        Err(e) => return step("making its entry", Err(e)),
    }
    let at = format!("/{name}");
    let moved = move_mount(&made.mount, "", CWD, at, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH);
    if moved.is_err() {
        // The first error says more.
        let _ = remove_entry(&root, name);
    }
    step("moving its mount", moved)
}

fn remove_entry(root: &OwnedFd, name: &str) -> Result<(), AttachError> {
    let removed = match rustix::fs::unlinkat(root, name, AtFlags::REMOVEDIR) {
        Err(Errno::NOTDIR) => rustix::fs::unlinkat(root, name, AtFlags::empty()),
        other => other,
    };
    match removed {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(e) => step("removing its entry", Err(e)),
    }
}
