//! Mounts that a container gets while it runs: paths of the guest, bound at paths of the container.
//!
//! Each source is copied as a detached mount in the guest's namespace. A thread then enters the container's mount namespace, moves the copies to
//! their places and ends, because it cannot leave a namespace that it has entered. Places resolve within the container's root.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{CWD, FileType, fstat};
use rustix::mount::{
    MountAttrFlags, MountFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags, move_mount, open_tree, unmount,
};
use rustix::thread::{ThreadNameSpaceType, UnshareFlags, move_into_thread_name_spaces};
use thaw_protocol::agent::oci;
use thaw_sys::jail::unshare;
use thaw_sys::lock::Lock;
use thaw_sys::mount::{Attributes, set_attributes};

use super::Container;
use super::rootfs::Root;
use super::spec::Mount;
use crate::error::{Error, Result, WithContext};
use crate::storage::{Storage, Storages, check_guest_path};

/// The options that such a mount can have, and what they are of a detached mount.
const ATTRIBUTES: [(MountFlags, MountAttrFlags); 4] = [
    (MountFlags::RDONLY, MountAttrFlags::MOUNT_ATTR_RDONLY),
    (MountFlags::NOSUID, MountAttrFlags::MOUNT_ATTR_NOSUID),
    (MountFlags::NODEV, MountAttrFlags::MOUNT_ATTR_NODEV),
    (MountFlags::NOEXEC, MountAttrFlags::MOUNT_ATTR_NOEXEC),
];

/// A detached mount.
struct Tree {
    mount: OwnedFd,
    is_directory: bool,
}

impl Container {
    /// Mounts `storages`, which are released with the container, and then `mounts` in it. Blocks. A failure leaves nothing mounted.
    ///
    /// # Errors
    /// It does not run, a mount is no bind mount or has other options, or mounting failed.
    pub fn add_mounts(&self, storages: &[Storage], mounts: &[oci::Mount], all: &Storages) -> Result<()> {
        let mounts = mounts.iter().map(Mount::new).collect::<Result<Vec<_>>>()?;
        // Locked so that it is not removed meanwhile, which releases its storages.
        let mut kept = self.mounts.locked();
        self.check_runs()?;
        let mounted = all.acquire_all(storages)?;
        let added = self.init.pidfd().and_then(|process| add(&process, &mounts));
        match added {
            Ok(()) => kept.extend(mounted),
            Err(_) => all.release_all(&mounted),
        }
        added
    }
}

/// Mounts in the namespace of a process.
fn add(process: &OwnedFd, mounts: &[Mount]) -> Result<()> {
    let trees = mounts.iter().map(copy).collect::<Result<Vec<_>>>()?;
    let enter_and_place = || {
        unshare(UnshareFlags::FS).with_context(|| "leave the other threads' root".into())?;
        move_into_thread_name_spaces(process.as_fd(), ThreadNameSpaceType::MOUNT)
            .with_context(|| "enter the container's mount namespace".into())?;
        place_all(mounts, &trees)
    };
    let placed = std::thread::scope(|scope| scope.spawn(enter_and_place).join());
    placed.map_err(|_| Error::State("the container got no mounts: the agent's thread failed".into()))?
}

fn copy(m: &Mount) -> Result<Tree> {
    let at = m.destination.display();
    check_guest_path(&m.destination)?;
    check_guest_path(Path::new(&m.source))?;
    let Some(is_recursive) = m.options.bind.filter(|_| m.options.data.is_empty()) else {
        return Err(Error::Unsupported(format!(
            "mount at {at}: a container that runs gets bind mounts only, without options of a file system"
        )));
    };
    let (mut rest, mut set) = (m.options.flags, MountAttrFlags::empty());
    for (flag, attribute) in ATTRIBUTES {
        if rest.contains(flag) {
            rest.remove(flag);
            set |= attribute;
        }
    }
    if !rest.is_empty() {
        return Err(Error::Unsupported(format!(
            "mount at {at}: {rest:?} of a mount in a container that runs"
        )));
    }
    let what = || format!("mount at {at} of the container: {}", m.source);
    let mut flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    flags.set(OpenTreeFlags::AT_RECURSIVE, is_recursive);
    let mount = open_tree(CWD, &m.source, flags).with_context(what)?;
    let attributes = Attributes {
        set,
        clear: MountAttrFlags::empty(),
        // As for all mounts of a container: what it mounts there stays its own.
        propagation: libc::MS_SLAVE,
    };
    set_attributes(&mount, attributes, is_recursive).with_context(what)?;
    let mode = fstat(&mount).with_context(what)?.st_mode;
    Ok(Tree {
        is_directory: FileType::from_raw_mode(mode).is_dir(),
        mount,
    })
}

/// Must run in the container's mount namespace.
fn place_all(mounts: &[Mount], trees: &[Tree]) -> Result<()> {
    let root = Root::open(Path::new("/"))?;
    for (done, (m, tree)) in mounts.iter().zip(trees).enumerate() {
        if let Err(e) = place(&root, m, tree) {
            for m in mounts[..done].iter().rev() {
                // The first error is the one to report.
                let _ = unmount(
                    m.destination.as_path(),
                    UnmountFlags::DETACH | UnmountFlags::NOFOLLOW,
                );
            }
            return Err(e);
        }
    }
    Ok(())
}

fn place(root: &Root, m: &Mount, tree: &Tree) -> Result<()> {
    let target = match tree.is_directory {
        true => root.make_dir(&m.destination)?,
        false => root.make_file(&m.destination)?,
    };
    let both = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    move_mount(&tree.mount, "", &target, "", both)
        .with_context(|| format!("mount at {} of the container", m.destination.display()))
}
