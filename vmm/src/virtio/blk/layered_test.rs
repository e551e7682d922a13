use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::thread;

use proptest::prelude::*;
use vm_memory::{GuestAddress, GuestMemory as _};

use super::*;
use crate::memory::GuestMemory;

/// The last block has three of its sectors.
const SECTORS: u64 = 20 * 8 + 3;
const BYTES: usize = (SECTORS * SECTOR) as usize;

#[derive(Clone, Debug)]
enum Step {
    Read(Range),
    Write(Range, u8),
    Discard(Range),
    WriteZeroes(Range),
    Flush,
    Reopen,
}

/// Some sectors of the disk.
fn range() -> impl Strategy<Value = Range> {
    (0..SECTORS, 1..40u64, any::<bool>()).prop_map(|(sector, sectors, unmap)| Range {
        sector,
        sectors: sectors.min(SECTORS - sector) as u32,
        unmap,
    })
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => range().prop_map(Step::Read),
        6 => (range(), any::<u8>()).prop_map(|(range, value)| Step::Write(range, value)),
        2 => range().prop_map(Step::Discard),
        2 => range().prop_map(Step::WriteZeroes),
        1 => Just(Step::Flush),
        1 => Just(Step::Reopen),
    ]
}

/// A base with data in every second block, whose sectors differ, and its content.
fn base() -> (File, Vec<u8>) {
    let content: Vec<u8> = (0..BYTES)
        .map(|at| match at / BLOCK as usize % 2 {
            0 => 1 + (at / SECTOR as usize % 100) as u8,
            _ => 0,
        })
        .collect();
    let file = tempfile::tempfile().unwrap();
    file.set_len(BYTES as u64).unwrap();
    for (block, content) in content.chunks(BLOCK as usize).enumerate().step_by(2) {
        file.write_all_at(content, block as u64 * BLOCK).unwrap();
    }
    (file, content)
}

fn new_layer() -> File {
    let file = tempfile::tempfile().unwrap();
    file.set_len(file_bytes(BYTES as u64)).unwrap();
    file
}

fn open(base: &File, layer: &File) -> LayeredDisk {
    let fds = [base, layer].map(|file| OwnedFd::from(file.try_clone().unwrap()));
    LayeredDisk::open(fds.into()).unwrap()
}

fn memory() -> GuestMemory {
    GuestMemory::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap()
}

/// Two buffers of the guest, which are not neighbours, for so many sectors.
fn buffers(memory: &GuestMemory, sectors: u64) -> [VolatileSlice<'_>; 2] {
    let bytes = (sectors * SECTOR) as usize;
    let slice = |at: usize, length| memory.get_slice(GuestAddress(at as u64), length).unwrap();
    [slice(0, bytes / 3), slice(bytes, bytes - bytes / 3)]
}

fn read(disk: &LayeredDisk, memory: &GuestMemory, sector: u64, sectors: u64) -> Vec<u8> {
    let buffers = buffers(memory, sectors);
    disk.read(sector, &buffers).unwrap();
    let mut bytes = vec![0; guest_io::total(&buffers)];
    guest_io::copy_out(&buffers, 0, &mut bytes);
    bytes
}

fn write(disk: &LayeredDisk, memory: &GuestMemory, range: Range, value: u8) {
    let buffers = buffers(memory, range.sectors.into());
    let content = vec![value; guest_io::total(&buffers)];
    guest_io::copy_in(&buffers, 0, &content);
    disk.write(range.sector, &buffers).unwrap();
}

/// The bytes of a range.
fn bytes(range: Range) -> ops::Range<usize> {
    let (start, length) = (range.sector * SECTOR, u64::from(range.sectors) * SECTOR);
    start as usize..(start + length) as usize
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// After any sequence of requests, the disk has the content of a plain one, and the base its own.
    #[test]
    fn layered_disk_is_like_a_plain_one(steps in prop::collection::vec(step(), 1..60)) {
        let ((base, original), layer, memory) = (base(), new_layer(), memory());
        let (mut disk, mut plain) = (open(&base, &layer), original.clone());
        for step in steps {
            match step {
                Step::Read(range) => {
                    let seen = read(&disk, &memory, range.sector, range.sectors.into());
                    prop_assert!(seen == plain[bytes(range)], "{range:?}");
                }
                Step::Write(range, value) => {
                    write(&disk, &memory, range, value);
                    plain[bytes(range)].fill(value);
                }
                Step::Discard(range) => {
                    disk.discard(&range).unwrap();
                    let ops::Range { start, end } = bytes(range);
                    let start = start.next_multiple_of(BLOCK as usize);
                    let end = if end == BYTES { end } else { end / BLOCK as usize * BLOCK as usize };
                    plain[start.min(end)..end].fill(0);
                }
                Step::WriteZeroes(range) => {
                    disk.write_zeroes(&range).unwrap();
                    plain[bytes(range)].fill(0);
                }
                Step::Flush => disk.flush().unwrap(),
                Step::Reopen => {
                    let marks = disk.marks.into_inner().unwrap();
                    disk = open(&base, &layer);
                    prop_assert!(*disk.marks.reading() == marks, "the file has the marks");
                }
            }
        }
        prop_assert!(read(&disk, &memory, 0, SECTORS) == plain);
        let mut seen = vec![0; BYTES];
        base.read_exact_at(&mut seen, 0).unwrap();
        prop_assert!(seen == original, "the base never changes");
    }
}

#[test]
fn layer_has_only_blocks_that_were_written() {
    let ((base, _), layer, memory) = (base(), new_layer(), memory());
    let disk = open(&base, &layer);
    assert_eq!(layer.metadata().unwrap().blocks(), 0, "a new layer is a hole");
    let one = Range {
        sector: 17,
        sectors: 1,
        unmap: false,
    };
    write(&disk, &memory, one, 7);
    let marks = disk.marks.reading();
    let marked: Vec<u64> = (0..marks.blocks()).filter(|block| marks.has(*block)).collect();
    assert_eq!(marked, [2]);
    let kept = layer.metadata().unwrap().blocks() * 512;
    assert!(kept <= 16 * BLOCK, "{kept} bytes for a block and its mark");
}

#[test]
fn threads_that_write_parts_of_one_block_lose_nothing() {
    let ((base, original), layer) = (base(), new_layer());
    let disk = open(&base, &layer);
    let block = BLOCK / SECTOR;
    thread::scope(|scope| {
        for part in 0..block - 1 {
            let disk = &disk;
            scope.spawn(move || {
                let memory = memory();
                for sector in (part..SECTORS).step_by(block as usize) {
                    let one = Range {
                        sector,
                        sectors: 1,
                        unmap: false,
                    };
                    write(disk, &memory, one, part as u8);
                }
            });
        }
    });
    let seen = read(&disk, &memory(), 0, SECTORS);
    for sector in 0..SECTORS {
        let range = bytes(Range {
            sector,
            sectors: 1,
            unmap: false,
        });
        let part = sector % block;
        match part < block - 1 {
            true => assert!(seen[range].iter().all(|byte| *byte == part as u8), "{sector}"),
            false => assert_eq!(seen[range.clone()], original[range], "the base's"),
        }
    }
}

#[test]
fn request_outside_the_disk_touches_neither_file() {
    let ((base, _), layer, memory) = (base(), new_layer(), memory());
    let disk = open(&base, &layer);
    let beyond = Range {
        sector: SECTORS - 1,
        sectors: 2,
        unmap: true,
    };
    let buffers = buffers(&memory, 2);
    disk.read(beyond.sector, &buffers).unwrap_err();
    disk.write(beyond.sector, &buffers).unwrap_err();
    disk.discard(&beyond).unwrap_err();
    disk.write_zeroes(&beyond).unwrap_err();
    assert_eq!(layer.metadata().unwrap().blocks(), 0);
    assert_eq!(*disk.marks.reading(), Marks::none(BYTES as u64));
}

#[test]
fn base_and_layer_must_fit() {
    let (base, layer) = (base().0, new_layer());
    let open = |files: &[&File]| {
        let fds = files.iter().map(|file| OwnedFd::from(file.try_clone().unwrap()));
        LayeredDisk::open(fds.collect()).unwrap_err()
    };
    let one = open(&[&base]);
    assert!(
        matches!(one, AttachError::Descriptors { expected: 2, got: 1 }),
        "{one}"
    );
    let other_size = open(&[&layer, &base]);
    assert!(matches!(other_size, AttachError::Invalid(_)), "{other_size}");
    layer.set_len(file_bytes(BYTES as u64) - 4096).unwrap();
    let shorter = open(&[&base, &layer]);
    assert!(matches!(shorter, AttachError::Invalid(_)), "{shorter}");
}
