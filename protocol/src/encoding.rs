//! Bytes of messages and records: [postcard](https://docs.rs/postcard), decoded whole, with errors that say where.
//!
//! All decoding is of untrusted bytes: it returns an error and never panics.

use serde::{Serialize, de::DeserializeOwned};

use crate::tags;

/// Why bytes are not what they should be, or a value has no bytes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EncodingError {
    /// An enum's number is not one of its [tags](crate::tags).
    #[error("{what}: this release knows no {of} {tag}, which ends at byte {at}")]
    UnknownTag {
        /// The type that was read.
        what: &'static str,
        /// The enum in it.
        of: &'static str,
        /// What was found.
        tag: u32,
        at: usize,
    },
    #[error("{what}: {error}, at byte {at}")]
    Malformed {
        what: &'static str,
        at: usize,
        error: postcard::Error,
    },
    #[error("{what}: {bytes} bytes follow it")]
    Trailing { what: &'static str, bytes: usize },
    #[error("{what} cannot be encoded: {error}")]
    Unencodable {
        what: &'static str,
        error: postcard::Error,
    },
}

/// A value's bytes.
///
/// # Errors
/// Where a part of it has no encoding: none of the types here.
pub fn encode<T: Serialize>(value: &T) -> Result<Vec<u8>, EncodingError> {
    let what = name::<T>();
    postcard::to_stdvec(value).map_err(|error| EncodingError::Unencodable { what, error })
}

/// Reads a value that is all of `bytes`.
///
/// # Errors
/// When it is not one, or bytes follow it.
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

/// Reads a value that `bytes` begin with, and what follows it.
///
/// # Errors
/// When they do not begin with one.
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

/// A type's own name.
fn name<T>() -> &'static str {
    let name = std::any::type_name::<T>();
    let path = name.split('<').next().unwrap_or(name);
    match path.rsplit("::").next() {
        // A tuple's or an array's is what it is made of.
        Some(last) if path.len() == name.len() => last,
        _ => name,
    }
}
