//! One tree in three views: the merged tree, its image as our reader sees it, and as the kernel sees it.

mod extents;
mod made;
pub(crate) mod walk;

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use proptest::prelude::*;
use thaw_imagefs::erofs::*;
use thaw_imagefs::tree::{Attributes, BlobExtent, Inode as TreeInode, Kind, PAGE, Timestamp, Tree, Xattr};

use crate::layer::testing::{END, header, padded};

use made::make;
pub(crate) use made::{Made, random};
use walk::{Walk, walk_directory, walk_image, walk_tree};

/// `cap_net_bind_service` permitted and effective (`vfs_cap_data`, version 2).
const CAPABILITY: &[u8] = b"\x01\0\0\x02\0\x04\0\0\0\0\0\0\0\0\0\0\0\0\0\0";

fn fsck(image: &Path) {
    let output = Command::new("fsck.erofs")
        .arg(image)
        .output()
        .expect("fsck.erofs, of package erofs-utils");
    assert!(
        output.status.success(),
        "fsck.erofs refuses the image: {}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Mounts an image and calls `with` on the directory. Without permission to mount, prints so and skips the call.
fn mounted(image: &Path, with: impl FnOnce(&Path)) {
    let directory = tempfile::tempdir().unwrap();
    let mount = Command::new("mount")
        .args(["-t", "erofs", "-o", "loop,ro"])
        .arg(image)
        .arg(directory.path())
        .output();
    let output = mount.expect("mount, of package mount");
    if !output.status.success() {
        let why = String::from_utf8_lossy(&output.stderr).into_owned();
        let may_mount = rustix::process::geteuid().is_root() && Path::new("/dev/loop-control").exists();
        assert!(
            !may_mount || why.contains("unknown filesystem"),
            "the kernel refuses the image: {why}"
        );
        thaw_test_skip::skip(format!("images cannot be mounted here: {why}"));
        return;
    }
    struct Unmount<'a>(&'a Path);
    impl Drop for Unmount<'_> {
        fn drop(&mut self) {
            assert!(Command::new("umount").arg(self.0).status().unwrap().success());
        }
    }
    let _unmount = Unmount(directory.path());
    with(directory.path());
}

pub(crate) fn assert_same(one: &Walk, other: &Walk) {
    for (path, node) in one {
        assert_eq!(Some(node), other.get(path), "{}", path.escape_ascii());
    }
    for path in other.keys() {
        assert!(one.contains_key(path), "{} is there too", path.escape_ascii());
    }
}

fn directory(entries: &[(&str, u32)]) -> TreeInode {
    let entries: BTreeMap<Box<[u8]>, u32> = entries
        .iter()
        .map(|(name, index)| (name.as_bytes().into(), *index))
        .collect();
    TreeInode {
        attributes: Attributes::implied_directory(),
        kind: Kind::Directory { entries },
    }
}

fn file(size: u64, extents: &[(u64, u64, u64)]) -> TreeInode {
    let extents = extents
        .iter()
        .map(|(file_offset, data_offset, length)| BlobExtent {
            file_offset: *file_offset,
            blob: 0,
            data_offset: *data_offset,
            length: *length,
        })
        .collect();
    let attributes = Attributes {
        mode: 0o644,
        ..Attributes::default()
    };
    TreeInode {
        attributes,
        kind: Kind::File { size, extents },
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn the_reader_sees_the_tree(seed: u64) {
        let made = random(seed, 60);
        let (image, summary) = made.metadata();
        let reader = Reader::new(&image[..]).unwrap();
        assert_same(&made.walk(), &walk_image(&reader, &summary, &made.data));
        prop_assert_eq!(image, made.metadata().0);
    }

    #[test]
    fn fsck_accepts_every_image(seed: u64) {
        let made = random(seed, 40);
        let metadata = tempfile::NamedTempFile::new().unwrap();
        metadata.as_file().write_all_at(&made.metadata().0, 0).unwrap();
        fsck(metadata.path());
        fsck(made.whole().0.path());
    }

    /// Damage anywhere in the metadata gives errors or other content, never a panic or an endless walk.
    #[test]
    fn damaged_images_never_panic(seed: u64, damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..20)) {
        let made = random(seed, 20);
        let (mut image, _) = made.metadata();
        for (place, value) in damage {
            let place = place.index(image.len());
            image[place] = value;
        }
        if let Ok(reader) = Reader::new(&image[..]) {
            let blobs = [BlobPlacement { address: 2 << 20, length: 1 << 24 }];
            if let Ok(tree) = read_tree(&reader, &blobs) {
                prop_assert!(tree.inodes.len() <= image.len() / 32);
            }
            for nid in 0..(image.len() / 32 + 2) as u64 {
                let Ok(inode) = reader.inode(nid) else { continue };
                let _ = reader.read_link(&inode);
                if let Ok(entries) = reader.entries(&inode, 0) {
                    prop_assert!(entries.count() <= image.len());
                }
                let _ = reader.lookup(&inode, b"n1");
                if let Ok(xattrs) = reader.xattrs(&inode) {
                    prop_assert!(xattrs.count() <= image.len());
                }
                let _ = reader.mappings(&inode, 0, 1 << 20).count();
            }
        }
    }
}

#[test]
fn the_kernel_sees_the_tree() {
    for seed in 0..6 {
        let made = random(seed, 80);
        let (image, _) = made.whole();
        mounted(image.path(), |root| {
            assert_same(&made.walk(), &walk_directory(root))
        });
    }
}

#[test]
fn a_directory_goes_through_gnu_tar_and_the_image_unchanged() {
    if !rustix::process::geteuid().is_root() {
        thaw_test_skip::skip("devices and owners need root");
        return;
    }
    let source = tempfile::tempdir().unwrap();
    let script = "
        mkdir -p a/b/c empty; : > a/true; echo hello > a/file; ln a/file a/b/hard; ln -s ../file a/b/soft
        mknod a/null c 1 3; mknod a/disk b 259 300000; mkfifo a/fifo; chmod 4755 a/file; chmod 1777 empty
        chown 100000:4000000000 a/file; truncate -s 3000000 a/sparse; printf x | dd of=a/sparse bs=1 seek=1500000 conv=notrunc status=none
        touch -d '2001-02-03 04:05:06.123456789' a/b; touch -d '1969-12-31 23:59:58.5 UTC' a/fifo
        seq 1 100000 > a/numbers";
    assert!(
        Command::new("sh")
            .arg("-ec")
            .arg(script)
            .current_dir(source.path())
            .status()
            .unwrap()
            .success()
    );
    for (path, name) in [
        ("a/file", "user.note"),
        ("a/b/c", "trusted.note"),
        ("a/true", "security.capability"),
    ] {
        let set = || {
            rustix::fs::setxattr(
                source.path().join(path),
                name,
                CAPABILITY,
                rustix::fs::XattrFlags::empty(),
            )
        };
        match set() {
            Ok(()) => {}
            Err(rustix::io::Errno::OPNOTSUPP) => {
                thaw_test_skip::skip(format!("{name}: this file system does not have it"));
            }
            Err(error) => panic!("{name}: {error}"),
        }
    }
    let output = Command::new("tar")
        .arg("-C")
        .arg(source.path())
        .args([
            "--format=pax",
            "--sparse",
            "--xattrs",
            "--xattrs-include=*",
            "-cf",
            "-",
            ".",
        ])
        .output()
        .unwrap();
    assert!(output.status.success());
    let made = make(&[output.stdout]);
    let original = walk_directory(source.path());
    assert_same(&original, &made.walk());
    let (image, _) = made.whole();
    fsck(image.path());
    mounted(image.path(), |root| assert_same(&original, &walk_directory(root)));
}

#[test]
fn a_hundred_thousand_files() {
    const FILES: usize = 100_000;
    let mut tar = Vec::new();
    for index in 0..FILES {
        // Half of them in one directory, the others spread.
        let name = match index % 2 {
            0 => format!("one/file-{index}"),
            _ => format!("many/{:03}/{index}", index % 1000),
        };
        // Some have content; each of these takes a page.
        let content: &[u8] = if index % 100 > 97 { b"0123456789" } else { b"" };
        tar.extend_from_slice(&header(&name, b'0', content.len() as u64, ""));
        tar.extend_from_slice(&padded(content));
    }
    tar.extend_from_slice(&END);
    let started = std::time::Instant::now();
    let made = make(&[tar]);
    let (image, summary) = made.metadata();
    eprintln!(
        "{FILES} files: {} KiB of metadata in {:?}",
        image.len() >> 10,
        started.elapsed()
    );
    assert_eq!(summary.inodes as usize, FILES + 500 + 3);
    let reader = Reader::new(&image[..]).unwrap();
    let root = reader.inode(reader.superblock().root).unwrap();
    let one = reader
        .inode(reader.lookup(&root, b"one").unwrap().unwrap().nid)
        .unwrap();
    for index in (0..FILES).step_by(2) {
        let name = format!("file-{index}");
        let found = reader.lookup(&one, name.as_bytes()).unwrap().unwrap();
        assert_eq!(found.name, name.as_bytes());
        assert_eq!(
            reader.inode(found.nid).unwrap().size,
            if index % 100 > 97 { 10 } else { 0 }
        );
        assert_eq!(
            reader.lookup(&one, format!("file-{index}x").as_bytes()).unwrap(),
            None
        );
    }
    let mut names: Vec<_> = reader
        .entries(&one, 0)
        .unwrap()
        .map(|entry| entry.unwrap().name.to_vec())
        .collect();
    assert_eq!(names.len(), FILES / 2 + 2);
    names.dedup();
    assert_eq!(names.len(), FILES / 2 + 2);
    let (file, _) = made.whole();
    fsck(file.path());
    mounted(file.path(), |root| {
        let one = std::fs::read_dir(root.join("one"))
            .unwrap()
            .map(|entry| entry.unwrap().file_name());
        assert_eq!(one.count(), FILES / 2);
        assert_eq!(std::fs::read(root.join("one/file-99998")).unwrap(), b"0123456789");
        assert_eq!(std::fs::read(root.join("many/999/99999")).unwrap(), b"0123456789");
    });
}

#[test]
fn a_directory_is_read_on_from_any_entry() {
    let names: Vec<String> = (0..1000).map(|index| format!("{index:0>40}")).collect();
    let entries: Vec<(&str, u32)> = names.iter().map(|name| (&name[..], 1)).collect();
    let tree = Tree {
        inodes: vec![directory(&entries), file(0, &[])],
    };
    let mut image = Vec::new();
    write(&tree, &[], &mut image).unwrap();
    let reader = Reader::new(&image[..]).unwrap();
    let root = reader.inode(reader.superblock().root).unwrap();
    let all: Vec<_> = reader.entries(&root, 0).unwrap().map(Result::unwrap).collect();
    assert_eq!(all.len(), 1002);
    for (index, entry) in all.iter().enumerate() {
        let after: Vec<_> = reader
            .entries(&root, entry.next)
            .unwrap()
            .map(Result::unwrap)
            .collect();
        assert_eq!(after, all[index + 1..]);
    }
    // Positions that no entry returned.
    for position in [1, 5, 13, 4095, root.size, u64::MAX] {
        assert!(
            reader
                .entries(&root, position)
                .unwrap()
                .all(|entry| entry.is_ok())
        );
    }
    assert_eq!(reader.inode(all[5].nid).unwrap().nlink, 1000);
}

#[test]
fn trees_that_are_none_are_refused() {
    let refused = |inodes: Vec<TreeInode>, lengths: &[u64]| {
        let result = write(&Tree { inodes }, lengths, &mut Vec::new());
        assert!(
            matches!(
                result,
                Err(WriteError::Malformed(_) | WriteError::TooLarge { .. })
            ),
            "{result:?}"
        );
    };
    refused(vec![], &[]);
    refused(vec![file(0, &[])], &[]);
    refused(vec![directory(&[("a", 7)])], &[]);
    refused(vec![directory(&[("a", 0)])], &[]);
    refused(vec![directory(&[("a/b", 1)]), file(0, &[])], &[]);
    refused(vec![directory(&[(&"n".repeat(256), 1)]), file(0, &[])], &[]);
    refused(vec![directory(&[("a", 1)]), file(PAGE, &[(0, 0, PAGE)])], &[]);
    refused(
        vec![directory(&[("a", 1)]), file(PAGE, &[(0, PAGE, PAGE)])],
        &[PAGE],
    );
    refused(
        vec![directory(&[("a", 1)]), file(PAGE, &[(0, 0, 2 * PAGE)])],
        &[2 * PAGE],
    );
    refused(
        vec![directory(&[("a", 1)]), file(PAGE, &[(0, 1, PAGE)])],
        &[2 * PAGE],
    );
    refused(vec![directory(&[])], &[1 << 44]);
    let mut odd = directory(&[]);
    odd.attributes.xattrs = vec![Xattr {
        name: b"system.odd".to_vec(),
        value: vec![],
    }];
    refused(vec![odd], &[]);
    let mut late = directory(&[]);
    late.attributes.mtime = Timestamp {
        seconds: 0,
        nanoseconds: 1_000_000_000,
    };
    refused(vec![late], &[]);
}

#[test]
fn images_of_mkfs_are_read() {
    let source = tempfile::tempdir().unwrap();
    for index in 0..300 {
        std::fs::write(
            source.path().join(format!("{index}")),
            vec![index as u8; index * 37],
        )
        .unwrap();
    }
    let image = tempfile::NamedTempFile::new().unwrap();
    let mkfs = Command::new("mkfs.erofs")
        .arg(image.path())
        .arg(source.path())
        .output();
    assert!(mkfs.expect("mkfs.erofs, of package erofs-utils").status.success());
    let bytes = std::fs::read(image.path()).unwrap();
    let reader = Reader::new(&bytes[..]).unwrap();
    let summary = Summary {
        metadata_length: bytes.len() as u64,
        total_length: bytes.len() as u64,
        blobs: vec![],
        inodes: 0,
    };
    assert_same(
        &walk_directory(source.path()),
        &walk_image(&reader, &summary, &[]),
    );
}

#[test]
fn other_file_systems_are_refused() {
    assert_eq!(Reader::new(&[0u8; 100][..]).unwrap_err(), ReadError::NotErofs);
    assert_eq!(Reader::new(&[0u8; 8192][..]).unwrap_err(), ReadError::NotErofs);
    let mut image = Vec::new();
    write(&Tree::new(Attributes::implied_directory()), &[], &mut image).unwrap();
    for (place, value) in [(12, 9), (80, 8), (86, 1)] {
        let mut changed = image.clone();
        changed[1024 + place] = value;
        assert!(matches!(
            Reader::new(&changed[..]),
            Err(ReadError::Unsupported { .. })
        ));
    }
}
