//! Generated trees and their images, from tars with everything that a layer can contain.

use thaw_imagefs::tree::Tree;

use crate::layer::testing::{END, header, padded, pax, seal};
use crate::layer::tree::LayerTree;
use crate::layer::{LayerLimits, unpack};
use crate::merge::flatten;

use super::walk::{Walk, walk_tree};
use super::{Summary, write, write_with_data};

/// A small generator of numbers: the tests need variety, not randomness.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self, below: u64) -> u64 {
        // SplitMix64.
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        (mixed ^ mixed >> 31) % below
    }

    fn one_in(&mut self, count: u64) -> bool {
        self.next(count) == 0
    }
}

const ACL: &[u8] = b"\x02\0\0\0\x01\0\x06\0\xff\xff\xff\xff\x02\0\x04\0\xe8\x03\0\0\x04\0\x04\0\xff\xff\xff\xff\x10\0\x04\0\xff\xff\xff\xff\x20\0\x04\0\xff\xff\xff\xff";

/// A layer with entries of all types, while they are generated.
struct RandomLayer<'a> {
    numbers: &'a mut Numbers,
    /// Names that later layers may remove.
    names: &'a mut Vec<String>,
    tar: Vec<u8>,
    /// Directories for entries, each with a slash at its end.
    directories: Vec<String>,
    /// Files that may be linked to.
    linkable: Vec<String>,
}

/// The type and content of an entry.
struct Entry {
    name: String,
    type_flag: u8,
    content: Vec<u8>,
    link: String,
}

impl RandomLayer<'_> {
    fn name(&mut self, index: usize) -> String {
        let numbers = &mut self.numbers;
        let parent = self.directories[numbers.next(self.directories.len() as u64) as usize].clone();
        let base = match numbers.next(12) {
            0 => format!("{index}").repeat(255).chars().take(255).collect(),
            1 => "!before-dot".into(),
            2 => format!(".hidden{index}"),
            _ => format!("n{}", numbers.next(40)),
        };
        format!("{parent}{base}")
    }

    /// PAX records of times, owners and attributes, and the number that chooses the type.
    fn attributes(&mut self, index: usize) -> (Vec<(&'static str, Vec<u8>)>, u64) {
        let numbers = &mut self.numbers;
        let time = match numbers.next(3) {
            0 => "1700000000".to_string(),
            1 => format!(
                "{}.{:09}",
                numbers.next(4_000_000_000),
                numbers.next(1_000_000_000)
            ),
            _ => format!("-{}.5", numbers.next(1000)),
        };
        let uid = if numbers.one_in(4) {
            70_000 + numbers.next(1 << 31)
        } else {
            numbers.next(1000)
        };
        let mut records = vec![
            ("mtime", time.into_bytes()),
            ("uid", uid.to_string().into_bytes()),
        ];
        if numbers.one_in(3) {
            records.push((
                "SCHILY.xattr.security.capability",
                b"\x01\0\0\x02\0\x04\0\0\0\0\0\0\0\0\0\0\0\0\0\0".to_vec(),
            ));
            records.push((
                "SCHILY.xattr.trusted.k",
                vec![index as u8; numbers.next(300) as usize],
            ));
        }
        let kind = numbers.next(12);
        // Linux supports these only on files and directories.
        let is_file_or_directory = kind < 7;
        if is_file_or_directory && numbers.one_in(6) {
            records.push(("SCHILY.xattr.system.posix_acl_access", ACL.to_vec()));
        }
        if is_file_or_directory && numbers.one_in(4) {
            records.push(("SCHILY.xattr.user.large", vec![b'v'; numbers.next(5000) as usize]));
        }
        (records, kind)
    }

    fn entry(&mut self, mut name: String, kind: u64) -> Entry {
        let numbers = &mut self.numbers;
        let mut content = Vec::new();
        let mut link = String::new();
        let type_flag = match kind {
            0..=2 => {
                name.push('/');
                self.directories.push(name.clone());
                b'5'
            }
            3..=6 => {
                for _ in 0..numbers.next(4) {
                    let byte = numbers.next(3) as u8;
                    content.resize(content.len() + numbers.next(100_000) as usize, byte);
                }
                self.linkable.push(name.clone());
                b'0'
            }
            7 => {
                link = "t".repeat(1 + numbers.next(4094) as usize);
                b'2'
            }
            8 => b'3',
            9 => b'4',
            10 => b'6',
            _ => match self
                .linkable
                .get(numbers.next(1 + self.linkable.len() as u64) as usize)
            {
                Some(target) => {
                    link = target.clone();
                    b'1'
                }
                None => b'6',
            },
        };
        Entry {
            name,
            type_flag,
            content,
            link,
        }
    }

    /// Records the names that the entry adds and replaces.
    fn note(&mut self, entry: &Entry) {
        let Entry { name, type_flag, .. } = entry;
        if !matches!(type_flag, b'1' | b'5') {
            self.names.push(name.clone());
        }
        // A file that a later entry replaces can no longer be a link target.
        if *type_flag != b'0' {
            self.linkable
                .retain(|other| *other != name.trim_end_matches('/') && !other.starts_with(name));
        }
        // An entry that replaces a directory removes the directory's entries.
        if *type_flag != b'5' {
            let prefix = format!("{name}/");
            self.directories.retain(|other| !other.starts_with(&prefix));
            self.linkable.retain(|other| !other.starts_with(&prefix));
        }
    }

    fn write(&mut self, entry: Entry, mut records: Vec<(&str, Vec<u8>)>) {
        records.push(("path", entry.name.into_bytes()));
        records.push(("linkpath", entry.link.into_bytes()));
        let borrowed: Vec<(&str, &[u8])> = records.iter().map(|(key, value)| (*key, &value[..])).collect();
        self.tar.extend_from_slice(&pax(&borrowed));
        let mut block = header("short", entry.type_flag, entry.content.len() as u64, "");
        let numbers = &mut self.numbers;
        block[329..337].copy_from_slice(format!("{:07o}\0", numbers.next(4096)).as_bytes());
        block[337..345].copy_from_slice(format!("{:07o}\0", numbers.next(1 << 20)).as_bytes());
        block[100..108].copy_from_slice(format!("{:07o}\0", numbers.next(0o10000)).as_bytes());
        seal(&mut block);
        self.tar.extend_from_slice(&block);
        self.tar.extend_from_slice(&padded(&entry.content));
    }

    /// Removes some of the existing names, by whiteouts.
    fn remove_some(&mut self) {
        let numbers = &mut self.numbers;
        let removed = self.names.iter().filter(|_| numbers.one_in(10));
        for name in removed.cloned().collect::<Vec<_>>() {
            let (parent, base) = name
                .rsplit_once('/')
                .map_or(("", &name[..]), |(parent, base)| (parent, base));
            if base.len() < 250 {
                let hidden = format!("{parent}/.wh.{base}");
                let path = hidden.trim_start_matches('/').as_bytes();
                self.tar.extend_from_slice(&pax(&[("path", path)]));
                self.tar.extend_from_slice(&header("short", b'0', 0, ""));
            }
        }
    }
}

/// The tar of a layer with entries of all types.
fn random_layer(numbers: &mut Numbers, names: &mut Vec<String>, entries: usize) -> Vec<u8> {
    let mut layer = RandomLayer {
        numbers,
        names,
        tar: Vec::new(),
        directories: vec![String::new()],
        linkable: Vec::new(),
    };
    for index in 0..entries {
        let name = layer.name(index);
        let (records, kind) = layer.attributes(index);
        let entry = layer.entry(name, kind);
        layer.note(&entry);
        layer.write(entry, records);
    }
    layer.remove_some();
    layer.tar.extend_from_slice(&END);
    layer.tar
}

pub(crate) struct Made {
    pub(crate) tree: Tree,
    pub(crate) data: Vec<Vec<u8>>,
}

pub(super) fn make(tars: &[Vec<u8>]) -> Made {
    let mut data = Vec::new();
    let layers: Vec<LayerTree> = tars
        .iter()
        .map(|tar| {
            let mut bytes = Vec::new();
            let tree = unpack(&tar[..], &mut bytes, &LayerLimits::default()).unwrap();
            data.push(bytes);
            tree
        })
        .collect();
    Made {
        tree: flatten(&layers).unwrap(),
        data,
    }
}

pub(crate) fn random(seed: u64, entries: usize) -> Made {
    let mut numbers = Numbers(seed);
    let layers = 1 + numbers.next(3);
    let mut names = Vec::new();
    let tars: Vec<_> = (0..layers)
        .map(|_| random_layer(&mut numbers, &mut names, entries))
        .collect();
    make(&tars)
}

impl Made {
    pub(super) fn metadata(&self) -> (Vec<u8>, Summary) {
        let lengths: Vec<u64> = self.data.iter().map(|data| data.len() as u64).collect();
        let mut image = Vec::new();
        let summary = write(&self.tree, &lengths, &mut image).unwrap();
        assert_eq!(image.len() as u64, summary.metadata_length);
        (image, summary)
    }

    /// The image and its data in one file.
    pub(super) fn whole(&self) -> (tempfile::NamedTempFile, Summary) {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut readers: Vec<&[u8]> = self.data.iter().map(|data| &data[..]).collect();
        let mut blobs: Vec<(u64, &mut dyn std::io::Read)> = Vec::new();
        for reader in &mut readers {
            blobs.push((reader.len() as u64, reader));
        }
        let summary = write_with_data(&self.tree, &mut blobs, file.as_file()).unwrap();
        (file, summary)
    }

    pub(crate) fn walk(&self) -> Walk {
        walk_tree(&self.tree, &self.data)
    }
}
