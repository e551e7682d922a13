//! What a VMM that was taken over sends thawd, and a guest's agent the host: replies and events, misses, accesses, frames of the
//! handshake. What decodes must encode to what decodes the same.

use serde::{Serialize, de::DeserializeOwned};
use thaw_protocol::access::Access;
use thaw_protocol::control::FromVmm;
use thaw_protocol::encoding::{decode, encode};
use thaw_protocol::handshake::{
    FromAgent, Greeting, HANDSHAKE_VERSION, Quiesced, read_answer, read_greeting, read_quiesced,
};
use thaw_protocol::miss::{Filled, Miss};

// One byte says which message; the rest is its bytes.
pub fn run(input: &[u8]) {
    let [which, bytes @ ..] = input else { return };
    let frame = [&(bytes.len() as u32).to_le_bytes(), bytes].concat();
    match which % 7 {
        0 => again::<FromVmm>(bytes),
        1 => again::<Miss>(bytes),
        2 => again::<Filled>(bytes),
        3 => again::<Access>(bytes),
        4 => {
            again::<Greeting>(bytes);
            if let Ok(Greeting::Become(identity)) = read_greeting(&mut frame.as_slice()) {
                assert_eq!(identity.version, HANDSHAKE_VERSION);
            }
        }
        5 => {
            again::<FromAgent>(bytes);
            if let Ok(FromAgent::Acknowledged(answer)) = read_answer(&mut frame.as_slice()) {
                assert_eq!(answer.version, HANDSHAKE_VERSION);
            }
        }
        _ => {
            again::<Quiesced>(bytes);
            if let Ok(answer) = read_quiesced(&mut frame.as_slice()) {
                assert_eq!(answer.version, HANDSHAKE_VERSION);
            }
        }
    }
}

fn again<T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(bytes: &[u8]) {
    if let Ok(message) = decode::<T>(bytes) {
        let encoded = encode(&message).expect("it was read from bytes");
        assert_eq!(decode::<T>(&encoded), Ok(message));
    }
}
