//! One question over HTTP, and the status of its answer.
//!
//! The answer is the container's, so anything: of it at most [`MOST`] bytes are looked at, and nothing but the heads of
//! interim answers and the status line.

use crate::error::{Error, Result};

/// Most bytes that are read until there is a status.
pub const MOST: usize = 16 * 1024;
/// Longest path and longest host.
const LONGEST_PATH: usize = 1024;
const LONGEST_HOST: usize = 253;

/// What is asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    path: String,
    host: String,
}

/// What the bytes so far say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Said {
    /// Nothing yet.
    Unfinished,
    Status(u16),
    /// They are no answer by HTTP/1.
    Nonsense,
}

impl Question {
    /// For `path`, of the host with that name.
    ///
    /// # Errors
    /// Either would be more than a word of the request.
    pub fn new(path: &str, host: &str) -> Result<Self> {
        let word = |text: &str| text.bytes().all(|b| b.is_ascii_graphic());
        if !path.starts_with('/') || !word(path) || path.len() > LONGEST_PATH {
            return Err(Error::Invalid(format!(
                "{path:?} is not a path to ask for: printable ASCII from its first '/' on, at most {LONGEST_PATH}"
            )));
        }
        if !word(host) || host.len() > LONGEST_HOST {
            return Err(Error::Invalid(format!(
                "{host:?} is not a host: printable ASCII, at most {LONGEST_HOST}"
            )));
        }
        Ok(Question {
            path: path.to_owned(),
            host: host.to_owned(),
        })
    }

    /// What is asked for.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The request to a server on `port`.
    pub fn request(&self, port: u16) -> Vec<u8> {
        let host = match self.host.as_str() {
            "" => format!("localhost:{port}"),
            host => host.to_owned(),
        };
        let agent = concat!("thaw-agent/", env!("CARGO_PKG_VERSION"));
        let path = &self.path;
        format!(
            "GET {path} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: {agent}\r\nAccept: */*\r\nConnection: close\r\n\r\n"
        )
        .into_bytes()
    }
}

/// What an answer that begins with these bytes says: the status of the first answer that is not interim (RFC 9110, 15.2).
/// Once it says something, more bytes change nothing.
pub fn said(mut bytes: &[u8]) -> Said {
    loop {
        let Some(end) = bytes.iter().position(|b| *b == b'\n') else {
            return match could_begin(bytes) {
                true => Said::Unfinished,
                false => Said::Nonsense,
            };
        };
        let Some(status) = status(&bytes[..end]) else {
            return Said::Nonsense;
        };
        // 101 is no interim answer: what follows is another protocol.
        if !(100..200).contains(&status) || status == 101 {
            return Said::Status(status);
        }
        match after_head(&bytes[end + 1..]) {
            Some(rest) => bytes = rest,
            None => return Said::Unfinished,
        }
    }
}

const VERSION: &[u8] = b"HTTP/1.";

fn could_begin(bytes: &[u8]) -> bool {
    let common = bytes.len().min(VERSION.len());
    bytes[..common] == VERSION[..common]
}

/// The status of a status line without its end: `HTTP/1.x NNN`, and nothing or a space and a reason.
fn status(line: &[u8]) -> Option<u16> {
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    let (minor, rest) = line.strip_prefix(VERSION)?.split_first()?;
    let (number, reason) = rest.strip_prefix(b" ")?.split_first_chunk::<3>()?;
    let digits = [*minor].iter().chain(number).all(u8::is_ascii_digit);
    if !digits || reason.first().is_some_and(|b| *b != b' ') {
        return None;
    }
    let number = number.iter().fold(0, |sum, b| sum * 10 + u16::from(b - b'0'));
    (number >= 100).then_some(number)
}

/// What follows the fields of a head, whose lines end with CRLF or LF alone.
fn after_head(mut bytes: &[u8]) -> Option<&[u8]> {
    loop {
        let end = bytes.iter().position(|b| *b == b'\n')?;
        let (line, rest) = (&bytes[..end], &bytes[end + 1..]);
        if line.is_empty() || line == b"\r" {
            return Some(rest);
        }
        bytes = rest;
    }
}

#[cfg(test)]
#[path = "http_test.rs"]
mod tests;
