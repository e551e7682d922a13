//! Attaches shares to a running thaw-share and detaches them.
//!
//! A mount is made in the mount namespace of the caller, whose paths the source names, and is then moved onto a new entry of the root of
//! thaw-share's namespace. A thread enters both namespaces and then ends, so this process's own namespace never has the mount. When
//! thaw-share ends, all its mounts end with it.

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

/// Mounts `source`, as the process `whose` sees it, as the entry `name` of a running thaw-share. `share` and `whose` are pidfds. Blocks
/// for as long as the file systems take.
///
/// # Errors
/// Why it cannot be shared. An error changes nothing.
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

/// Removes the entry `name`. Files that the guest has open stay usable until it closes them. A missing entry is no error.
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
            // Nothing is mounted there, or the path does not exist.
            Ok(()) | Err(Errno::INVAL | Errno::NOENT) => {}
            Err(e) => return step("unmounting it", Err(e)),
        }
        remove_entry(&writable_root()?, name)
    })
}

/// Runs `work` on a thread with a working directory and root of its own. The thread ends because it cannot leave a namespace that it
/// has entered.
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

/// A detached, writable copy of the namespace's root mount, which is itself read-only.
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

/// Moves the mount onto a new entry. Must run in thaw-share's namespace.
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
        // The first error is the one to report.
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
