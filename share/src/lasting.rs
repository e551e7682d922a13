//! Node ids that outlive this process.
//!
//! virtiofsd numbers files as it meets them, and a guest's kernel holds on to those numbers: the root of each mount, each working
//! directory, each name it has looked up. Here a guest sees ids of ours, written down in a [`Ledger`]; a process that is started in place of one
//! that died finds the files again by their names, and goes on under the same ids. Invariants:
//!
//! - an id never means another file than the one it was made for: ids of different processes differ, and what is found by a name must have the
//!   inode number and the type of what was there. What is not found again answers ESTALE, on which the guest looks the path up anew.
//! - a file that was opened with a process that died can be read, and answers EIO otherwise: what was written to it may or may not have been
//!   done. An open directory answers EIO.
//!
//! The guest's kernel must not see an id change or an error for a name that is still there: it would take away whatever is mounted on it.

use std::collections::{HashMap, HashSet};
use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::sync::{Mutex, MutexGuard, RwLock};
use std::time::Duration;

use thaw_sys::lock::{Lock, Share};
use virtiofsd::filesystem::{
    Context, Entry, Extensions, FileSystem, FsOptions, GetxattrReply, ListxattrReply, OpenOptions, ROOT_ID,
    SetattrValid, SetxattrFlags, ZeroCopyReader, ZeroCopyWriter,
};
use virtiofsd::fuse::{Attr, InHeader, SetattrIn};

use crate::ledger::{Ledger, Past, Place};

/// Bits of a handle that are virtiofsd's; above is the process it is of.
const HANDLE_BITS: u32 = 48;
/// Bits of a node id that count within one process; above is the process it was made by.
const NODE_BITS: u32 = 40;
/// Most directories between a node and the root.
const DEPTH: usize = 4096;

/// A file system under ids of ours.
pub struct Lasting<F> {
    inner: F,
    nodes: RwLock<Nodes>,
    /// Which process of this guest's this is, from 0.
    generation: u64,
    /// What the one before left, until the guest's INIT comes.
    past: Mutex<HashMap<u64, Place>>,
}

/// A node the guest knows.
struct Node {
    inner: u64,
    /// How often this process has told the guest of it.
    lookups: u64,
    place: PlaceKey,
}

/// Enough of a place to see that it is another.
#[derive(Clone, Copy, PartialEq, Eq)]
struct PlaceKey {
    parent: u64,
    name_hash: u64,
    name_length: usize,
}

#[derive(Default)]
struct Nodes {
    by_id: HashMap<u64, Node>,
    by_inner: HashMap<u64, u64>,
    next: u64,
    ledger: Option<Ledger>,
}

fn error<T>(errno: i32) -> io::Result<T> {
    Err(io::Error::from_raw_os_error(errno))
}

impl PlaceKey {
    fn of(parent: u64, name: &CStr) -> PlaceKey {
        use std::hash::{DefaultHasher, Hash, Hasher};
        let mut hasher = DefaultHasher::new();
        name.hash(&mut hasher);
        PlaceKey {
            parent,
            name_hash: hasher.finish(),
            name_length: name.to_bytes().len(),
        }
    }
}

impl Nodes {
    /// The id of what was found, counted once more.
    fn found(&mut self, parent: u64, name: &CStr, entry: &Entry) -> u64 {
        let place = PlaceKey::of(parent, name);
        // The other names are of no directory.
        let is_place = !matches!(name.to_bytes(), b"." | b"..");
        let id = match self.by_inner.get(&entry.inode) {
            Some(id) => *id,
            None => {
                let id = self.next;
                self.next += 1;
                self.insert(id, entry.inode, place);
                if is_place {
                    self.note(id, parent, name, entry, None);
                }
                return id;
            }
        };
        if let Some(node) = self.by_id.get_mut(&id) {
            node.lookups = node.lookups.saturating_add(1);
            if is_place && node.place != place {
                let was = std::mem::replace(&mut node.place, place);
                self.note(id, parent, name, entry, Some(was.name_length));
            }
        }
        id
    }

    fn insert(&mut self, id: u64, inner: u64, place: PlaceKey) {
        self.by_inner.insert(inner, id);
        let node = Node {
            inner,
            lookups: 1,
            place,
        };
        self.by_id.insert(id, node);
    }

    fn note(&mut self, id: u64, parent: u64, name: &CStr, entry: &Entry, before: Option<usize>) {
        if let Some(ledger) = &mut self.ledger {
            let place = Place::new(parent, name, entry.attr.ino, entry.attr.mode);
            ledger.put(id, &place, before);
        }
    }

    /// The guest knows it so many times less: the node below, and how many times of those are this process's.
    fn forget(&mut self, id: u64, count: u64) -> Option<(u64, u64)> {
        let node = self.by_id.get_mut(&id)?;
        // The guest counts what processes before this one told it, too.
        let ours = count.min(node.lookups);
        node.lookups -= ours;
        let (inner, is_last, name) = (node.inner, node.lookups == 0, node.place.name_length);
        if is_last {
            self.by_id.remove(&id);
            self.by_inner.remove(&inner);
            if let Some(ledger) = &mut self.ledger {
                ledger.forget(id, name);
            }
        }
        Some((inner, ours))
    }
}

impl<F: FileSystem<Inode = u64, Handle = u64>> Lasting<F> {
    /// Of a guest whose ids are in `ledger`, if it is to have ids that last.
    ///
    /// # Errors
    /// Those of the file.
    pub fn new(inner: F, ledger: Option<File>) -> io::Result<Lasting<F>> {
        let opened = ledger.map(Ledger::open).transpose()?;
        let (ledger, past) = opened.map_or((None, Past::default()), |(ledger, past)| (Some(ledger), past));
        let generation = past.generation % (1 << (u64::BITS - HANDLE_BITS));
        let nodes = Nodes {
            next: (past.generation << NODE_BITS) + ROOT_ID + 1,
            ledger,
            ..Nodes::default()
        };
        Ok(Lasting {
            inner,
            nodes: RwLock::new(nodes),
            generation,
            past: Mutex::new(past.places),
        })
    }

    fn read<T>(&self, look: impl FnOnce(&Nodes) -> T) -> T {
        look(&self.nodes.reading())
    }

    fn write<T>(&self, change: impl FnOnce(&mut Nodes) -> T) -> T {
        change(&mut self.nodes.writing())
    }

    fn past(&self) -> MutexGuard<'_, HashMap<u64, Place>> {
        self.past.locked()
    }

    fn node(&self, id: u64) -> io::Result<u64> {
        match id {
            ROOT_ID => Ok(ROOT_ID),
            id => self
                .read(|nodes| nodes.by_id.get(&id).map(|node| node.inner))
                .ok_or_else(|| io::Error::from_raw_os_error(libc::ESTALE)),
        }
    }

    fn handle(&self, handle: u64) -> io::Result<u64> {
        match handle >> HANDLE_BITS == self.generation {
            true => Ok(handle & ((1 << HANDLE_BITS) - 1)),
            false => error(libc::EIO),
        }
    }

    fn tagged(&self, handle: Option<u64>) -> Option<u64> {
        handle.map(|handle| handle | self.generation << HANDLE_BITS)
    }

    /// Reads a file that was opened with a process that died. What is read can have lost nothing; and a program that is executed from it would be killed
    /// by an error.
    fn reopened<T>(
        &self,
        ctx: Context,
        inner: u64,
        read: impl FnOnce(u64) -> io::Result<T>,
    ) -> io::Result<T> {
        let flags = libc::O_RDONLY as u32;
        let Some(handle) = self.inner.open(ctx, inner, false, flags)?.0 else {
            return error(libc::EIO);
        };
        let result = read(handle);
        self.inner
            .release(ctx, inner, flags, handle, false, false, None)?;
        result
    }

    fn entry(&self, parent: u64, name: &CStr, mut entry: Entry) -> Entry {
        if !matches!(entry.inode, 0 | ROOT_ID) {
            entry.inode = self.write(|nodes| nodes.found(parent, name, &entry));
        }
        entry
    }

    /// What is at a name now is there under the id it has.
    fn moved(&self, ctx: Context, parent: u64, name: &CStr) {
        let Ok(there) = self
            .node(parent)
            .and_then(|inner| self.inner.lookup(ctx, inner, name))
        else {
            return;
        };
        let inner = there.inode;
        if self.read(|nodes| nodes.by_inner.contains_key(&inner)) {
            let id = self.write(|nodes| nodes.found(parent, name, &there));
            self.forget(ctx, id, 1);
        } else {
            self.inner.forget(ctx, inner, 1);
        }
    }

    /// Finds the nodes of the process before this one again. Those that are not there any more are unknown from now on.
    fn find_again(&self, places: &HashMap<u64, Place>) {
        let ctx = Context::from(InHeader::default());
        let (mut lost, mut found) = (HashSet::new(), 0);
        for id in places.keys() {
            // Itself and its directories, up to one that is known.
            let (mut chain, mut at) = (Vec::new(), *id);
            let is_known = loop {
                if self.node(at).is_ok() {
                    break true;
                }
                match places.get(&at) {
                    Some(place) if chain.len() < DEPTH && !lost.contains(&at) => {
                        chain.push((at, place));
                        at = place.parent;
                    }
                    _ => break false,
                }
            };
            let mut is_there = is_known;
            for (id, place) in chain.into_iter().rev() {
                is_there = is_there && self.find(ctx, id, place);
                match is_there {
                    true => found += 1,
                    false => drop(lost.insert(id)),
                }
            }
        }
        for id in &lost {
            let name = places.get(id).map_or(0, |place| place.name.to_bytes().len());
            self.write(|nodes| nodes.ledger.as_mut().map(|ledger| ledger.forget(*id, name)));
        }
        tracing::info!(found, lost = lost.len(), "in place of a process that ended");
    }

    fn find(&self, ctx: Context, id: u64, place: &Place) -> bool {
        let there = self
            .node(place.parent)
            .and_then(|parent| self.inner.lookup(ctx, parent, &place.name));
        let Ok(there) = there else { return false };
        let is_it = there.attr.ino == place.ino && there.attr.mode & libc::S_IFMT == place.kind;
        let is_new = self.read(|nodes| !nodes.by_inner.contains_key(&there.inode));
        if is_it && is_new && there.inode != ROOT_ID {
            self.write(|nodes| nodes.insert(id, there.inode, PlaceKey::of(place.parent, &place.name)));
            return true;
        }
        self.inner.forget(ctx, there.inode, 1);
        false
    }
}

/// Operations on a node, which is all that is translated.
macro_rules! on_a_node {
    ($(fn $name:ident(&self $(, $argument:ident: $type:ty)*) -> $result:ty;)*) => {
        $(fn $name(&self, ctx: Context, inode: u64 $(, $argument: $type)*) -> io::Result<$result> {
            self.inner.$name(ctx, self.node(inode)? $(, $argument)*)
        })*
    };
}

impl<F: FileSystem<Inode = u64, Handle = u64>> FileSystem for Lasting<F> {
    type Inode = u64;
    type Handle = u64;
    type DirIter = F::DirIter;

    fn init(&self, capable: FsOptions) -> io::Result<FsOptions> {
        let options = self.inner.init(capable)?;
        let places = std::mem::take(&mut *self.past());
        self.write(|nodes| {
            nodes.by_id.clear();
            nodes.by_inner.clear();
            match &mut nodes.ledger {
                Some(ledger) if places.is_empty() => ledger.clear(),
                _ => {}
            }
        });
        if !places.is_empty() {
            self.find_again(&places);
        }
        Ok(options)
    }

    fn destroy(&self) {
        self.inner.destroy();
        self.write(|nodes| {
            nodes.by_id.clear();
            nodes.by_inner.clear();
            nodes.ledger.iter_mut().for_each(Ledger::clear);
        });
    }

    fn lookup(&self, ctx: Context, parent: u64, name: &CStr) -> io::Result<Entry> {
        let entry = self.inner.lookup(ctx, self.node(parent)?, name)?;
        Ok(self.entry(parent, name, entry))
    }

    fn forget(&self, ctx: Context, inode: u64, count: u64) {
        if let Some((inner, ours)) = self.write(|nodes| nodes.forget(inode, count)) {
            self.inner.forget(ctx, inner, ours);
        }
    }

    fn batch_forget(&self, ctx: Context, requests: Vec<(u64, u64)>) {
        let ours = self.write(|nodes| {
            let each = requests.into_iter();
            each.filter_map(|(id, count)| nodes.forget(id, count)).collect()
        });
        self.inner.batch_forget(ctx, ours);
    }

    on_a_node! {
        fn readlink(&self) -> Vec<u8>;
        fn unlink(&self, name: &CStr) -> ();
        fn rmdir(&self, name: &CStr) -> ();
        fn statfs(&self) -> libc::statvfs64;
        fn setxattr(&self, name: &CStr, value: &[u8], flags: u32, extra: SetxattrFlags) -> ();
        fn getxattr(&self, name: &CStr, size: u32) -> GetxattrReply;
        fn listxattr(&self, size: u32) -> ListxattrReply;
        fn removexattr(&self, name: &CStr) -> ();
        fn access(&self, mask: u32) -> ();
        fn syncfs(&self) -> ();
    }

    fn getattr(&self, ctx: Context, inode: u64, handle: Option<u64>) -> io::Result<(Attr, Duration)> {
        // A file that was opened with another process has attributes all the same.
        let handle = handle.and_then(|handle| self.handle(handle).ok());
        self.inner.getattr(ctx, self.node(inode)?, handle)
    }

    fn setattr(
        &self,
        ctx: Context,
        inode: u64,
        attr: SetattrIn,
        handle: Option<u64>,
        valid: SetattrValid,
    ) -> io::Result<(Attr, Duration)> {
        let handle = handle.map(|handle| self.handle(handle)).transpose()?;
        self.inner.setattr(ctx, self.node(inode)?, attr, handle, valid)
    }

    fn symlink(
        &self,
        ctx: Context,
        target: &CStr,
        parent: u64,
        name: &CStr,
        extensions: Extensions,
    ) -> io::Result<Entry> {
        let entry = self
            .inner
            .symlink(ctx, target, self.node(parent)?, name, extensions)?;
        Ok(self.entry(parent, name, entry))
    }

    fn mknod(
        &self,
        ctx: Context,
        parent: u64,
        name: &CStr,
        mode: u32,
        rdev: u32,
        umask: u32,
        extensions: Extensions,
    ) -> io::Result<Entry> {
        let inner = self.node(parent)?;
        let entry = self
            .inner
            .mknod(ctx, inner, name, mode, rdev, umask, extensions)?;
        Ok(self.entry(parent, name, entry))
    }

    fn mkdir(
        &self,
        ctx: Context,
        parent: u64,
        name: &CStr,
        mode: u32,
        umask: u32,
        extensions: Extensions,
    ) -> io::Result<Entry> {
        let inner = self.node(parent)?;
        let entry = self.inner.mkdir(ctx, inner, name, mode, umask, extensions)?;
        Ok(self.entry(parent, name, entry))
    }

    fn rename(
        &self,
        ctx: Context,
        from: u64,
        name: &CStr,
        to: u64,
        new_name: &CStr,
        flags: u32,
    ) -> io::Result<()> {
        let (inner_from, inner_to) = (self.node(from)?, self.node(to)?);
        self.inner
            .rename(ctx, inner_from, name, inner_to, new_name, flags)?;
        self.moved(ctx, to, new_name);
        if flags & libc::RENAME_EXCHANGE != 0 {
            self.moved(ctx, from, name);
        }
        Ok(())
    }

    fn link(&self, ctx: Context, inode: u64, parent: u64, name: &CStr) -> io::Result<Entry> {
        let entry = self
            .inner
            .link(ctx, self.node(inode)?, self.node(parent)?, name)?;
        Ok(self.entry(parent, name, entry))
    }

    fn open(
        &self,
        ctx: Context,
        inode: u64,
        kill_priv: bool,
        flags: u32,
    ) -> io::Result<(Option<u64>, OpenOptions)> {
        let (handle, options) = self.inner.open(ctx, self.node(inode)?, kill_priv, flags)?;
        Ok((self.tagged(handle), options))
    }

    fn create(
        &self,
        ctx: Context,
        parent: u64,
        name: &CStr,
        mode: u32,
        kill_priv: bool,
        flags: u32,
        umask: u32,
        extensions: Extensions,
    ) -> io::Result<(Entry, Option<u64>, OpenOptions)> {
        let inner = self.node(parent)?;
        let (entry, handle, options) = self
            .inner
            .create(ctx, inner, name, mode, kill_priv, flags, umask, extensions)?;
        Ok((self.entry(parent, name, entry), self.tagged(handle), options))
    }

    fn read<W: ZeroCopyWriter>(
        &self,
        ctx: Context,
        inode: u64,
        handle: u64,
        w: W,
        size: u32,
        offset: u64,
        lock_owner: Option<u64>,
        flags: u32,
    ) -> io::Result<usize> {
        let inode = self.node(inode)?;
        let read = |handle| {
            self.inner
                .read(ctx, inode, handle, w, size, offset, lock_owner, flags)
        };
        match self.handle(handle) {
            Ok(handle) => read(handle),
            Err(_) => self.reopened(ctx, inode, read),
        }
    }

    fn write<R: ZeroCopyReader>(
        &self,
        ctx: Context,
        inode: u64,
        handle: u64,
        r: R,
        size: u32,
        offset: u64,
        lock_owner: Option<u64>,
        delayed_write: bool,
        kill_priv: bool,
        flags: u32,
    ) -> io::Result<usize> {
        let (handle, inode) = (self.handle(handle)?, self.node(inode)?);
        self.inner.write(
            ctx,
            inode,
            handle,
            r,
            size,
            offset,
            lock_owner,
            delayed_write,
            kill_priv,
            flags,
        )
    }

    fn flush(&self, ctx: Context, inode: u64, handle: u64, lock_owner: u64) -> io::Result<()> {
        let (handle, inode) = (self.handle(handle)?, self.node(inode)?);
        self.inner.flush(ctx, inode, handle, lock_owner)
    }

    fn fsync(&self, ctx: Context, inode: u64, datasync: bool, handle: u64) -> io::Result<()> {
        let (handle, inode) = (self.handle(handle)?, self.node(inode)?);
        self.inner.fsync(ctx, inode, datasync, handle)
    }

    fn fallocate(
        &self,
        ctx: Context,
        inode: u64,
        handle: u64,
        mode: u32,
        offset: u64,
        length: u64,
    ) -> io::Result<()> {
        let (handle, inode) = (self.handle(handle)?, self.node(inode)?);
        self.inner.fallocate(ctx, inode, handle, mode, offset, length)
    }

    fn release(
        &self,
        ctx: Context,
        inode: u64,
        flags: u32,
        handle: u64,
        flush: bool,
        flock_release: bool,
        lock_owner: Option<u64>,
    ) -> io::Result<()> {
        // One of a process that ended was closed with it.
        let Ok(handle) = self.handle(handle) else {
            return Ok(());
        };
        let inode = self.node(inode)?;
        self.inner
            .release(ctx, inode, flags, handle, flush, flock_release, lock_owner)
    }

    fn opendir(&self, ctx: Context, inode: u64, flags: u32) -> io::Result<(Option<u64>, OpenOptions)> {
        let (handle, options) = self.inner.opendir(ctx, self.node(inode)?, flags)?;
        Ok((self.tagged(handle), options))
    }

    fn readdir(
        &self,
        ctx: Context,
        inode: u64,
        handle: u64,
        size: u32,
        offset: u64,
    ) -> io::Result<Self::DirIter> {
        let (handle, inode) = (self.handle(handle)?, self.node(inode)?);
        self.inner.readdir(ctx, inode, handle, size, offset)
    }

    fn fsyncdir(&self, ctx: Context, inode: u64, datasync: bool, handle: u64) -> io::Result<()> {
        let (handle, inode) = (self.handle(handle)?, self.node(inode)?);
        self.inner.fsyncdir(ctx, inode, datasync, handle)
    }

    fn releasedir(&self, ctx: Context, inode: u64, flags: u32, handle: u64) -> io::Result<()> {
        let Ok(handle) = self.handle(handle) else {
            return Ok(());
        };
        self.inner.releasedir(ctx, self.node(inode)?, flags, handle)
    }

    fn lseek(&self, ctx: Context, inode: u64, handle: u64, offset: u64, whence: u32) -> io::Result<u64> {
        let (handle, inode) = (self.handle(handle)?, self.node(inode)?);
        self.inner.lseek(ctx, inode, handle, offset, whence)
    }

    fn copyfilerange(
        &self,
        ctx: Context,
        inode_in: u64,
        handle_in: u64,
        offset_in: u64,
        inode_out: u64,
        handle_out: u64,
        offset_out: u64,
        length: u64,
        flags: u64,
    ) -> io::Result<usize> {
        let (handle_in, handle_out) = (self.handle(handle_in)?, self.handle(handle_out)?);
        let (inode_in, inode_out) = (self.node(inode_in)?, self.node(inode_out)?);
        self.inner.copyfilerange(
            ctx, inode_in, handle_in, offset_in, inode_out, handle_out, offset_out, length, flags,
        )
    }

    fn getlk(&self) -> io::Result<()> {
        self.inner.getlk()
    }

    fn setlk(&self) -> io::Result<()> {
        self.inner.setlk()
    }

    fn setlkw(&self) -> io::Result<()> {
        self.inner.setlkw()
    }

    fn ioctl(&self) -> io::Result<()> {
        self.inner.ioctl()
    }

    fn bmap(&self) -> io::Result<()> {
        self.inner.bmap()
    }

    fn poll(&self) -> io::Result<()> {
        self.inner.poll()
    }

    fn notify_reply(&self) -> io::Result<()> {
        self.inner.notify_reply()
    }

    fn tmpfile(&self) -> io::Result<(Entry, Option<u64>, OpenOptions)> {
        // Not implemented by the file system below, and an entry without a name has no place.
        error(libc::ENOSYS)
    }
}

#[cfg(test)]
#[path = "lasting_test.rs"]
mod tests;
