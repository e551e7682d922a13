//! The nodes of the file system and their directory entries. The nodes are the root, in which each image is a directory, and the inodes of
//! images.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use fuse_backend_rs::abi::fuse_abi::{FUSE_ATTR_DAX, stat64};
use fuse_backend_rs::api::filesystem::{DirEntry, Entry};

use crate::erofs::{FileType, Inode, Nid};
use crate::tree::{PAGE, Timestamp};

use super::image::{Image, read_error};
use super::{Node, ROOT_NODE, RootFs, inode_number, node_id};

/// How long a client may cache data about an image: for ever, because an image does not change.
pub(super) const FOREVER: Duration = Duration::from_secs(u32::MAX as u64);
/// How long it may cache data about the root, which can change at any moment.
pub(super) const NEVER: Duration = Duration::ZERO;

pub(super) fn errno(number: i32) -> io::Error {
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

pub(super) fn inode_attributes(slot: u16, inode: &Inode) -> stat64 {
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

/// Called with an entry to report, and its attributes. `.` and `..` have none.
pub(super) type Reported<'a> = &'a mut dyn FnMut(DirEntry, Option<Entry>) -> io::Result<usize>;

impl RootFs {
    /// The node, or ESTALE if its image is gone.
    pub(super) fn find(&self, node: u64) -> io::Result<Node> {
        self.node(node).ok_or(errno(libc::ESTALE))
    }

    /// An inode's attributes that `stat` does not contain.
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
    pub(super) fn inode(&self, node: u64) -> io::Result<(u16, Arc<Image>, Inode)> {
        match self.find(node)? {
            Node::Root => Err(errno(libc::EISDIR)),
            Node::Inode(slot, image, nid) => {
                let inode = image.reader.inode(nid).map_err(read_error)?;
                Ok((slot, image, inode))
            }
        }
    }

    pub(super) fn root_attributes(&self) -> stat64 {
        let slots = self.slots();
        let mut stat = empty_stat();
        stat.st_ino = ROOT_NODE;
        stat.st_mode = libc::S_IFDIR | 0o555;
        stat.st_nlink = 2 + slots.len() as u64;
        stat.st_blksize = PAGE as i64;
        // A guest that caches the root's listing checks its mtime. The mtime is computed from the content, so it is right in a thawed guest
        // too.
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

    pub(super) fn lookup_in_root(&self, name: &[u8]) -> io::Result<Entry> {
        if matches!(name, b"." | b"..") {
            return Ok(self.root_entry());
        }
        // An absent name is an error and not a negative entry, so that the guest never caches it.
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

    pub(super) fn lookup_in_image(
        &self,
        slot: u16,
        image: &Image,
        parent: Nid,
        name: &[u8],
    ) -> io::Result<Entry> {
        let directory = image.reader.inode(parent).map_err(read_error)?;
        // Looked up when a file handle is opened (overlayfs stores handles), also for a file.
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
        // Positions are slot numbers plus two, so images that are added and removed meanwhile do no harm.
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

    /// Reports the entries of a directory from `offset` on, until `report` takes no more.
    pub(super) fn list(
        &self,
        node: u64,
        offset: u64,
        with_entries: bool,
        report: Reported,
    ) -> io::Result<()> {
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
