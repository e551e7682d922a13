//! The operations of the guest: each is passed to the file system below with its own ids and handles.

use std::ffi::CStr;
use std::io;
use std::time::Duration;

use virtiofsd::filesystem::{
    Context, Entry, Extensions, FileSystem, FsOptions, GetxattrReply, ListxattrReply, OpenOptions,
    SetattrValid, SetxattrFlags, ZeroCopyReader, ZeroCopyWriter,
};
use virtiofsd::fuse::{Attr, SetattrIn};

use super::{StableIds, error};
use crate::ledger::Ledger;

/// Operations that need only the node's id translated.
macro_rules! on_a_node {
    ($(fn $name:ident(&self $(, $argument:ident: $type:ty)*) -> $result:ty;)*) => {
        $(fn $name(&self, ctx: Context, inode: u64 $(, $argument: $type)*) -> io::Result<$result> {
            self.inner.$name(ctx, self.node(inode)? $(, $argument)*)
        })*
    };
}

impl<F: FileSystem<Inode = u64, Handle = u64>> FileSystem for StableIds<F> {
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
            self.recover(&places);
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
        // A file that was opened with another process still has attributes.
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
        self.update_place(ctx, to, new_name);
        if flags & libc::RENAME_EXCHANGE != 0 {
            self.update_place(ctx, from, name);
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
        let inode = self.node(inode)?;
        let (handle, options) = self.inner.open(ctx, inode, kill_priv, flags)?;
        self.note_opened(ctx, inode, handle, flags);
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
        self.note_opened(ctx, entry.inode, handle, flags);
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
            Err(_) => self.read_reopened(ctx, inode, read),
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
        // The handle of a process that ended was closed with it.
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
        // The file system below does not implement it, and an entry without a name has no place to record.
        error(libc::ENOSYS)
    }
}
