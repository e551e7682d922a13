//! A container's file system: its mounts, devices, masked paths and root.
//!
//! The image is hostile: it may have symbolic links where directories are expected. Every path inside it is
//! therefore resolved with openat2's `RESOLVE_IN_ROOT`, and mounts are made on the resolved descriptor, never
//! on the path.

use std::fs;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, Gid, Mode, OFlags, ResolveFlags, StatVfsMountFlags, Uid};
use rustix::io::Errno;
use rustix::mount::{
    MountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags, mount_bind_recursive,
    mount_change, mount_remount, move_mount, open_tree, unmount,
};
use rustix::process::{chdir, fchdir, pivot_root};
use thaw_protocol::agent::layout::DEFAULT_DEVICES;

use super::spec::{DeviceKind, DeviceNode, Mount, Spec};
use crate::error::{Error, Result, WithContext};
use crate::mount_options::MountOptions;

const LINKS: &[(&str, &str)] = &[
    ("fd", "/proc/self/fd"),
    ("stdin", "/proc/self/fd/0"),
    ("stdout", "/proc/self/fd/1"),
    ("stderr", "/proc/self/fd/2"),
    ("ptmx", "pts/ptmx"),
];

/// Mounts everything below the root, which becomes a mount itself. Must be called in the container's mount
/// namespace.
pub fn prepare(spec: &Spec) -> Result<()> {
    // Mounts made here must not propagate to the guest's namespace; unmounts of the guest may propagate here.
    let down = spec.propagation.map_or(
        MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC,
        |p| {
            // A shared root would propagate the container's mounts, and pivot_root requires it to be private.
            if p.contains(MountPropagationFlags::SHARED) {
                MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC
            } else {
                p
            }
        },
    );
    mount_change("/", down).with_context(|| "set the root's propagation".into())?;
    mount_bind_recursive(&spec.root, &spec.root)
        .with_context(|| format!("bind the root filesystem {} on itself", spec.root.display()))?;
    let root = Root::open(&spec.root)?;
    for m in &spec.mounts {
        mount_one(&root, m, &spec.cgroup)?;
    }
    // A bind mount at /dev is the guest's own, which is complete.
    if !spec
        .mounts
        .iter()
        .any(|m| m.destination == Path::new("/dev") && m.options.bind.is_some())
    {
        devices(&root, spec)?;
    }
    for (key, value) in &spec.sysctl {
        let path = format!("/proc/sys/{}", key.replace('.', "/"));
        fs::write(&path, value).with_context(|| format!("set sysctl {key} to {value:?}"))?;
    }
    Ok(())
}

/// Makes the prepared root the root of this process, and everything else unreachable.
pub fn enter(root: &Path) -> Result<()> {
    let what = || format!("pivot to {}", root.display());
    let new = rustix::fs::open(
        root,
        OFlags::DIRECTORY | OFlags::PATH | OFlags::CLOEXEC,
        Mode::empty(),
    )
    .with_context(what)?;
    fchdir(&new).with_context(what)?;
    // The old root is then mounted on top of the new one at ".", and is unmounted (pivot_root(2), NOTES).
    pivot_root(".", ".").with_context(what)?;
    mount_change(
        ".",
        MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC,
    )
    .with_context(what)?;
    unmount(".", UnmountFlags::DETACH).with_context(|| "unmount the guest's root".into())?;
    chdir("/").with_context(what)
}

/// Applies read-only and masked paths. Must be called after [`enter`].
pub fn restrict(spec: &Spec) -> Result<()> {
    for path in &spec.read_only_paths {
        read_only(Path::new(path))?;
    }
    for path in &spec.masked {
        mask(Path::new(path))?;
    }
    if spec.read_only {
        remount_read_only(Path::new("/"))?;
    }
    Ok(())
}

fn read_only(path: &Path) -> Result<()> {
    match mount_bind_recursive(path, path) {
        Err(Errno::NOENT) => return Ok(()),
        other => other.with_context(|| format!("make {} read-only", path.display()))?,
    }
    remount_read_only(path)
}

/// A remount replaces all flags, so the mount's other flags are repeated.
fn remount_read_only(path: &Path) -> Result<()> {
    let what = || format!("make {} read-only", path.display());
    let have = rustix::fs::statvfs(path).with_context(what)?.f_flag;
    let keep = [
        (StatVfsMountFlags::NOSUID, MountFlags::NOSUID),
        (StatVfsMountFlags::NODEV, MountFlags::NODEV),
        (StatVfsMountFlags::NOEXEC, MountFlags::NOEXEC),
        (StatVfsMountFlags::NOATIME, MountFlags::NOATIME),
        (StatVfsMountFlags::NODIRATIME, MountFlags::NODIRATIME),
        (StatVfsMountFlags::RELATIME, MountFlags::RELATIME),
    ]
    .into_iter()
    .filter(|(from, _)| have.contains(*from))
    .fold(MountFlags::BIND | MountFlags::RDONLY, |set, (_, to)| set | to);
    mount_remount(path, keep, c"").with_context(what)
}

fn mask(path: &Path) -> Result<()> {
    let what = || format!("mask {}", path.display());
    match rustix::mount::mount_bind("/dev/null", path) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(Errno::NOTDIR) => {
            rustix::mount::mount("tmpfs", path, "tmpfs", MountFlags::RDONLY, c"size=0k").with_context(what)
        }
        Err(e) => Err(e).with_context(what),
    }
}

fn mount_one(root: &Root, m: &Mount, cgroup: &Path) -> Result<()> {
    let what = |e: Error| match e {
        Error::System { what, source } => Error::System {
            what: format!("mount at {} of the container: {what}", m.destination.display()),
            source,
        },
        other => other,
    };
    if m.options.bind.is_some() {
        let is_dir = fs::metadata(&m.source)
            .map(|found| found.is_dir())
            .with_context(|| {
                format!(
                    "mount at {} of the container: source {}",
                    m.destination.display(),
                    m.source
                )
            })?;
        let target = if is_dir {
            root.make_dir(&m.destination)
        } else {
            root.make_file(&m.destination)
        }
        .map_err(what)?;
        return m
            .options
            .bind(&m.source, &magic(&target))
            .and_then(|()| finish(root, m, &m.options))
            .map_err(what);
    }
    let target = root.make_dir(&m.destination).map_err(what)?;
    match m.kind.as_str() {
        // In its own cgroup namespace, the container sees its cgroup as the root.
        "cgroup" | "cgroup2" => {
            let options = MountOptions {
                data: vec!["nsdelegate".into()],
                ..m.options.clone()
            };
            match options.mount("cgroup2", &magic(&target), "cgroup2") {
                Ok(()) => finish(root, m, &options).map_err(what),
                Err(_) => {
                    let bind = MountOptions {
                        data: Vec::new(),
                        bind: Some(true),
                        ..m.options.clone()
                    };
                    bind.bind(Path::new(super::cgroup::ROOT).join(cgroup), &magic(&target))
                        .and_then(|()| finish(root, m, &bind))
                        .map_err(what)
                }
            }
        }
        kind => {
            let source = if m.source.is_empty() { kind } else { &m.source };
            m.options
                .mount(source, &magic(&target), kind)
                .and_then(|()| finish(root, m, &m.options))
                .map_err(what)
        }
    }
}

/// Applies the remaining options to the new mount, which is found again by its path.
fn finish(root: &Root, m: &Mount, options: &MountOptions) -> Result<()> {
    let mounted = root
        .resolve(&m.destination, OFlags::PATH)
        .with_context(|| format!("find {} again", m.destination.display()))?;
    options.finish(&magic(&mounted))
}

fn devices(root: &Root, spec: &Spec) -> Result<()> {
    let dev = root.make_dir(Path::new("/dev"))?;
    let defaults = DEFAULT_DEVICES.iter().map(|(name, major, minor)| DeviceNode {
        path: Path::new("/dev").join(name),
        kind: DeviceKind::Character,
        major: *major,
        minor: *minor,
        mode: 0o666,
        uid: 0,
        gid: 0,
    });
    for node in defaults.chain(spec.devices.iter().cloned()) {
        make_node(root, &node)?;
    }
    for (name, target) in LINKS {
        match rustix::fs::symlinkat(*target, &dev, *name) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(e) => return Err(e).with_context(|| format!("link /dev/{name} of the container")),
        }
    }
    Ok(())
}

fn make_node(root: &Root, node: &DeviceNode) -> Result<()> {
    let what = || format!("make device {} of the container", node.path.display());
    let (Some(parent), Some(name)) = (node.path.parent(), node.path.file_name()) else {
        return Err(Error::Invalid(format!(
            "{} is not the path of a device",
            node.path.display()
        )));
    };
    let dir = root.make_dir(parent)?;
    let kind = match node.kind {
        DeviceKind::Block => FileType::BlockDevice,
        DeviceKind::Character => FileType::CharacterDevice,
        DeviceKind::Fifo => FileType::Fifo,
    };
    let mode = Mode::from_raw_mode(node.mode);
    match rustix::fs::mknodat(
        &dir,
        name,
        kind,
        mode,
        rustix::fs::makedev(node.major, node.minor),
    ) {
        // An image or a mount may contain the device already.
        Err(Errno::EXIST) => return Ok(()),
        other => other.with_context(what)?,
    }
    // mknod applies the umask to the mode.
    rustix::fs::chmodat(&dir, name, mode, AtFlags::empty()).with_context(what)?;
    rustix::fs::chownat(
        &dir,
        name,
        Some(Uid::from_raw(node.uid)),
        Some(Gid::from_raw(node.gid)),
        AtFlags::SYMLINK_NOFOLLOW,
    )
    .with_context(what)
}

/// Binds the container's terminal at /dev/console. Must be called after [`enter`]. Uses only descriptors,
/// because the container may have no /proc.
pub fn console(slave: impl AsFd) -> Result<()> {
    let what = || "bind the terminal at /dev/console".into();
    let target = Root::open(Path::new("/"))?.make_file(Path::new("/dev/console"))?;
    let clone =
        OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
    let tree = open_tree(slave, "", clone).with_context(what)?;
    let here = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    move_mount(&tree, "", &target, "", here).with_context(what)
}

fn magic(fd: &OwnedFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", fd.as_raw_fd()))
}

/// A root directory that paths cannot leave.
pub(super) struct Root {
    dir: OwnedFd,
}

impl Root {
    pub(super) fn open(path: &Path) -> Result<Self> {
        let dir = rustix::fs::openat(
            CWD,
            path,
            OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        )
        .with_context(|| format!("open the root filesystem {}", path.display()))?;
        Ok(Root { dir })
    }

    fn resolve(&self, path: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
        loop {
            let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
            match rustix::fs::openat2(&self.dir, path, flags | OFlags::CLOEXEC, Mode::empty(), resolve) {
                // A rename raced with the resolution of "..".
                Err(Errno::AGAIN) | Err(Errno::INTR) => {}
                other => return other,
            }
        }
    }

    /// Opens the directory at `path`, and creates it and its parents if they are missing.
    pub(super) fn make_dir(&self, path: &Path) -> Result<OwnedFd> {
        let what = || format!("make directory {} of the container", path.display());
        let flags = OFlags::PATH | OFlags::DIRECTORY;
        match self.resolve(path, flags) {
            Err(Errno::NOENT) => {}
            other => return other.with_context(what),
        }
        let mut done = PathBuf::from("/");
        let mut at = self.resolve(&done, flags).with_context(what)?;
        for part in path.components() {
            let Component::Normal(name) = part else {
                if part == Component::ParentDir {
                    return Err(Error::Invalid(format!("{} contains '..'", path.display())));
                }
                continue;
            };
            done.push(name);
            at = match self.resolve(&done, flags) {
                Err(Errno::NOENT) => {
                    rustix::fs::mkdirat(&at, name, Mode::from_raw_mode(0o755)).with_context(what)?;
                    self.resolve(&done, flags).with_context(what)?
                }
                other => other.with_context(what)?,
            };
        }
        Ok(at)
    }

    /// Opens the file at `path`, and creates an empty one if it is missing.
    pub(super) fn make_file(&self, path: &Path) -> Result<OwnedFd> {
        let what = || format!("make file {} of the container", path.display());
        match self.resolve(path, OFlags::PATH) {
            Err(Errno::NOENT) => {}
            other => return other.with_context(what),
        }
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(Error::Invalid(format!(
                "{} is not the path of a file",
                path.display()
            )));
        };
        let dir = self.make_dir(parent)?;
        let create = OFlags::CREATE | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        drop(rustix::fs::openat(&dir, name, create, Mode::from_raw_mode(0o644)).with_context(what)?);
        self.resolve(path, OFlags::PATH).with_context(what)
    }
}

/// Creates the working directory if it is missing.
pub fn make_cwd(path: &Path) -> Result<()> {
    if fs::metadata(path).is_ok() {
        return Ok(());
    }
    // The root is the container's own, so links cannot lead out of it.
    fs::create_dir_all(path).with_context(|| format!("make the working directory {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn link_out_of_the_root_resolves_within_it() {
        let outer = tempfile::tempdir().unwrap();
        let root = outer.path().join("root");
        fs::create_dir_all(root.join("etc")).unwrap();
        symlink("/../../etc", root.join("proc")).unwrap();
        symlink("../../..", root.join("up")).unwrap();
        let r = Root::open(&root).unwrap();
        r.make_dir(Path::new("/proc/deep/er")).unwrap();
        assert!(root.join("etc/deep/er").is_dir());
        r.make_file(Path::new("/up/file")).unwrap();
        assert!(root.join("file").is_file() && !outer.path().join("file").exists());
        assert!(r.make_dir(Path::new("/new/../x")).is_err());
    }

    #[test]
    fn dangling_link_is_an_error_and_creates_nothing() {
        let root = tempfile::tempdir().unwrap();
        symlink("/nowhere", root.path().join("f")).unwrap();
        let r = Root::open(root.path()).unwrap();
        assert!(r.make_file(Path::new("/f")).is_err());
        assert!(!root.path().join("nowhere").exists());
    }
}
