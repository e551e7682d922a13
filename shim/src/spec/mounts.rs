//! The mounts of a container: file systems the guest's kernel makes, the pod's shared memory, the few small files a pod gets from
//! its runtime, which are copied, images in the store, which are shown, and whatever else is of the host, which is shared with
//! the guest. What cannot be is refused by name.

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use thaw_protocol::agent::agent::Storage;
use thaw_protocol::agent::{layout, oci};

use super::config::{Mount, Spec};
use super::shown::{self, OfAnImage};
use crate::error::{Error, For, Result};
use crate::share::Source;

/// Made by the guest's kernel alone.
const OF_THE_GUEST: [&str; 8] = [
    "proc", "sysfs", "tmpfs", "devpts", "mqueue", "cgroup", "cgroup2", HUGETLBFS,
];
/// The file system type of huge pages, and its number (linux/magic.h).
const HUGETLBFS: &str = "hugetlbfs";
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;
/// The number of file systems in memory (linux/magic.h).
const TMPFS_MAGIC: u64 = 0x0102_1994;
/// Copied when the container is made: later changes on the host are not seen.
const COPIED: [&str; 3] = ["/etc/hosts", "/etc/hostname", "/etc/resolv.conf"];
/// Device nodes that are the same in every Linux, by name and number: the guest's own stand for them.
const NODES: [(&str, u32, u32); 6] = [
    ("null", 1, 3),
    ("zero", 1, 5),
    ("full", 1, 7),
    ("random", 1, 8),
    ("urandom", 1, 9),
    ("tty", 5, 0),
];
/// File systems that show what a kernel is about (linux/magic.h): the host's is none of a guest's, and their files have no size.
const OF_A_KERNEL: [(u64, &str); 7] = [
    (0x9fa0, "proc"),
    (0x6265_6572, "sysfs"),
    (0x0027_e0eb, "cgroup"),
    (0x6367_7270, "cgroup2"),
    (0x6462_6720, "debugfs"),
    (0x7472_6163, "tracefs"),
    (0xcafe_4a11, "bpf"),
];
/// Largest file that is copied.
const MOST_COPIED: u64 = 1 << 20;
/// Where a container has its shared memory.
const SHARED: &str = "/dev/shm";
/// Below it the guest has that of the pod, by the host's path of it: a volume in its place is another.
const SHARED_MEMORY: &str = "/run/thaw/shm";
/// What it has where the host does not say, bytes.
const SHARED_MEMORY_SIZE: u64 = 64 << 20;
/// Below it the guest has the volumes of huge pages, by the host's paths of them: a kernel's huge pages are its own.
const HUGE_PAGES: &str = "/run/thaw/huge";
/// What is shared read-only: that mount alone, or all that is mounted below it too.
const READ_ONLY_ALONE: &str = "ro";
const READ_ONLY_WHOLE: &str = "rro";

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

/// A mount of what is shared: its source is known once that is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bound {
    /// Which of the mounts.
    pub mount: usize,
    pub source: Source,
}

/// A mount of what an image has: its source is known once that is shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shown {
    /// Which of the mounts.
    pub mount: usize,
    pub of: OfAnImage,
}

/// What becomes of a container's mounts.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Mounts {
    pub mounts: Vec<oci::Mount>,
    pub storages: Vec<Storage>,
    pub files: Vec<CopiedFile>,
    pub bound: Vec<Bound>,
    pub shown: Vec<Shown>,
}

/// Converts the mounts of container `id`, whose relative sources are below `bundle`.
pub fn convert(id: &str, bundle: &Path, given: &[Mount]) -> Result<Mounts> {
    let mut made = Mounts::default();
    for mount in given {
        let mut writable_below = false;
        let (kind, source) = match (is_bind(mount), mount.kind.as_str()) {
            (false, "cgroup") => ("cgroup2", mount.source.clone()),
            (false, kind) if OF_THE_GUEST.contains(&kind) => (kind, mount.source.clone()),
            (true, _) if is_shared_memory(mount) => {
                let memory = shared_memory(&mount.source);
                let place = memory.mount_point.clone();
                made.storages.push(memory);
                ("bind", place)
            }
            (true, _) if COPIED.contains(&mount.destination.as_str()) => {
                let path = format!("{}/{}", layout::files_path(id), made.files.len());
                made.files.push(copy(&mount.source, path.clone())?);
                ("bind", path)
            }
            (true, _) => match look(mount, bundle)? {
                Found::HugePages(volume) => {
                    let place = volume.mount_point.clone();
                    made.storages.push(*volume);
                    ("bind", place)
                }
                Found::Node(path) => ("bind", path),
                Found::Image(of) => {
                    let mount = made.mounts.len();
                    made.shown.push(Shown { mount, of });
                    ("bind", String::new())
                }
                Found::Shared(source) => {
                    writable_below = source.options.iter().any(|o| o == READ_ONLY_ALONE);
                    made.bound.push(Bound {
                        mount: made.mounts.len(),
                        source,
                    });
                    ("bind", String::new())
                }
            },
            (false, "overlay") => {
                made.bound.push(Bound {
                    mount: made.mounts.len(),
                    source: Source {
                        kind: mount.kind.clone(),
                        source: mount.source.clone(),
                        options: mount.options.clone(),
                    },
                });
                ("bind", String::new())
            }
            (false, kind) => {
                return Err(Error::Unsupported(format!(
                    "the mount at {} has file system type {kind:?}, which no guest has: use one of {}, or bind what the \
                     host has mounted",
                    mount.destination,
                    OF_THE_GUEST.join(", ")
                )));
            }
        };
        let options = match (is_bind(mount), mount.kind.as_str()) {
            // What the layers are is told to who mounts them.
            (false, "overlay") => mount.options.iter().filter(|o| *o == "ro").cloned().collect(),
            // There it is one mount, and the host's kernel refuses what is written to those that are read-only.
            (true, _) if writable_below => {
                let options = mount.options.iter().filter(|o| *o != "ro");
                options.map(|option| in_guest(option)).collect()
            }
            (true, _) => mount.options.iter().map(|option| in_guest(option)).collect(),
            (false, _) => mount.options.clone(),
        };
        made.mounts.push(oci::Mount {
            destination: mount.destination.clone(),
            type_: kind.into(),
            source,
            options,
            ..Default::default()
        });
    }
    Ok(made)
}

/// A bind's option as the agent knows it: there every mount below is the guest's own.
fn in_guest(option: &str) -> String {
    match option {
        "rro" => "ro".into(),
        other => other.into(),
    }
}

/// What is at the source of a bind.
enum Found {
    /// The guest has it too, there.
    Node(String),
    Shared(Source),
    /// It is of an image in the store.
    Image(OfAnImage),
    /// A volume of huge pages, to be one of the guest's.
    HugePages(Box<Storage>),
}

/// Looks at the source of a bind, through links as the kernel goes.
fn look(mount: &Mount, bundle: &Path) -> Result<Found> {
    let path: PathBuf = bundle.join(&mount.source);
    let of = || {
        format!(
            "the mount at {}: {} of the host",
            mount.destination,
            path.display()
        )
    };
    let refused = |what: String| Err(Error::Unsupported(format!("{} {what}", of())));
    let found = std::fs::metadata(&path).map_err(|e| Error::Invalid(format!("{}: {e}", of())))?;
    let kind = found.file_type();
    if kind.is_char_device() {
        let numbers = (rustix::fs::major(found.rdev()), rustix::fs::minor(found.rdev()));
        return match NODES.iter().find(|(_, major, minor)| (*major, *minor) == numbers) {
            Some((name, ..)) => Ok(Found::Node(format!("/dev/{name}"))),
            None => refused("is a device, which a microVM has none of".into()),
        };
    }
    if kind.is_block_device() {
        return refused("is a block device: give it as a device (linux.devices), not as a mount".into());
    }
    if kind.is_socket() || kind.is_fifo() {
        let what = if kind.is_socket() { "socket" } else { "pipe" };
        return refused(format!(
            "is a {what}: nobody in a microVM can talk to the host's processes through it"
        ));
    }
    let fs = rustix::fs::statfs(&path).for_(|| format!("look at {}", path.display()))?;
    if fs.f_type as u64 == HUGETLBFS_MAGIC {
        return Ok(Found::HugePages(Box::new(huge_pages(&path, fs.f_bsize as u64))));
    }
    if let Some((_, name)) = OF_A_KERNEL.iter().find(|(magic, _)| *magic == fs.f_type as u64) {
        return refused(format!(
            "is of its kernel ({name}): mount {name} itself to have the guest's"
        ));
    }
    if fs.f_type as u64 == shown::OVERLAY_MAGIC
        && let Some(of) = shown::find(&path)?
    {
        let is_read_only = mount.options.iter().any(|o| o == "ro" || o == "rro");
        return match is_read_only {
            true => Ok(Found::Image(of)),
            false => refused(format!(
                "is of image {}, which is read-only: bind it with ro",
                of.digest
            )),
        };
    }
    let (mut recursive, mut read_only, mut slave) = (true, None, false);
    for option in &mount.options {
        match option.as_str() {
            "bind" => recursive = mount.options.iter().any(|o| o == "rbind"),
            "ro" | "rro" => read_only = Some(option.as_str()),
            "rw" => read_only = None,
            "slave" | "rslave" => slave = true,
            "shared" | "rshared" => {
                return refused(format!(
                    "is bound {option}: mounts a guest makes are never the host's; use rslave or rprivate"
                ));
            }
            "idmap" | "ridmap" => return refused("is bound with ids mapped, which no share can be".into()),
            _ => {}
        }
    }
    let mut options = vec![if recursive { "rbind" } else { "bind" }.to_owned()];
    options.extend(match read_only {
        Some("ro") if recursive && has_mounts_below(&path)? => Some(READ_ONLY_ALONE.to_owned()),
        Some(_) => Some(READ_ONLY_WHOLE.to_owned()),
        None => None,
    });
    options.extend(slave.then(|| "rslave".to_owned()));
    Ok(Found::Shared(Source {
        kind: "bind".into(),
        source: path.display().to_string(),
        options,
    }))
}

/// Whether anything is mounted below a path of the host: with `ro` that stays as it is, with `rro` not.
fn has_mounts_below(path: &Path) -> Result<bool> {
    let what = || format!("look for mounts below {}", path.display());
    let path = path.canonicalize().for_(what)?;
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").for_(what)?;
    Ok(is_above_one(&path, &mounts))
}

/// Of a text as proc(5) has it: the fifth word is a mount's place, with what would end the word as octal numbers.
fn is_above_one(path: &Path, mounts: &str) -> bool {
    let path = path.to_string_lossy().replace('\\', "\\134");
    let path = path
        .replace(' ', "\\040")
        .replace('\t', "\\011")
        .replace('\n', "\\012");
    let below = format!("{}/", path.trim_end_matches('/'));
    mounts
        .lines()
        .filter_map(|line| line.split(' ').nth(4))
        .any(|place| place.len() > below.len() && place.starts_with(&below))
}

/// What the pod's own container has mounted and the others find: it is there as long as the pod, whichever of them is restarted.
pub fn pod_storages(spec: &Spec) -> Vec<Storage> {
    let mounts = spec.mounts.iter();
    let shared = mounts.filter(|mount| is_shared_memory(mount));
    shared.map(|mount| shared_memory(&mount.source)).collect()
}

fn is_bind(mount: &Mount) -> bool {
    matches!(mount.kind.as_str(), "bind" | "rbind")
        || mount.options.iter().any(|o| o == "bind" || o == "rbind")
}

/// Whether it is the memory a pod's containers share: the host's own where they share that (`hostIPC`), or a tmpfs made for the pod.
fn is_shared_memory(mount: &Mount) -> bool {
    let is_tmpfs = |path: &str| rustix::fs::statfs(path).is_ok_and(|fs| fs.f_type as u64 == TMPFS_MAGIC);
    let source = mount.source.as_str();
    is_bind(mount) && mount.destination == SHARED && (source == SHARED || is_tmpfs(source))
}

/// As large as what the host has made for the pod: that is how its size is said.
fn shared_memory(source: &str) -> Storage {
    let size = rustix::fs::statvfs(source)
        .ok()
        .filter(|_| source != SHARED)
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
        mount_point: below(SHARED_MEMORY, source),
        ..Default::default()
    }
}

/// One of pages of this size, bytes. How many there are is settled by the limits of its containers.
fn huge_pages(source: &Path, page: u64) -> Storage {
    Storage {
        driver: "ephemeral".into(),
        source: HUGETLBFS.into(),
        fstype: HUGETLBFS.into(),
        options: vec![format!("pagesize={page}")],
        mount_point: below(HUGE_PAGES, &source.to_string_lossy()),
        ..Default::default()
    }
}

/// A place of the guest's for what has this path on the host.
fn below(directory: &str, source: &str) -> String {
    format!("{directory}/{}", source.replace('%', "%25").replace('/', "%2F"))
}

fn copy(source: &str, path: String) -> Result<CopiedFile> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_is_found_below_its_path_whatever_the_path_is_called() {
        let mounts = "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n\
                      30 22 0:5 / /srv/a\\040b/c rw - tmpfs none rw\n\
                      31 22 0:6 / /srv/data rw - tmpfs none rw\n";
        for (path, found) in [
            ("/", true),
            ("/srv", true),
            ("/srv/a b", true),
            ("/srv/a b/c", false),
            ("/srv/data", false),
            ("/srv/dat", false),
            ("/home", false),
        ] {
            assert_eq!(is_above_one(Path::new(path), mounts), found, "{path}");
        }
    }
}
