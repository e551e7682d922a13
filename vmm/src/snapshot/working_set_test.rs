use proptest::collection::vec;
use proptest::prelude::*;
use thaw_protocol::control::FreezeKind::Full;

use super::*;
use crate::snapshot::testing::*;

fn run(first: u64, pages: u32, written: bool) -> Run {
    Run {
        first,
        pages,
        written,
    }
}

fn any_set() -> impl Strategy<Value = WorkingSet> {
    vec((0u64..1000, 1u32..1000, any::<bool>()), 0..50).prop_map(|runs| {
        let mut end = 0;
        let runs = runs.into_iter().map(|(gap, pages, written)| {
            let first = end + gap;
            end = first + u64::from(pages);
            run(first, pages, written)
        });
        WorkingSet::new(runs.collect()).unwrap()
    })
}

/// A clone of a template that uses all of low memory and the start of high memory.
fn clone() -> Clone {
    let original = Clone::booted();
    (0..PAGES + 100).for_each(|page| write(&original.memory, page, page + 1));
    Clone::thawed(original.freeze(Full, &[]).unwrap())
}

fn recorded(clone: &Clone) -> WorkingSet {
    record(&clone.memory, clone.map.as_ref().unwrap(), &pagemap()).unwrap()
}

fn pages_of(set: &WorkingSet, written: bool) -> Vec<u64> {
    set.runs()
        .iter()
        .filter(|run| run.written == written)
        .flat_map(|run| run.first..run.first + u64::from(run.pages))
        .collect()
}

#[test]
fn touched_pages_are_recorded_and_mapped_in_the_next() {
    let first = clone();
    assert_eq!(recorded(&first), WorkingSet::default());
    read(&first.memory, 50);
    write(&first.memory, 300, 1);
    write(&first.memory, PAGES + 7, 1);
    let set = recorded(&first);
    assert_eq!(pages_of(&set, true), [300, PAGES + 7]);
    // Reading a page maps its neighbours too (fault-around).
    assert!(pages_of(&set, false).contains(&50));

    let second = clone();
    let populated = populate(&second.memory, second.map.as_ref().unwrap(), &set);
    assert!(populated.pages >= 3);
    let there = recorded(&second);
    assert_eq!(pages_of(&there, true), [300, PAGES + 7]);
    let read_pages = pages_of(&there, false);
    assert!(pages_of(&set, false).iter().all(|page| read_pages.contains(page)));
    // Mapping in advance changes no contents: they are the template's.
    assert!((0..PAGES + 100).all(|page| read(&second.memory, page) == page + 1));
}

#[test]
fn page_read_in_a_hole_costs_no_successor_a_page() {
    let clone = clone();
    read(&clone.memory, PAGES + 500);
    write(&clone.memory, PAGES + 700, 1);
    let set = recorded(&clone);
    assert_eq!(
        (pages_of(&set, false), pages_of(&set, true)),
        (vec![PAGES + 500], vec![PAGES + 700])
    );
}

#[test]
fn set_of_another_memory_maps_what_it_can_up_to_a_bound() {
    let clone = clone();
    let map = clone.map.as_ref().unwrap();
    let beyond = WorkingSet::new(vec![run(2 * PAGES - 1, u32::MAX, false), run(1 << 40, 100, true)]).unwrap();
    assert_eq!(populate(&clone.memory, map, &beyond).pages, 1);
    let list = at_most(vec![0..4 * PAGE, 8 * PAGE..16 * PAGE, 32 * PAGE..64 * PAGE], 6);
    assert_eq!(list, [0..4 * PAGE, 8 * PAGE..10 * PAGE]);
}

#[test]
fn a_set_of_unplugged_memory_maps_none_of_it() {
    let original = Clone::booted();
    write(&original.memory, 2 * PAGES + 3, 9);
    let clone = Clone::thawed(original.freeze(Full, &[hotplugged()]).unwrap());
    // Of virtio-mem's region, the file has one block, and data of one page.
    for written in [false, true] {
        let set = WorkingSet::new(vec![run(2 * PAGES, 512, written)]).unwrap();
        assert_eq!(
            populate(&clone.memory, clone.map.as_ref().unwrap(), &set).pages,
            1
        );
    }
}

#[test]
fn no_batch_is_large() {
    let range = 3 * PAGE..3 * PAGE + 2 * BATCH + PAGE;
    let sizes: Vec<_> = batches(&range).collect();
    assert_eq!(
        sizes,
        [
            (3 * PAGE, BATCH),
            (3 * PAGE + BATCH, BATCH),
            (3 * PAGE + 2 * BATCH, PAGE)
        ]
    );
}

#[test]
fn runs_that_are_none_are_refused() {
    for runs in [
        vec![run(0, 0, false)],
        vec![run(5, 2, false), run(6, 1, true)],
        vec![run(5, 2, false), run(1, 1, true)],
        vec![run(u64::MAX, 1, false)],
        vec![run(1 << 50, 1, false)],
    ] {
        assert!(matches!(WorkingSet::new(runs), Err(FileError::Damaged { .. })));
    }
}

proptest! {
    #[test]
    fn a_file_says_what_was_written_to_it(set in any_set()) {
        let file = empty_file();
        set.write(&file).unwrap();
        prop_assert_eq!(WorkingSet::read(&file).unwrap(), set.clone());
        assert!(matches!(set.write(&file), Err(FileError::NotEmpty { .. })));
    }

    #[test]
    fn flipped_bit_or_cut_file_is_refused(
        set in any_set(),
        at: prop::sample::Index,
        bit in 0u8..8,
    ) {
        let mut bytes = FORMAT.seal(&set.encode());
        let at = at.index(bytes.len());
        prop_assert!(WorkingSet::decode(&bytes[..at]).is_err());
        bytes[at] ^= 1 << bit;
        prop_assert!(WorkingSet::decode(&bytes).is_err());
    }

    #[test]
    fn decoding_any_bytes_never_panics(bytes in vec(any::<u8>(), 0..200)) {
        let _ = WorkingSet::decode(&bytes);
        let _ = WorkingSet::decode_body(&bytes);
    }
}
