//! Messages as JSON or protobuf.

use prost::{Message, Name};
use thaw_protocol::connect::Code;
use thaw_protocol::e2b::{from_json, to_json};

use super::super::failure::Failure;

/// How messages are encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Codec {
    Json,
    Proto,
}

impl Codec {
    /// The codec of a media type.
    pub fn of(media_type: &str, is_stream: bool) -> Option<Codec> {
        match (media_type, is_stream) {
            ("application/json", false) | ("application/connect+json", true) => Some(Codec::Json),
            ("application/proto", false) | ("application/connect+proto", true) => Some(Codec::Proto),
            _ => None,
        }
    }

    /// Its media type.
    pub fn media_type(self, is_stream: bool) -> &'static str {
        match (self, is_stream) {
            (Codec::Json, false) => "application/json",
            (Codec::Json, true) => "application/connect+json",
            (Codec::Proto, false) => "application/proto",
            (Codec::Proto, true) => "application/connect+proto",
        }
    }

    /// A message.
    ///
    /// # Errors
    /// The bytes are not such a message.
    pub fn decode<M: Message + Name + Default>(self, bytes: &[u8]) -> Result<M, Failure> {
        let decoded = match self {
            Codec::Json => from_json(bytes).map_err(|e| e.to_string()),
            Codec::Proto => M::decode(bytes).map_err(|e| e.to_string()),
        };
        decoded.map_err(|e| Failure::invalid(format!("this is no {}: {e}", M::full_name())))
    }

    /// Its bytes.
    ///
    /// # Errors
    /// The message has a value that JSON cannot express.
    pub fn encode<M: Message + Name>(self, message: &M) -> Result<Vec<u8>, Failure> {
        match self {
            Codec::Json => to_json(message).map_err(|e| Failure::new(Code::Internal, e)),
            Codec::Proto => Ok(message.encode_to_vec()),
        }
    }
}
