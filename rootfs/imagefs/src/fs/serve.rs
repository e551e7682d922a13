//! Answers a FUSE client's requests from the images.

use std::ffi::CStr;
use std::io;
use std::time::Duration;

use fuse_backend_rs::abi::fuse_abi::{CreateIn, stat64, statvfs64};
use fuse_backend_rs::api::filesystem::{
    Context, DirEntry, Entry, FileSystem, FsOptions, GetxattrReply, ListxattrReply, OpenOptions,
    SetattrValid, ZeroCopyReader, ZeroCopyWriter,
};

use crate::tree::PAGE;

use super::entries::{FOREVER, NEVER, errno, inode_attributes};
use super::image::read_error;
use super::{Node, ROOT_NODE, RootFs};

impl FileSystem for RootFs {
    type Inode = u64;
    type Handle = u64;

    fn init(&self, capable: FsOptions) -> io::Result<FsOptions> {
        // Without these a guest would request handles, which the server does not keep, or get errors that it should not get.
        if !capable.contains(FsOptions::ZERO_MESSAGE_OPEN | FsOptions::ZERO_MESSAGE_OPENDIR) {
            tracing::error!(
                "the guest's FUSE client cannot open files without a message: it is older than Linux 5.1"
            );
            return Err(errno(libc::EPROTO));
        }
        let window = match self.has_window {
            true => FsOptions::MAP_ALIGNMENT | FsOptions::PERFILE_DAX,
            false => FsOptions::empty(),
        };
        Ok(window
            | FsOptions::ASYNC_READ
            | FsOptions::ASYNC_DIO
            | FsOptions::BIG_WRITES
            | FsOptions::MAX_PAGES
            | FsOptions::EXPORT_SUPPORT
            // The root's listing is checked against its mtime. In an image, attributes are cached for ever, so nothing is checked.
            | FsOptions::AUTO_INVAL_DATA
            | FsOptions::DO_READDIRPLUS
            | FsOptions::READDIRPLUS_AUTO
            | FsOptions::PARALLEL_DIROPS
            | FsOptions::CACHE_SYMLINKS
            | FsOptions::POSIX_ACL
            | FsOptions::ZERO_MESSAGE_OPEN
            | FsOptions::ZERO_MESSAGE_OPENDIR
            | FsOptions::INIT_EXT)
    }

    fn lookup(&self, _: &Context, parent: u64, name: &CStr) -> io::Result<Entry> {
        match self.find(parent)? {
            Node::Root => self.lookup_in_root(name.to_bytes()),
            Node::Inode(slot, image, nid) => self.lookup_in_image(slot, &image, nid, name.to_bytes()),
        }
    }

    fn forget(&self, _: &Context, _: u64, _: u64) {}

    fn batch_forget(&self, _: &Context, _: Vec<(u64, u64)>) {}

    fn getattr(&self, _: &Context, node: u64, _: Option<u64>) -> io::Result<(stat64, Duration)> {
        if node == ROOT_NODE {
            return Ok((self.root_attributes(), NEVER));
        }
        let (slot, _, inode) = self.inode(node)?;
        Ok((inode_attributes(slot, &inode), FOREVER))
    }

    fn readlink(&self, _: &Context, node: u64) -> io::Result<Vec<u8>> {
        let (_, image, inode) = self.inode(node)?;
        image.reader.read_link(&inode).map_err(read_error)
    }

    /// ENOSYS makes the guest's kernel open every file by itself from then on.
    fn open(
        &self,
        _: &Context,
        _: u64,
        flags: u32,
        _: u32,
    ) -> io::Result<(Option<u64>, OpenOptions, Option<u32>)> {
        match flags as i32 & libc::O_ACCMODE {
            libc::O_RDONLY => Err(errno(libc::ENOSYS)),
            _ => Err(errno(libc::EROFS)),
        }
    }

    /// As [`FileSystem::open`].
    fn opendir(&self, _: &Context, _: u64, _: u32) -> io::Result<(Option<u64>, OpenOptions)> {
        Err(errno(libc::ENOSYS))
    }

    fn read(
        &self,
        _: &Context,
        node: u64,
        _: u64,
        out: &mut dyn ZeroCopyWriter,
        size: u32,
        offset: u64,
        _: Option<u64>,
        _: u32,
    ) -> io::Result<usize> {
        match self.find(node)? {
            Node::Root => Err(errno(libc::EISDIR)),
            Node::Inode(_, image, nid) => image.read(nid, offset, size, out),
        }
    }

    fn lseek(&self, _: &Context, node: u64, _: u64, offset: u64, whence: u32) -> io::Result<u64> {
        let Node::Inode(_, image, nid) = self.find(node)? else {
            return Err(errno(libc::EISDIR));
        };
        match whence as i32 {
            libc::SEEK_DATA => image.seek(nid, offset, true),
            libc::SEEK_HOLE => image.seek(nid, offset, false),
            _ => Err(errno(libc::EINVAL)),
        }
    }

    fn readdir(
        &self,
        _: &Context,
        node: u64,
        _: u64,
        _: u32,
        offset: u64,
        add: &mut dyn FnMut(DirEntry) -> io::Result<usize>,
    ) -> io::Result<()> {
        self.list(node, offset, false, &mut |listed, _| add(listed))
    }

    fn readdirplus(
        &self,
        _: &Context,
        node: u64,
        _: u64,
        _: u32,
        offset: u64,
        add: &mut dyn FnMut(DirEntry, Entry) -> io::Result<usize>,
    ) -> io::Result<()> {
        self.list(node, offset, true, &mut |listed, entry| {
            add(listed, entry.unwrap_or_default())
        })
    }

    fn getxattr(&self, _: &Context, node: u64, name: &CStr, size: u32) -> io::Result<GetxattrReply> {
        if node == ROOT_NODE {
            return Err(errno(libc::ENODATA));
        }
        let (_, image, inode) = self.inode(node)?;
        let value = image.reader.xattr(&inode, name.to_bytes()).map_err(read_error)?;
        let value = value.ok_or(errno(libc::ENODATA))?;
        Ok(match wants_bytes(value.len(), size)? {
            true => GetxattrReply::Value(value.to_vec()),
            false => GetxattrReply::Count(value.len() as u32),
        })
    }

    fn listxattr(&self, _: &Context, node: u64, size: u32) -> io::Result<ListxattrReply> {
        let mut names = Vec::new();
        if node != ROOT_NODE {
            let (_, image, inode) = self.inode(node)?;
            for xattr in image.reader.xattrs(&inode).map_err(read_error)? {
                let xattr = xattr.map_err(read_error)?;
                names.extend_from_slice(xattr.prefix);
                names.extend_from_slice(xattr.suffix);
                names.push(0);
            }
        }
        Ok(match wants_bytes(names.len(), size)? {
            true => ListxattrReply::Names(names),
            false => ListxattrReply::Count(names.len() as u32),
        })
    }

    fn statfs(&self, _: &Context, node: u64) -> io::Result<statvfs64> {
        let (blocks, inodes) = match self.find(node)? {
            Node::Root => {
                let slots = self.slots();
                let sums = slots.values().map(|image| image.reader.superblock());
                sums.fold((0u64, 0u64), |(blocks, inodes), superblock| {
                    (
                        blocks.saturating_add(superblock.length / PAGE),
                        inodes.saturating_add(superblock.inodes),
                    )
                })
            }
            Node::Inode(_, image, _) => {
                let superblock = image.reader.superblock();
                (superblock.length / PAGE, superblock.inodes)
            }
        };
        let mut statistics = empty_statvfs();
        statistics.f_bsize = PAGE;
        statistics.f_frsize = PAGE;
        statistics.f_blocks = blocks;
        statistics.f_files = inodes;
        statistics.f_namemax = 255;
        Ok(statistics)
    }

    // Requests that would change something are refused, as on any read-only file system.

    fn setattr(
        &self,
        _: &Context,
        _: u64,
        _: stat64,
        _: Option<u64>,
        _: SetattrValid,
    ) -> io::Result<(stat64, Duration)> {
        Err(errno(libc::EROFS))
    }

    fn symlink(&self, _: &Context, _: &CStr, _: u64, _: &CStr) -> io::Result<Entry> {
        Err(errno(libc::EROFS))
    }

    fn mknod(&self, _: &Context, _: u64, _: &CStr, _: u32, _: u32, _: u32) -> io::Result<Entry> {
        Err(errno(libc::EROFS))
    }

    fn mkdir(&self, _: &Context, _: u64, _: &CStr, _: u32, _: u32) -> io::Result<Entry> {
        Err(errno(libc::EROFS))
    }

    fn unlink(&self, _: &Context, _: u64, _: &CStr) -> io::Result<()> {
        Err(errno(libc::EROFS))
    }

    fn rmdir(&self, _: &Context, _: u64, _: &CStr) -> io::Result<()> {
        Err(errno(libc::EROFS))
    }

    fn rename(&self, _: &Context, _: u64, _: &CStr, _: u64, _: &CStr, _: u32) -> io::Result<()> {
        Err(errno(libc::EROFS))
    }

    fn link(&self, _: &Context, _: u64, _: u64, _: &CStr) -> io::Result<Entry> {
        Err(errno(libc::EROFS))
    }

    fn create(
        &self,
        _: &Context,
        _: u64,
        _: &CStr,
        _: CreateIn,
    ) -> io::Result<(Entry, Option<u64>, OpenOptions, Option<u32>)> {
        Err(errno(libc::EROFS))
    }

    fn write(
        &self,
        _: &Context,
        _: u64,
        _: u64,
        _: &mut dyn ZeroCopyReader,
        _: u32,
        _: u64,
        _: Option<u64>,
        _: bool,
        _: u32,
        _: u32,
    ) -> io::Result<usize> {
        Err(errno(libc::EROFS))
    }

    fn fallocate(&self, _: &Context, _: u64, _: u64, _: u32, _: u64, _: u64) -> io::Result<()> {
        Err(errno(libc::EROFS))
    }

    fn setxattr(&self, _: &Context, _: u64, _: &CStr, _: &[u8], _: u32) -> io::Result<()> {
        Err(errno(libc::EROFS))
    }

    fn removexattr(&self, _: &Context, _: u64, _: &CStr) -> io::Result<()> {
        Err(errno(libc::EROFS))
    }
}

/// Whether a client with a buffer of `size` bytes wants the bytes, or only their number (if `size` is 0). ERANGE if they do not fit.
fn wants_bytes(length: usize, size: u32) -> io::Result<bool> {
    match size as usize {
        0 => Ok(false),
        size if size < length => Err(errno(libc::ERANGE)),
        _ => Ok(true),
    }
}

/// All fields zero.
fn empty_statvfs() -> statvfs64 {
    // SAFETY: a plain C struct of integers, for which zero is a value.
    unsafe { std::mem::zeroed() }
}
