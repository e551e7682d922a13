//! A converted image reads back unchanged; a tampered one does not.

use std::sync::Arc;

use proptest::prelude::*;
use thaw_imagefs::digest::Digest;
use thaw_imagefs::erofs::Reader;
use thaw_imagefs::tree::{Attributes, BlobExtent, Inode, Kind, Tree};

use crate::accelerated::testing::{Memory, block_on};
use crate::accelerated::{self, open};
use crate::erofs_test::walk::{walk_image, walk_tree};
use crate::erofs_test::{Made, assert_same, random};
use crate::error::Error;
use crate::form::layer_key;
use crate::lazy::LazyImage;
use crate::load_order::LoadOrder;
use crate::load_order::{OrderedBlob, Run};
use crate::manifest::{ARTIFACT_TYPE, BLOB_TYPE, ConvertedManifest, Descriptor, METADATA_TYPE, TABLE_TYPE};

use super::*;

impl Memory {
    /// Stores what a push would send, and returns its number of bytes.
    fn take(&self, converted: Converted) -> (ConvertedManifest, Facts) {
        let mut blobs = self.blobs.lock().unwrap();
        let mut sent = converted.manifest.len() as u64;
        for part in converted.parts {
            let bytes = match part.body {
                Body::Bytes(bytes) => bytes,
                Body::File(mut file) => {
                    let mut bytes = Vec::new();
                    std::io::Read::read_to_end(&mut file, &mut bytes).unwrap();
                    bytes
                }
                Body::Dictionary(_) => {
                    assert!(blobs.contains_key(&part.descriptor.digest));
                    continue;
                }
            };
            assert_eq!(Digest::of(&bytes), part.descriptor.digest);
            assert_eq!(bytes.len() as u64, part.descriptor.size);
            sent += bytes.len() as u64;
            blobs.insert(part.descriptor.digest, bytes);
        }
        assert_eq!(sent, converted.facts.push_bytes);
        let manifest = ConvertedManifest::parse("test", &converted.manifest)
            .unwrap()
            .unwrap();
        (manifest, converted.facts)
    }

    fn open(&self, manifest: &ConvertedManifest) -> Result<LazyImage, Error> {
        block_on(open(manifest, self))
    }

    fn dictionary(&self, manifest: &ConvertedManifest) -> Dictionary {
        block_on(Dictionary::open(manifest, Arc::new(self.clone()))).unwrap()
    }
}

fn original() -> Original {
    Original {
        image: Digest::of(b"original"),
        subject: None,
        config: b"{}".to_vec(),
    }
}

fn input(made: &Made) -> Input {
    let blobs = made.data.iter().map(|data| SourceBlob {
        id: Digest::of(data),
        layer: None,
        length: data.len() as u64,
        data: Box::new(data.clone()),
    });
    Input {
        tree: made.tree.clone(),
        blobs: blobs.collect(),
        load_order: None,
    }
}

fn options(chunking: &str) -> Options {
    Options {
        chunking: Some(chunking.parse().unwrap()),
        level: 3,
    }
}

fn run(input: Input, chunking: &str, dictionaries: &[Dictionary]) -> Converted {
    convert(
        input,
        &original(),
        &options(chunking),
        dictionaries,
        &std::env::temp_dir(),
        &crate::progress::Silent,
    )
    .unwrap()
}

fn noise(length: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let mut words = std::iter::repeat_with(move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    });
    (0..length.div_ceil(8))
        .flat_map(|_| words.next().unwrap_or_default().to_le_bytes())
        .take(length)
        .collect()
}

/// A random tree, some of whose pages are not constant.
fn made(seed: u64) -> Made {
    let mut made = random(seed, 30);
    for (at, data) in made.data.iter_mut().enumerate() {
        for (page, bytes) in data.chunks_mut(4096).enumerate() {
            if (seed >> (page % 60)) & 3 == 0 {
                bytes.copy_from_slice(&noise(bytes.len(), seed ^ (page as u64) << 8 ^ at as u64));
            }
        }
    }
    made
}

/// A tree of files with these contents, in one blob.
fn files(contents: &[(&str, Vec<u8>)]) -> Made {
    let mut tree = Tree::new(Attributes::implied_directory());
    let mut data = Vec::new();
    for (name, content) in contents {
        let data_offset = data.len() as u64;
        data.extend_from_slice(content);
        data.resize(data.len().next_multiple_of(4096), 0);
        let extent = BlobExtent {
            file_offset: 0,
            blob: 0,
            data_offset,
            length: data.len() as u64 - data_offset,
        };
        let index = tree.inodes.len() as u32;
        tree.inodes.push(Inode {
            attributes: Attributes {
                mode: 0o644,
                ..Attributes::default()
            },
            kind: Kind::File {
                size: content.len() as u64,
                extents: if content.is_empty() { vec![] } else { vec![extent] },
            },
        });
        if let Kind::Directory { entries } = &mut tree.inodes[0].kind {
            entries.insert(name.as_bytes().into(), index);
        }
    }
    Made {
        tree,
        data: vec![data],
    }
}

fn assert_reads_back(memory: &Memory, manifest: &ConvertedManifest, made: &Made) {
    let opened = memory.open(manifest).unwrap();
    let (summary, data) = opened.expanded(memory);
    let reader = Reader::new(&opened.metadata[..]).unwrap();
    assert_same(&made.walk(), &walk_image(&reader, &summary, &data));
    // The tree read back, from which an image can be converted again.
    let tree = thaw_imagefs::erofs::read_tree(&reader, &summary.blobs).unwrap();
    assert_same(&made.walk(), &walk_tree(&tree, &data));
}

const CHUNKINGS: [&str; 4] = ["fixed:4K", "fixed:64K", "cdc:4K:16K:64K", "cdc"];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn what_is_converted_reads_back(seed: u64, base: u64, chunking in 0..CHUNKINGS.len()) {
        let memory = Memory::default();
        let made = made(seed);
        let chunking = CHUNKINGS[chunking];
        let plain = run(input(&made), chunking, &[]);
        let again = run(input(&made), chunking, &[]);
        prop_assert_eq!(&plain.manifest, &again.manifest);
        let (plain, facts) = memory.take(plain);
        assert_reads_back(&memory, &plain, &made);
        prop_assert_eq!(facts.unique_chunks, facts.new_chunks);

        // Against itself nothing is new; against another image, the same bytes are read.
        let own = memory.dictionary(&plain);
        let (manifest, facts) = memory.take(run(input(&made), chunking, &[own]));
        prop_assert_eq!((facts.new_chunks, facts.stored_bytes), (0, 0));
        assert_reads_back(&memory, &manifest, &made);
        let other = self::made(base);
        let (other, _) = memory.take(run(input(&other), chunking, &[]));
        let dictionaries = [memory.dictionary(&other), memory.dictionary(&plain)];
        let (manifest, _) = memory.take(run(input(&made), chunking, &dictionaries));
        assert_reads_back(&memory, &manifest, &made);
    }

    /// Any damage to any document is an error, because the manifest has the digests of all documents.
    #[test]
    fn damaged_documents_are_refused(seed: u64, place: prop::sample::Index, flip in 1u8..) {
        let memory = Memory::default();
        let (manifest, _) = memory.take(run(input(&made(seed)), "fixed:16K", &[]));
        let documents: Vec<Digest> = std::iter::once(&manifest.metadata)
            .chain(manifest.blobs.iter().map(|blob| &blob.table))
            .map(|descriptor| descriptor.digest)
            .collect();
        for digest in documents {
            let kept = memory.blobs.lock().unwrap()[&digest].clone();
            let mut bytes = kept.clone();
            let at = place.index(bytes.len());
            bytes[at] ^= flip;
            memory.blobs.lock().unwrap().insert(digest, bytes);
            prop_assert!(memory.open(&manifest).is_err());
            memory.blobs.lock().unwrap().insert(digest, kept);
        }
        prop_assert!(memory.open(&manifest).is_ok());
    }

    /// Documents from an attacker, with correct digests, are errors or images whose every byte is still verified.
    #[test]
    fn hostile_documents_never_panic(
        seed: u64,
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        which in 0..2,
    ) {
        let memory = Memory::default();
        let (manifest, _) = memory.take(run(input(&made(seed)), "fixed:16K", &[]));
        let mut documents = block_on(accelerated::Documents::read(&manifest, &memory)).unwrap();
        let bytes = match documents.tables.first_mut() {
            Some((_, bytes, _)) if which == 0 => bytes,
            _ => &mut documents.metadata.1,
        };
        for (place, value) in damage {
            let at = place.index(bytes.len());
            bytes[at] = value;
        }
        if let Ok(opened) = documents.open() {
            for blob in &opened.blobs {
                let _ = memory.data(blob);
            }
        }
    }
}

#[test]
fn identical_files_are_stored_once_and_zeros_not_at_all() {
    let memory = Memory::default();
    let big = noise(1 << 20, 1);
    let made = files(&[
        ("a", big.clone()),
        ("b", big),
        ("zeros", vec![0; 1 << 20]),
        ("small", b"text".to_vec()),
        ("empty", vec![]),
    ]);
    for chunking in ["fixed", "cdc"] {
        let (manifest, facts) = memory.take(run(input(&made), chunking, &[]));
        assert_reads_back(&memory, &manifest, &made);
        assert_eq!(facts.unique_bytes, (1 << 20) + 4096);
        assert_eq!(facts.zero_bytes, 1 << 20);
        assert_eq!(facts.logical_bytes, (3 << 20) + 4096);
        assert!(facts.stored_bytes < (1 << 20) + 4096);
        // In one piece, so the metadata needs no chunk table.
        assert_eq!(facts.metadata_bytes, 4096);
    }
}

#[test]
fn a_change_of_one_file_pushes_little() {
    let text = |seed: u64| -> Vec<u8> {
        let noise = noise(2000, seed);
        noise
            .iter()
            .flat_map(|byte| format!("{byte:03} ").into_bytes())
            .collect()
    };
    let mut contents: Vec<(String, Vec<u8>)> =
        (0..200u64).map(|at| (format!("f{at}"), text(at + 1))).collect();
    contents.push(("large".into(), noise(4 << 20, 77)));
    let borrowed = |contents: &[(String, Vec<u8>)]| -> Made {
        let borrowed: Vec<(&str, Vec<u8>)> = contents
            .iter()
            .map(|(name, content)| (&name[..], content.clone()))
            .collect();
        files(&borrowed)
    };
    let base = borrowed(&contents);
    contents[100].1 = text(5000);
    contents[0].1.extend_from_slice(&[b'x'; 9000]);
    let changed = borrowed(&contents);
    for chunking in ["fixed", "cdc"] {
        let memory = Memory::default();
        let (manifest, whole) = memory.take(run(input(&base), chunking, &[]));
        let dictionary = memory.dictionary(&manifest);
        assert_eq!(dictionary.chunking, Some(chunking.parse().unwrap()));
        let (manifest, facts) = memory.take(run(input(&changed), chunking, &[dictionary]));
        assert_reads_back(&memory, &manifest, &changed);
        assert!(facts.new_bytes <= 3 * 16384, "{facts:?}");
        assert!(
            facts.push_bytes < 24 << 10 && whole.push_bytes > 4 << 20,
            "{facts:?}"
        );
        assert_eq!(manifest.blobs.len(), 2);
    }
}

#[test]
fn a_dictionary_that_lies_is_found_out_when_it_is_read() {
    let memory = Memory::default();
    let good = files(&[("program", noise(100_000, 1))]);
    let evil = files(&[("program", noise(100_000, 2))]);
    let (honest, _) = memory.take(run(input(&good), "fixed:64K", &[]));
    let (manifest, _) = memory.take(run(input(&evil), "fixed:64K", &[]));
    // The evil image's table claims the digests of the good one's chunks.
    let mut dictionary = memory.dictionary(&manifest);
    let honest = memory.dictionary(&honest);
    let blob = &mut dictionary.blobs[0];
    blob.table.chunks = honest.blobs[0].table.chunks.clone();
    blob.document = blob.table.encode();
    blob.stored.table = Descriptor::of(TABLE_TYPE, &blob.document);
    memory
        .blobs
        .lock()
        .unwrap()
        .insert(blob.stored.table.digest, blob.document.clone());
    let (converted, facts) = memory.take(run(input(&good), "fixed:64K", &[dictionary]));
    assert_eq!(facts.new_bytes, 0);
    let opened = memory.open(&converted).unwrap();
    assert!(memory.data(&opened.blobs[0]).unwrap_err().contains("digest"));
}

#[test]
fn a_load_order_is_laid_out_first_and_told() {
    let memory = Memory::default();
    let contents: Vec<(String, Vec<u8>)> = (0..64u64)
        .map(|at| (format!("f{at:02}"), noise(40_000, at + 1)))
        .collect();
    let borrowed: Vec<(&str, Vec<u8>)> = contents
        .iter()
        .map(|(name, content)| (&name[..], content.clone()))
        .collect();
    let made = files(&borrowed);
    let mut input = input(&made);
    let length = made.data[0].len() as u64;
    let blob = OrderedBlob {
        digest: input.blobs[0].id,
        layer: None,
        length,
    };
    let unknown = OrderedBlob {
        digest: Digest::of(b"another"),
        layer: None,
        length: 4096,
    };
    // Of files 40, 3 and 40 again, from the middle of each; and of an unknown blob.
    let size = 40960;
    let runs = [
        (0, 40 * size + 8192, 4096),
        (0, 3 * size, 100),
        (1, 0, 4096),
        (0, 40 * size, 4096),
    ];
    let order = LoadOrder::new(
        original().image,
        vec![blob, unknown],
        runs.into_iter().map(Run::from).collect(),
        2,
    );
    input.load_order = Some(order.unwrap());
    let (manifest, facts) = memory.take(run(input, "fixed", &[]));
    assert_eq!(facts.unmatched_load_order_bytes, 4096);
    assert_reads_back(&memory, &manifest, &made);
    let opened = memory.open(&manifest).unwrap();
    let order = opened.load_order.unwrap();
    let blob = &opened.blobs[0];
    let key = layer_key(blob.form, &blob.stored.digest, &blob.document);
    assert_eq!(order.blobs[0].digest, key);
    assert_eq!(order.dropped, 2);
    // One range from the blob's start, in frames of its own.
    assert_eq!(order.runs, [Run::from((0, 0, 2 * size))]);
    assert_eq!(blob.content.spans.spans()[0].stream, 0..2 * size);
    let data = memory.data(blob).unwrap();
    assert!(data[..40_000] == noise(40_000, 41) && data[size as usize..][..40_000] == noise(40_000, 4));
}

#[test]
fn an_image_without_data_has_no_blob() {
    let memory = Memory::default();
    let made = files(&[("empty", vec![])]);
    let (manifest, facts) = memory.take(run(input(&made), "fixed", &[]));
    assert!(manifest.blobs.is_empty() && facts.stored_bytes == 0);
    assert_reads_back(&memory, &manifest, &made);
}

#[test]
fn manifests_of_other_things_are_told_apart() {
    let ordinary = br#"{"schemaVersion":2,"config":{"mediaType":"x","digest":"sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855","size":2},"layers":[]}"#;
    assert_eq!(ConvertedManifest::parse("test", ordinary).unwrap(), None);
    let text = String::from_utf8_lossy(ordinary).into_owned();
    let claimed = text.replace(
        "\"schemaVersion\":2",
        &format!("\"schemaVersion\":2,\"artifactType\":\"{ARTIFACT_TYPE}\""),
    );
    assert!(ConvertedManifest::parse("test", claimed.as_bytes()).is_err());
    let (_, written) = {
        let made = files(&[("a", noise(10, 1))]);
        let converted = run(input(&made), "fixed", &[]);
        ((), String::from_utf8(converted.manifest).unwrap())
    };
    let parse = |text: &str| ConvertedManifest::parse("test", text.as_bytes());
    assert!(parse(&written).unwrap().is_some());
    assert!(parse(&written.replace(BLOB_TYPE, TABLE_TYPE)).is_err());
    assert!(parse(&written.replace(METADATA_TYPE, BLOB_TYPE)).is_err());
    assert!(matches!(
        parse(&written.replace(TABLE_TYPE, "application/vnd.thaw.image.chunks.v2")),
        Err(Error::UnknownMediaType { .. })
    ));
}
