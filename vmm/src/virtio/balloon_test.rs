use proptest::prelude::*;
use vm_memory::Bytes;

use super::*;
use crate::virtio::testing::{Buf, MEMORY, NOWHERE, Rig};

fn rig() -> Rig<Balloon> {
    Rig::new(Balloon::new(Arc::default()), 1 << F_REPORTING)
}

/// First of the pages that the test fills, far from rings and buffers.
const FIRST: u64 = MEMORY / PAGE / 2;

fn fill(rig: &Rig<Balloon>, pages: std::ops::Range<u64>) {
    for page in pages {
        rig.memory
            .write_slice(&[7; PAGE as usize], GuestAddress(page * PAGE))
            .unwrap();
    }
}

fn is_zero(rig: &Rig<Balloon>, page: u64) -> bool {
    let mut bytes = [1; PAGE as usize];
    rig.memory
        .read_slice(&mut bytes, GuestAddress(page * PAGE))
        .unwrap();
    bytes.iter().all(|byte| *byte == 0)
}

#[test]
fn inflated_pages_are_taken_and_their_neighbours_are_not() {
    let mut rig = rig();
    fill(&rig, FIRST..FIRST + 6);
    let pages = [FIRST + 1, FIRST + 2, FIRST + 4]
        .map(|page| (page as u32).to_le_bytes())
        .concat();
    let list = rig.readable(&pages);
    assert_eq!(rig.request(INFLATE, &[list]), 0);
    let zero: Vec<_> = (FIRST..FIRST + 6).map(|page| is_zero(&rig, page)).collect();
    assert_eq!(zero, [false, true, true, false, true, false]);
}

#[test]
fn reported_ranges_are_taken() {
    let mut rig = rig();
    fill(&rig, FIRST..FIRST + 4);
    let range = Buf {
        address: (FIRST + 1) * PAGE,
        length: 2 * PAGE as u32,
        write: true,
    };
    rig.request(REPORTING, &[range]);
    let zero: Vec<_> = (FIRST..FIRST + 4).map(|page| is_zero(&rig, page)).collect();
    assert_eq!(zero, [false, true, true, false]);
}

#[test]
fn reports_count_only_if_negotiated() {
    let mut rig = Rig::new(Balloon::new(Arc::default()), 0);
    fill(&rig, FIRST..FIRST + 1);
    rig.request(
        REPORTING,
        &[Buf {
            address: FIRST * PAGE,
            length: PAGE as u32,
            write: true,
        }],
    );
    assert!(!is_zero(&rig, FIRST));
}

#[test]
fn held_discards_keep_reported_pages() {
    let discards = Arc::new(Discards::default());
    let mut rig = Rig::new(Balloon::new(discards.clone()), 1 << F_REPORTING);
    fill(&rig, FIRST..FIRST + 1);
    let page = Buf {
        address: FIRST * PAGE,
        length: PAGE as u32,
        write: true,
    };
    discards.hold();
    rig.request(REPORTING, &[page]);
    assert!(!is_zero(&rig, FIRST));
    discards.allow();
    rig.request(REPORTING, &[page]);
    assert!(is_zero(&rig, FIRST));
}

#[test]
fn deflating_changes_nothing() {
    let mut rig = rig();
    fill(&rig, FIRST..FIRST + 1);
    let list = rig.readable(&(FIRST as u32).to_le_bytes());
    rig.request(DEFLATE, &[list]);
    assert!(!is_zero(&rig, FIRST));
}

#[test]
fn what_is_not_whole_pages_of_memory_is_left_alone() {
    let mut rig = rig();
    fill(&rig, FIRST..FIRST + 2);
    for (address, length) in [
        (NOWHERE, PAGE as u32),
        (FIRST * PAGE + 1, PAGE as u32),
        (FIRST * PAGE, 100),
        (FIRST * PAGE, 0),
    ] {
        rig.request(
            REPORTING,
            &[Buf {
                address,
                length,
                write: true,
            }],
        );
    }
    let past_the_end = Buf {
        address: MEMORY - PAGE,
        length: 2 * PAGE as u32,
        write: true,
    };
    rig.request(REPORTING, &[past_the_end]);
    let list = rig.readable(&u32::MAX.to_le_bytes());
    rig.request(INFLATE, &[list]);
    let outside = Buf {
        address: NOWHERE,
        length: 4,
        write: false,
    };
    rig.request(INFLATE, &[outside]);
    assert!(!is_zero(&rig, FIRST) && !is_zero(&rig, FIRST + 1));
}

#[test]
fn the_driver_may_say_how_large_the_balloon_is() {
    let config = Balloon::new(Arc::default()).config();
    config.write(4, &5u32.to_le_bytes());
    config.write(0, &5u32.to_le_bytes());
    assert_eq!(config.bytes()[..8], [0, 0, 0, 0, 5, 0, 0, 0]);
}

proptest! {
    /// Runs cover exactly the numbers given, in order.
    #[test]
    fn runs_are_the_numbers(numbers in prop::collection::vec(prop_oneof![0u32..20, Just(u32::MAX), Just(u32::MAX - 1)], 0..50)) {
        let expanded: Vec<u64> = runs(numbers.iter().copied())
            .into_iter()
            .flat_map(|(first, count)| (0..count).map(move |i| u64::from(first) + i))
            .collect();
        prop_assert_eq!(expanded, numbers.into_iter().map(u64::from).collect::<Vec<_>>());
    }

    /// Whatever numbers a guest lists, only listed pages are reclaimed.
    #[test]
    fn only_listed_pages_are_taken(offsets in prop::collection::vec(0u64..16, 0..10), wild in any::<u32>()) {
        let mut rig = rig();
        fill(&rig, FIRST..FIRST + 16);
        let wild = wild | 1 << 31;
        let numbers: Vec<u32> = offsets.iter().map(|o| (FIRST + o) as u32).chain([wild]).collect();
        let list = rig.readable(&numbers.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<_>>());
        rig.request(INFLATE, &[list]);
        for offset in 0..16 {
            prop_assert_eq!(is_zero(&rig, FIRST + offset), offsets.contains(&offset));
        }
    }
}
