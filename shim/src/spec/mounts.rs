//! A container's mounts. The guest's kernel makes its own file systems and the pod's shared memory; the few small files that a runtime
//! provides are copied; images of the store are shown; everything else of the host is shared. A source that cannot be shared is refused by
//! name.

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use thaw_protocol::agent::agent::Storage;
use thaw_protocol::agent::{layout, oci};

use super::config::{Mount, Spec};
use super::image_mount::{self, ImagePath};
use crate::error::{Error, Result, WithContext};
use crate::host_resource::Source;

/// File systems that the guest's kernel makes by itself.
const GUEST_FILESYSTEMS: [&str; 8] = [
    "proc", "sysfs", "tmpfs", "devpts", "mqueue", "cgroup", "cgroup2", HUGETLBFS,
];
/// The type of the huge pages file system, and its magic number (linux/magic.h).
const HUGETLBFS: &str = "hugetlbfs";
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;
/// The magic number of tmpfs (linux/magic.h).
const TMPFS_MAGIC: u64 = 0x0102_1994;
/// Files that are copied when the container is created. Later changes on the host are not seen.
const COPIED: [&str; 3] = ["/etc/hosts", "/etc/hostname", "/etc/resolv.conf"];
/// File systems that show a kernel's state, by magic number (linux/magic.h). The host's would be wrong in a
/// guest, and their files report no size.
const KERNEL_FILESYSTEMS: [(u64, &str); 7] = [
    (0x9fa0, "proc"),
    (0x6265_6572, "sysfs"),
    (0x0027_e0eb, "cgroup"),
    (0x6367_7270, "cgroup2"),
    (0x6462_6720, "debugfs"),
    (0x7472_6163, "tracefs"),
    (0xcafe_4a11, "bpf"),
];
/// Largest file that is copied, in bytes.
const MAX_COPIED: u64 = 1 << 20;
/// Path of the shared memory in a container.
const SHARED: &str = "/dev/shm";
/// Directory in the guest of the pod's shared memory, named by its path on the host; a volume in its place
/// has another path.
const SHARED_MEMORY: &str = "/run/thaw/shm";
/// Default size of the shared memory, in bytes.
const SHARED_MEMORY_SIZE: u64 = 64 << 20;
/// Directory in the guest of huge page volumes, named by their path on the host. The pages are the guest
/// kernel's own.
const HUGE_PAGES: &str = "/run/thaw/huge";
/// Options for thawd: read-only at the top mount only, or including all mounts below.
const READ_ONLY_TOP: &str = "ro";
const READ_ONLY_ALL: &str = "rro";

/// A host file to copy into the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopiedFile {
    /// Path in the guest.
    pub path: String,
    pub data: Vec<u8>,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
}

/// A mount whose source is known once it is shared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedMount {
    /// Index of the mount.
    pub mount: usize,
    pub source: Source,
}

/// A mount from an image whose source is known once the image is shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageMount {
    /// Index of the mount.
    pub mount: usize,
    pub image: ImagePath,
}

/// The converted mounts of a container.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Mounts {
    pub mounts: Vec<oci::Mount>,
    pub storages: Vec<Storage>,
    pub files: Vec<CopiedFile>,
    pub shared_mounts: Vec<SharedMount>,
    pub image_mounts: Vec<ImageMount>,
}

/// Converts the mounts of container `id`. Relative sources are below `bundle`.
pub fn convert(id: &str, bundle: &Path, given: &[Mount]) -> Result<Mounts> {
    let mut made = Mounts::default();
    for mount in given {
        let mut writable_below = false;
        let (kind, source) = match (is_bind(mount), mount.kind.as_str()) {
            (false, "cgroup") => ("cgroup2", mount.source.clone()),
            (false, kind) if GUEST_FILESYSTEMS.contains(&kind) => (kind, mount.source.clone()),
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
            (true, _) => match inspect_source(mount, bundle)? {
                Found::HugePages(volume) => {
                    let place = volume.mount_point.clone();
                    made.storages.push(*volume);
                    ("bind", place)
                }
                Found::Node(path) => ("bind", path),
                Found::Image(image) => {
                    let mount = made.mounts.len();
                    made.image_mounts.push(ImageMount { mount, image });
                    ("bind", String::new())
                }
                Found::Shared(source) => {
                    writable_below = source.options.iter().any(|o| o == READ_ONLY_TOP);
                    made.shared_mounts.push(SharedMount {
                        mount: made.mounts.len(),
                        source,
                    });
                    ("bind", String::new())
                }
            },
            (false, "overlay") => {
                made.shared_mounts.push(SharedMount {
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
                    "the mount at {} has file system type {kind:?}, which guests do not support: use one of {}, or bind a mount of \
                     the host",
                    mount.destination,
                    GUEST_FILESYSTEMS.join(", ")
                )));
            }
        };
        let options = match (is_bind(mount), mount.kind.as_str()) {
            // The layers are options of the mount that thawd makes.
            (false, "overlay") => mount.options.iter().filter(|o| *o == "ro").cloned().collect(),
            // In the guest this is one mount, and the host's kernel refuses writes to its read-only parts.
            (true, _) if writable_below => {
                let options = mount.options.iter().filter(|o| *o != "ro");
                options.map(|option| guest_option(option)).collect()
            }
            (true, _) => mount.options.iter().map(|option| guest_option(option)).collect(),
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

/// Converts an option of a bind mount. In the guest there is one mount, so `rro` equals `ro`.
fn guest_option(option: &str) -> String {
    match option {
        "rro" => "ro".into(),
        other => other.into(),
    }
}

/// The source of a bind mount.
enum Found {
    /// A device node that the guest has at this path.
    Node(String),
    Shared(Source),
    /// A path of an image in the store.
    Image(ImagePath),
    /// A volume of huge pages, to be replaced by one of the guest's.
    HugePages(Box<Storage>),
}

/// Inspects the source of a bind mount; follows symbolic links as the kernel does.
fn inspect_source(mount: &Mount, bundle: &Path) -> Result<Found> {
    let path: PathBuf = bundle.join(&mount.source);
    let subject = format!(
        "the mount at {}: {} of the host",
        mount.destination,
        path.display()
    );
    let found = std::fs::metadata(&path).map_err(|e| Error::Invalid(format!("{subject}: {e}")))?;
    let refused = |what: String| Error::Unsupported(format!("{subject} {what}"));
    if let Some(of_type) = inspect_special_file(&found).map_err(refused)? {
        return Ok(of_type);
    }
    let fs = rustix::fs::statfs(&path).with_context(|| format!("look at {}", path.display()))?;
    if fs.f_type as u64 == HUGETLBFS_MAGIC {
        return Ok(Found::HugePages(Box::new(huge_pages(&path, fs.f_bsize as u64))));
    }
    if let Some((_, name)) = KERNEL_FILESYSTEMS
        .iter()
        .find(|(magic, _)| *magic == fs.f_type as u64)
    {
        return Err(refused(format!(
            "belongs to the host's kernel ({name}): mount {name} itself to get the guest's"
        )));
    }
    if fs.f_type as u64 == image_mount::OVERLAY_MAGIC
        && let Some(of) = image_mount::find(&path)?
    {
        let is_read_only = mount.options.iter().any(|o| o == "ro" || o == "rro");
        return match is_read_only {
            true => Ok(Found::Image(of)),
            false => Err(refused(format!(
                "belongs to image {}, which is read-only: bind it with ro",
                of.digest
            ))),
        };
    }
    let bind = BindOptions::parse(&mount.options).map_err(refused)?;
    let mut options = vec![if bind.recursive { "rbind" } else { "bind" }.to_owned()];
    options.extend(match bind.read_only {
        Some("ro") if bind.recursive && has_mounts_below(&path)? => Some(READ_ONLY_TOP.to_owned()),
        Some(_) => Some(READ_ONLY_ALL.to_owned()),
        None => None,
    });
    options.extend(bind.slave.then(|| "rslave".to_owned()));
    Ok(Found::Shared(Source {
        kind: "bind".into(),
        source: path.display().to_string(),
        options,
    }))
}

/// Inspects a file that is not a regular file or directory. `None` if it is one. The error says why it cannot be
/// mounted.
fn inspect_special_file(found: &std::fs::Metadata) -> Result<Option<Found>, String> {
    let kind = found.file_type();
    if kind.is_char_device() {
        let numbers = (rustix::fs::major(found.rdev()), rustix::fs::minor(found.rdev()));
        return match layout::DEFAULT_DEVICES
            .iter()
            .find(|(_, major, minor)| (*major, *minor) == numbers)
        {
            Some((name, ..)) => Ok(Some(Found::Node(format!("/dev/{name}")))),
            None => Err("is a device of the host, which a microVM cannot use".into()),
        };
    }
    if kind.is_block_device() {
        return Err("is a block device: give it as a device (linux.devices), not as a mount".into());
    }
    if kind.is_socket() || kind.is_fifo() {
        let what = if kind.is_socket() { "socket" } else { "pipe" };
        return Err(format!(
            "is a {what}: processes in a microVM cannot reach the host's processes through it"
        ));
    }
    Ok(None)
}

/// The options of a bind mount that matter for a share.
struct BindOptions<'a> {
    recursive: bool,
    /// `ro` or `rro`.
    read_only: Option<&'a str>,
    slave: bool,
}

impl<'a> BindOptions<'a> {
    /// The error says why such a mount cannot be shared.
    fn parse(options: &'a [String]) -> Result<Self, String> {
        let mut bind = BindOptions {
            recursive: true,
            read_only: None,
            slave: false,
        };
        for option in options {
            match option.as_str() {
                "bind" => bind.recursive = options.iter().any(|o| o == "rbind"),
                "ro" | "rro" => bind.read_only = Some(option),
                "rw" => bind.read_only = None,
                "slave" | "rslave" => bind.slave = true,
                "shared" | "rshared" => {
                    return Err(format!(
                        "is bound {option}: mounts made in a guest do not reach the host; use rslave or rprivate"
                    ));
                }
                "idmap" | "ridmap" => {
                    return Err("is bound with id mapping, which shares do not support".into());
                }
                _ => {}
            }
        }
        Ok(bind)
    }
}

/// Whether anything is mounted below a host path. `ro` leaves such mounts writable, `rro` does not.
fn has_mounts_below(path: &Path) -> Result<bool> {
    let what = || format!("look for mounts below {}", path.display());
    let path = path.canonicalize().with_context(what)?;
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").with_context(what)?;
    Ok(has_mount_point_below(&path, &mounts))
}

/// Searches a text in the format of mountinfo, proc(5): the fifth field is the mount point, with special
/// characters as octal escapes.
fn has_mount_point_below(path: &Path, mounts: &str) -> bool {
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

/// Shared memory of the pod's own container. It exists as long as the pod, whichever of its containers
/// restarts.
pub fn pod_storages(spec: &Spec) -> Vec<Storage> {
    let mounts = spec.mounts.iter();
    let shared = mounts.filter(|mount| is_shared_memory(mount));
    shared.map(|mount| shared_memory(&mount.source)).collect()
}

/// Whether it shows files of the host.
pub fn is_bind(mount: &Mount) -> bool {
    matches!(mount.kind.as_str(), "bind" | "rbind")
        || mount.options.iter().any(|o| o == "bind" || o == "rbind")
}

/// Whether a mount is the shared memory of the pod: the host's own `/dev/shm` (`hostIPC`), or a tmpfs made
/// for the pod.
fn is_shared_memory(mount: &Mount) -> bool {
    let is_tmpfs = |path: &str| rustix::fs::statfs(path).is_ok_and(|fs| fs.f_type as u64 == TMPFS_MAGIC);
    let source = mount.source.as_str();
    is_bind(mount) && mount.destination == SHARED && (source == SHARED || is_tmpfs(source))
}

/// The shared memory as a storage, of the same size as the host's tmpfs, by which the size is configured.
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
        mount_point: guest_path(SHARED_MEMORY, source),
        ..Default::default()
    }
}

/// A huge page volume with pages of this size in bytes. The limits of its containers determine the number of
/// pages.
fn huge_pages(source: &Path, page: u64) -> Storage {
    Storage {
        driver: "ephemeral".into(),
        source: HUGETLBFS.into(),
        fstype: HUGETLBFS.into(),
        options: vec![format!("pagesize={page}")],
        mount_point: guest_path(HUGE_PAGES, &source.to_string_lossy()),
        ..Default::default()
    }
}

/// The path in the guest that stands for a host path.
fn guest_path(directory: &str, source: &str) -> String {
    format!("{directory}/{}", source.replace('%', "%25").replace('/', "%2F"))
}

fn copy(source: &str, path: String) -> Result<CopiedFile> {
    let what = || format!("read {source}");
    let found = std::fs::metadata(source).with_context(what)?;
    if !found.is_file() || found.len() > MAX_COPIED {
        let why = format!("is not a file of at most {MAX_COPIED} bytes");
        return Err(Error::malformed(Path::new(source), why));
    }
    Ok(CopiedFile {
        path,
        data: std::fs::read(source).with_context(what)?,
        mode: found.mode(),
        uid: found.uid(),
        gid: found.gid(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_below_a_path_is_found_with_any_characters() {
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
            assert_eq!(has_mount_point_below(Path::new(path), mounts), found, "{path}");
        }
    }
}
