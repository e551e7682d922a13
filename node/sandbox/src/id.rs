//! Ids of sandboxes, containers and processes: 12 hexadecimal digits.

use std::io;

/// Digits of an id.
const ID_DIGITS: usize = 12;

/// Whether a text has the form of a sandbox's id.
pub fn is_id(text: &str) -> bool {
    let is_digit = |b: u8| matches!(b, b'0'..=b'9' | b'a'..=b'f');
    text.len() == ID_DIGITS && text.bytes().all(is_digit)
}

/// A new id.
///
/// # Errors
/// The kernel gives no random bytes.
pub fn new_id() -> io::Result<String> {
    Ok(crate::random::<{ ID_DIGITS / 2 }>()?
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect())
}
