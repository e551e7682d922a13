//! A stored layer, told by its first bytes: indexed, it reads as it does without, and each of its spans yields its part of the
//! stream.

use std::io::Read;

use thaw_images::compression::{Indexing, decoder};

/// A few kilobytes can be a thousand times as many.
const MOST: u64 = 8 << 20;

pub fn run(stored: &[u8]) {
    let mut expected = Vec::new();
    let outcome = decoder(stored).and_then(|decoder| decoder.take(MOST).read_to_end(&mut expected));
    let Ok(mut indexing) = Indexing::new(stored) else {
        assert!(outcome.is_err());
        return;
    };
    let mut stream = Vec::new();
    let read = indexing.by_ref().take(MOST).read_to_end(&mut stream);
    assert_eq!(read.is_err(), outcome.is_err());
    if read.is_err() || stream.len() as u64 == MOST {
        return;
    }
    assert!(stream == expected);
    let Some(spans) = indexing.into_spans() else {
        return;
    };
    for (index, span) in spans.spans().iter().enumerate() {
        let of_span = &stored[span.stored.start as usize..span.stored.end as usize];
        let expanded = spans.expand(index, of_span).expect("a recorded span expands");
        assert!(expanded == stream[span.stream.start as usize..span.stream.end as usize]);
    }
    assert_eq!(spans.stream_length(), stream.len() as u64);
}
