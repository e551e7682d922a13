//! The mounts of a container: file systems the guest's kernel makes, the pod's shared memory, and the few small files a pod
//! gets from its runtime, which are copied. Whatever else is of the host is refused by name.

use std::path::Path;

use thaw_protocol::agent::agent::Storage;
use thaw_protocol::agent::oci;

use super::config::Mount;
use crate::error::{Error, For, Result};

/// Made by the guest's kernel alone.
const OF_THE_GUEST: [&str; 7] = ["proc", "sysfs", "tmpfs", "devpts", "mqueue", "cgroup", "cgroup2"];
/// Copied when the container is made: later changes on the host are not seen.
const COPIED: [&str; 3] = ["/etc/hosts", "/etc/hostname", "/etc/resolv.conf"];
/// Largest file that is copied.
const MOST_COPIED: u64 = 1 << 20;
/// Where the guest has the pod's shared memory.
const SHARED_MEMORY: &str = "/run/thaw/shm";
/// What it has where the host does not say, bytes.
const SHARED_MEMORY_SIZE: u64 = 64 << 20;
/// Below it are the files of each container.
const COPIES: &str = "/run/thaw/files";

/// A file of the host, to be one of the guest's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopiedFile {
    /// In the guest.
    pub path: String,
    pub data: Vec<u8>,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
}

/// What becomes of a container's mounts.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Mounts {
    pub mounts: Vec<oci::Mount>,
    pub storages: Vec<Storage>,
    pub files: Vec<CopiedFile>,
}

/// Converts the mounts of container `id`.
pub fn convert(id: &str, given: &[Mount]) -> Result<Mounts> {
    let mut made = Mounts::default();
    for mount in given {
        let is_bind = mount.kind == "bind" || mount.options.iter().any(|o| o == "bind" || o == "rbind");
        let (kind, source) = match (is_bind, mount.kind.as_str()) {
            (false, "cgroup") => ("cgroup2", mount.source.clone()),
            (false, kind) if OF_THE_GUEST.contains(&kind) => (kind, mount.source.clone()),
            (true, _) if mount.destination == "/dev/shm" => {
                made.storages.push(shared_memory(&mount.source));
                ("bind", SHARED_MEMORY.to_owned())
            }
            (true, _) if COPIED.contains(&mount.destination.as_str()) => {
                let path = format!("{COPIES}/{id}/{}", made.files.len());
                made.files.push(copy(&mount.source, path.clone())?);
                ("bind", path)
            }
            _ => return Err(refused(mount)),
        };
        made.mounts.push(oci::Mount {
            destination: mount.destination.clone(),
            type_: kind.into(),
            source,
            options: mount.options.clone(),
            ..Default::default()
        });
    }
    Ok(made)
}

fn refused(mount: &Mount) -> Error {
    let Mount {
        destination,
        source,
        kind,
        ..
    } = mount;
    Error::Unsupported(match kind.as_str() {
        "bind" | "" | "none" => format!(
            "the mount at {destination} is {source} of the host, which this microVM cannot be shown: remove the mount, or copy the data into the image"
        ),
        _ => format!(
            "the mount at {destination} has file system type {kind:?}, which no guest has: use one of {}",
            OF_THE_GUEST.join(", ")
        ),
    })
}

/// As large as what the host has made for the pod: that is how its size is said.
fn shared_memory(source: &str) -> Storage {
    let size = rustix::fs::statvfs(source)
        .ok()
        .filter(|_| source != "/dev/shm")
        .map(|fs| fs.f_blocks.saturating_mul(fs.f_frsize))
        .filter(|size| *size > 0)
        .unwrap_or(SHARED_MEMORY_SIZE);
    Storage {
        driver: "ephemeral".into(),
        source: "shm".into(),
        fstype: "tmpfs".into(),
        options: vec![
            "nosuid".into(),
            "nodev".into(),
            "noexec".into(),
            "mode=1777".into(),
            format!("size={size}"),
        ],
        mount_point: SHARED_MEMORY.into(),
        ..Default::default()
    }
}

fn copy(source: &str, path: String) -> Result<CopiedFile> {
    use std::os::unix::fs::MetadataExt;
    let what = || format!("read {source}");
    let found = std::fs::metadata(source).for_(what)?;
    if !found.is_file() || found.len() > MOST_COPIED {
        let why = format!("is not a file of at most {MOST_COPIED} bytes");
        return Err(Error::malformed(Path::new(source), why));
    }
    Ok(CopiedFile {
        path,
        data: std::fs::read(source).for_(what)?,
        mode: found.mode(),
        uid: found.uid(),
        gid: found.gid(),
    })
}
