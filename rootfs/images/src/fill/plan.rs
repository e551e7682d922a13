//! Chooses the ranges of a stored blob to read for some spans.

use std::ops::Range;

use crate::ranges::Priority;
use crate::span::{Run, SpanTable};

/// Largest gap between spans that is read and discarded instead of a second request.
const GAP: u64 = 32 << 10;
/// Spans passed over so.
const PASSED: usize = 64;

/// Most stored bytes of one read (one span may be larger). A prefetch's is small, so that little is lost when a guest
/// overtakes it.
fn most(priority: Priority) -> u64 {
    match priority {
        Priority::Demand => 4 << 20,
        Priority::Prefetch => 2 << 20,
    }
}

/// Joins spans, sorted by index, to runs that are read at once.
pub fn runs(table: &SpanTable, spans: &[usize], priority: Priority) -> Vec<Run> {
    let stored = |span: usize| table.spans()[span].stored.clone();
    let mut groups: Vec<Range<usize>> = Vec::new();
    for span in spans.iter().copied().filter(|span| *span < table.spans().len()) {
        match groups.last_mut() {
            Some(group)
                if span == group.end
                    || (span - group.end < PASSED
                        && stored(span).start >= stored(group.end - 1).start
                        && stored(span).start <= stored(group.end - 1).end.saturating_add(GAP)) =>
            {
                group.end = span + 1;
            }
            _ => groups.push(span..span + 1),
        }
    }
    groups
        .into_iter()
        .flat_map(|group| table.runs(group, most(priority), GAP))
        .filter(|run| spans.iter().any(|span| run.spans.contains(span)))
        .collect()
}

#[cfg(test)]
mod tests {
    use crate::span::{Expansion, Span, SpanDigest};

    use super::*;

    fn table(stored: &[Range<u64>]) -> SpanTable {
        let mut at = 0;
        let spans = stored.iter().map(|stored| {
            let length = stored.end - stored.start;
            at += length;
            Span {
                stored: stored.clone(),
                stream: at - length..at,
                digest: SpanDigest::None,
                expansion: Expansion::Plain,
            }
        });
        SpanTable::new(spans.collect(), 1 << 40).unwrap()
    }

    #[test]
    fn neighbours_are_read_at_once_and_strangers_are_not() {
        const MIB: u64 = 1 << 20;
        let even: Vec<_> = (0..16).map(|at| at * MIB..(at + 1) * MIB).collect();
        let even = table(&even);
        let stored = |spans: &[usize], priority| -> Vec<_> {
            runs(&even, spans, priority)
                .into_iter()
                .map(|run| run.stored)
                .collect()
        };
        let one = stored(&[2, 3], Priority::Demand);
        assert!(one.len() == 1 && one[0] == (2 * MIB..4 * MIB));
        assert_eq!(stored(&[0, 5], Priority::Demand), [0..MIB, 5 * MIB..6 * MIB]);
        assert_eq!(
            stored(&[0, 1, 2, 3, 4], Priority::Demand),
            [0..4 * MIB, 4 * MIB..5 * MIB]
        );
        assert_eq!(
            stored(&[0, 1, 2], Priority::Prefetch),
            [0..2 * MIB, 2 * MIB..3 * MIB]
        );
        assert!(stored(&[], Priority::Demand).is_empty() && stored(&[99], Priority::Demand).is_empty());

        // Fetching a few bytes between two ranges is cheaper than another request. Ranges out of order are requested separately.
        let odd = table(&[0..1000, 2000..3000, 3000..5000, 100_000..100_100, 50_000..50_100]);
        let read: Vec<_> = runs(&odd, &[0, 2, 3, 4], Priority::Demand)
            .into_iter()
            .map(|run| (run.spans, run.stored))
            .collect();
        assert_eq!(
            read,
            [(0..3, 0..5000), (3..4, 100_000..100_100), (4..5, 50_000..50_100)]
        );
    }
}
