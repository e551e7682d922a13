//! Unpacks a tar stream below a directory.
//!
//! Invariants: nothing outside the [`Root`] is read or written, whatever names and links the archive has and whatever changes there
//! meanwhile; a file that exists is replaced, never written to; a directory is never replaced by something else, nor the reverse.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Timespec, Timestamps, Uid};
use rustix::io::Errno;
use tar::{Archive, Entry, EntryType};

use crate::bounded::bounded;
use crate::{Error, Result, Root, contents, entry_name};

/// Most directories whose mode and time are set at the end.
const MAX_DIRECTORIES: usize = 1 << 20;
/// Largest sparse file, bytes: a few bytes can claim any size, and its holes take time to skip.
const MAX_SPARSE: u64 = 1 << 40;
/// The mode of directories that the archive implies.
const IMPLIED: Mode = Mode::from_raw_mode(0o755);

/// What an archive may do.
#[derive(Clone, Debug)]
pub struct Unpacking {
    /// Give files the owners that the archive names. Otherwise they belong to this process's user.
    pub keep_owner: bool,
    /// Make device nodes, and keep set-user-ID and set-group-ID bits. Not for an archive that another party made.
    pub trusted: bool,
    /// Accept only this name and names below it.
    pub only: Option<OsString>,
}

/// Unpacks a stream below the directory `below` of a root. Reads it to its end.
///
/// # Errors
/// The archive is damaged or has something that may not be unpacked, or a file cannot be written. What was unpacked before stays.
pub fn unpack(root: Root<'_>, below: &Path, from: impl Read, how: &Unpacking) -> Result<()> {
    let (reader, budget) = bounded(from);
    let mut archive = Archive::new(reader);
    let mut place = Place {
        root,
        below,
        how,
        directories: Vec::new(),
        parent: None,
    };
    let mut entries = archive.entries().map_err(|e| Error::stream(&e))?;
    loop {
        budget.for_headers();
        let Some(entry) = entries.next() else { break };
        let mut entry = entry.map_err(|e| Error::stream(&e))?;
        budget.for_contents();
        place.put(&mut entry)?;
        // So that the budget for headers pays for headers only.
        io::copy(&mut entry, &mut io::sink()).map_err(|e| Error::stream(&e))?;
    }
    budget.for_contents();
    io::copy(&mut archive.into_inner(), &mut io::sink()).map_err(|e| Error::stream(&e))?;
    place.finish()
}

/// The owner, mode and time of an entry.
#[derive(Clone, Copy)]
struct Attributes {
    mode: Mode,
    owner: Option<(Uid, Gid)>,
    /// Seconds since 1970.
    modified: i64,
}

impl Attributes {
    /// The time of the last change. That of the last access stays.
    fn times(self) -> Timestamps {
        let at = |tv_sec, tv_nsec| Timespec { tv_sec, tv_nsec };
        Timestamps {
            last_access: at(0, rustix::fs::UTIME_OMIT),
            last_modification: at(self.modified, 0),
        }
    }
}

/// Where one entry goes.
#[derive(Clone, Copy)]
struct Spot<'a> {
    /// The whole name, below the archive's directory.
    path: &'a Path,
    directory: BorrowedFd<'a>,
    name: &'a OsStr,
}

impl Spot<'_> {
    fn remove(self) -> Result<(), Errno> {
        rustix::fs::unlinkat(self.directory, self.name, AtFlags::empty())
    }

    fn make_node(self, kind: FileType, device: u64) -> Result<()> {
        let mode = Mode::from_raw_mode(0o600);
        let made = rustix::fs::mknodat(self.directory, self.name, kind, mode, device);
        made.map_err(|e| Error::file("make", self.path, e))
    }
}

/// Where the archive goes.
struct Place<'a> {
    root: Root<'a>,
    below: &'a Path,
    how: &'a Unpacking,
    /// Their modes are set last: one may forbid to write into them, and writing changes their time.
    directories: Vec<(PathBuf, Attributes)>,
    /// The directory of the last entry: the next is often in it too.
    parent: Option<(PathBuf, OwnedFd)>,
}

impl Place<'_> {
    fn put(&mut self, entry: &mut Entry<'_, impl Read>) -> Result<()> {
        let path = entry_name::relative(&entry.path_bytes())?;
        let kind = entry.header().entry_type();
        if kind == EntryType::XGlobalHeader {
            return Ok(());
        }
        self.accept(&path)?;
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
            return match kind {
                EntryType::Directory => Ok(()),
                _ => Err(Error::Refused(
                    "the archive's top entry is not a directory".into(),
                )),
            };
        };
        refuse_pax_sparse(entry, &path)?;
        let attributes = self.attributes(entry)?;
        let directory = self.take_parent(parent)?;
        let spot = Spot {
            path: &path,
            directory: directory.as_fd(),
            name,
        };
        let put = self.put_at(entry, spot, attributes);
        self.parent = Some((parent.to_owned(), directory));
        put
    }

    /// Checks that this archive may have the name.
    fn accept(&self, path: &Path) -> Result<()> {
        match &self.how.only {
            Some(only) if path.components().next().map(|c| c.as_os_str()) != Some(only) => {
                let (path, only) = (path.display(), only.display());
                Err(Error::Refused(format!(
                    "the archive has the name {path}, which is not part of {only}"
                )))
            }
            _ => Ok(()),
        }
    }

    fn attributes(&self, entry: &Entry<'_, impl Read>) -> Result<Attributes> {
        let header = entry.header();
        let number = |value: io::Result<u64>| {
            let value = value.map_err(|e| Error::stream(&e))?;
            let fits = u32::try_from(value).ok().filter(|id| *id != u32::MAX);
            fits.ok_or_else(|| Error::Refused(format!("the archive has an owner of number {value}")))
        };
        let owner = match self.how.keep_owner {
            true => Some((
                Uid::from_raw(number(header.uid())?),
                Gid::from_raw(number(header.gid())?),
            )),
            false => None,
        };
        let mode = header.mode().map_err(|e| Error::stream(&e))?;
        let most = if self.how.trusted { 0o7777 } else { 0o1777 };
        Ok(Attributes {
            mode: Mode::from_raw_mode(mode & most),
            owner,
            modified: i64::try_from(header.mtime().unwrap_or(0)).unwrap_or(0),
        })
    }

    fn put_at(
        &mut self,
        entry: &mut Entry<'_, impl Read>,
        spot: Spot<'_>,
        attributes: Attributes,
    ) -> Result<()> {
        let kind = entry.header().entry_type();
        make_room(spot, kind == EntryType::Directory)?;
        match kind {
            EntryType::Directory => return self.put_directory(spot, attributes),
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
                return put_file(entry, spot, attributes);
            }
            EntryType::Link => return self.put_link(entry, spot),
            EntryType::Symlink => {
                let target = entry.link_name_bytes().unwrap_or_default();
                let made = rustix::fs::symlinkat(OsStr::from_bytes(&target), spot.directory, spot.name);
                made.map_err(|e| Error::file("make", spot.path, e))?;
            }
            EntryType::Fifo => spot.make_node(FileType::Fifo, 0)?,
            EntryType::Char | EntryType::Block => self.put_device(entry, spot)?,
            other => {
                return Err(Error::Refused(format!(
                    "{}: the archive has an entry of type {:?}",
                    spot.path.display(),
                    char::from(other.as_byte())
                )));
            }
        }
        set_without_following(spot, attributes, kind != EntryType::Symlink)
    }

    fn put_directory(&mut self, spot: Spot<'_>, attributes: Attributes) -> Result<()> {
        match rustix::fs::mkdirat(spot.directory, spot.name, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(e) => return Err(Error::file("make", spot.path, e)),
        }
        if self.directories.len() == MAX_DIRECTORIES {
            let what = format!("the archive has more than {MAX_DIRECTORIES} directories");
            return Err(Error::Refused(what));
        }
        self.directories.push((spot.path.to_owned(), attributes));
        Ok(())
    }

    fn put_device(&self, entry: &Entry<'_, impl Read>, spot: Spot<'_>) -> Result<()> {
        if !self.how.trusted {
            return Err(Error::Refused(format!(
                "{} is a device: an archive from elsewhere may make none here",
                spot.path.display()
            )));
        }
        let header = entry.header();
        let numbers = header
            .device_major()
            .and_then(|major| Ok((major, header.device_minor()?)));
        let (major, minor) = numbers.map_err(|e| Error::stream(&e))?;
        let device = rustix::fs::makedev(major.unwrap_or(0), minor.unwrap_or(0));
        let kind = match header.entry_type() {
            EntryType::Char => FileType::CharacterDevice,
            _ => FileType::BlockDevice,
        };
        spot.make_node(kind, device)
    }

    fn put_link(&self, entry: &Entry<'_, impl Read>, spot: Spot<'_>) -> Result<()> {
        let target = entry_name::relative(&entry.link_name_bytes().unwrap_or_default())?;
        self.accept(&target)?;
        let (Some(holder), Some(last)) = (target.parent(), target.file_name()) else {
            let what = format!("{} is a hard link to the archive's top", spot.path.display());
            return Err(Error::Refused(what));
        };
        let holder = self.root.open(
            &self.below.join(holder),
            OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW,
        );
        let link = |holder| rustix::fs::linkat(holder, last, spot.directory, spot.name, AtFlags::empty());
        let linked = holder.and_then(link);
        linked.map_err(|e| Error::file("make the hard link", spot.path, e))
    }

    /// Opens the directory of an entry, and makes it first if the archive only implies it.
    fn take_parent(&mut self, parent: &Path) -> Result<OwnedFd> {
        match self.parent.take() {
            Some((path, opened)) if path == parent => return Ok(opened),
            _ => {}
        }
        let at = self.below.join(parent);
        let open = || self.root.open(&at, OFlags::PATH | OFlags::DIRECTORY);
        match open() {
            Err(Errno::NOENT) => {}
            opened => return opened.map_err(|e| Error::file("open the directory", parent, e)),
        }
        let mut made = PathBuf::new();
        for part in parent.components() {
            let holder = self
                .root
                .open(&self.below.join(&made), OFlags::PATH | OFlags::DIRECTORY);
            let holder = holder.map_err(|e| Error::file("open the directory", &made, e))?;
            made.push(part);
            match rustix::fs::mkdirat(&holder, part.as_os_str(), IMPLIED) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(e) => return Err(Error::file("make", &made, e)),
            }
        }
        open().map_err(|e| Error::file("open the directory", parent, e))
    }

    /// Sets what the directories are to have, the innermost first.
    fn finish(self) -> Result<()> {
        for (path, attributes) in self.directories.iter().rev() {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW;
            let opened = self.root.open(&self.below.join(path), flags);
            let set = opened.and_then(|directory| set(directory, attributes));
            set.map_err(|e| Error::file("set the mode of", path, e))?;
        }
        Ok(())
    }
}

/// Removes what has the name of a new entry. A directory stays for a directory.
fn make_room(spot: Spot<'_>, is_directory: bool) -> Result<()> {
    let there = match rustix::fs::statat(spot.directory, spot.name, AtFlags::SYMLINK_NOFOLLOW) {
        Err(Errno::NOENT) => return Ok(()),
        other => other.map_err(|e| Error::file("look at", spot.path, e))?,
    };
    let was_directory = FileType::from_raw_mode(there.st_mode) == FileType::Directory;
    let path_text = spot.path.display();
    match (was_directory, is_directory) {
        (true, true) => Ok(()),
        (true, false) => Err(Error::Refused(format!(
            "{path_text} is a directory, which is not replaced by a file"
        ))),
        (false, true) => Err(Error::Refused(format!(
            "{path_text} is a file or a link, which is not replaced by a directory"
        ))),
        (false, false) => spot.remove().map_err(|e| Error::file("replace", spot.path, e)),
    }
}

/// Writes a regular file. One that is not complete is removed again.
fn put_file(entry: &mut Entry<'_, impl Read>, spot: Spot<'_>, attributes: Attributes) -> Result<()> {
    let path = spot.path;
    let size = entry.size();
    if entry.header().entry_type() == EntryType::GNUSparse && size > MAX_SPARSE {
        return Err(Error::Refused(format!(
            "{} is a sparse file of {size} bytes, more than {MAX_SPARSE}",
            path.display()
        )));
    }
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let opened = rustix::fs::openat(spot.directory, spot.name, flags, Mode::RUSR | Mode::WUSR);
    let file = File::from(opened.map_err(|e| Error::file("make", path, e))?);
    let written = contents::write(&file, size, entry).map_err(|e| match e.kind() {
        io::ErrorKind::UnexpectedEof => Error::Refused(format!("the archive ends within {}", path.display())),
        _ => Error::file("write", path, e),
    });
    let written =
        written.and_then(|()| set(&file, &attributes).map_err(|e| Error::file("set the mode of", path, e)));
    if written.is_err() {
        // The first error says more.
        let _ = spot.remove();
    }
    written
}

/// The owner comes first: a change of it clears the set-user-ID bit.
fn set(file: impl AsFd, attributes: &Attributes) -> Result<(), Errno> {
    let file = file.as_fd();
    if let Some((uid, gid)) = attributes.owner {
        rustix::fs::fchown(file, Some(uid), Some(gid))?;
    }
    rustix::fs::fchmod(file, attributes.mode)?;
    rustix::fs::futimens(file, &attributes.times())
}

/// The same for what is not opened: links, devices and FIFOs.
fn set_without_following(spot: Spot<'_>, attributes: Attributes, has_mode: bool) -> Result<()> {
    let flags = AtFlags::SYMLINK_NOFOLLOW;
    let set = || {
        if let Some((uid, gid)) = attributes.owner {
            rustix::fs::chownat(spot.directory, spot.name, Some(uid), Some(gid), flags)?;
        }
        if has_mode {
            set_mode(spot, attributes.mode)?;
        }
        rustix::fs::utimensat(spot.directory, spot.name, &attributes.times(), flags)
    };
    set().map_err(|e| Error::file("set the owner of", spot.path, e))
}

/// Changes the mode of a node that is not opened, through `/proc`: `fchmodat` itself follows links.
fn set_mode(spot: Spot<'_>, mode: Mode) -> Result<(), Errno> {
    use std::os::fd::AsRawFd;

    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let node = rustix::fs::openat(spot.directory, spot.name, flags, Mode::empty())?;
    let itself = format!("/proc/self/fd/{}", node.as_raw_fd());
    if FileType::from_raw_mode(rustix::fs::fstat(&node)?.st_mode) == FileType::Symlink {
        return Ok(());
    }
    rustix::fs::chmod(itself, mode)
}

/// GNU tar's newer sparse format hides the map in the contents, which this reader would write to the file.
fn refuse_pax_sparse(entry: &mut Entry<'_, impl Read>, path: &Path) -> Result<()> {
    let Some(extensions) = entry.pax_extensions().map_err(|e| Error::stream(&e))? else {
        return Ok(());
    };
    for extension in extensions {
        let extension = extension.map_err(|e| Error::stream(&e))?;
        if extension.key_bytes().starts_with(b"GNU.sparse.") {
            return Err(Error::Refused(format!(
                "{} is a sparse file in the PAX format, which is not supported: make the archive with tar --format=gnu",
                path.display()
            )));
        }
    }
    Ok(())
}
