//! Records the spans of a stored blob while it is read once, first byte to last.
//!
//! Invariant: spans are gapless in the stream and cover the stored blob to its end, each with the SHA-256 of its stored bytes. If there are
//! too few places at which decompression can start, there is no index.

use sha2::{Digest as _, Sha256};

use crate::span::{Expansion, Span, SpanDigest, SpanTable};

/// Most bytes that a span may take or yield. If a form has no place to start at for longer, an index would be useless.
const MOST: u64 = 16 << 20;
/// Most spans: 256 GiB of stream.
const SPANS: usize = 1 << 18;

/// A place to begin at.
struct Begin {
    /// Offset of the first byte of the blob that is not read completely.
    input: u64,
    /// Bytes of the stream so far.
    output: u64,
    expansion: Expansion,
    /// Hash of the span's stored bytes so far.
    hasher: Sha256,
}

/// A possible start, which may not be used.
struct Next {
    begin: Begin,
    /// The hasher of the previous span, as it was at this place.
    before: Sha256,
}

/// Receives every stored byte once, with the number of bytes that each run yields.
pub struct Recorder {
    /// Least bytes of stream between the starts of two spans.
    pub every: u64,
    spans: Vec<Span>,
    /// The span that is being read.
    current: Option<Begin>,
    /// A place that becomes a span once bytes are yielded after it; until then its bytes belong to the previous span.
    next: Option<Next>,
    input: u64,
    output: u64,
    last_byte: u8,
    given_up: bool,
}

impl Recorder {
    /// Nothing seen yet.
    pub fn new(every: u64) -> Recorder {
        Recorder {
            every,
            spans: Vec::new(),
            current: None,
            next: None,
            input: 0,
            output: 0,
            last_byte: 0,
            given_up: false,
        }
    }

    /// `stored` was read, and yielded `yielded` bytes.
    pub fn progress(&mut self, stored: &[u8], yielded: usize) {
        self.input += stored.len() as u64;
        self.output += yielded as u64;
        if self.given_up {
            return;
        }
        if yielded > 0
            && let Some(next) = self.next.take()
        {
            if let Some(current) = &mut self.current {
                current.hasher = next.before;
            }
            self.close(next.begin.input, next.begin.output);
            self.current = Some(next.begin);
        }
        self.last_byte = stored.last().copied().unwrap_or(self.last_byte);
        let next = self.next.as_mut().map(|next| &mut next.begin);
        for begin in self.current.iter_mut().chain(next) {
            begin.hasher.update(stored);
        }
        if let Some(current) = &self.current
            && (self.input - current.input > MOST
                || self.output - current.output > MOST
                || self.spans.len() > SPANS)
        {
            *self = Recorder {
                given_up: true,
                ..Recorder::new(self.every)
            };
        }
    }

    /// Whether a place to start at would be used: at the start, or if the span is longer than `least`.
    pub fn is_due(&self, least: u64) -> bool {
        match (&self.current, &self.next) {
            _ if self.given_up => false,
            (None, _) => true,
            (Some(current), None) => self.output - current.output > least,
            (Some(_), Some(_)) => false,
        }
    }

    /// Bytes that the current span may still yield until it has `length`; `length` if there is no current span.
    pub fn until(&self, length: u64) -> usize {
        let next = self.next.as_ref().map(|next| &next.begin);
        let begin = next.or(self.current.as_ref());
        let yielded = begin.map_or(0, |begin| self.output - begin.output);
        length.saturating_sub(yielded) as usize
    }

    /// A span may begin here.
    pub fn begin(&mut self, expansion: Expansion) {
        if self.given_up {
            return;
        }
        let mut hasher = Sha256::new();
        if has_bits(&expansion) {
            hasher.update([self.last_byte]);
        }
        let begin = Begin {
            input: self.input,
            output: self.output,
            expansion,
            hasher,
        };
        match &self.current {
            None => self.current = Some(begin),
            Some(current) => {
                let before = current.hasher.clone();
                self.next = Some(Next { begin, before });
            }
        }
    }

    /// Ends the current span.
    fn close(&mut self, input: u64, output: u64) {
        if let Some(current) = self.current.take()
            && output > current.output
        {
            self.spans.push(Span {
                stored: current.input - u64::from(has_bits(&current.expansion))..input,
                stream: current.output..output,
                digest: SpanDigest::StoredSha256(current.hasher.finalize().into()),
                expansion: current.expansion,
            });
        }
    }

    /// Returns the table at the end of the blob; `None` if there are too few places at which decompression can start.
    pub fn finish(mut self) -> Option<SpanTable> {
        if self.given_up {
            return None;
        }
        self.close(self.input, self.output);
        SpanTable::new(self.spans, self.input).ok()
    }
}

fn has_bits(expansion: &Expansion) -> bool {
    matches!(expansion, Expansion::Deflate { bits: 1.., .. })
}
