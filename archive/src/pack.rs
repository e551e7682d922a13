//! Packs a file or a directory with everything below it as a tar stream (GNU's format).
//!
//! Invariants: no link is followed; only regular files and directories are opened; a file that changes while it is read never makes the
//! stream unreadable. Sockets are left out, as are the contents of file systems that the kernel makes up (`/proc`, `/sys`, cgroups).

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Dir, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;
use tar::{Builder, EntryType, Header};

use crate::contents::Exactly;
use crate::{Error, Result};

/// Most directories within each other; each that is read holds a descriptor.
const MAX_DEPTH: usize = 256;
/// Most files with several names whose first name is remembered. Further ones are packed once for each name.
const MAX_LINKED: usize = 1 << 18;
/// File systems whose files have no contents until they are read: proc, sysfs, cgroup2.
const OF_THE_KERNEL: [i64; 3] = [0x9fa0, 0x6265_6572, 0x6367_7270];

/// Packs what `top` is open on (with `O_PATH`) and all below it. Its entry is called `name`, or `.` for a directory.
///
/// # Errors
/// A file cannot be read, or the stream cannot be written.
pub fn pack(top: OwnedFd, name: &Path, out: &mut dyn Write) -> Result<()> {
    let mut packing = Packing {
        out: Builder::new(out),
        first_names: HashMap::new(),
    };
    let stat = rustix::fs::fstat(&top).map_err(|e| Error::file("read", name, e))?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::Directory && is_of_the_kernel(&top) {
        return Err(Error::Refused(format!(
            "{} is made up by the kernel when it is read, so it has no size to copy: read it with a process, such as cat",
            name.display()
        )));
    }
    let mut levels = Vec::new();
    levels.extend(packing.add(&top, &stat, name)?);
    while let Some(level) = levels.last_mut() {
        let Some(next) = level.directory.read() else {
            levels.pop();
            continue;
        };
        let next = next.map_err(|e| Error::file("list", &level.name, e))?;
        let part = OsStr::from_bytes(next.file_name().to_bytes());
        if part == "." || part == ".." {
            continue;
        }
        let name = level.name.join(part);
        let (object, stat) = match level.open(part) {
            // It was removed meanwhile.
            Err(Errno::NOENT) => continue,
            opened => opened.map_err(|e| Error::file("open", &name, e))?,
        };
        let is_directory = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
        let skipped = is_directory && stat.st_dev != level.device && is_of_the_kernel(&object);
        let below = packing.add(&object, &stat, &name)?;
        if skipped {
            continue;
        }
        if levels.len() == MAX_DEPTH && below.is_some() {
            let what = format!("{} is over {MAX_DEPTH} directories deep", name.display());
            return Err(Error::Refused(what));
        }
        levels.extend(below);
    }
    let finished = packing.out.into_inner();
    finished.map_err(|e| Error::stream(&e)).map(drop)
}

/// A directory that is being read.
struct Level {
    directory: Dir,
    name: PathBuf,
    device: u64,
}

impl Level {
    /// Opens what has this name in it, whatever it is.
    fn open(&self, part: &OsStr) -> Result<(OwnedFd, Stat), Errno> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let object = rustix::fs::openat(self.directory.fd()?, part, flags, Mode::empty())?;
        let stat = rustix::fs::fstat(&object)?;
        Ok((object, stat))
    }
}

struct Packing<'a> {
    out: Builder<&'a mut dyn Write>,
    /// The first name of each file that has several, by its device and inode.
    first_names: HashMap<(u64, u64), PathBuf>,
}

impl Packing<'_> {
    /// Adds an object. Returns the directory that is to be read next, if it is one.
    fn add(&mut self, object: &OwnedFd, stat: &Stat, name: &Path) -> Result<Option<Level>> {
        let kind = FileType::from_raw_mode(stat.st_mode);
        let failed = |doing| move |e: io::Error| Error::file(doing, name, e);
        if kind != FileType::Directory && stat.st_nlink > 1 {
            let key = (stat.st_dev, stat.st_ino);
            if let Some(first) = self.first_names.get(&key).cloned() {
                let link = first.as_os_str().as_bytes();
                let header = header(stat, EntryType::Link);
                return self.put(header, name, link, io::empty()).map(|()| None);
            }
            if self.first_names.len() < MAX_LINKED {
                self.first_names.insert(key, name.to_owned());
            }
        }
        match kind {
            FileType::Directory => {
                let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
                let opened = rustix::fs::openat(object, ".", flags, Mode::empty()).and_then(Dir::new);
                let directory = opened.map_err(|e| Error::file("open", name, e))?;
                self.put(header(stat, EntryType::Directory), name, b"", io::empty())?;
                let (name, device) = (name.to_owned(), stat.st_dev);
                return Ok(Some(Level {
                    directory,
                    name,
                    device,
                }));
            }
            FileType::RegularFile => {
                // Opens the same file that was looked at.
                let file = File::open(format!("/proc/self/fd/{}", object.as_raw_fd()));
                self.add_file(file.map_err(failed("open"))?, stat, name)?;
            }
            FileType::Symlink => {
                let target = rustix::fs::readlinkat(object, "", Vec::new());
                let target = target.map_err(|e| Error::file("read", name, e))?;
                self.put(
                    header(stat, EntryType::Symlink),
                    name,
                    target.as_bytes(),
                    io::empty(),
                )?;
            }
            FileType::CharacterDevice => self.add_device(stat, EntryType::Char, name)?,
            FileType::BlockDevice => self.add_device(stat, EntryType::Block, name)?,
            FileType::Fifo => self.put(header(stat, EntryType::Fifo), name, b"", io::empty())?,
            FileType::Socket | FileType::Unknown => {}
        }
        Ok(None)
    }

    fn add_file(&mut self, mut file: File, stat: &Stat, name: &Path) -> Result<()> {
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        if stat.st_blocks.saturating_mul(512) >= stat.st_size {
            let mut header = header(stat, EntryType::Regular);
            header.set_size(size);
            let contents = Exactly {
                file: &file,
                left: size,
            };
            return self.put(header, name, b"", contents);
        }
        // The tar crate finds the holes and leaves them out. It does not notice a change meanwhile.
        self.out
            .append_file(name, &mut file)
            .map_err(|e| Error::file("copy", name, e))?;
        let now = rustix::fs::fstat(&file).map_err(|e| Error::file("read", name, e))?;
        match (now.st_size, now.st_mtime, now.st_mtime_nsec)
            == (stat.st_size, stat.st_mtime, stat.st_mtime_nsec)
        {
            true => Ok(()),
            false => Err(Error::Refused(format!(
                "{} changed while it was read",
                name.display()
            ))),
        }
    }

    fn add_device(&mut self, stat: &Stat, kind: EntryType, name: &Path) -> Result<()> {
        let mut header = header(stat, kind);
        let (major, minor) = (rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev));
        header
            .set_device_major(major)
            .and_then(|()| header.set_device_minor(minor))
            .map_err(|e| Error::file("copy", name, e))?;
        self.put(header, name, b"", io::empty())
    }

    /// Writes an entry. Names and targets are bytes, as the file system has them; what is longer than its field goes before the entry.
    fn put(&mut self, mut header: Header, name: &Path, link: &[u8], contents: impl Read) -> Result<()> {
        let mut bytes = name.as_os_str().as_bytes().to_vec();
        if header.entry_type() == EntryType::Directory {
            bytes.push(b'/');
        }
        let written = self.put_long(b'L', &bytes).and_then(|()| {
            self.put_long(b'K', link)?;
            let fields = header.as_old_mut();
            copy(&mut fields.name, &bytes);
            copy(&mut fields.linkname, link);
            header.set_cksum();
            self.out.append(&header, contents)
        });
        written.map_err(|e| Error::file("copy", name, e))
    }

    /// GNU's extension for a name that does not fit.
    fn put_long(&mut self, kind: u8, name: &[u8]) -> io::Result<()> {
        let mut header = Header::new_gnu();
        if name.len() <= header.as_old().name.len() {
            return Ok(());
        }
        copy(&mut header.as_old_mut().name, b"././@LongLink");
        header.set_entry_type(EntryType::new(kind));
        header.set_mode(0o644);
        header.set_size(name.len() as u64 + 1);
        header.set_cksum();
        self.out.append(&header, name.chain(&b"\0"[..]))
    }
}

fn copy(field: &mut [u8], bytes: &[u8]) {
    let length = bytes.len().min(field.len());
    field[..length].copy_from_slice(&bytes[..length]);
}

fn header(stat: &Stat, kind: EntryType) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(stat.st_mode & 0o7777);
    header.set_uid(stat.st_uid.into());
    header.set_gid(stat.st_gid.into());
    header.set_mtime(u64::try_from(stat.st_mtime).unwrap_or(0));
    header.set_size(0);
    header
}

/// Whether an open file is on a file system that the kernel makes up: proc, sysfs or cgroup2.
pub fn is_of_the_kernel(object: impl AsFd) -> bool {
    rustix::fs::fstatfs(object).is_ok_and(|of| OF_THE_KERNEL.contains(&of.f_type))
}
