//! Lists of address ranges: sorted, disjoint, none empty. Every list passed in must be such a list. Every list returned is one, and no two
//! of its ranges touch.

use std::ops::Range;

/// Appends a range, which must begin at or after the end of the last one.
pub fn push(list: &mut Vec<Range<u64>>, range: Range<u64>) {
    if range.is_empty() {
        return;
    }
    match list.last_mut() {
        Some(last) if last.end >= range.start => last.end = last.end.max(range.end),
        _ => list.push(range),
    }
}

/// The addresses in either list.
pub fn union(a: &[Range<u64>], b: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut all: Vec<_> = a.iter().chain(b).cloned().collect();
    all.sort_unstable_by_key(|range| range.start);
    let mut list = Vec::with_capacity(all.len());
    for range in all {
        push(&mut list, range);
    }
    list
}

/// The addresses in both lists.
pub fn intersection(a: &[Range<u64>], b: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut list = Vec::new();
    let (mut i, mut j) = (0, 0);
    while let (Some(x), Some(y)) = (a.get(i), b.get(j)) {
        push(&mut list, x.start.max(y.start)..x.end.min(y.end));
        if x.end <= y.end { i += 1 } else { j += 1 }
    }
    list
}

/// The addresses in `a` that are not in `b`.
pub fn difference(a: &[Range<u64>], b: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut list = Vec::new();
    let mut j = 0;
    for range in a {
        let mut from = range.start;
        while b.get(j).is_some_and(|cut| cut.end <= from) {
            j += 1;
        }
        for cut in b[j..].iter().take_while(|cut| cut.start < range.end) {
            if cut.start > from {
                push(&mut list, from..cut.start);
            }
            from = from.max(cut.end);
        }
        if from < range.end {
            push(&mut list, from..range.end);
        }
    }
    list
}

/// Closes every gap of `list` that is smaller than `gap` bytes, if one range of `within` holds both sides of it.
pub fn close_gaps(list: &[Range<u64>], gap: u64, within: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut closed: Vec<Range<u64>> = Vec::new();
    let mut j = 0;
    for range in intersection(list, within) {
        while within.get(j).is_some_and(|around| around.end <= range.start) {
            j += 1;
        }
        match (closed.last_mut(), within.get(j)) {
            (Some(last), Some(around)) if last.end > around.start && range.start - last.end < gap => {
                last.end = range.end;
            }
            _ => closed.push(range),
        }
    }
    closed
}

/// Whether this is a valid list (see the module) of multiples of `unit`.
pub fn is_list(list: &[Range<u64>], unit: u64) -> bool {
    let whole = |range: &Range<u64>| {
        !range.is_empty() && range.start.is_multiple_of(unit) && range.end.is_multiple_of(unit)
    };
    list.iter().all(whole) && list.is_sorted_by(|a, b| a.end <= b.start)
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;

    use super::*;

    const END: u64 = 64;

    /// The list of ranges whose addresses are the set bits of `bits`.
    fn list(bits: u64) -> Vec<Range<u64>> {
        let mut list = Vec::new();
        for at in (0..END).filter(|at| bits >> at & 1 == 1) {
            push(&mut list, at..at + 1);
        }
        list
    }

    fn bits(list: &[Range<u64>]) -> u64 {
        assert!(is_list(list, 1) && list.is_sorted_by(|a, b| a.end < b.start));
        list.iter().cloned().flatten().fold(0, |bits, at| bits | 1 << at)
    }

    proptest::proptest! {
        #[test]
        fn ranges_are_sets(a: u64, b: u64) {
            let (x, y) = (list(a), list(b));
            assert_eq!(bits(&union(&x, &y)), a | b);
            assert_eq!(bits(&intersection(&x, &y)), a & b);
            assert_eq!(bits(&difference(&x, &y)), a & !b);
        }

        #[test]
        fn only_small_gaps_are_closed_and_none_across_a_border(a: u64, gap in 0u64..8, borders in vec(0..END, 0..4)) {
            let mut cuts = borders;
            cuts.extend([0, END]);
            cuts.sort_unstable();
            cuts.dedup();
            let within: Vec<_> = cuts.windows(2).map(|w| w[0]..w[1]).collect();
            let closed = close_gaps(&list(a), gap, &within);
            assert!(is_list(&closed, 1));
            for at in 0..END {
                let inside = closed.iter().any(|range| range.contains(&at));
                let around = within.iter().find(|range| range.contains(&at)).unwrap();
                let before = (around.start..=at).rev().find(|x| a >> x & 1 == 1);
                let after = (at..around.end).find(|x| a >> x & 1 == 1);
                let wanted = match (before, after) {
                    (Some(before), Some(after)) => before == after || after - before - 1 < gap,
                    _ => false,
                };
                assert_eq!(inside, wanted, "at {at} of {a:b}, gap {gap}, {within:?}: {closed:?}");
            }
        }
    }
}
