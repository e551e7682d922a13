//! The directories of one watch, and what inotify(7) tells of them.
//!
//! Invariants: below the watched directory no link is followed, nothing but directories is opened, and file systems that the kernel makes
//! up (`/proc`, `/sys`, cgroups) are left out. At most [`MAX_DIRECTORIES`] are watched; a path has at most [`MAX_PATH`] bytes and a file's
//! name. A directory that cannot be watched shows as OVERFLOW. What a new directory contains is created once, whether it is found when the
//! directory is or told by the kernel afterwards.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use rustix::fs::{Dir, FileType, OFlags};
use rustix::io::Errno;
use thaw_archive::{Links, Root, is_of_the_kernel};
use thaw_protocol::agent::files::file_event::Kind;

use super::queue::Queue;
use crate::container::files::{UPLOAD_PREFIX, resolve};
use crate::error::{Error, Result, WithContext};

/// Most watched directories below the first.
const MAX_DIRECTORIES: usize = 4096;
/// Longest path of a directory, relative to the watched one, bytes.
const MAX_PATH: usize = 4096;
/// Most files in new directories whose event by the kernel is awaited. Further ones may be told twice.
const MAX_FOUND: usize = 4096;
/// Bytes read from the kernel at once: at most 1024 events.
const BUFFER: usize = 16 << 10;
/// The name of the watched directory itself.
const ITSELF: &[u8] = b".";

/// A file: the watch descriptor of its directory, and its name in that directory.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    directory: i32,
    name: Vec<u8>,
}

/// An event of the kernel.
#[derive(Debug)]
struct Told {
    directory: i32,
    what: ReadFlags,
    /// Connects the two events of a rename.
    cookie: u32,
    /// `None`: of the directory itself.
    name: Option<Vec<u8>>,
}

/// What counts as created of what is found in a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Created {
    Nothing,
    /// Directories that are not watched yet, with all that is in them.
    Unwatched,
    All,
}

/// The directories of one watch.
#[derive(Debug)]
pub struct Tree {
    inotify: OwnedFd,
    /// The container's root, and the watched directory's path below it. The directory itself is not held open, because the kernel
    /// would not tell of its removal.
    root: OwnedFd,
    path: PathBuf,
    /// The device and inode of the watched directory.
    identity: (u64, u64),
    top_id: i32,
    recursive: bool,
    /// The directories below the top, by watch descriptor.
    directories: BTreeMap<i32, Place>,
    /// A directory that was just renamed, with the cookie of its new name's event. If another event comes first, it has left the tree.
    moved: Option<(u32, i32)>,
    /// Files that were found in new directories, until the kernel's queue is empty.
    found: BTreeSet<Place>,
    pub queue: Queue,
    ended: Option<&'static str>,
}

impl Tree {
    /// Watches the directory at a path, and with `recursive` the directories below it.
    pub fn watch(root: OwnedFd, path: &Path, recursive: bool) -> Result<Tree> {
        let shown = path.display();
        let top = resolve(root.as_fd(), path, OFlags::DIRECTORY)?;
        let identity = identity(&top).map_err(|e| refused(&shown, e))?;
        let flags = CreateFlags::CLOEXEC | CreateFlags::NONBLOCK;
        let inotify = inotify::init(flags).with_context(|| "begin to watch files".into())?;
        let top_id = add(&inotify, &top).map_err(|e| refused(&shown, e))?;
        let mut tree = Tree {
            inotify,
            root,
            path: path.to_owned(),
            identity,
            top_id,
            recursive,
            directories: BTreeMap::new(),
            moved: None,
            found: BTreeSet::new(),
            queue: Queue::default(),
            ended: None,
        };
        if recursive {
            tree.descend(top_id, Created::Nothing)
                .map_err(|e| refused(&shown, e))?;
        }
        Ok(tree)
    }

    /// Another descriptor of its inotify instance, to wait on.
    pub fn descriptor(&self) -> Result<OwnedFd> {
        self.inotify
            .try_clone()
            .with_context(|| "copy a descriptor".into())
    }

    /// Why it is over, if it is.
    pub fn ended(&self) -> Option<&'static str> {
        self.ended
    }

    /// Ends it. The first reason counts.
    pub fn end(&mut self, why: &'static str) {
        self.ended.get_or_insert(why);
    }

    /// Reads from the kernel until an event is queued or there is none left. Blocks on the file systems of new directories.
    pub fn fill(&mut self) -> Result<()> {
        while self.queue.is_empty() {
            let batch = self.read().with_context(|| "read events".into())?;
            if batch.is_empty() {
                // What was found and had an event is no longer in the kernel's queue.
                self.found.clear();
                return Ok(());
            }
            batch.into_iter().for_each(|told| self.hear(told));
        }
        Ok(())
    }

    /// The kernel's next events; none if its queue is empty.
    fn read(&self) -> Result<Vec<Told>, Errno> {
        let mut buffer = [MaybeUninit::uninit(); BUFFER];
        let mut reader = Reader::new(&self.inotify, &mut buffer);
        let mut batch = Vec::new();
        loop {
            match reader.next() {
                Ok(event) => batch.push(Told {
                    directory: event.wd(),
                    what: event.events(),
                    cookie: event.cookie(),
                    name: event.file_name().map(|name| name.to_bytes().to_vec()),
                }),
                Err(Errno::AGAIN) => return Ok(batch),
                Err(Errno::INTR) => continue,
                Err(e) => return Err(e),
            }
            if reader.is_buffer_empty() {
                return Ok(batch);
            }
        }
    }

    fn hear(&mut self, told: Told) {
        if told.what.contains(ReadFlags::QUEUE_OVERFLOW) {
            return self.lost();
        }
        let moved = self.moved.take();
        let Some(name) = told.name else {
            return self.hear_of_directory(told.directory, told.what, moved);
        };
        let place = Place {
            directory: told.directory,
            name,
        };
        let Some(kind) = kind(told.what) else {
            return;
        };
        match moved {
            Some((cookie, directory)) if kind == Kind::CREATE && cookie == told.cookie => {
                self.queue_of(kind, &place);
                self.directories.insert(directory, place);
                // If it was renamed while it was entered, not all below it is watched.
                let entered = self.descend(directory, Created::Unwatched);
                return self.overflow_unless(entered);
            }
            Some((_, directory)) => self.forget(directory),
            None => {}
        }
        let was_found = self.found.remove(&place);
        if was_found && kind == Kind::CREATE {
            return;
        }
        self.queue_of(kind, &place);
        if self.recursive && told.what.contains(ReadFlags::ISDIR) {
            match kind {
                Kind::CREATE => self.enter(place),
                Kind::RENAME => self.moved = self.id_of(&place).map(|id| (told.cookie, id)),
                _ => {}
            }
        }
    }

    /// An event of a watched directory itself. The directory above tells the same of those below the top.
    fn hear_of_directory(&mut self, directory: i32, what: ReadFlags, moved: Option<(u32, i32)>) {
        // The kernel tells a directory's own watch of a rename after the directories it left and entered.
        if let Some((_, moved)) = moved {
            self.forget(moved);
        }
        if directory != self.top_id {
            if what.contains(ReadFlags::IGNORED) {
                self.directories.remove(&directory);
            }
        } else if what.contains(ReadFlags::ATTRIB) {
            self.queue.push(Kind::CHMOD, ITSELF.to_vec());
        } else if what.contains(ReadFlags::MOVE_SELF) {
            self.queue.push(Kind::RENAME, ITSELF.to_vec());
            self.end("the directory was moved");
        } else if what.contains(ReadFlags::DELETE_SELF) {
            self.queue.push(Kind::REMOVE, ITSELF.to_vec());
            self.end("the directory was removed");
        } else if what.contains(ReadFlags::UNMOUNT) {
            self.end("its file system was unmounted");
        } else if what.contains(ReadFlags::IGNORED) {
            self.end("the directory is gone");
        }
    }

    /// The kernel has dropped events, perhaps of new directories: finds those again.
    fn lost(&mut self) {
        self.queue.overflow();
        self.moved = None;
        self.found.clear();
        if self.recursive {
            // A failure shows as OVERFLOW, which is queued.
            let _ = self.descend(self.top_id, Created::Nothing);
        }
    }

    /// Watches a directory that has appeared, and what is below it.
    fn enter(&mut self, place: Place) {
        let entered = match self.add(place) {
            Ok(Some(directory)) => self.descend(directory, Created::All),
            Ok(None) => Ok(()),
            Err(e) => Err(e),
        };
        self.overflow_unless(entered);
    }

    fn overflow_unless(&mut self, entered: Result<(), Errno>) {
        if entered.is_err() {
            self.queue.overflow();
        }
    }

    /// Watches the directories below one that is watched.
    fn descend(&mut self, first: i32, created: Created) -> Result<(), Errno> {
        let watched: BTreeSet<Place> = match created {
            Created::Unwatched => self.directories.values().cloned().collect(),
            Created::Nothing | Created::All => BTreeSet::new(),
        };
        let mut visited = BTreeSet::from([self.top_id, first]);
        let mut left = vec![(first, created)];
        while let Some((directory, created)) = left.pop() {
            let Some(listed) = self.list(directory)? else {
                continue;
            };
            for entry in listed {
                let entry = entry?;
                let name = entry.file_name().to_bytes();
                if name == b"." || name == b".." {
                    continue;
                }
                let name = name.to_vec();
                let place = Place { directory, name };
                // Some file systems tell no type: then the attempt to open it as a directory decides.
                let is_directory = matches!(entry.file_type(), FileType::Directory | FileType::Unknown);
                let created = match created {
                    Created::Unwatched if is_directory && !watched.contains(&place) => Created::All,
                    created => created,
                };
                if created == Created::All {
                    self.find(&place);
                }
                if is_directory
                    && let Some(below) = self.add(place)?
                    && visited.insert(below)
                {
                    left.push((below, created));
                }
            }
        }
        Ok(())
    }

    /// The entries of a watched directory; `None` if it is gone.
    fn list(&self, directory: i32) -> Result<Option<Dir>, Errno> {
        let path = match self.directories.get(&directory) {
            Some(place) => self.path(place),
            None if directory == self.top_id => Some(Vec::new()),
            None => None,
        };
        let Some(path) = path else {
            return Ok(None);
        };
        gone_is_none(self.open(&path, OFlags::RDONLY).and_then(Dir::new))
    }

    /// Watches one directory. `None` if it is gone, is no directory, or is the kernel's.
    fn add(&mut self, place: Place) -> Result<Option<i32>, Errno> {
        let path = self.path(&place).ok_or(Errno::NAMETOOLONG)?;
        let Some(opened) = gone_is_none(self.open(&path, OFlags::PATH))? else {
            return Ok(None);
        };
        if is_of_the_kernel(&opened) {
            return Ok(None);
        }
        if path.len() > MAX_PATH {
            return Err(Errno::NAMETOOLONG);
        }
        if self.directories.len() >= MAX_DIRECTORIES {
            return Err(Errno::MFILE);
        }
        let directory = add(&self.inotify, &opened)?;
        if directory != self.top_id {
            self.directories.insert(directory, place);
        }
        Ok(Some(directory))
    }

    /// Opens a directory below the top, or the top itself. Follows no link below the top.
    ///
    /// # Errors
    /// `STALE`: another directory has taken the top's path.
    fn open(&self, path: &[u8], flags: OFlags) -> Result<OwnedFd, Errno> {
        let top = Root::new(self.root.as_fd(), Links::WithinRoot);
        let top = top.open(&self.path, OFlags::PATH | OFlags::DIRECTORY);
        let top = top.map_err(|_| Errno::STALE)?;
        if identity(&top)? != self.identity {
            return Err(Errno::STALE);
        }
        let top = Root::new(top.as_fd(), Links::Refused);
        top.open(Path::new(OsStr::from_bytes(path)), flags | OFlags::DIRECTORY)
    }

    /// Reports a file that was found in a new directory.
    fn find(&mut self, place: &Place) {
        if self.found.len() < MAX_FOUND {
            self.found.insert(place.clone());
        }
        self.queue_of(Kind::CREATE, place);
    }

    fn queue_of(&mut self, kind: Kind, place: &Place) {
        if place.name.starts_with(UPLOAD_PREFIX.as_bytes()) {
            return;
        }
        // Without a path its directory has left the tree.
        if let Some(path) = self.path(place) {
            self.queue.push(kind, path);
        }
    }

    /// A file's path, relative to the top. `None` if its directory is not watched, or the path is too long.
    fn path(&self, place: &Place) -> Option<Vec<u8>> {
        let mut parts = vec![place.name.as_slice()];
        let (mut above, mut length) = (place.directory, 0);
        while above != self.top_id {
            let directory = self.directories.get(&above)?;
            length += directory.name.len() + 1;
            if length > MAX_PATH {
                return None;
            }
            parts.push(&directory.name);
            above = directory.directory;
        }
        parts.reverse();
        Some(parts.join(&b'/'))
    }

    fn id_of(&self, place: &Place) -> Option<i32> {
        let mut directories = self.directories.iter();
        directories.find(|(_, there)| *there == place).map(|(id, _)| *id)
    }

    /// Watches a directory that has left the tree, and what is below it, no more.
    fn forget(&mut self, gone: i32) {
        let below: Vec<i32> = self
            .directories
            .keys()
            .copied()
            .filter(|id| self.is_within(*id, gone))
            .collect();
        for id in below {
            self.directories.remove(&id);
            // It may be gone altogether.
            let _ = inotify::remove_watch(&self.inotify, id);
        }
    }

    /// Whether a directory is another one, or below it.
    fn is_within(&self, mut directory: i32, other: i32) -> bool {
        // Never in a circle: no chain has more members than there are directories.
        for _ in 0..=self.directories.len() {
            if directory == other {
                return true;
            }
            let Some(place) = self.directories.get(&directory) else {
                return false;
            };
            directory = place.directory;
        }
        false
    }
}

fn identity(directory: &OwnedFd) -> Result<(u64, u64), Errno> {
    let stat = rustix::fs::fstat(directory)?;
    Ok((stat.st_dev, stat.st_ino))
}

/// Adds an open directory to an inotify instance, and returns its watch descriptor.
fn add(inotify: &OwnedFd, directory: &OwnedFd) -> Result<i32, Errno> {
    let flags = WatchFlags::CREATE
        | WatchFlags::MODIFY
        | WatchFlags::DELETE
        | WatchFlags::MOVE
        | WatchFlags::ATTRIB
        | WatchFlags::DELETE_SELF
        | WatchFlags::MOVE_SELF
        | WatchFlags::EXCL_UNLINK
        | WatchFlags::ONLYDIR;
    // The descriptor's own directory, whatever has taken its name.
    inotify::add_watch(inotify, format!("/proc/self/fd/{}", directory.as_raw_fd()), flags)
}

fn kind(what: ReadFlags) -> Option<Kind> {
    let kinds = [
        (ReadFlags::CREATE, Kind::CREATE),
        (ReadFlags::MOVED_TO, Kind::CREATE),
        (ReadFlags::MODIFY, Kind::WRITE),
        (ReadFlags::DELETE, Kind::REMOVE),
        (ReadFlags::MOVED_FROM, Kind::RENAME),
        (ReadFlags::ATTRIB, Kind::CHMOD),
    ];
    let found = kinds.into_iter().find(|(flag, _)| what.contains(*flag));
    found.map(|(_, kind)| kind)
}

/// What was removed or replaced meanwhile is none.
fn gone_is_none<T>(result: Result<T, Errno>) -> Result<Option<T>, Errno> {
    match result {
        Ok(there) => Ok(Some(there)),
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Ok(None),
        Err(e) => Err(e),
    }
}

/// Why a directory cannot be watched.
fn refused(path: &impl std::fmt::Display, error: Errno) -> Error {
    let why = match error {
        Errno::MFILE => {
            format!("there are more than {MAX_DIRECTORIES} directories below it: watch a smaller one")
        }
        Errno::NAMETOOLONG => format!("a path below it has more than {MAX_PATH} bytes: watch a smaller one"),
        Errno::NOSPC => {
            "the guest's kernel allows no more watches (fs.inotify.max_user_watches): watch a smaller one"
                .into()
        }
        other => std::io::Error::from(other).to_string(),
    };
    Error::State(format!("cannot watch {path}: {why}"))
}

#[cfg(test)]
#[path = "tree_test.rs"]
mod tests;
