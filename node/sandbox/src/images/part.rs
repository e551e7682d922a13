//! Walks the part of an image that is copied to the host: the volumes that its config declares, with the directories and links on the way
//! to them; or the whole image.
//!
//! Invariant: the directory above a path is reported before it, as a directory, and no path is reported twice. The metadata is
//! hostile: the walk is bounded by [`Bound`], and no name is `.`, `..` or contains a slash.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use async_trait::async_trait;
use thaw_imagefs::erofs::{FileType, Inode, Nid, Reader};
use thaw_images::store::Image;

use super::Images;
use super::file::malformed;
use crate::error::{Error, ErrorKind};

/// Maximum number of links followed on the way to a volume, as in Linux.
const MOST_LINKS: usize = 40;
/// Maximum length of a path, bytes.
const MOST_PATH: usize = 4095;

/// Limits of a copied part of an image.
#[derive(Clone, Copy, Debug)]
pub struct Bound {
    pub entries: usize,
    pub bytes: u64,
    /// The remedy if there is more.
    pub remedy: &'static str,
}

/// Limits of an image's volumes, which are copied before a container is created.
pub const VOLUMES: Bound = Bound {
    entries: 10_000,
    bytes: 256 << 20,
    remedy: "build it without that VOLUME, or use another snapshotter for it",
};

/// Limits of a whole image.
pub const WHOLE: Bound = Bound {
    entries: 2_000_000,
    bytes: 64 << 30,
    remedy: "use another snapshotter for it",
};

/// The kind of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum What {
    Directory,
    File { size: u64 },
    Link { target: Vec<u8> },
}

/// One path of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    pub what: What,
    /// Its inode number, by which its bytes are read.
    pub number: u64,
    /// Permission bits, including set-user-ID, set-group-ID and sticky.
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    /// Modification time: seconds since the epoch, and nanoseconds.
    pub changed: (i64, u32),
    /// Whether it has more than one path (hard links of a file).
    pub is_linked: bool,
    /// Extended attributes: file capabilities and the `user` ones.
    pub extended: Extended,
}

/// Names and values of extended attributes.
pub type Extended = Vec<(Vec<u8>, Vec<u8>)>;

/// Nodes by path without a leading slash. A directory comes before its contents.
pub type Nodes = BTreeMap<Vec<u8>, Node>;

/// The source of files' bytes.
#[async_trait]
pub trait Contents: Send + Sync {
    /// Reads bytes of the file with this inode number, from `offset` on.
    async fn read(&self, number: u64, offset: u64, into: &mut [u8]) -> Result<(), Error>;
}

/// The part of an image to copy.
#[derive(Clone)]
pub struct Part {
    pub nodes: Nodes,
    pub contents: Arc<dyn Contents>,
}

impl Part {
    /// An empty part.
    pub fn none() -> Part {
        Part {
            nodes: Nodes::new(),
            contents: Arc::new(Nothing),
        }
    }
}

struct Nothing;

#[async_trait]
impl Contents for Nothing {
    async fn read(&self, number: u64, _: u64, _: &mut [u8]) -> Result<(), Error> {
        Err(malformed(format!("there is no file {number}")))
    }
}

struct Stored {
    images: Images,
    image: Image,
    reader: Reader<Vec<u8>>,
}

#[async_trait]
impl Contents for Stored {
    async fn read(&self, number: u64, offset: u64, into: &mut [u8]) -> Result<(), Error> {
        let inode = self.reader.inode(number).map_err(malformed)?;
        into.fill(0);
        for mapping in self.reader.mappings(&inode, offset, into.len() as u64) {
            let mapping = mapping.map_err(malformed)?;
            let Some(address) = mapping.address else { continue };
            let start = mapping.offset.saturating_sub(offset) as usize;
            let piece = into
                .get_mut(start..)
                .and_then(|rest| rest.get_mut(..mapping.length as usize))
                .ok_or_else(|| malformed("a file's extents do not fit it"))?;
            self.images
                .read_address(&self.image, self.reader.bytes(), address, piece)
                .await?;
        }
        Ok(())
    }
}

impl Images {
    /// The image's files at the paths that its config declares as volumes. Paths without files are left out.
    ///
    /// # Errors
    /// The metadata is malformed, or exceeds [`VOLUMES`].
    pub async fn volumes(&self, image: &Image) -> Result<Part, Error> {
        let config = image.config.config().as_ref();
        let paths = config.and_then(|it| it.volumes().clone()).unwrap_or_default();
        self.part(image, paths, VOLUMES).await
    }

    /// The whole image.
    ///
    /// # Errors
    /// The metadata is malformed, or exceeds [`WHOLE`].
    pub async fn whole(&self, image: &Image) -> Result<Part, Error> {
        self.part(image, vec!["/".into()], WHOLE).await
    }

    async fn part(&self, image: &Image, paths: Vec<String>, bound: Bound) -> Result<Part, Error> {
        if paths.is_empty() {
            return Ok(Part::none());
        }
        let (images, image) = (self.clone(), image.clone());
        crate::blocking::blocking(move || {
            let path = &image.metadata;
            let bytes = std::fs::read(path);
            let bytes = bytes.map_err(|e| Error::system(format!("cannot read {}", path.display()), &e))?;
            let reader = Reader::new(bytes).map_err(malformed)?;
            let nodes = walk(&reader, &paths, bound).map_err(|failure| Error {
                what: format!("image {} ({}): {}", image.reference, image.digest, failure.what),
                ..failure
            })?;
            let contents = Arc::new(Stored {
                images,
                image,
                reader,
            });
            Ok(Part { nodes, contents })
        })
        .await
    }
}

/// Collects the nodes at these paths.
fn walk<B: AsRef<[u8]>>(reader: &Reader<B>, paths: &[String], bound: Bound) -> Result<Nodes, Error> {
    let mut walk = Walk {
        reader,
        bound,
        seen: 0,
        bytes: 0,
        nodes: Nodes::new(),
    };
    for path in paths {
        if let Some((at, inode)) = walk.resolve(path)? {
            walk.tree(path, at, inode)?;
        }
    }
    Ok(walk.nodes)
}

struct Walk<'a, B> {
    reader: &'a Reader<B>,
    bound: Bound,
    /// Number of directory entries examined, including repeated ones.
    seen: usize,
    bytes: u64,
    nodes: Nodes,
}

impl<B: AsRef<[u8]>> Walk<'_, B> {
    /// Resolves a path as a kernel would with the image as its root, and keeps the nodes on the way.
    fn resolve(&mut self, volume: &str) -> Result<Option<(Vec<u8>, Inode)>, Error> {
        let root = self.inode(self.reader.superblock().root)?;
        let mut names: VecDeque<Vec<u8>> = split(volume.as_bytes()).collect();
        // The directories from the root's child down to the current position.
        let mut above: Vec<(Vec<u8>, Inode)> = Vec::new();
        let mut links = 0;
        while let Some(name) = names.pop_front() {
            if name == b".." {
                above.pop();
                continue;
            }
            let (place, directory) = above.last().cloned().unwrap_or_else(|| (Vec::new(), root));
            if directory.file_type != FileType::Directory {
                return Ok(None);
            }
            let found = self.reader.lookup(&directory, &name).map_err(malformed)?;
            let Some(number) = found.map(|entry| entry.nid) else {
                return Ok(None);
            };
            let (inode, path) = (self.inode(number)?, join(&place, &name)?);
            self.keep(volume, &path, &inode)?;
            if inode.file_type == FileType::Symlink {
                links += 1;
                if links > MOST_LINKS {
                    return Err(malformed(format!(
                        "volume {volume}: more than {MOST_LINKS} links"
                    )));
                }
                let target = self.reader.read_link(&inode).map_err(malformed)?;
                if target.first() == Some(&b'/') {
                    above.clear();
                }
                for name in split(&target).collect::<Vec<_>>().into_iter().rev() {
                    names.push_front(name);
                }
                continue;
            }
            above.push((path, inode));
        }
        Ok(Some(above.pop().unwrap_or((Vec::new(), root))))
    }

    /// Keeps everything below a directory.
    fn tree(&mut self, volume: &str, at: Vec<u8>, inode: Inode) -> Result<(), Error> {
        let mut pending = vec![(at, inode)];
        while let Some((place, directory)) = pending.pop() {
            if directory.file_type != FileType::Directory {
                continue;
            }
            for entry in self.reader.entries(&directory, 0).map_err(malformed)? {
                let entry = entry.map_err(malformed)?;
                if matches!(entry.name, b"." | b"..") {
                    continue;
                }
                let (inode, path) = (self.inode(entry.nid)?, join(&place, entry.name)?);
                self.keep(volume, &path, &inode)?;
                pending.push((path, inode));
            }
        }
        Ok(())
    }

    fn keep(&mut self, volume: &str, path: &[u8], inode: &Inode) -> Result<(), Error> {
        self.seen += 1;
        if self.seen > self.bound.entries {
            return Err(too_large(volume, self.bound));
        }
        let what = match inode.file_type {
            FileType::Directory => What::Directory,
            FileType::File => What::File { size: inode.size },
            FileType::Symlink => What::Link {
                target: self.reader.read_link(inode).map_err(malformed)?,
            },
            other => {
                let path = path.escape_ascii();
                tracing::info!("{path} of an image is a {other:?}, which is left out of what is copied");
                return Ok(());
            }
        };
        if let Some(there) = self.nodes.get(path) {
            return match there.number == inode.nid {
                true => Ok(()),
                false => Err(malformed(format!("{} is there twice", path.escape_ascii()))),
            };
        }
        if let What::File { size } = what {
            self.bytes = self.bytes.saturating_add(size);
        }
        if self.bytes > self.bound.bytes {
            return Err(too_large(volume, self.bound));
        }
        let node = Node {
            what,
            number: inode.nid,
            mode: u32::from(inode.mode) & 0o7777,
            uid: inode.uid,
            gid: inode.gid,
            changed: (inode.mtime.seconds, inode.mtime.nanoseconds),
            is_linked: inode.file_type == FileType::File && inode.nlink > 1,
            extended: self.extended(inode)?,
        };
        self.nodes.insert(path.to_owned(), node);
        Ok(())
    }

    /// The extended attributes that have no special meaning on the host.
    fn extended(&self, inode: &Inode) -> Result<Extended, Error> {
        let mut kept = Vec::new();
        for xattr in self.reader.xattrs(inode).map_err(malformed)? {
            let xattr = xattr.map_err(malformed)?;
            if xattr.is_named(b"security.capability") || xattr.prefix == b"user." {
                kept.push(([xattr.prefix, xattr.suffix].concat(), xattr.value.to_vec()));
            }
        }
        Ok(kept)
    }

    fn inode(&self, number: Nid) -> Result<Inode, Error> {
        self.reader.inode(number).map_err(malformed)
    }
}

fn too_large(place: &str, bound: Bound) -> Error {
    Error::new(
        ErrorKind::ImageMalformed,
        format!(
            "what of it is copied on the host is, with {place}, more than {} entries or {} MiB",
            bound.entries,
            bound.bytes >> 20
        ),
    )
    .remedy(bound.remedy)
}

fn join(place: &[u8], name: &[u8]) -> Result<Vec<u8>, Error> {
    let mut path = place.to_owned();
    if !path.is_empty() {
        path.push(b'/');
    }
    path.extend_from_slice(name);
    match path.len() > MOST_PATH {
        true => Err(malformed("a path is longer than Linux has them")),
        false => Ok(path),
    }
}

fn split(path: &[u8]) -> impl Iterator<Item = Vec<u8>> + '_ {
    path.split(|byte| *byte == b'/')
        .filter(|name| !name.is_empty() && *name != b".")
        .map(<[u8]>::to_vec)
}

#[cfg(test)]
#[path = "part_test.rs"]
mod tests;
