//! An image for tests: one small file, in a blob whose chunks a test makes ready.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use thaw_imagefs::blob::{BootId, CHUNK_SIZE, Digests, ReadyFile};
use thaw_imagefs::erofs;
use thaw_imagefs::tree::{Attributes, BlobExtent, Inode, Kind, Tree};
use thaw_protocol::control::{BlobRange, ImageSpec};

pub const DIGEST: [u8; 32] = [7; 32];
pub const BOOT: BootId = BootId([1; 16]);
/// Bytes of the one file of the image: four chunks of data, a hole, and one more chunk.
pub const DATA: u64 = 5 * CHUNK_SIZE;
pub const HOLE: u64 = CHUNK_SIZE;
pub const SIZE: u64 = DATA + HOLE - 5;

pub fn pattern(offset: u64) -> u8 {
    (offset / 97 + offset) as u8
}

/// The file's content, as a program reads it.
pub fn content(offset: u64, length: u64) -> Vec<u8> {
    (offset..(offset + length).min(SIZE))
        .map(|at| match at {
            at if at < 4 * CHUNK_SIZE => pattern(at),
            at if at < 4 * CHUNK_SIZE + HOLE => 0,
            at => pattern(at - HOLE),
        })
        .collect()
}

/// An image whose root contains `file`. Its data file is complete, and all bits are unset.
pub struct Image {
    pub spec: ImageSpec,
    pub metadata: File,
    pub data: File,
    pub ready_file: File,
    pub ready: ReadyFile,
}

impl Image {
    pub fn new(name: &str) -> Image {
        let extent = |file_offset, data_offset, length| BlobExtent {
            blob: 0,
            file_offset,
            data_offset,
            length,
        };
        let extents = vec![
            extent(0, 0, 4 * CHUNK_SIZE),
            extent(4 * CHUNK_SIZE + HOLE, 4 * CHUNK_SIZE, CHUNK_SIZE),
        ];
        Image::made(name, DATA, vec![("file", SIZE, extents)])
    }

    /// An image with these files and a data file of `length` bytes.
    pub fn made(name: &str, length: u64, files: Vec<(&str, u64, Vec<BlobExtent>)>) -> Image {
        let mut tree = Tree::new(Attributes {
            mode: 0o755,
            ..Attributes::default()
        });
        for (name, size, extents) in files {
            let index = tree.inodes.len() as u32;
            tree.inodes.push(Inode {
                attributes: Attributes {
                    mode: 0o644,
                    ..Attributes::default()
                },
                kind: Kind::File { size, extents },
            });
            let Kind::Directory { entries } = &mut tree.inodes[0].kind else {
                unreachable!()
            };
            entries.insert(name.as_bytes().into(), index);
        }
        let mut metadata = tempfile::tempfile().unwrap();
        let summary = erofs::write(&tree, &[length], &mut metadata).unwrap();
        let data = tempfile::tempfile().unwrap();
        data.write_all_at(&(0..length).map(pattern).collect::<Vec<_>>(), 0)
            .unwrap();
        let (ready_file, ready) = sealed_ready_file(length, false);
        let blob = BlobRange {
            address: summary.blobs[0].address,
            length,
            digest: DIGEST,
        };
        Image {
            spec: ImageSpec {
                name: name.into(),
                blobs: vec![blob],
            },
            metadata,
            data,
            ready_file,
            ready,
        }
    }

    pub fn fds(&self) -> Vec<OwnedFd> {
        [&self.metadata, &self.data, &self.ready_file]
            .map(|file| file.try_clone().unwrap().into())
            .into()
    }

    pub fn fill(&self) {
        for chunk in 0..self.ready.chunk_count() {
            self.ready.set_ready(chunk);
        }
    }
}

/// The ready file of a blob whose digests are sealed; all its chunks are ready if `is_complete`.
pub fn sealed_ready_file(length: u64, is_complete: bool) -> (File, ReadyFile) {
    let file = tempfile::tempfile().unwrap();
    let digests = vec![[0; 32]; length.div_ceil(CHUNK_SIZE) as usize];
    let digests = Digests::Sealed(&digests);
    let ready = ReadyFile::create(
        file.try_clone().unwrap(),
        DIGEST,
        length,
        digests,
        is_complete,
        BOOT,
    );
    (file, ready.unwrap())
}
