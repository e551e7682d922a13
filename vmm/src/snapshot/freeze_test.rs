use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::MetadataExt;
use std::process::{Command, Stdio};

use proptest::collection::vec;
use proptest::prelude::*;
use thaw_protocol::control::FreezeKind::{Delta, DeltaOver, Full};

use super::*;
use crate::layout::{HIGH_MEMORY_START, VIRTIO_MEM};
use crate::snapshot::testing::*;

/// A step in the life of a machine.
#[derive(Clone, Debug)]
enum Step {
    Write(u64, u64),
    Touch(u64),
    Freeze(FreezeKind),
}

fn step() -> impl Strategy<Value = Step> {
    // Few pages, so that steps hit the same ones; some far apart, so that gaps stay open.
    let page = (0u64..12, 0u64..3).prop_map(|(page, part)| page * 36 + part * (PAGES - 200));
    prop_oneof![
        6 => (page.clone(), 0u64..3).prop_map(|(page, value)| Step::Write(page, value)),
        3 => page.prop_map(Step::Touch),
        1 => Just(Step::Freeze(Full)),
        2 => Just(Step::Freeze(Delta)),
        2 => (1u8..4).prop_map(|layers| Step::Freeze(DeltaOver { layers })),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// After any sequence of writes, reads and freezes, a clone has the same memory as its original.
    #[test]
    fn a_thawed_memory_is_the_frozen_one(steps in vec(step(), 1..60)) {
        let mut clone = Clone::booted();
        let mut model: BTreeMap<u64, u64> = BTreeMap::new();
        for step in steps.into_iter().chain([Step::Freeze(Full)]) {
            match step {
                Step::Write(page, value) => {
                    write(&clone.memory, page, value);
                    model.insert(page, value);
                }
                Step::Touch(page) => prop_assert_eq!(read(&clone.memory, page), *model.get(&page).unwrap_or(&0)),
                Step::Freeze(kind) => match clone.freeze(kind, &[]) {
                    Ok(frozen) => clone = Clone::thawed(frozen),
                    Err(FreezeError::NoBase) => assert!(clone.map.is_none() && kind != Full),
                    Err(FreezeError::NoSuchBase { wanted, has }) => {
                        assert!(kind == DeltaOver { layers: wanted } && wanted > has);
                        assert_eq!(clone.layers.len(), usize::from(has));
                    }
                    Err(FreezeError::TooManyLayers(_)) => assert_eq!(clone.layers.len(), 8),
                    Err(e) => panic!("{e}"),
                },
            }
            for page in 0..2 * PAGES {
                prop_assert_eq!(read(&clone.memory, page), *model.get(&page).unwrap_or(&0), "page {}", page);
            }
        }
    }
}

/// Other VMMs computed a page's offset in the file from its guest address, and lost the MMIO hole in between.
#[test]
fn a_delta_snapshot_is_not_corrupt_above_3_gib() {
    let original = Clone::booted();
    write(&original.memory, 5, 50);
    write(&original.memory, PAGES + 5, 51);
    write(&original.memory, 2 * PAGES - 1, 52);
    let template = original.freeze(Full, &[]).unwrap();
    assert_eq!(template.0.map.file_size(), 2 * SIZE);
    let clone = Clone::thawed(template);
    write(&clone.memory, PAGES + 5, 61);
    write(&clone.memory, PAGES + 900, 62);
    let (frozen, layers) = clone.freeze(Delta, &[]).unwrap();
    let high: Vec<_> = frozen.map.extents().iter().filter(|e| e.layer == 1).collect();
    assert!(
        high.iter()
            .all(|extent| extent.guest_address >= HIGH_MEMORY_START)
            && !high.is_empty()
    );
    let again = Clone::thawed((frozen, layers));
    let pages = [5, PAGES + 5, PAGES + 900, 2 * PAGES - 1, 900];
    assert_eq!(pages.map(|page| read(&again.memory, page)), [50, 61, 62, 52, 0]);
}

#[test]
fn zero_pages_are_holes_and_small_gaps_are_not() {
    let original = Clone::booted();
    for page in [0, 40, 400, PAGES, 2 * PAGES - 1] {
        write(&original.memory, page, 1);
    }
    // Written, and zeroed again.
    for page in 600..800 {
        write(&original.memory, page, 1);
        write(&original.memory, page, 0);
    }
    let (frozen, layers) = original.freeze(Full, &[]).unwrap();
    let extents: Vec<_> = frozen.map.extents().iter().map(Extent::range).collect();
    let last = HIGH_MEMORY_START + SIZE;
    // Pages 0 and 40 are less than 256 KiB apart. The end of low memory and the start of high memory are not adjacent.
    let wanted = [
        0..41 * PAGE,
        400 * PAGE..401 * PAGE,
        HIGH_MEMORY_START..HIGH_MEMORY_START + PAGE,
        last - PAGE..last,
    ];
    assert_eq!(extents, wanted);
    assert_eq!(frozen.bytes, 44 * PAGE);
    let metadata = layers[0].metadata().unwrap();
    assert_eq!((metadata.len(), metadata.blocks() * 512), (2 * SIZE, 44 * PAGE));
}

#[test]
fn a_clone_frozen_in_full_has_the_templates_untouched_pages() {
    let original = Clone::booted();
    write(&original.memory, 3, 30);
    write(&original.memory, PAGES + 3, 31);
    let clone = Clone::thawed(original.freeze(Full, &[]).unwrap());
    write(&clone.memory, 900, 90);
    let (frozen, layers) = clone.freeze(Full, &[]).unwrap();
    assert_eq!((frozen.map.layers(), layers.len()), (1, 1));
    let again = Clone::thawed((frozen, layers));
    let pages = [3, PAGES + 3, 900];
    assert_eq!(pages.map(|page| read(&again.memory, page)), [30, 31, 90]);
}

#[test]
fn a_delta_has_what_was_written_and_not_what_was_read() {
    let original = Clone::booted();
    (0..PAGES).for_each(|page| write(&original.memory, page, 1));
    let clone = Clone::thawed(original.freeze(Full, &[]).unwrap());
    (0..PAGES).for_each(|page| assert_eq!(read(&clone.memory, page), 1));
    write(&clone.memory, 100, 2);
    let (frozen, _) = clone.freeze(Delta, &[]).unwrap();
    assert_eq!(frozen.bytes, PAGE);
    let layers: Vec<_> = frozen
        .map
        .extents()
        .iter()
        .map(|e| (e.size / PAGE, e.layer))
        .collect();
    assert_eq!(layers, [(100, 0), (1, 1), (PAGES - 101, 0)]);
}

/// A clone of a full freeze with the value 1 in each low page, upon which lie two deltas: of page 100, and of pages 100, 200 and 201.
fn over_two_deltas() -> Clone {
    let original = Clone::booted();
    (0..PAGES).for_each(|page| write(&original.memory, page, 1));
    let mut clone = Clone::thawed(original.freeze(Full, &[]).unwrap());
    for (value, pages) in [(2, vec![100]), (3, vec![100, 200, 201])] {
        pages.iter().for_each(|page| write(&clone.memory, *page, value));
        clone = Clone::thawed(clone.freeze(Delta, &[]).unwrap());
    }
    assert_eq!(clone.layers.len(), 3);
    clone
}

#[test]
fn layers_above_a_base_become_one_layer() {
    let clone = over_two_deltas();
    write(&clone.memory, 200, 0);
    write(&clone.memory, 202, 4);
    let (frozen, layers) = clone.freeze(DeltaOver { layers: 1 }, &[]).unwrap();
    assert_eq!((frozen.map.layers(), layers.len()), (2, 2));
    // Pages 100, 201 and 202: no page of the base is written again.
    assert_eq!(frozen.bytes, 3 * PAGE);
    let again = Clone::thawed((frozen, layers));
    for page in 0..2 * PAGES {
        assert_eq!(
            read(&again.memory, page),
            read(&clone.memory, page),
            "page {page}"
        );
    }
    // So does a delta over it, as often as one likes.
    let (frozen, layers) = again.freeze(DeltaOver { layers: 1 }, &[]).unwrap();
    assert_eq!((frozen.bytes, layers.len()), (3 * PAGE, 2));
}

#[test]
fn delta_over_layers_that_are_not_there_is_refused() {
    let Clone { memory, map, .. } = over_two_deltas();
    let freeze_over = |layers| {
        freeze_memory(
            DeltaOver { layers },
            &memory,
            &boot(),
            map.as_ref(),
            &pagemap(),
            &empty_file(),
        )
    };
    for layers in [0, 4, 8, 255] {
        let refused = freeze_over(layers).unwrap_err();
        assert!(matches!(refused, FreezeError::NoSuchBase { wanted, has: 3 } if wanted == layers));
    }
    assert_eq!(freeze_over(3).unwrap().map.layers(), 4);
}

#[test]
fn memory_plugged_again_has_lost_the_bytes_of_a_merged_layer() {
    let plugged = [VIRTIO_MEM.start..VIRTIO_MEM.start + SIZE];
    let clone = Clone::plugged_again();
    let again = Clone::thawed(clone.freeze(Delta, &plugged).unwrap());
    let merged = again.freeze(DeltaOver { layers: 1 }, &plugged).unwrap();
    assert_eq!(merged.1.len(), 2);
    Clone::thawed(merged).is_plugged_again();
}

#[test]
fn a_page_that_became_zero_is_zero_in_a_clone_of_the_clone() {
    let original = Clone::booted();
    (0..PAGES).for_each(|page| write(&original.memory, page, 7));
    let clone = Clone::thawed(original.freeze(Full, &[]).unwrap());
    write(&clone.memory, 500, 0);
    let (frozen, layers) = clone.freeze(Delta, &[]).unwrap();
    assert_eq!(frozen.bytes, 0);
    let again = Clone::thawed((frozen, layers));
    assert_eq!([499, 500, 501].map(|page| read(&again.memory, page)), [7, 0, 7]);
}

#[test]
fn memory_that_is_not_plugged_is_neither_read_nor_in_the_file() {
    let original = Clone::booted();
    let block =
        |number: u64| VIRTIO_MEM.start + number * mem::BLOCK..VIRTIO_MEM.start + (number + 1) * mem::BLOCK;
    write(&original.memory, 2 * PAGES, 20);
    write(&original.memory, 3 * PAGES - 1, 21);
    let (frozen, _) = original.freeze(Full, &[]).unwrap();
    assert_eq!(frozen.map.file_size(), 2 * SIZE);
    // The first block is plugged: the file grows by it, and the second is left out.
    let with_block = original.freeze(Full, &[block(0)]).unwrap();
    assert_eq!(with_block.0.map.file_size(), 2 * SIZE + mem::BLOCK);
    let clone = Clone::thawed(with_block);
    assert_eq!(
        [2 * PAGES, 3 * PAGES - 1].map(|page| read(&clone.memory, page)),
        [20, 0]
    );
    // The block is unplugged, and the second one is plugged and written. The template's data for the first is gone.
    write(&clone.memory, 3 * PAGES - 1, 22);
    let again = Clone::thawed(clone.freeze(Delta, &[block(1)]).unwrap());
    assert_eq!(
        [2 * PAGES, 3 * PAGES - 1].map(|page| read(&again.memory, page)),
        [0, 22]
    );
}

#[test]
fn memory_plugged_again_has_lost_the_templates_bytes() {
    let plugged = [VIRTIO_MEM.start..VIRTIO_MEM.start + SIZE];
    let frozen = Clone::plugged_again().freeze(Delta, &plugged).unwrap();
    Clone::thawed(frozen).is_plugged_again();
}

#[test]
fn scattered_writes_leave_a_restore_few_mappings() {
    let many = GuestMemory::from_ranges(&[(GuestAddress(0), 512 << 20)]).unwrap();
    let live = [0..512 << 20];
    for page in (0..131_072).step_by(24) {
        vm_memory::Bytes::write_obj(&many, 1u8, GuestAddress(page * PAGE)).unwrap();
    }
    let (first, second) = (empty_file(), empty_file());
    let full = freeze_memory(Full, &many, &live, None, &pagemap(), &first).unwrap();
    assert!(full.map.extents().len() <= EXTENTS);
    // 5462 single pages, 96 KiB apart.
    let empty = MemoryMap::new(full.map.regions().to_vec(), 1, vec![]).unwrap();
    let delta = freeze_memory(Delta, &many, &live, Some(&empty), &pagemap(), &second).unwrap();
    assert!(delta.map.extents().len() <= EXTENTS && delta.bytes >= 5462 * PAGE);
}

#[test]
fn what_cannot_be_frozen_is_refused_and_nothing_is_written() {
    let original = Clone::booted();
    write(&original.memory, 1, 1);
    let freeze = |live: &[Range<u64>], pagemap: &File, out: &File| {
        freeze_memory(Full, &original.memory, live, None, pagemap, out)
    };
    let out = empty_file();
    for live in [
        vec![0..SIZE + PAGE],
        vec![PAGE..1],
        vec![0..2 * PAGE, PAGE..3 * PAGE],
        vec![0..17],
        vec![SIZE..SIZE + PAGE],
        vec![0..!(PAGE - 1)],
    ] {
        let error = freeze(&live, &pagemap(), &out).unwrap_err();
        assert!(matches!(error, FreezeError::NotMemory(_)), "{error}");
    }
    // No pagemap at all; another process's pagemap.
    let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
    let others = File::open(format!("/proc/{}/pagemap", child.id())).unwrap();
    for wrong in [empty_file(), others, File::open("/dev/zero").unwrap()] {
        let error = freeze(&boot(), &wrong, &out).unwrap_err();
        assert!(matches!(error, FreezeError::NotOurPagemap), "{error}");
    }
    drop(child.stdin.take());
    child.wait().unwrap();
    assert_eq!(out.metadata().unwrap().len(), 0);
    out.set_len(1).unwrap();
    assert!(matches!(
        freeze(&boot(), &pagemap(), &out),
        Err(FreezeError::NotEmpty)
    ));
    let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
    assert!(freeze(&boot(), &pagemap(), &full).is_err());
}
