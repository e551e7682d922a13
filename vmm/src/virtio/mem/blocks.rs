//! Which blocks of a virtio-mem region are plugged: one bit each, and their count.

/// Consecutive blocks of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    pub first: usize,
    pub count: usize,
}

impl Span {
    fn range(self) -> std::ops::Range<usize> {
        self.first..self.first + self.count
    }
}

/// The bits. The caller must have checked that every span lies inside the region.
#[derive(Clone, Debug)]
pub struct Blocks {
    bits: Vec<u64>,
    len: usize,
    plugged: usize,
}

impl Blocks {
    /// `len` blocks, none plugged.
    pub fn new(len: usize) -> Blocks {
        Blocks {
            bits: vec![0; len.div_ceil(64)],
            len,
            plugged: 0,
        }
    }

    /// Blocks in the region.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Blocks plugged.
    pub fn plugged(&self) -> usize {
        self.plugged
    }

    /// Whether all of `span` are plugged.
    pub fn all(&self, span: Span) -> bool {
        span.range().all(|block| self.get(block))
    }

    /// Whether none of `span` is plugged.
    pub fn none(&self, span: Span) -> bool {
        !span.range().any(|block| self.get(block))
    }

    /// Marks all blocks of `span` as plugged or not.
    pub fn set(&mut self, span: Span, plugged: bool) {
        for block in span.range() {
            match (self.get(block), plugged) {
                (false, true) => self.plugged += 1,
                (true, false) => self.plugged -= 1,
                _ => continue,
            }
            self.bits[block / 64] ^= 1 << (block % 64);
        }
    }

    /// The plugged blocks as spans in order. No span touches the next.
    pub fn runs(&self) -> Vec<Span> {
        let mut runs: Vec<Span> = Vec::new();
        for first in (0..self.len).filter(|block| self.get(*block)) {
            match runs.last_mut() {
                Some(last) if last.range().end == first => last.count += 1,
                _ => runs.push(Span { first, count: 1 }),
            }
        }
        runs
    }

    fn get(&self, block: usize) -> bool {
        self.bits[block / 64] & 1 << (block % 64) != 0
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    proptest::proptest! {
        /// The bits and their count are those of a plain set.
        #[test]
        fn blocks_are_a_set(steps in proptest::collection::vec((0usize..150, 0usize..50, proptest::bool::ANY), 0..40)) {
            let (mut blocks, mut set) = (Blocks::new(200), BTreeSet::new());
            for (first, count, plugged) in steps {
                let span = Span { first, count };
                blocks.set(span, plugged);
                for block in span.range() {
                    if plugged { set.insert(block) } else { set.remove(&block) };
                }
                assert_eq!(blocks.plugged(), set.len());
                assert_eq!(blocks.all(span), span.range().all(|b| set.contains(&b)));
                assert_eq!(blocks.none(Span { first: 0, count: 200 }), set.is_empty());
                let runs = blocks.runs();
                assert_eq!(runs.iter().flat_map(|run| run.range()).collect::<BTreeSet<_>>(), set);
                assert!(runs.windows(2).all(|pair| pair[0].range().end < pair[1].first));
            }
        }
    }
}
