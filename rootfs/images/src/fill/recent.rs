//! A cache of spans that were expanded shortly before and that belong partly to a chunk that is not ready yet.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use super::in_flight::SpanKey;

/// Bytes that are kept.
const MOST: u64 = 32 << 20;
/// A larger span is not kept, because it would displace all others.
const LARGEST: u64 = 8 << 20;

/// The spans, the most recently used at the end of `order`. Bounded in bytes.
#[derive(Default)]
pub struct Recent {
    spans: HashMap<SpanKey, Arc<[u8]>>,
    order: VecDeque<SpanKey>,
    bytes: u64,
}

impl Recent {
    pub fn get(&mut self, key: &SpanKey) -> Option<Arc<[u8]>> {
        let found = self.spans.get(key).cloned()?;
        self.order.retain(|it| it != key);
        self.order.push_back(*key);
        Some(found)
    }

    pub fn put(&mut self, key: SpanKey, bytes: Arc<[u8]>) {
        let length = bytes.len() as u64;
        if length > LARGEST {
            return;
        }
        self.remove(&key);
        self.spans.insert(key, bytes);
        self.order.push_back(key);
        self.bytes += length;
        while self.bytes > MOST {
            let Some(oldest) = self.order.front().copied() else {
                return;
            };
            self.remove(&oldest);
        }
    }

    pub fn remove(&mut self, key: &SpanKey) {
        if let Some(bytes) = self.spans.remove(key) {
            self.bytes -= bytes.len() as u64;
            self.order.retain(|it| it != key);
        }
    }
}

#[cfg(test)]
mod tests {
    use thaw_imagefs::digest::Digest;

    use super::*;

    #[test]
    fn what_was_used_longest_ago_goes_first_and_bytes_are_bounded() {
        let key = |span| (Digest::of(b"x"), span);
        let bytes = |length: u64| Arc::from(vec![0; length as usize]);
        let mut recent = Recent::default();
        recent.put(key(0), bytes(LARGEST + 1));
        assert!(recent.get(&key(0)).is_none() && recent.bytes == 0);
        for span in 0..4 {
            recent.put(key(span), bytes(LARGEST));
        }
        assert!(recent.get(&key(0)).is_some());
        recent.put(key(4), bytes(1));
        assert!(recent.get(&key(1)).is_none() && recent.get(&key(0)).is_some());
        assert!(recent.get(&key(4)).is_some());
        recent.put(key(4), bytes(2));
        assert_eq!(recent.bytes, 3 * LARGEST + 2);
        for span in 0..5 {
            recent.remove(&key(span));
        }
        assert!(recent.bytes == 0 && recent.order.is_empty());
    }
}
