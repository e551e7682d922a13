use std::os::unix::fs::MetadataExt;

use super::*;

/// Blocks of the disk of the tests.
const BLOCKS: u64 = 40;
const SIZE: usize = (BLOCKS * BLOCK) as usize;

/// A disk of a snapshot, of which every third block is a hole, and its content.
fn frozen(directory: &Path) -> (OwnedFd, Vec<u8>) {
    let file = tempfile::tempfile_in(directory).unwrap();
    file.set_len(SIZE as u64).unwrap();
    let mut content = vec![0; SIZE];
    for (block, content) in content.chunks_mut(BLOCK as usize).enumerate() {
        if block % 3 != 2 {
            content.fill(1 + block as u8);
            file.write_all_at(content, block as u64 * BLOCK).unwrap();
        }
    }
    (file.into(), content)
}

fn content(disk: Disk) -> Vec<u8> {
    assert!(disk.base.is_none());
    let mut bytes = vec![0; SIZE];
    assert_eq!(disk.size, SIZE as u64);
    File::from(disk.file).read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

#[test]
fn a_copy_has_the_data_and_the_holes() {
    let directory = tempfile::tempdir().unwrap();
    let original = tempfile::tempfile_in(directory.path()).unwrap();
    original.set_len(64 << 20).unwrap();
    original.write_all_at(&[5; 5000], 1 << 20).unwrap();
    original.write_all_at(b"end", (64 << 20) - 3).unwrap();
    let copied = nameless_file(directory.path()).unwrap();
    copy_data(&original.into(), &copied).unwrap();
    let copied = File::from(copied);
    let metadata = copied.metadata().unwrap();
    assert_eq!(metadata.len(), 64 << 20);
    assert!(metadata.blocks() * 512 < 1 << 20, "{} blocks", metadata.blocks());
    let mut bytes = [0; 5001];
    copied.read_exact_at(&mut bytes, 1 << 20).unwrap();
    assert_eq!((bytes[0], bytes[4999], bytes[5000]), (5, 5, 0));
    let mut end = [0; 3];
    copied.read_exact_at(&mut end, (64 << 20) - 3).unwrap();
    assert_eq!(&end, b"end");
}

/// Makes a block the layer's: data, or a hole.
fn write(disk: &Disk, block: u64, value: Option<u8>) {
    let layer = File::from(disk.file.try_clone().unwrap());
    if let Some(value) = value {
        layer
            .write_all_at(&[value; BLOCK as usize], block * BLOCK)
            .unwrap();
    }
    let marks = read_marks(&layer, disk.size).unwrap();
    let (at, bytes) = marks.marked(block..block + 1);
    layer.write_all_at(&bytes, marks_offset(disk.size) + at).unwrap();
}

#[test]
fn copy_of_a_layered_disk_is_what_its_guest_sees() {
    let directory = tempfile::tempdir().unwrap();
    let (base, mut expected) = frozen(directory.path());
    let disk = Disk::layered(base, nameless_file(directory.path()).unwrap()).unwrap();
    assert!(content(whole(&disk, directory.path()).unwrap()) == expected);
    for (block, value) in [(2, Some(0xA2)), (3, Some(0xA3)), (4, None), (39, Some(0xA4))] {
        write(&disk, block, value);
        let place = block as usize * BLOCK as usize..(block as usize + 1) * BLOCK as usize;
        expected[place].fill(value.unwrap_or(0));
    }
    // Without a mark, a block is the base's.
    let layer = File::from(disk.file.try_clone().unwrap());
    layer.write_all_at(&[0xFF; 100], 7 * BLOCK).unwrap();
    assert!(content(whole(&disk, directory.path()).unwrap()) == expected);
}

#[test]
fn thawed_layer_is_another_over_the_same_base() {
    let directory = tempfile::tempdir().unwrap();
    let (base, _) = frozen(directory.path());
    let file = nameless_file(directory.path()).unwrap();
    let original = Disk::layered(base.try_clone().unwrap(), file).unwrap();
    write(&original, 5, Some(0xA5));
    let expected = content(whole(&original, directory.path()).unwrap());
    let base_file = File::from(base.try_clone().unwrap());
    for may_layer in [true, false] {
        let disk = thawed_layer(&base, &original.file, directory.path(), may_layer).unwrap();
        assert_eq!(is_base(&disk, &base_file).unwrap(), may_layer);
        assert!(content(whole(&disk, directory.path()).unwrap()) == expected);
        if may_layer {
            write(&disk, 6, Some(0xA6));
        }
    }
    assert!(content(whole(&original, directory.path()).unwrap()) == expected);
}

#[test]
fn thawed_disk_has_the_content_of_the_frozen_one() {
    let directory = tempfile::tempdir().unwrap();
    let (frozen, expected) = frozen(directory.path());
    for may_layer in [true, false] {
        let disk = thawed(&frozen, directory.path(), may_layer).unwrap();
        assert!(may_layer || disk.base.is_none());
        assert!(content(whole(&disk, directory.path()).unwrap()) == expected);
    }
}

#[test]
fn disk_that_others_can_change_is_no_base() {
    let directory = tempfile::tempdir().unwrap();
    let (frozen, _) = frozen(directory.path());
    let file = nameless_file(directory.path()).unwrap();
    assert!(can_be_base(&frozen, &file).unwrap());
    rustix::fs::fchmod(&frozen, Mode::RUSR | Mode::WGRP).unwrap();
    assert!(!can_be_base(&frozen, &file).unwrap());
    rustix::fs::fchmod(&frozen, Mode::RUSR).unwrap();
    assert!(can_be_base(&frozen, &file).unwrap());
    rustix::fs::ftruncate(&frozen, SIZE as u64 + 512).unwrap();
    assert!(
        !can_be_base(&frozen, &file).unwrap(),
        "its last block is not whole"
    );
}
