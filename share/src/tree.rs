//! The directory that is served: an empty root that cannot be written, and in it each share as a mount.
//!
//! It is this process's whole file system: what is not shared has no name here, so neither a symbolic link, nor `..`, nor a bug leads to
//! it. That a share is read-only is the mount's property, not a check of ours. The alternative, one file system each behind
//! a multiplexer of node numbers, would have all the host's files within reach of it.
//!
//! What is shared later is mounted here by who has the rights to ([`thaw_protocol::share`]), past the root's being read-only: that is
//! the mount's, and a mount of the same file system that is not can be made by them and by nobody here.
//!
//! A mount is copied from the descriptor before this process leaves the namespace that is in. Where it may not (it has the
//! rights of its own user namespace only), it is found again, by the name the descriptor has, in the copy of the namespace, and must be the same file.

use std::ffi::CString;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::PathBuf;

use rustix::fs::{CWD, FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{
    MountAttrFlags, MountFlags, MoveMountFlags, OpenTreeFlags, mount_remount, move_mount, open_tree,
};
use thaw_protocol::share::{SHARES, SLOTS, Serve, Share};
use thaw_sys::jail::{self, StepError, step};
use thaw_sys::mount::{self, Attributes};

/// Why there is no tree.
#[derive(Debug, thiserror::Error)]
pub enum TreeError {
    #[error("{0}")]
    Refused(String),
    #[error("share {name}: {what}: {source}")]
    Share {
        name: String,
        what: &'static str,
        source: io::Error,
    },
    #[error(transparent)]
    Step(#[from] StepError),
}

/// Inodes the root's file system has beside those of shares.
const OWN_INODES: usize = 16;

/// What is to be shown, not yet where.
pub struct Shares {
    shares: Vec<(Share, Source)>,
    /// Inodes that is, with what comes later.
    inodes: usize,
}

struct Source {
    file: OwnedFd,
    is_directory: bool,
    /// A copy of its mount.
    tree: Option<OwnedFd>,
    /// Else, where it was.
    path: PathBuf,
}

impl Shares {
    /// Checks what was asked for, and copies what can be copied. In the namespace the files are of.
    pub fn take(serve: &Serve, files: Vec<OwnedFd>) -> Result<Shares, TreeError> {
        let refuse = |what: String| Err(TreeError::Refused(what));
        if serve.shares.len() != files.len() || files.len() > SHARES {
            return refuse(format!(
                "{} shares and {} files: one each, and at most {SHARES}",
                serve.shares.len(),
                files.len()
            ));
        }
        if serve.slots > SLOTS || (serve.slots == 0 && files.is_empty()) {
            return refuse(format!(
                "no share, and room for {}: there are to be 1 to {SLOTS}",
                serve.slots
            ));
        }
        let inodes = OWN_INODES + files.len() + serve.slots as usize;
        let mut shares: Vec<(Share, Source)> = Vec::with_capacity(files.len());
        for (share, file) in serve.shares.iter().zip(files) {
            if !share.has_good_name() || shares.iter().any(|(other, _)| other.name == share.name) {
                return refuse(format!(
                    "{:?} cannot be the name of a share, or is another's",
                    share.name
                ));
            }
            let source = Source::take(file).map_err(|(what, source)| TreeError::Share {
                name: share.name.clone(),
                what,
                source,
            })?;
            shares.push((share.clone(), source));
        }
        Ok(Shares { shares, inodes })
    }

    /// Makes the tree this process's root. In a mount namespace of its own, single-threaded.
    pub fn enter(self) -> Result<(), TreeError> {
        jail::make_mounts_private()?;
        let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
        // Found while the host's names are still there.
        let mut trees = Vec::with_capacity(self.shares.len());
        for (share, source) in self.shares {
            let is_directory = source.is_directory;
            let tree = source.tree(share.read_only);
            let tree = tree.map_err(|(what, source)| TreeError::Share {
                name: share.name.clone(),
                what,
                source,
            })?;
            trees.push((share.name, is_directory, tree));
        }
        // Its inodes are all that bounds what is mounted here later.
        let options = format!("size=64k,nr_inodes={},mode=755", self.inodes);
        let options = CString::new(options).map_err(|e| TreeError::Refused(e.to_string()))?;
        jail::mount_root(flags, &options)?;
        for (name, is_directory, tree) in trees {
            let placed = place(&name, is_directory, &tree);
            placed.map_err(|e| TreeError::Share {
                name,
                what: "attaching its mount",
                source: e.into(),
            })?;
        }
        jail::pivot_to_working_directory()?;
        let flags = flags | MountFlags::BIND | MountFlags::RDONLY;
        Ok(step("making the root read-only", mount_remount("/", flags, c""))?)
    }
}

fn place(name: &str, is_directory: bool, tree: &OwnedFd) -> Result<(), Errno> {
    match is_directory {
        true => rustix::fs::mkdir(name, Mode::from_raw_mode(0o755))?,
        false => drop(rustix::fs::open(
            name,
            OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC,
            Mode::from_raw_mode(0o644),
        )?),
    }
    move_mount(tree, "", CWD, name, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
}

/// This process's directory of descriptors, as a tree of its own: from which no `..` leads to the rest of /proc. Once there
/// is a mount namespace in which this process may copy mounts.
pub fn proc_self_fd() -> Result<File, TreeError> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    Ok(step("opening /proc/self/fd", open_tree(CWD, "/proc/self/fd", flags)).map(File::from)?)
}

type Failed = (&'static str, io::Error);

impl Source {
    fn take(file: OwnedFd) -> Result<Source, Failed> {
        let stat = rustix::fs::fstat(&file).map_err(|e| ("looking at it", e.into()))?;
        let kind = FileType::from_raw_mode(stat.st_mode);
        if !matches!(kind, FileType::Directory | FileType::RegularFile) {
            let what = io::Error::other("only directories and regular files can be shared");
            return Err(("looking at it", what));
        }
        let path = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))
            .map_err(|e| ("finding its name", e))?;
        let tree = match copy_mount(&file, "") {
            Ok(tree) => Some(tree),
            // Ours is another user namespace than the mount's.
            Err(Errno::PERM) => None,
            Err(e) => return Err(("copying its mount", e.into())),
        };
        Ok(Source {
            file,
            is_directory: kind == FileType::Directory,
            tree,
            path,
        })
    }

    /// A copy of its mount with all that is below.
    fn tree(self, read_only: bool) -> Result<OwnedFd, Failed> {
        let tree = match self.tree {
            Some(tree) => tree,
            None => {
                let path = CString::new(self.path.into_os_string().into_encoded_bytes())
                    .map_err(|e| ("finding its name", e.into()))?;
                let tree = copy_mount(CWD, path.as_c_str())
                    .map_err(|e| ("copying its mount", io::Error::from(e)))?;
                let identity = |fd: &OwnedFd| rustix::fs::fstat(fd).map(|s| (s.st_dev, s.st_ino));
                match (identity(&tree), identity(&self.file)) {
                    (Ok(found), Ok(asked)) if found == asked => tree,
                    _ => {
                        let what = io::Error::other("something else is there now, or it has no name");
                        return Err(("finding it again", what));
                    }
                }
            }
        };
        set_attributes(&tree, read_only).map_err(|e| ("setting its mount's attributes", e.into()))?;
        Ok(tree)
    }
}

fn copy_mount(file: impl AsFd, path: impl rustix::path::Arg) -> Result<OwnedFd, Errno> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_EMPTY_PATH
        | OpenTreeFlags::AT_RECURSIVE;
    open_tree(file, path, flags)
}

/// Of all mounts of a tree: nothing is executed or opened as a device here, and nothing mounted elsewhere comes in.
fn set_attributes(tree: &OwnedFd, read_only: bool) -> Result<(), Errno> {
    let mut set = MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    set.set(MountAttrFlags::MOUNT_ATTR_RDONLY, read_only);
    let attributes = Attributes {
        set,
        clear: MountAttrFlags::empty(),
        propagation: libc::MS_PRIVATE,
    };
    mount::set_attributes(tree, attributes, true)
}
