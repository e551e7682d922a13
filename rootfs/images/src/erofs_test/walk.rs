//! The contents of a tree, path by path, in a form for comparing trees, images and mounted directories.

use std::collections::BTreeMap;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use thaw_imagefs::erofs::{Inode, Nid, Reader, Summary};
use thaw_imagefs::tree::{InodeIndex, Kind, Tree};

#[derive(Debug, PartialEq, Eq)]
pub struct Node {
    mode: u32,
    uid: u32,
    gid: u32,
    nlink: u64,
    mtime: (i64, u32),
    device: (u32, u32),
    /// Size of files and symbolic links.
    size: u64,
    /// Target of a symbolic link, hash of a file.
    content: Vec<u8>,
    xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    /// The first path with the same inode.
    same_as: Vec<u8>,
}

pub type Walk = BTreeMap<Vec<u8>, Node>;

fn hash(bytes: &[u8]) -> Vec<u8> {
    blake3::hash(bytes).as_bytes().to_vec()
}

fn join(path: &[u8], name: &[u8]) -> Vec<u8> {
    [path, b"/", name].concat()
}

/// Sets each node's `same_as` from the keys that distinguish inodes.
fn finish<K: Ord>(nodes: BTreeMap<Vec<u8>, (K, Node)>) -> Walk {
    let mut first: BTreeMap<K, Vec<u8>> = BTreeMap::new();
    nodes
        .into_iter()
        .map(|(path, (key, mut node))| {
            node.same_as = first.entry(key).or_insert_with(|| path.clone()).clone();
            (path, node)
        })
        .collect()
}

pub fn walk_tree(tree: &Tree, data: &[Vec<u8>]) -> Walk {
    let mut links: BTreeMap<InodeIndex, u64> = BTreeMap::new();
    let mut found: Vec<(Vec<u8>, InodeIndex)> = vec![(Vec::new(), Tree::ROOT)];
    let mut next = 0;
    while let Some((path, index)) = found.get(next).cloned() {
        next += 1;
        *links.entry(index).or_default() += 1;
        for (name, child) in tree.entries(index).into_iter().flatten() {
            found.push((join(&path, name), *child));
        }
    }
    let node = |index: InodeIndex| {
        let inode = tree.inode(index);
        let (kind, size, device, content) = match &inode.kind {
            Kind::Directory { .. } => (libc::S_IFDIR, 0, (0, 0), vec![]),
            Kind::File { size, extents } => {
                let mut file = vec![0; size.next_multiple_of(4096) as usize];
                for extent in extents {
                    let (from, to) = (extent.data_offset as usize, extent.file_offset as usize);
                    let length = extent.length as usize;
                    file[to..to + length].copy_from_slice(&data[extent.blob as usize][from..from + length]);
                }
                file.truncate(*size as usize);
                (libc::S_IFREG, *size, (0, 0), hash(&file))
            }
            Kind::Symlink { target } => (libc::S_IFLNK, target.len() as u64, (0, 0), target.clone()),
            Kind::CharDevice { major, minor } => (libc::S_IFCHR, 0, (*major, *minor), vec![]),
            Kind::BlockDevice { major, minor } => (libc::S_IFBLK, 0, (*major, *minor), vec![]),
            Kind::Fifo => (libc::S_IFIFO, 0, (0, 0), vec![]),
            Kind::Socket => (libc::S_IFSOCK, 0, (0, 0), vec![]),
        };
        let subdirectories = tree.entries(index).map(|entries| {
            2 + entries
                .values()
                .filter(|child| tree.entries(**child).is_some())
                .count() as u64
        });
        let attributes = &inode.attributes;
        Node {
            mode: kind | u32::from(attributes.mode),
            uid: attributes.uid,
            gid: attributes.gid,
            nlink: subdirectories.unwrap_or_else(|| links[&index]),
            mtime: (attributes.mtime.seconds, attributes.mtime.nanoseconds),
            device,
            size,
            content,
            xattrs: attributes
                .xattrs
                .iter()
                .map(|xattr| (xattr.name.clone(), xattr.value.clone()))
                .collect(),
            same_as: vec![],
        }
    };
    finish(
        found
            .into_iter()
            .map(|(path, index)| (path, (index, node(index))))
            .collect(),
    )
}

/// An image whose file data is in memory.
struct Loaded<'a> {
    reader: &'a Reader<&'a [u8]>,
    summary: &'a Summary,
    data: &'a [Vec<u8>],
}

impl Loaded<'_> {
    fn bytes(&self, address: u64, length: u64) -> &[u8] {
        if address < self.summary.metadata_length {
            return &self.reader.bytes()[address as usize..(address + length) as usize];
        }
        let (blob, placement) = self
            .summary
            .blobs
            .iter()
            .enumerate()
            .find(|(_, blob)| (blob.address..blob.address + blob.length).contains(&address))
            .expect("the address is in a blob");
        let offset = (address - placement.address) as usize;
        &self.data[blob][offset..offset + length as usize]
    }

    fn file(&self, inode: &Inode) -> Vec<u8> {
        let mut file = Vec::new();
        for piece in self.reader.mappings(inode, 0, u64::MAX) {
            let piece = piece.unwrap();
            assert_eq!(piece.offset, file.len() as u64);
            match piece.address {
                Some(address) => file.extend(self.bytes(address, piece.length)),
                None => file.resize(file.len() + piece.length as usize, 0),
            }
        }
        assert_eq!(file.len() as u64, inode.size);
        file
    }

    fn node(&self, inode: &Inode) -> Node {
        let reader = self.reader;
        let kind = u32::from(inode.mode) & libc::S_IFMT;
        let content = match kind {
            libc::S_IFLNK => reader.read_link(inode).unwrap(),
            libc::S_IFREG => hash(&self.file(inode)),
            _ => vec![],
        };
        let device = u64::from(inode.device);
        let xattrs = reader.xattrs(inode).unwrap().map(|xattr| {
            let xattr = xattr.unwrap();
            let name = [xattr.prefix, xattr.suffix].concat();
            assert_eq!(reader.xattr(inode, &name).unwrap(), Some(xattr.value));
            (name, xattr.value.to_vec())
        });
        Node {
            mode: u32::from(inode.mode),
            uid: inode.uid,
            gid: inode.gid,
            nlink: u64::from(inode.nlink),
            mtime: (inode.mtime.seconds, inode.mtime.nanoseconds),
            device: (
                ((device >> 8) & 0xfff) as u32,
                (device & 0xff | (device >> 12) & 0xfff00) as u32,
            ),
            size: if matches!(kind, libc::S_IFREG | libc::S_IFLNK) {
                inode.size
            } else {
                0
            },
            content,
            xattrs: xattrs.collect(),
            same_as: vec![],
        }
    }
}

pub fn walk_image(reader: &Reader<&[u8]>, summary: &Summary, data: &[Vec<u8>]) -> Walk {
    let image = Loaded {
        reader,
        summary,
        data,
    };
    let mut nodes: BTreeMap<Vec<u8>, (Nid, Node)> = BTreeMap::new();
    let root = reader.superblock().root;
    let mut pending = vec![(Vec::new(), root, root)];
    while let Some((path, nid, parent)) = pending.pop() {
        let inode = reader.inode(nid).unwrap();
        nodes.insert(path.clone(), (nid, image.node(&inode)));
        let Ok(entries) = reader.entries(&inode, 0) else {
            continue;
        };
        for entry in entries {
            let entry = entry.unwrap();
            let found = reader
                .lookup(&inode, entry.name)
                .unwrap()
                .expect("a listed name is found");
            assert_eq!(found.nid, entry.nid);
            assert_eq!(entry.file_type, Some(reader.inode(entry.nid).unwrap().file_type));
            match entry.name {
                b"." => assert_eq!(entry.nid, nid),
                b".." => assert_eq!(entry.nid, parent),
                name => pending.push((join(&path, name), entry.nid, nid)),
            }
        }
    }
    finish(nodes)
}

pub fn walk_directory(root: &Path) -> Walk {
    let node = |path: &Path| {
        let metadata = std::fs::symlink_metadata(path).unwrap();
        let file_type = metadata.file_type();
        let content = if file_type.is_symlink() {
            std::fs::read_link(path).unwrap().as_os_str().as_bytes().to_vec()
        } else if file_type.is_file() {
            hash(&std::fs::read(path).unwrap())
        } else {
            vec![]
        };
        let has_size = file_type.is_file() || file_type.is_symlink();
        let device = metadata.rdev();
        let node = Node {
            mode: metadata.mode(),
            uid: metadata.uid(),
            gid: metadata.gid(),
            nlink: metadata.nlink(),
            mtime: (metadata.mtime(), metadata.mtime_nsec() as u32),
            device: (rustix::fs::major(device), rustix::fs::minor(device)),
            size: if has_size { metadata.len() } else { 0 },
            content,
            xattrs: xattrs(path),
            same_as: vec![],
        };
        (metadata.ino(), node)
    };
    let mut nodes = BTreeMap::new();
    let mut pending = vec![(Vec::new(), root.to_path_buf())];
    while let Some((path, place)) = pending.pop() {
        if std::fs::symlink_metadata(&place).unwrap().is_dir() {
            for entry in std::fs::read_dir(&place).unwrap() {
                let entry = entry.unwrap();
                pending.push((join(&path, entry.file_name().as_bytes()), entry.path()));
            }
        }
        nodes.insert(path, node(&place));
    }
    finish(nodes)
}

fn xattrs(path: &Path) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let mut names = vec![0u8; 64 << 10];
    let length = match rustix::fs::llistxattr(path, &mut names[..]) {
        Ok(length) => length,
        Err(rustix::io::Errno::OPNOTSUPP) => 0,
        Err(error) => panic!("llistxattr: {error}"),
    };
    let mut value = vec![0u8; 64 << 10];
    names[..length]
        .split(|byte| *byte == 0)
        .filter(|name| !name.is_empty())
        .map(|name| {
            let length = rustix::fs::lgetxattr(path, name, &mut value[..]).unwrap();
            (name.to_vec(), value[..length].to_vec())
        })
        .collect()
}
