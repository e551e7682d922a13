//! Encoding of messages and records: [postcard](https://docs.rs/postcard). Errors name the type and the byte
//! offset.
//!
//! Input is untrusted: decoding returns an error and never panics.

use serde::{Serialize, de::DeserializeOwned};

use crate::tags;

/// Why a value could not be encoded or decoded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EncodingError {
    /// The number of an enum's variant is not one of its [tags](crate::tags).
    #[error("{what}: unknown {of} tag {tag}, ending at byte {at}")]
    UnknownTag {
        /// The type that was decoded.
        what: &'static str,
        /// The enum within it.
        of: &'static str,
        /// The unknown tag.
        tag: u32,
        at: usize,
    },
    #[error("{what}: {error}, at byte {at}")]
    Malformed {
        what: &'static str,
        at: usize,
        error: postcard::Error,
    },
    #[error("{what}: {bytes} bytes are left over")]
    Trailing { what: &'static str, bytes: usize },
    #[error("{what} cannot be encoded: {error}")]
    Unencodable {
        what: &'static str,
        error: postcard::Error,
    },
}

/// Encodes a value.
///
/// # Errors
/// A part of it cannot be encoded. No type of this crate fails.
pub fn encode<T: Serialize>(value: &T) -> Result<Vec<u8>, EncodingError> {
    let what = name::<T>();
    postcard::to_stdvec(value).map_err(|error| EncodingError::Unencodable { what, error })
}

/// Decodes a value from all of `bytes`.
///
/// # Errors
/// The bytes are malformed, or bytes are left over.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, EncodingError> {
    let (value, rest) = take::<T>(bytes)?;
    match rest.len() {
        0 => Ok(value),
        bytes => Err(EncodingError::Trailing {
            what: name::<T>(),
            bytes,
        }),
    }
}

/// Decodes a value from the start of `bytes`, and returns it with the remaining bytes.
///
/// # Errors
/// The bytes are malformed.
pub fn take<T: DeserializeOwned>(bytes: &[u8]) -> Result<(T, &[u8]), EncodingError> {
    let what = name::<T>();
    let mut reader = postcard::Deserializer::from_bytes(bytes);
    tags::take_unknown();
    let value = T::deserialize(&mut reader);
    let rest = reader.finalize().unwrap_or_default();
    let at = bytes.len() - rest.len();
    match (value, tags::take_unknown()) {
        (Ok(value), _) => Ok((value, rest)),
        (Err(_), Some((of, tag))) => Err(EncodingError::UnknownTag { what, of, tag, at }),
        (Err(error), None) => Err(EncodingError::Malformed { what, at, error }),
    }
}

/// The name of a type without its path.
fn name<T>() -> &'static str {
    let name = std::any::type_name::<T>();
    let path = name.split('<').next().unwrap_or(name);
    match path.rsplit("::").next() {
        // The name of a tuple or array contains other types: keep it whole.
        Some(last) if path.len() == name.len() => last,
        _ => name,
    }
}
