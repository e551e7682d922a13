//! What a caller of a sandbox's in-sandbox protocol sends: frames of a stream in any pieces, and messages in them as JSON.

use prost::{Message, Name};
use thaw_protocol::connect::envelope::{Decoder, Envelope, EnvelopeError};
use thaw_protocol::e2b::filesystem::WatchDirRequest;
use thaw_protocol::e2b::process::{StartRequest, StreamInputRequest};
use thaw_protocol::e2b::{from_json, to_json};

/// The largest frame.
const MOST: usize = 4096;

/// The first byte is the size of the pieces.
pub fn run(input: &[u8]) {
    let Some((&size, bytes)) = input.split_first() else {
        return;
    };
    let whole = read(bytes, bytes.len().max(1));
    assert_eq!(
        whole,
        read(bytes, usize::from(size).max(1)),
        "the pieces make no difference"
    );
    for envelope in &whole.0 {
        assert!(envelope.data.len() <= MOST);
        if !envelope.is_compressed {
            let again = Envelope::encode(envelope.is_last, &envelope.data).expect("it is short");
            assert_eq!(read(&again, again.len()).0, std::slice::from_ref(envelope));
        }
        message::<StartRequest>(&envelope.data);
        message::<StreamInputRequest>(&envelope.data);
        message::<WatchDirRequest>(&envelope.data);
    }
}

/// The frames of bytes that come in pieces of this size, and how they ended.
fn read(bytes: &[u8], size: usize) -> (Vec<Envelope>, Result<(), EnvelopeError>) {
    let mut decoder = Decoder::new(MOST);
    let mut frames = Vec::new();
    for mut piece in bytes.chunks(size) {
        loop {
            match decoder.next(&mut piece) {
                Ok(Some(envelope)) => frames.push(envelope),
                Ok(None) => break,
                Err(e) => return (frames, Err(e)),
            }
        }
        assert!(piece.is_empty());
    }
    (frames, decoder.finish())
}

/// A message that decodes encodes to the same.
fn message<M: Message + Name + Default + PartialEq>(bytes: &[u8]) {
    if let Ok(message) = from_json::<M>(bytes) {
        let json = to_json(&message).expect("it came from JSON");
        let again = from_json::<M>(&json);
        assert!(
            again.is_ok_and(|again| again == message),
            "JSON changes the message"
        );
    }
    if let Ok(message) = M::decode(bytes) {
        let _ = to_json(&message);
    }
}
