//! The directory that is served: a read-only empty root with a mount for each share.
//!
//! It is this process's whole file system. Files that are not shared have no name here, so no symbolic link, `..` or bug leads to them. A
//! read-only share is a read-only mount, not a check by this process. The alternative, one file system per share behind a multiplexer of
//! node numbers, would leave all of the host's files within reach.
//!
//! A process with the rights to do so mounts later shares here ([`thaw_protocol::share`]), although the root is
//! read-only: that is a property of this mount, and such a process can make a writable mount of the same file
//! system, which this process cannot.
//!
//! A mount is copied from the descriptor before this process leaves the namespace of that mount. If this is not
//! permitted, because the process has rights only in its own user namespace, the mount is found again by the
//! descriptor's name in the copy of the namespace, and must then be the same file.

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

/// Why the tree was not made.
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

/// Inodes of the root's file system in addition to those of shares.
const OWN_INODES: usize = 16;

/// The shares, before they are mounted.
pub struct Shares {
    shares: Vec<(Share, Source)>,
    /// Number of inodes needed, including those of later shares.
    inodes: usize,
}

struct Source {
    file: OwnedFd,
    is_directory: bool,
    /// A copy of its mount, if it could be copied at once.
    tree: Option<OwnedFd>,
    /// Its path, to find it again otherwise.
    path: PathBuf,
}

impl Shares {
    /// Checks the request, and copies the mounts that can be copied. Must be called in the namespace of the
    /// files.
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
                "no share, and room for {} later ones: at least one and at most {SLOTS} are required",
                serve.slots
            ));
        }
        let inodes = OWN_INODES + files.len() + serve.slots as usize;
        let mut shares: Vec<(Share, Source)> = Vec::with_capacity(files.len());
        for (share, file) in serve.shares.iter().zip(files) {
            if !share.has_good_name() || shares.iter().any(|(other, _)| other.name == share.name) {
                return refuse(format!(
                    "{:?} is not a valid name of a share, or is used twice",
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

    /// Makes the tree this process's root. Must be called in a mount namespace of its own, with one thread.
    pub fn enter(self) -> Result<(), TreeError> {
        jail::make_mounts_private()?;
        let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
        // Found while the host's names still exist.
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
        // The number of inodes limits what can be mounted here later.
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

/// Opens this process's directory of descriptors as a detached mount, from which `..` does not lead to the rest
/// of /proc. Must be called in a mount namespace in which this process may copy mounts.
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
            // This process is in another user namespace than the mount.
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

    /// Copies its mount with all mounts below.
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
                        let what = io::Error::other("its name now leads to another file, or it has none");
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

/// Sets attributes of all mounts of a tree: nothing can be executed or opened as a device, and no mount
/// propagates in.
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
