//! Handmade bootstraps, and images of Nydus if there are any (tests/interop/nydus).

use std::path::{Path, PathBuf};

use proptest::prelude::*;
use thaw_imagefs::erofs::Reader;

use crate::accelerated::testing::{Memory, block_on};
use crate::erofs_test::assert_same;
use crate::erofs_test::walk::{walk_directory, walk_image};
use crate::manifest::{BOOTSTRAP_ANNOTATION, NYDUS_BLOB_TYPE, NydusManifest};

use super::*;

/// Little-endian fields at offsets of a growing image.
struct Image(Vec<u8>);

impl Image {
    fn put(&mut self, at: usize, bytes: &[u8]) {
        let end = at + bytes.len();
        if self.0.len() < end {
            self.0.resize(end, 0);
        }
        self.0[at..end].copy_from_slice(bytes);
    }

    fn u16(&mut self, at: usize, value: u16) {
        self.put(at, &value.to_le_bytes());
    }

    fn u32(&mut self, at: usize, value: u32) {
        self.put(at, &value.to_le_bytes());
    }

    fn u64(&mut self, at: usize, value: u64) {
        self.put(at, &value.to_le_bytes());
    }
}

const SUPER: usize = 1024;
const EXTENDED: usize = SUPER + 128;
const BLOB_TABLE: usize = 4096;
const CHUNK_TABLE: usize = 8192;
const INODES: usize = 12288;
const CHUNK_SIZE: u32 = 4096;

/// An image of `file`, whose two chunks are in the wrong order in the blob; one of them is compressed. Returns bootstrap, blob, and the
/// file's content.
pub fn image() -> (Vec<u8>, Vec<u8>, Vec<u8>) {
    let content: Vec<u8> = (0..6000u32).map(|at| (at / 7) as u8).collect();
    let (first, second) = content.split_at(4096);
    let packed = zstd::bulk::compress(first, 3).unwrap();
    let stored = [second, &packed].concat();
    let id = Digest::of(&stored).hex();

    let mut image = Image(vec![0; INODES + 4096]);
    image.u32(SUPER, 0xE0F5_E1E2);
    image.u32(SUPER + 8, 0x4000_0000);
    image.put(SUPER + 12, &[12]);
    image.u64(SUPER + 16, 2);
    image.u32(SUPER + 40, (INODES / 4096) as u32);
    image.u32(SUPER + 80, 0xc);
    image.u16(SUPER + 86, 1);
    image.u16(SUPER + 88, 11);
    image.u64(EXTENDED, 0x80 | 0x4 | 0x10);
    image.u64(EXTENDED + 8, BLOB_TABLE as u64);
    image.u32(EXTENDED + 16, 256);
    image.u32(EXTENDED + 20, CHUNK_SIZE);
    image.u64(EXTENDED + 24, CHUNK_TABLE as u64);
    image.u64(EXTENDED + 32, 160);
    image.put(EXTENDED + 256, id.as_bytes());
    image.u32(EXTENDED + 256 + 64, 2);

    image.put(BLOB_TABLE, id.as_bytes());
    image.u32(BLOB_TABLE + 68, CHUNK_SIZE);
    image.u32(BLOB_TABLE + 72, 2);
    image.u32(BLOB_TABLE + 76, 3);
    image.u32(BLOB_TABLE + 84, 1);
    image.u64(BLOB_TABLE + 88, stored.len() as u64);
    image.u64(BLOB_TABLE + 96, 8192);

    let chunks = [
        (second, 0, second.len(), 0, 0),
        (first, second.len(), packed.len(), 4096, 1),
    ];
    for (index, (data, stored_offset, stored_length, offset, flags)) in chunks.into_iter().enumerate() {
        let at = CHUNK_TABLE + index * 80;
        image.put(at, blake3::hash(data).as_bytes());
        image.u32(at + 36, flags);
        image.u32(at + 40, stored_length as u32);
        image.u32(at + 44, data.len() as u32);
        image.u64(at + 48, stored_offset as u64);
        image.u64(at + 56, offset);
    }

    // The root: an extended inode with inline entries; then the file, with two chunk indexes.
    let names = [(".", 0u64, 2u8), ("..", 0, 2), ("file", 8, 1)];
    let mut directory = Image(Vec::new());
    let mut name_offset = names.len() * 12;
    for (index, (name, nid, file_type)) in names.into_iter().enumerate() {
        directory.u64(index * 12, nid);
        directory.u16(index * 12 + 8, name_offset as u16);
        directory.put(index * 12 + 10, &[file_type]);
        directory.put(name_offset, name.as_bytes());
        name_offset += name.len();
    }
    image.u16(INODES, 2 << 1 | 1);
    image.u16(INODES + 4, 0o040_755);
    image.u64(INODES + 8, directory.0.len() as u64);
    image.u32(INODES + 44, 2);
    image.put(INODES + 64, &directory.0);
    let file = INODES + 8 * 32;
    image.u16(file, 4 << 1 | 1);
    image.u16(file + 4, 0o100_644);
    image.u64(file + 8, content.len() as u64);
    image.u32(file + 16, 0x20);
    image.u32(file + 44, 1);
    for (index, block) in [1u32, 0].into_iter().enumerate() {
        image.u16(file + 64 + index * 8 + 2, 1);
        image.u32(file + 64 + index * 8 + 4, block);
    }
    (image.0, stored, content)
}

fn decode(bytes: &[u8], stored: &[u8]) -> Result<Bootstrap, BootstrapError> {
    let (digest, size) = (Digest::of(stored), stored.len() as u64);
    Bootstrap::decode(bytes, |wanted| (*wanted == digest).then_some(size))
}

/// The file's bytes, by extents, pieces and spans.
fn read_file(bootstrap: &Bootstrap, stored: &[u8]) -> Vec<u8> {
    let index = bootstrap.tree.lookup(b"file").unwrap();
    let thaw_imagefs::tree::Kind::File { size, extents } = &bootstrap.tree.inode(index).kind else {
        panic!("no file")
    };
    let mut file = vec![0; size.next_multiple_of(4096) as usize];
    for extent in extents {
        let content = &bootstrap.blobs[extent.blob as usize].content;
        let data = extent.data_offset..extent.data_offset + extent.length;
        for piece in content.pieces.within(data) {
            let stream = piece.stream_offset..piece.stream_offset + piece.length;
            for index in content.spans.overlapping(stream.clone()) {
                let span = &content.spans.spans()[index];
                let bytes = content
                    .spans
                    .expand(
                        index,
                        &stored[span.stored.start as usize..span.stored.end as usize],
                    )
                    .unwrap();
                for (at, byte) in (span.stream.start..)
                    .zip(bytes)
                    .filter(|(at, _)| stream.contains(at))
                {
                    let data = piece.data_offset + (at - piece.stream_offset);
                    file[(extent.file_offset + (data - extent.data_offset)) as usize] = byte;
                }
            }
        }
    }
    file.truncate(*size as usize);
    file
}

#[test]
fn a_bootstrap_reads_as_it_was_made() {
    let (bytes, stored, content) = image();
    let bootstrap = decode(&bytes, &stored).unwrap();
    assert_eq!(bootstrap.blobs.len(), 1);
    assert!(read_file(&bootstrap, &stored) == content);
    // The last chunk lies first: two extents.
    let index = bootstrap.tree.lookup(b"file").unwrap();
    let thaw_imagefs::tree::Kind::File { extents, .. } = &bootstrap.tree.inode(index).kind else {
        panic!("no file")
    };
    assert_eq!(extents.len(), 2);
}

#[test]
fn what_is_not_read_is_named() {
    let (good, stored, _) = image();
    let changed = |at: usize, value: u32| {
        let mut image = Image(good.clone());
        image.u32(at, value);
        decode(&image.0, &stored)
            .err()
            .map(|error| error.to_string())
            .unwrap_or_default()
    };
    for (at, value, word) in [
        (0, 0x5241_4653, "RAFS v5"),
        (SUPER, 0, "no EROFS superblock"),
        (SUPER + 8, 0, "not RAFS v6"),
        (SUPER + 80, 0x1c, "unknown EROFS features"),
        (SUPER + 84, 0, "number of devices"),
        (EXTENDED, 0x80 | 0x10, "digest algorithm"),
        (EXTENDED, 0x884, "encryption"),
        (EXTENDED, 0x88, "two digest algorithms"),
        (EXTENDED + 20, 5000, "chunk size"),
        (EXTENDED + 8, u32::MAX, "blob table"),
        (EXTENDED + 36, 1, "chunk table"),
        (EXTENDED + 32, 0, "chunk tables that are in the blobs"),
        (EXTENDED + 256, 0, "devices are not its blobs"),
        (EXTENDED + 256 + 68, 5, "flattened"),
        (BLOB_TABLE, 0, "no SHA-256"),
        (BLOB_TABLE + 64, 7, "out of order"),
        (BLOB_TABLE + 76, 9, "unknown compressor"),
        (BLOB_TABLE + 84, 0, "aligned"),
        (BLOB_TABLE + 84, 0x9, "zran"),
        (BLOB_TABLE + 84, 0x41, "unknown blob features"),
        (CHUNK_TABLE + 32, 1, "in no blob"),
        (CHUNK_TABLE + 36, 4, "encryption"),
        (CHUNK_TABLE + 36, 8, "batches"),
        (CHUNK_TABLE + 36, 0x100, "chunk flags"),
        (CHUNK_TABLE + 48, 1 << 20, "stored blob"),
        (CHUNK_TABLE + 56, 4096, "overlap"),
        (CHUNK_TABLE + 56, 8192, "beyond its blob"),
        (CHUNK_TABLE + 56, 1, "page"),
        (INODES + 8 * 32 + 64 + 4, 2, "data that no chunk has"),
        (INODES + 8 * 32 + 64, 0, "in the bootstrap"),
        (INODES + 8 * 32 + 64, 2 << 16, "data that no chunk has"),
    ] {
        let message = changed(at, value);
        assert!(
            message.contains(word),
            "{at}={value:#x}: {message:?} has no {word:?}"
        );
    }
    assert!(
        decode(&good, b"another")
            .err()
            .unwrap()
            .to_string()
            .contains("layers")
    );
}

proptest! {
    #[test]
    fn damaged_bootstraps_never_panic(
        damage in prop::collection::vec((0..INODES + 4096, any::<u8>()), 1..8),
        end in 0..INODES + 4097,
    ) {
        let (mut bytes, stored, _) = image();
        for (at, value) in damage {
            bytes[at] = value;
        }
        let _ = decode(&bytes, &stored);
        let _ = decode(&bytes[..end], &stored);
    }
}

/// A layer that is a bootstrap, if that is its name.
pub fn layer_of(name: &str, bootstrap: &[u8]) -> Vec<u8> {
    let mut header = tar::Header::new_ustar();
    header.set_size(bootstrap.len() as u64);
    header.set_mode(0o644);
    let mut tar = tar::Builder::new(Vec::new());
    tar.append_data(&mut header, name, bootstrap).unwrap();
    tar.into_inner().unwrap()
}

#[test]
fn a_layer_holds_its_bootstrap() {
    let (bytes, stored, _) = image();
    let tar = |name: &str| layer_of(name, &bytes);
    assert_eq!(extract(&tar("image/image.boot")).unwrap().as_ref(), Some(&bytes));
    assert_eq!(extract(&tar("image/else")).unwrap(), None);
    let packed = zstd::encode_all(&tar("image/image.boot")[..], 1).unwrap();
    assert_eq!(extract(&packed).unwrap().as_ref(), Some(&bytes));

    let memory = Memory::default();
    let descriptor = |media_type: &str, bytes: &[u8], bootstrap: bool| {
        memory.insert(bytes);
        Descriptor {
            media_type: media_type.into(),
            digest: Digest::of(bytes),
            size: bytes.len() as u64,
            urls: vec![],
            platform: None,
            annotations: bootstrap.then(|| [(BOOTSTRAP_ANNOTATION.to_owned(), "true".to_owned())].into()),
        }
    };
    let manifest = serde_json::json!({
        "schemaVersion": 2,
        "config": descriptor("c", b"{}", false),
        "layers": [descriptor(NYDUS_BLOB_TYPE, &stored, false), descriptor("t", &packed, true)],
    });
    let manifest = serde_json::to_vec(&manifest).unwrap();
    let manifest = NydusManifest::parse("test", &manifest).unwrap().unwrap();
    let opened = block_on(open(&manifest, &memory)).unwrap();
    let reader = Reader::new(&opened.metadata[..]).unwrap();
    let root = reader.inode(reader.superblock().root).unwrap();
    assert!(reader.lookup(&root, b"file").unwrap().is_some());
    assert_eq!(opened.blobs[0].stored.digest, Digest::of(&stored));
}

#[test]
fn manifests_are_told_apart() {
    let parse = |layers: &str| {
        let digest = Digest::of(b"");
        let text = format!(
            r#"{{"schemaVersion":2,"config":{{"digest":"{digest}","size":1}},"layers":[{}]}}"#,
            layers.replace('@', &format!(r#""size":1,"digest":"{digest}""#))
        );
        NydusManifest::parse("test", text.as_bytes())
    };
    let boot = r#"{@,"annotations":{"containerd.io/snapshot/nydus-bootstrap":"true"}}"#;
    let blob = r#"{@,"mediaType":"application/vnd.oci.image.layer.nydus.blob.v1"}"#;
    let tar = r#"{@,"mediaType":"application/vnd.oci.image.layer.v1.tar"}"#;
    assert!(parse(tar).unwrap().is_none());
    assert!(parse(&format!("{blob},{boot}")).unwrap().is_some());
    for bad in [
        blob.to_owned(),
        format!("{boot},{boot}"),
        format!("{blob},{tar},{boot}"),
    ] {
        assert!(parse(&bad).is_err(), "{bad}");
    }
}

/// Every file of an image that Nydus created equals its source. tests/interop/nydus/test creates one and passes its path.
#[test]
fn an_image_of_nydus_reads_as_its_source() {
    let variable = |name| std::env::var_os(name).map(PathBuf::from);
    let (Some(layout), Some(source)) = (variable("THAW_NYDUS_LAYOUT"), variable("THAW_NYDUS_TREE")) else {
        thaw_test_skip::skip("tests/interop/nydus/test makes the image for this");
        return;
    };
    let memory = Memory::default();
    for entry in std::fs::read_dir(layout.join("blobs/sha256")).unwrap() {
        memory.insert(&std::fs::read(entry.unwrap().path()).unwrap());
    }
    let index: serde_json::Value =
        serde_json::from_slice(&std::fs::read(layout.join("index.json")).unwrap()).unwrap();
    let digest: Digest = index["manifests"][0]["digest"].as_str().unwrap().parse().unwrap();
    let manifest = NydusManifest::parse("test", &memory.get(&digest))
        .unwrap()
        .unwrap();
    let opened = block_on(open(&manifest, &memory)).unwrap();
    let (summary, data) = opened.expanded(&memory);
    let reader = Reader::new(&opened.metadata[..]).unwrap();
    let read = walk_image(&reader, &summary, &data);
    assert_same(&walk_directory(Path::new(&source)), &read);
}
