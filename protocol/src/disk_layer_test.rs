use proptest::prelude::*;

use super::*;

/// Blocks of the disk of the tests.
const BLOCKS: u64 = 100;

#[test]
fn layer_of_a_disk_has_blocks_then_marks() {
    for (base, marks_at, marks) in [
        (0, 0, 0),
        (511, 0, 0),
        (512, 4096, 4096),
        (4096, 4096, 4096),
        (4096 + 511, 4096, 4096),
        (4096 + 512, 8192, 4096),
        (1 << 30, 1 << 30, 32 << 10),
        ((1 << 27) + 4096, (1 << 27) + 4096, 8192),
    ] {
        assert_eq!(
            (marks_offset(base), marks_bytes(base)),
            (marks_at, marks),
            "{base}"
        );
        assert_eq!(file_bytes(base), marks_at + marks);
    }
}

#[test]
fn mark_of_a_block_is_one_bit() {
    let mut marks = Marks::none(BLOCKS * BLOCK);
    marks.mark(0..1);
    marks.mark(9..11);
    assert_eq!(marks.bits[..3], [1, 6, 0]);
    assert_eq!(marks.marked(8..9), (1, vec![7]));
    assert_eq!(
        marks.marked(96..200),
        (12, vec![0b1111]),
        "no block after the disk's end"
    );
    let read = Marks::from_bytes(BLOCKS * BLOCK, marks.bits.clone()).unwrap();
    assert_eq!(read, marks);
    assert_eq!(Marks::from_bytes(BLOCKS * BLOCK, vec![0; 13]), None);
}

proptest! {
    #[test]
    fn runs_are_those_of_single_blocks(ranges in prop::collection::vec((0..BLOCKS, 1..20u64), 0..8)) {
        let mut marks = Marks::none(BLOCKS * BLOCK);
        let mut plain = vec![false; BLOCKS as usize];
        for (start, length) in ranges {
            let end = (start + length).min(BLOCKS);
            plain[start as usize..end as usize].fill(true);
            marks.mark(start..end);
        }
        let mut block = 0;
        while block < BLOCKS {
            let (has, end) = marks.run(block, BLOCKS);
            prop_assert!(end > block && end <= BLOCKS);
            prop_assert!(plain[block as usize..end as usize].iter().all(|plain| *plain == has));
            prop_assert!(end == BLOCKS || plain[end as usize] != has, "the run is as long as it can be");
            block = end;
        }
    }
}
