//! Detached mounts of a directory, an overlay or a device, made for one guest and never part of this host's tree.
//!
//! Every mount is nosuid, nodev and noexec: this host executes nothing from it, opens no device in it, and honours no set-user-ID bit.
//!
//! The kernel gets an overlay's layers as descriptors, by their numbers in `/proc/thread-self/fd`: these are short, which matters before
//! Linux 6.8, where all layers must fit in one string of 255 bytes, and they need no escaping.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, OpenTreeFlags, fsconfig_create, fsconfig_set_flag,
    fsconfig_set_string, fsmount, fsopen, open_tree,
};
use rustix::process::fchdir;
use thaw_sys::mount::{Attributes, set_attributes};

use super::error::AttachError;
use super::source::{FsOption, Source, Tree};

/// Longest string that the kernel takes as one option, without its terminating zero.
const MOST_OF_A_STRING: usize = 255;
/// The attributes of every mount.
const ATTRIBUTES: MountAttrFlags = MountAttrFlags::MOUNT_ATTR_NOSUID
    .union(MountAttrFlags::MOUNT_ATTR_NODEV)
    .union(MountAttrFlags::MOUNT_ATTR_NOEXEC);

/// A detached mount.
#[derive(Debug)]
pub struct Detached {
    pub mount: OwnedFd,
    pub is_directory: bool,
}

/// Makes the mount of a source. Changes the working directory of the thread, which must not share it with others.
///
/// # Errors
/// [`AttachError::Source`] with the path, or with the message of the file system.
pub fn detached(source: &Source) -> Result<Detached, AttachError> {
    let mount = match &source.tree {
        Tree::Bind { path, recursive } => bind(source, path, *recursive)?,
        Tree::Overlay {
            lower,
            upper,
            options,
        } => overlay(source, lower, upper.as_ref(), options)?,
        Tree::Device { kind, path, options } => device(source, kind, path, options)?,
    };
    let stat = rustix::fs::fstat(&mount).map_err(of("looking at it"))?;
    let is_directory = match FileType::from_raw_mode(stat.st_mode) {
        FileType::Directory => true,
        FileType::RegularFile => false,
        other => {
            return Err(AttachError::Kind {
                what: name(source),
                kind: described(other),
            });
        }
    };
    Ok(Detached { mount, is_directory })
}

fn described(kind: FileType) -> &'static str {
    match kind {
        FileType::Socket => "a socket",
        FileType::Fifo => "a pipe",
        FileType::BlockDevice => "a block device",
        FileType::CharacterDevice => "a character device",
        _ => "no file",
    }
}

/// The source's name in error messages.
fn name(source: &Source) -> String {
    match &source.tree {
        Tree::Bind { path, .. } | Tree::Device { path, .. } => path.display().to_string(),
        Tree::Overlay {
            upper: Some((upper, _)),
            ..
        } => format!("the overlay over {}", upper.display()),
        Tree::Overlay { .. } => "the overlay".into(),
    }
}

fn failed(what: String) -> impl FnOnce(Errno) -> AttachError {
    move |e| AttachError::Source {
        what,
        source: e.into(),
    }
}

fn of(step: &'static str) -> impl FnOnce(Errno) -> AttachError {
    move |e| AttachError::Step {
        step,
        source: e.into(),
    }
}

fn bind(source: &Source, path: &Path, recursive: bool) -> Result<OwnedFd, AttachError> {
    let mut flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    flags.set(OpenTreeFlags::AT_RECURSIVE, recursive);
    let mount = open_tree(CWD, path, flags).map_err(failed(path.display().to_string()))?;
    let propagation = match source.follows_host {
        true => libc::MS_SLAVE,
        false => libc::MS_PRIVATE,
    };
    let set = |set, propagation, recursive| {
        let attributes = Attributes {
            set,
            clear: MountAttrFlags::empty(),
            propagation,
        };
        set_attributes(&mount, attributes, recursive).map_err(of("setting its mount's attributes"))
    };
    let mut below = attributes(source);
    below.set(MountAttrFlags::MOUNT_ATTR_RDONLY, source.read_only_below);
    set(below, propagation, true)?;
    if source.read_only && !source.read_only_below {
        set(MountAttrFlags::MOUNT_ATTR_RDONLY, 0, false)?;
    }
    Ok(mount)
}

fn attributes(source: &Source) -> MountAttrFlags {
    let mut set = ATTRIBUTES;
    set.set(MountAttrFlags::MOUNT_ATTR_RDONLY, source.read_only);
    set.set(MountAttrFlags::MOUNT_ATTR_NOATIME, source.no_access_times);
    set
}

fn overlay(
    source: &Source,
    lower: &[PathBuf],
    upper: Option<&(PathBuf, PathBuf)>,
    options: &[FsOption],
) -> Result<OwnedFd, AttachError> {
    let open = |path: &PathBuf| {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        rustix::fs::open(path, flags, Mode::empty()).map_err(failed(path.display().to_string()))
    };
    let lower = lower.iter().map(open).collect::<Result<Vec<OwnedFd>, _>>()?;
    let upper = match upper {
        Some((upper, work)) => Some((open(upper)?, open(work)?)),
        None => None,
    };
    let own = rustix::fs::open(
        "/proc/thread-self/fd",
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    );
    let own = own.map_err(failed("/proc/thread-self/fd".into()))?;
    fchdir(&own).map_err(of("entering a directory"))?;
    let number = |fd: &OwnedFd| fd.as_raw_fd().to_string();
    let numbers: Vec<String> = lower.iter().map(number).collect();
    let context = Context::open("overlay", source)?;
    let joined = numbers.join(":");
    match joined.len() <= MOST_OF_A_STRING {
        true => context.set("lowerdir", Some(&joined))?,
        false => {
            for layer in &numbers {
                context.set("lowerdir+", Some(layer))?;
            }
        }
    }
    if let Some((upper, work)) = &upper {
        context.set("upperdir", Some(&number(upper)))?;
        context.set("workdir", Some(&number(work)))?;
    }
    context.mount(options)
}

fn device(source: &Source, kind: &str, path: &Path, options: &[FsOption]) -> Result<OwnedFd, AttachError> {
    let context = Context::open(kind, source)?;
    let path = path.to_str().ok_or(Errno::INVAL).map_err(failed(name(source)))?;
    context.set("source", Some(path))?;
    if source.read_only {
        context.set("ro", None)?;
    }
    context.mount(options)
}

/// A file system context of fsopen(2).
struct Context<'a> {
    context: OwnedFd,
    source: &'a Source,
}

impl<'a> Context<'a> {
    fn open(kind: &str, source: &'a Source) -> Result<Context<'a>, AttachError> {
        let opened = fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC);
        let context = opened.map_err(|e| match e {
            Errno::NODEV => AttachError::Source {
                what: name(source),
                source: io::Error::other(format!("this kernel has no {kind}")),
            },
            e => failed(name(source))(e),
        })?;
        Ok(Context { context, source })
    }

    fn set(&self, key: &str, value: Option<&str>) -> Result<(), AttachError> {
        let done = match value {
            Some(value) => fsconfig_set_string(self.context.as_fd(), key, value),
            None => fsconfig_set_flag(self.context.as_fd(), key),
        };
        done.map_err(|e| self.explained(key, e))
    }

    fn mount(self, options: &[FsOption]) -> Result<OwnedFd, AttachError> {
        for (key, value) in options {
            self.set(key, value.as_deref())?;
        }
        fsconfig_create(self.context.as_fd()).map_err(|e| self.explained("mounting", e))?;
        let flags = FsMountFlags::FSMOUNT_CLOEXEC;
        fsmount(self.context.as_fd(), flags, attributes(self.source))
            .map_err(|e| self.explained("mounting", e))
    }

    /// An error with the kernel's messages about this context, which say more than the number.
    fn explained(&self, step: &str, error: Errno) -> AttachError {
        let mut said = vec![format!("{step}: {error}")];
        let mut line = [0; 256];
        // Each read returns one message, until there is none; the kernel keeps a handful.
        for _ in 0..16 {
            match rustix::io::read(&self.context, &mut line) {
                Ok(length) if length > 0 => {
                    let text = String::from_utf8_lossy(&line[..length]);
                    said.push(text.trim().chars().filter(|c| !c.is_control()).collect());
                }
                _ => break,
            }
        }
        AttachError::Source {
            what: name(self.source),
            source: io::Error::new(io::Error::from(error).kind(), said.join("; ")),
        }
    }
}
