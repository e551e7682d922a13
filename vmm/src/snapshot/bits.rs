//! A bit for each page of a machine.

use std::ops::Range;

/// The bits of pages `0..len`. All are unset at first.
#[derive(Debug)]
pub struct Bits(Vec<u64>);

impl Bits {
    pub fn new(len: usize) -> Bits {
        Bits(vec![0; len.div_ceil(64)])
    }

    pub fn get(&self, at: usize) -> bool {
        self.0[at / 64] & (1 << (at % 64)) != 0
    }

    pub fn set(&mut self, at: usize) {
        self.0[at / 64] |= 1 << (at % 64);
    }

    /// The runs of bits within `range` that are `wanted`, in order.
    pub fn runs(&self, range: Range<usize>, wanted: bool) -> impl Iterator<Item = Range<usize>> {
        let mut at = range.start;
        std::iter::from_fn(move || {
            let start = self.next(at..range.end, wanted)?;
            at = self.next(start..range.end, !wanted).unwrap_or(range.end);
            Some(start..at)
        })
    }

    /// The first bit within `range` that is `wanted`.
    fn next(&self, range: Range<usize>, wanted: bool) -> Option<usize> {
        let mut at = range.start;
        while at < range.end {
            let word = match wanted {
                true => self.0[at / 64],
                false => !self.0[at / 64],
            };
            let left = word >> (at % 64);
            if left != 0 {
                let found = at + left.trailing_zeros() as usize;
                return (found < range.end).then_some(found);
            }
            at = (at / 64 + 1) * 64;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn runs_are_those_of_a_list(set in proptest::collection::vec(0usize..300, 0..200), from in 0usize..300, len in 0usize..300) {
            let mut bits = Bits::new(300);
            set.iter().for_each(|at| bits.set(*at));
            let range = from..(from + len).min(300);
            for wanted in [true, false] {
                let found: Vec<usize> = bits.runs(range.clone(), wanted).flatten().collect();
                let expected: Vec<usize> = range.clone().filter(|at| set.contains(at) == wanted).collect();
                prop_assert_eq!(found, expected);
            }
            let runs: Vec<_> = bits.runs(0..300, true).collect();
            prop_assert!(runs.is_sorted_by(|a, b| a.end < b.start));
        }
    }
}
