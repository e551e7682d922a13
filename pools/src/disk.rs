//! The writable layer: a preformatted ext4 for the guest's `/dev/vda`.
//!
//! `mkfs.ext4` runs once per size; its result is kept as a template, and each sandbox gets a clone of it: FICLONE if the file system has
//! it, else a copy of the template's data extents. Invariant: a clone never has a name, so a killed owner leaves nothing on the host.
//!
//! The template has no journal, because the disk dies with its sandbox. Nothing is initialised lazily, so the guest does no background
//! work for it. A mounted disk can be grown: a disk of any size is one of a few sizes with more room behind it ([`Disk::enlarge`]).

use std::fs::{self, File, OpenOptions};
use std::io;
use std::num::NonZero;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::fs::{Advice, FlockOperation, Mode, OFlags, SeekFrom};

use crate::Error;
use crate::resource::{Kind, Unfit};
use thaw_failpoint::{Failpoint, reach};
use thaw_protocol::disk_layer;

/// Must change when the arguments of `mkfs.ext4` below change, so that an old template is not taken for a new one.
const RECIPE: u32 = 2;

/// A formatted, never mounted filesystem to clone from.
#[derive(Debug)]
pub struct DiskTemplate {
    file: File,
    directory: PathBuf,
    size: u64,
}

/// One sandbox's disk.
#[derive(Debug)]
pub struct Disk {
    /// An unlinked regular file, open for reading and writing: all of the disk, or its layer over `base`.
    pub file: OwnedFd,
    /// The disk below, if `file` is a layer ([`disk_layer`]). It is open for reading; several sandboxes may share it, and nobody writes to it.
    pub base: Option<OwnedFd>,
    /// Bytes, as the guest sees it.
    pub size: u64,
}

impl Disk {
    /// A disk in another unlinked file, such as that of a snapshot.
    pub fn of(file: OwnedFd) -> io::Result<Disk> {
        let size = rustix::fs::fstat(&file)?.st_size as u64;
        Ok(Disk {
            file,
            base: None,
            size,
        })
    }

    /// A disk of a base and an unlinked file that is a layer over it. An empty file becomes one.
    pub fn layered(base: OwnedFd, file: OwnedFd) -> io::Result<Disk> {
        let size = rustix::fs::fstat(&base)?.st_size as u64;
        if rustix::fs::fstat(&file)?.st_size == 0 {
            rustix::fs::ftruncate(&file, disk_layer::file_bytes(size))?;
        }
        Ok(Disk {
            file,
            base: Some(base),
            size,
        })
    }

    /// The same disk, with descriptors of its own.
    pub fn try_clone(&self) -> io::Result<Disk> {
        Ok(Disk {
            file: self.file.try_clone()?,
            base: self.base.as_ref().map(OwnedFd::try_clone).transpose()?,
            size: self.size,
        })
    }

    /// Makes the file `size` bytes long if it is shorter. The file system on it still has its old size.
    ///
    /// # Errors
    /// It has a base. The file cannot become so long.
    pub fn enlarge(&mut self, size: u64) -> io::Result<()> {
        if size > self.size {
            if self.base.is_some() {
                return Err(io::ErrorKind::Unsupported.into());
            }
            rustix::fs::ftruncate(&self.file, size)?;
            self.size = size;
        }
        Ok(())
    }
}

/// The kind of resource: disks under one directory, requested by their size in bytes.
#[derive(Debug)]
pub struct Disks {
    /// Holds the templates and the disks cloned from them.
    pub directory: PathBuf,
}

impl Kind for Disks {
    const NAME: &'static str = "disk";
    type Want = u64;
    type Resource = Disk;
    type Error = Error;

    fn make(&self, size: &u64) -> Result<Disk, Error> {
        DiskTemplate::open_or_make(&self.directory, *size)?.make()
    }

    fn check(&self, disk: &Disk) -> Result<(), Unfit> {
        let expected = match disk.base {
            Some(_) => disk_layer::file_bytes(disk.size),
            None => disk.size,
        };
        match rustix::fs::fstat(&disk.file) {
            Ok(stat) if stat.st_size as u64 != expected => Err(Unfit(format!(
                "the disk has {} bytes instead of {expected}",
                stat.st_size
            ))),
            Ok(stat) if stat.st_nlink != 0 => Err(Unfit("the disk has a name".into())),
            Ok(_) => Ok(()),
            Err(e) => Err(Unfit(format!("cannot look at the disk: {e}"))),
        }
    }

    fn destroy(&self, disk: Disk) {
        // It has no name: the kernel frees it with its last descriptor.
        drop(disk);
    }
}

impl DiskTemplate {
    /// Opens the template of `size` bytes in `directory`, and creates both if they are missing. Concurrent callers wait for one another;
    /// a template that a killed caller left incomplete is made again.
    pub fn open_or_make(directory: &Path, size: u64) -> Result<DiskTemplate, Error> {
        fs::create_dir_all(directory).map_err(Error::io("create", directory))?;
        reach(Failpoint::DiskDirectoryMade);
        let path = directory.join(format!("ext4-{RECIPE}-{size}.template"));
        if let Some(file) = open_existing(&path)? {
            return Ok(DiskTemplate {
                file,
                directory: directory.to_owned(),
                size,
            });
        }
        let lock = File::open(directory).map_err(Error::io("open", directory))?;
        rustix::fs::flock(&lock, FlockOperation::LockExclusive)
            .map_err(|e| Error::io("lock", directory)(e.into()))?;
        let file = match open_existing(&path)? {
            Some(made_meanwhile) => made_meanwhile,
            None => {
                let partial = path.with_extension("partial");
                let made = format(&partial, size).and_then(|()| {
                    reach(Failpoint::DiskTemplateFormatted);
                    fs::rename(&partial, &path).map_err(Error::io("rename", &partial))
                });
                if let Err(e) = made {
                    let _ = fs::remove_file(&partial);
                    return Err(e);
                }
                reach(Failpoint::DiskTemplateMade);
                File::open(&path).map_err(Error::io("open", &path))?
            }
        };
        Ok(DiskTemplate {
            file,
            directory: directory.to_owned(),
            size,
        })
    }

    /// Clones one disk.
    pub fn make(&self) -> Result<Disk, Error> {
        let file = nameless_file(&self.directory)?;
        match rustix::fs::ioctl_ficlone(&file, &self.file) {
            Ok(()) => warm(&file, self.size).map_err(Error::io("read ahead a disk in", &self.directory))?,
            Err(_) => copy_sparse(&self.file, &file, self.size)
                .map_err(Error::io("copy a disk into", &self.directory))?,
        }
        reach(Failpoint::DiskMade);
        Ok(Disk {
            file: file.into(),
            base: None,
            size: self.size,
        })
    }
}

fn open_existing(path: &Path) -> Result<Option<File>, Error> {
    match File::open(path) {
        Ok(file) => Ok(Some(file)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(Error::io("open", path)(e)),
    }
}

fn format(path: &Path, size: u64) -> Result<(), Error> {
    let file = File::create(path).map_err(Error::io("create", path))?;
    reach(Failpoint::DiskTemplateBegun);
    file.set_len(size).map_err(Error::io("size", path))?;
    drop(file);
    let output = Command::new("mkfs.ext4")
        .env(
            "PATH",
            "/usr/sbin:/sbin:/usr/bin:/bin:/usr/local/sbin:/usr/local/bin",
        )
        .args(["-q", "-F", "-b", "4096", "-m", "0"])
        // Not sparse_super2: the kernel grows no such file system. Without resize_inode it keeps the descriptors of new
        // groups in those (meta_bg), so nothing is reserved here for a growth that may never come.
        .args(["-O", "^has_journal,^resize_inode"])
        // The file is all holes, so the inode tables are already zero: say so instead of writing them or leaving it to
        // the guest's ext4lazyinit thread. Metadata packed together keeps the template to few extents.
        .args([
            "-E",
            "lazy_itable_init=0,assume_storage_prezeroed=1,nodiscard,packed_meta_blocks=1,root_owner=0:0",
        ])
        .arg(path)
        .stdin(Stdio::null())
        .output()
        .map_err(|e| match e.kind() {
            io::ErrorKind::NotFound => Error::ProgramMissing {
                program: "mkfs.ext4",
                package: "e2fsprogs",
            },
            _ => Error::System {
                what: "run mkfs.ext4",
                source: e,
            },
        })?;
    if !output.status.success() {
        return Err(Error::ProgramFailed {
            program: "mkfs.ext4",
            status: output.status,
            message: format!(
                "cannot format {}: {}",
                path.display(),
                String::from_utf8_lossy(&output.stderr).trim()
            ),
        });
    }
    Ok(())
}

/// A file in `directory` without a name: `O_TMPFILE`, or if the file system lacks that, a file that is unlinked before anything is
/// written.
fn nameless_file(directory: &Path) -> Result<File, Error> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    if let Ok(fd) = rustix::fs::open(directory, flags, Mode::RUSR | Mode::WUSR) {
        return Ok(fd.into());
    }
    let path = directory.join(format!(
        "disk-{}-{:?}.tmp",
        std::process::id(),
        std::thread::current().id()
    ));
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&path)
        .map_err(Error::io("create", &path))?;
    fs::remove_file(&path).map_err(Error::io("unlink", &path))?;
    Ok(file)
}

/// Copies the data extents of `from` and keeps its holes. The copied data is then in the page cache.
fn copy_sparse(from: &File, to: &File, size: u64) -> io::Result<()> {
    to.set_len(size)?;
    each_extent(from, size, |start, end| copy_range(from, to, start, end))
}

/// Reads the data extents into the page cache: a new file system's metadata, which its mount and first files read.
fn warm(file: &File, size: u64) -> io::Result<()> {
    each_extent(file, size, |start, end| {
        let length = NonZero::new(end - start);
        Ok(rustix::fs::fadvise(file, start, length, Advice::WillNeed)?)
    })
}

/// Calls `with` for the start and end of each data extent.
fn each_extent(file: &File, size: u64, with: impl Fn(u64, u64) -> io::Result<()>) -> io::Result<()> {
    let mut at = 0;
    while at < size {
        let start = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(start) => start,
            Err(rustix::io::Errno::NXIO) => break,
            Err(e) => return Err(e.into()),
        };
        let end = rustix::fs::seek(file, SeekFrom::Hole(start))?.min(size);
        with(start, end)?;
        at = end;
    }
    Ok(())
}

fn copy_range(from: &File, to: &File, start: u64, end: u64) -> io::Result<()> {
    let (mut read_at, mut write_at) = (start, start);
    while read_at < end {
        let left = usize::try_from(end - read_at).unwrap_or(usize::MAX);
        match rustix::fs::copy_file_range(from, Some(&mut read_at), to, Some(&mut write_at), left) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{FileExt, MetadataExt};

    const SIZE: u64 = 1 << 30;

    fn have_mkfs() -> bool {
        let have = ["/usr/sbin/mkfs.ext4", "/sbin/mkfs.ext4"]
            .iter()
            .any(|p| Path::new(p).exists());
        if !have {
            thaw_test_skip::skip("mkfs.ext4 is not installed");
        }
        have
    }

    #[test]
    fn disks_are_sound_separate_and_unlinked() {
        if !have_mkfs() {
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let template = DiskTemplate::open_or_make(directory.path(), SIZE).unwrap();
        let (a, b) = (template.make().unwrap(), template.make().unwrap());
        let (a, b) = (File::from(a.file), File::from(b.file));
        assert_eq!(a.metadata().unwrap().len(), SIZE);
        assert_eq!(a.metadata().unwrap().nlink(), 0);
        assert!(
            a.metadata().unwrap().blocks() * 512 < 8 << 20,
            "a disk costs its metadata, not its size"
        );

        a.write_at(b"only in a", SIZE / 2).unwrap();
        let mut seen = [1u8; 9];
        b.read_exact_at(&mut seen, SIZE / 2).unwrap();
        assert_eq!(seen, [0; 9]);

        let check = Command::new("/usr/sbin/e2fsck")
            .args([
                "-f",
                "-n",
                &format!(
                    "/proc/{}/fd/{}",
                    std::process::id(),
                    std::os::fd::AsRawFd::as_raw_fd(&b)
                ),
            ])
            .output();
        if let Ok(check) = check {
            assert!(
                check.status.success(),
                "{}",
                String::from_utf8_lossy(&check.stdout)
            );
        }
        drop((a, b));
        let names: Vec<_> = fs::read_dir(directory.path())
            .unwrap()
            .map(|e| e.unwrap().file_name())
            .collect();
        assert_eq!(names.len(), 1, "only the template has a name: {names:?}");
    }

    #[test]
    fn disk_is_enlarged_and_never_shrunk() {
        let directory = tempfile::tempdir().unwrap();
        let file = nameless_file(directory.path()).unwrap();
        file.set_len(4096).unwrap();
        let mut disk = Disk::of(file.into()).unwrap();
        disk.enlarge(1000).unwrap();
        assert_eq!(disk.size, 4096);
        disk.enlarge(1 << 40).unwrap();
        assert_eq!(
            (disk.size, rustix::fs::fstat(&disk.file).unwrap().st_size),
            (1 << 40, 1 << 40)
        );
    }

    #[test]
    fn empty_file_becomes_a_layer_and_keeps_its_size() {
        let directory = tempfile::tempdir().unwrap();
        let [base, file] = [(); 2].map(|()| nameless_file(directory.path()).unwrap());
        base.set_len(1 << 20).unwrap();
        let mut disk = Disk::layered(base.into(), file.into()).unwrap();
        assert_eq!(disk.size, 1 << 20);
        let length = rustix::fs::fstat(&disk.file).unwrap().st_size as u64;
        assert_eq!(length, disk_layer::file_bytes(1 << 20));
        let disks = Disks {
            directory: directory.path().into(),
        };
        disks.check(&disk).unwrap();
        assert_eq!(
            disk.enlarge(2 << 20).unwrap_err().kind(),
            io::ErrorKind::Unsupported
        );
        rustix::fs::ftruncate(&disk.file, length - 1).unwrap();
        disks.check(&disk).unwrap_err();
    }

    #[test]
    fn changed_disk_is_unfit() {
        if !have_mkfs() {
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let source = crate::pool::Pool::empty(Disks {
            directory: directory.path().into(),
        });
        let [fit, unfit] = [(); 2].map(|()| source.claim(&SIZE).unwrap().resource);
        File::from(unfit.file.try_clone().unwrap())
            .set_len(SIZE / 2)
            .unwrap();
        source.kind().check(&fit).unwrap();
        source.kind().check(&unfit).unwrap_err();
    }

    #[test]
    fn incomplete_disk_template_is_made_again() {
        if !have_mkfs() {
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        fs::write(
            directory.path().join(format!("ext4-{RECIPE}-{SIZE}.partial")),
            b"torn",
        )
        .unwrap();
        DiskTemplate::open_or_make(directory.path(), SIZE)
            .unwrap()
            .make()
            .unwrap();
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn sparse_copy_equals_its_source_and_keeps_holes() {
        let directory = tempfile::tempdir().unwrap();
        let from = nameless_file(directory.path()).unwrap();
        from.set_len(64 << 20).unwrap();
        from.write_at(b"first", 0).unwrap();
        from.write_at(b"middle", 33 << 20).unwrap();
        let to = nameless_file(directory.path()).unwrap();
        copy_sparse(&from, &to, 64 << 20).unwrap();
        warm(&to, 64 << 20).unwrap();
        let mut bytes = vec![0; 6];
        to.read_exact_at(&mut bytes, 33 << 20).unwrap();
        assert_eq!(bytes, b"middle");
        assert_eq!(to.metadata().unwrap().len(), 64 << 20);
        assert!(to.metadata().unwrap().blocks() * 512 < 1 << 20);
    }
}
