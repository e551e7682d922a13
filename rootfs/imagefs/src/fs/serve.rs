//! What a FUSE client asks, answered from the images.

use std::ffi::CStr;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use fuse_backend_rs::abi::fuse_abi::{CreateIn, FUSE_ATTR_DAX, stat64, statvfs64};
use fuse_backend_rs::api::filesystem::{
    Context, DirEntry, Entry, FileSystem, FsOptions, GetxattrReply, ListxattrReply, OpenOptions,
    SetattrValid, ZeroCopyReader, ZeroCopyWriter,
};

use crate::erofs::{FileType, Inode, Nid};
use crate::tree::{PAGE, Timestamp};

use super::image::{Image, read_error};
use super::{Node, ROOT_NODE, RootFs, inode_number, node_id};

/// As long as anyone will run: an image does not change.
const FOREVER: Duration = Duration::from_secs(u32::MAX as u64);
/// The root may change at any moment.
const NEVER: Duration = Duration::ZERO;

fn errno(number: i32) -> io::Error {
    io::Error::from_raw_os_error(number)
}

/// A zeroed C struct, whose fields the callers then set.
fn empty_stat() -> stat64 {
    Entry::default().attr
}

fn set_times(stat: &mut stat64, time: Timestamp) {
    let nanoseconds = i64::from(time.nanoseconds.min(999_999_999));
    (stat.st_atime, stat.st_atime_nsec) = (time.seconds, nanoseconds);
    (stat.st_mtime, stat.st_mtime_nsec) = (time.seconds, nanoseconds);
    (stat.st_ctime, stat.st_ctime_nsec) = (time.seconds, nanoseconds);
}

fn inode_attributes(slot: u16, inode: &Inode) -> stat64 {
    let mut stat = empty_stat();
    stat.st_ino = inode_number(slot, inode.nid);
    stat.st_mode = u32::from(inode.mode);
    stat.st_nlink = u64::from(inode.nlink);
    stat.st_uid = inode.uid;
    stat.st_gid = inode.gid;
    stat.st_rdev = u64::from(inode.device);
    stat.st_size = inode.size as i64;
    stat.st_blksize = PAGE as i64;
    stat.st_blocks = inode.size.div_ceil(PAGE) as i64 * (PAGE as i64 / 512);
    set_times(&mut stat, inode.mtime);
    stat
}

fn directory_type(file_type: FileType) -> u32 {
    u32::from(match file_type {
        FileType::File => libc::DT_REG,
        FileType::Directory => libc::DT_DIR,
        FileType::CharDevice => libc::DT_CHR,
        FileType::BlockDevice => libc::DT_BLK,
        FileType::Fifo => libc::DT_FIFO,
        FileType::Socket => libc::DT_SOCK,
        FileType::Symlink => libc::DT_LNK,
    })
}

/// An entry to report, and its attributes unless it is `.` or `..`, which carry none.
type Reported<'a> = &'a mut dyn FnMut(DirEntry, Option<Entry>) -> io::Result<usize>;

impl RootFs {
    /// The node, or ESTALE when its image is gone.
    fn find(&self, node: u64) -> io::Result<Node> {
        self.node(node).ok_or(errno(libc::ESTALE))
    }

    /// What an inode's attributes say beside `stat`.
    pub(super) fn flags(&self, image: &Image, inode: &Inode) -> u32 {
        match self.has_window && image.is_mappable(inode) {
            true => FUSE_ATTR_DAX,
            false => 0,
        }
    }

    fn entry(&self, slot: u16, image: &Image, inode: &Inode, name_lasts: Duration) -> Entry {
        Entry {
            inode: node_id(slot, inode.nid),
            generation: image.generation(),
            attr: inode_attributes(slot, inode),
            attr_flags: self.flags(image, inode),
            attr_timeout: FOREVER,
            entry_timeout: name_lasts,
        }
    }

    /// The inode of a node other than the root.
    fn inode(&self, node: u64) -> io::Result<(u16, Arc<Image>, Inode)> {
        match self.find(node)? {
            Node::Root => Err(errno(libc::EISDIR)),
            Node::Inode(slot, image, nid) => {
                let inode = image.reader.inode(nid).map_err(read_error)?;
                Ok((slot, image, inode))
            }
        }
    }

    fn root_attributes(&self) -> stat64 {
        let slots = self.slots();
        let mut stat = empty_stat();
        stat.st_ino = ROOT_NODE;
        stat.st_mode = libc::S_IFDIR | 0o555;
        stat.st_nlink = 2 + slots.len() as u64;
        stat.st_blksize = PAGE as i64;
        // A guest that keeps the root's listing asks whether its mtime is still the same: it follows from the content,
        // so that it is right in a thawed guest too.
        let mut hash = blake3::Hasher::new();
        for (slot, image) in slots.iter() {
            hash.update(&slot.to_le_bytes());
            hash.update(&image.generation().to_le_bytes());
            hash.update(&image.name);
            hash.update(&[0]);
        }
        let digest = hash.finalize();
        let [a, b, c, d] = *digest.as_bytes().first_chunk().expect("a digest has 32 bytes");
        let nanoseconds = u32::from_le_bytes([a, b, c, d]) % 1_000_000_000;
        set_times(
            &mut stat,
            Timestamp {
                seconds: 0,
                nanoseconds,
            },
        );
        stat
    }

    fn root_entry(&self) -> Entry {
        Entry {
            inode: ROOT_NODE,
            attr: self.root_attributes(),
            attr_timeout: NEVER,
            entry_timeout: NEVER,
            ..Entry::default()
        }
    }

    fn lookup_in_root(&self, name: &[u8]) -> io::Result<Entry> {
        if matches!(name, b"." | b"..") {
            return Ok(self.root_entry());
        }
        // Absent, it is an error and not a negative entry: that is never cached.
        let slots = self.slots();
        let (slot, image) = slots
            .iter()
            .find(|(_, image)| image.name == name)
            .ok_or(errno(libc::ENOENT))?;
        let root = image
            .reader
            .inode(image.reader.superblock().root)
            .map_err(read_error)?;
        Ok(self.entry(*slot, image, &root, NEVER))
    }

    fn lookup_in_image(&self, slot: u16, image: &Image, parent: Nid, name: &[u8]) -> io::Result<Entry> {
        let directory = image.reader.inode(parent).map_err(read_error)?;
        // Asked when a file handle is opened (overlayfs keeps handles); of a file too.
        if name == b"." {
            return Ok(self.entry(slot, image, &directory, FOREVER));
        }
        if directory.file_type != FileType::Directory {
            return Err(errno(libc::ENOTDIR));
        }
        if name == b".." && parent == image.reader.superblock().root {
            return Ok(self.root_entry());
        }
        match image.reader.lookup(&directory, name).map_err(read_error)? {
            Some(found) => {
                let inode = image.reader.inode(found.nid).map_err(read_error)?;
                Ok(self.entry(slot, image, &inode, FOREVER))
            }
            None => Ok(Entry {
                entry_timeout: FOREVER,
                ..Entry::default()
            }),
        }
    }

    fn list_root(&self, offset: u64, with_entries: bool, report: Reported) -> io::Result<()> {
        let slots: Vec<(u16, Arc<Image>)> = self
            .slots()
            .iter()
            .map(|(slot, image)| (*slot, image.clone()))
            .collect();
        // Positions are a slot's number plus two, so that images that come and go in between do no harm.
        let dots = [(&b"."[..], 0u64), (b"..", 1)];
        for (name, position) in dots.into_iter().filter(|(_, position)| *position >= offset) {
            let dot = DirEntry {
                ino: ROOT_NODE,
                offset: position + 1,
                type_: u32::from(libc::DT_DIR),
                name,
            };
            if report(dot, None)? == 0 {
                return Ok(());
            }
        }
        for (slot, image) in slots.iter().filter(|(slot, _)| u64::from(*slot) + 1 >= offset) {
            let root = image
                .reader
                .inode(image.reader.superblock().root)
                .map_err(read_error)?;
            let listed = DirEntry {
                ino: inode_number(*slot, root.nid),
                offset: u64::from(*slot) + 2,
                type_: u32::from(libc::DT_DIR),
                name: &image.name,
            };
            let attributes = with_entries.then(|| self.entry(*slot, image, &root, NEVER));
            if report(listed, attributes)? == 0 {
                return Ok(());
            }
        }
        Ok(())
    }

    fn list(&self, node: u64, offset: u64, with_entries: bool, report: Reported) -> io::Result<()> {
        let (slot, image, nid) = match self.find(node)? {
            Node::Root => return self.list_root(offset, with_entries, report),
            Node::Inode(slot, image, nid) => (slot, image, nid),
        };
        let directory = image.reader.inode(nid).map_err(read_error)?;
        if directory.file_type != FileType::Directory {
            return Err(errno(libc::ENOTDIR));
        }
        for found in image.reader.entries(&directory, offset).map_err(read_error)? {
            let found = found.map_err(read_error)?;
            let is_dots = matches!(found.name, b"." | b"..");
            let leads_to_root = found.name == b".." && nid == image.reader.superblock().root;
            let listed = DirEntry {
                ino: if leads_to_root {
                    ROOT_NODE
                } else {
                    inode_number(slot, found.nid)
                },
                offset: found.next,
                type_: found
                    .file_type
                    .map_or(u32::from(libc::DT_UNKNOWN), directory_type),
                name: found.name,
            };
            let attributes = match with_entries && !is_dots {
                true => {
                    let inode = image.reader.inode(found.nid).map_err(read_error)?;
                    Some(self.entry(slot, &image, &inode, FOREVER))
                }
                false => None,
            };
            if report(listed, attributes)? == 0 {
                return Ok(());
            }
        }
        Ok(())
    }
}

impl FileSystem for RootFs {
    type Inode = u64;
    type Handle = u64;

    fn init(&self, capable: FsOptions) -> io::Result<FsOptions> {
        // Without these a guest would ask for handles that are not kept, or get errors where it should get none.
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
            // The root's listing is checked against its mtime; in an image attributes last, so nothing is asked.
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

    /// ENOSYS: the guest's kernel opens every file by itself from then on.
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
        match size {
            0 => Ok(GetxattrReply::Count(value.len() as u32)),
            size if (size as usize) < value.len() => Err(errno(libc::ERANGE)),
            _ => Ok(GetxattrReply::Value(value.to_vec())),
        }
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
        match size {
            0 => Ok(ListxattrReply::Count(names.len() as u32)),
            size if (size as usize) < names.len() => Err(errno(libc::ERANGE)),
            _ => Ok(ListxattrReply::Names(names)),
        }
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

    // What changes something is refused as on any read-only file system.

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

/// All fields zero.
fn empty_statvfs() -> statvfs64 {
    // SAFETY: a plain C struct of integers, for which zero is a value.
    unsafe { std::mem::zeroed() }
}
