//! An image, and the buffers of a client, for tests.

use std::fs::File;
use std::io::{self, Write};

use fuse_backend_rs::api::filesystem::ZeroCopyWriter;
use fuse_backend_rs::file_buf::FileVolatileSlice;
use fuse_backend_rs::file_traits::FileReadWriteVolatile;

use crate::blob::{BootId, CHUNK_SIZE, Digests, ReadyFile};
use crate::erofs;
use crate::tree::{Attributes, BlobExtent, Inode, Kind, Timestamp, Tree, Xattr};

use super::*;

pub(super) const DIGEST: [u8; 32] = [9; 32];
pub(super) const LENGTH: u64 = 2 * CHUNK_SIZE;

/// Takes the bytes that are read, like a chain's writable buffers.
pub(super) struct Sink {
    pub(super) bytes: Vec<u8>,
    pub(super) room: usize,
}

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        assert!(
            bytes.len() <= self.room,
            "more was written than there is room for"
        );
        self.room -= bytes.len();
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl ZeroCopyWriter for Sink {
    fn write_from(
        &mut self,
        file: &mut dyn FileReadWriteVolatile,
        count: usize,
        offset: u64,
    ) -> io::Result<usize> {
        let mut buffer = vec![0u8; count];
        // SAFETY: the buffer lives until the call has returned, and nothing else uses it meanwhile.
        let slice = unsafe { FileVolatileSlice::from_mut_slice(&mut buffer) };
        let read = file.read_at_volatile(slice, offset)?;
        self.write(&buffer[..read])
    }

    fn available_bytes(&self) -> usize {
        self.room
    }
}

pub(super) fn pattern(at: u64) -> u8 {
    (at % 251) as u8
}

pub(super) fn add(tree: &mut Tree, name: &str, kind: Kind) -> usize {
    let index = tree.inodes.len();
    let mtime = Timestamp {
        seconds: 5,
        nanoseconds: 6,
    };
    let attributes = Attributes {
        mode: 0o640,
        uid: 100_000,
        gid: 7,
        mtime,
        xattrs: vec![],
    };
    tree.inodes.push(Inode { attributes, kind });
    let Kind::Directory { entries } = &mut tree.inodes[0].kind else {
        unreachable!()
    };
    entries.insert(name.as_bytes().into(), index as u32);
    index
}

pub(super) struct Shown {
    pub(super) metadata: File,
    pub(super) data: File,
    pub(super) ready: File,
    pub(super) bits: ReadyFile,
    pub(super) address: u64,
}

/// An image with a file over a hole, a symbolic link, a device and `more` empty files. No byte of it is ready.
pub(super) fn image(more: usize) -> Shown {
    let mut tree = Tree::new(Attributes {
        mode: 0o755,
        ..Attributes::default()
    });
    let extents = vec![
        BlobExtent {
            blob: 0,
            file_offset: 0,
            data_offset: 0,
            length: CHUNK_SIZE,
        },
        BlobExtent {
            blob: 0,
            file_offset: 2 * CHUNK_SIZE,
            data_offset: CHUNK_SIZE,
            length: CHUNK_SIZE,
        },
    ];
    let file = add(
        &mut tree,
        "file",
        Kind::File {
            size: 3 * CHUNK_SIZE - 1,
            extents,
        },
    );
    let xattr = |name: &str, value: &[u8]| Xattr {
        name: name.into(),
        value: value.into(),
    };
    tree.inodes[file].attributes.xattrs = vec![xattr("security.x", b""), xattr("user.note", b"text")];
    add(
        &mut tree,
        "link",
        Kind::Symlink {
            target: b"../target".to_vec(),
        },
    );
    add(&mut tree, "null", Kind::CharDevice { major: 1, minor: 3 });
    add(
        &mut tree,
        "directory",
        Kind::Directory {
            entries: Default::default(),
        },
    );
    for index in 0..more {
        add(
            &mut tree,
            &format!("more-{index}"),
            Kind::File {
                size: 0,
                extents: vec![],
            },
        );
    }
    let mut metadata = tempfile::tempfile().unwrap();
    let address = erofs::write(&tree, &[LENGTH], &mut metadata).unwrap().blobs[0].address;
    let mut data = tempfile::tempfile().unwrap();
    data.write_all(&(0..LENGTH).map(pattern).collect::<Vec<_>>())
        .unwrap();
    let ready = tempfile::tempfile().unwrap();
    let bits = ReadyFile::create(
        ready.try_clone().unwrap(),
        DIGEST,
        LENGTH,
        Digests::Sealed(&[[0; 32]; 2]),
        false,
        BootId([1; 16]),
    )
    .unwrap();
    Shown {
        metadata,
        data,
        ready,
        bits,
        address,
    }
}

impl Shown {
    pub(super) fn blob(&self) -> PlacedBlob {
        let file = BlobFile::open(self.data.try_clone().unwrap(), self.ready.try_clone().unwrap()).unwrap();
        PlacedBlob {
            address: self.address,
            length: LENGTH,
            digest: DIGEST,
            file,
        }
    }

    pub(super) fn show(&self, fs: &RootFs, slot: u16, name: &str) -> Result<(), ImageError> {
        fs.add_image(slot, name, &self.metadata, vec![self.blob()])
    }
}
