//! An HTTP request, and the status of its answer.
//!
//! The container sends the answer, so it may be anything. At most [`MAX_ANSWER`] bytes are read, and only the
//! heads of interim answers and the status line are parsed.

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use crate::error::{Error, Result};

/// Most bytes that are read to find a status.
pub const MAX_ANSWER: usize = 16 * 1024;
/// Longest path and longest host.
const MAX_PATH: usize = 1024;
const MAX_HOST: usize = 253;

/// The request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    path: String,
    host: String,
}

/// The meaning of the bytes received so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parsed {
    /// More bytes are needed.
    Unfinished,
    Status(u16),
    /// They are not an HTTP/1 answer.
    Nonsense,
}

impl Request {
    /// A request for `path` with this host.
    ///
    /// # Errors
    /// Either would be more than one word of the request.
    pub fn new(path: &str, host: &str) -> Result<Self> {
        let word = |text: &str| text.bytes().all(|b| b.is_ascii_graphic());
        if !path.starts_with('/') || !word(path) || path.len() > MAX_PATH {
            return Err(Error::Invalid(format!(
                "{path:?} is not a path to ask for: printable ASCII from its first '/' on, at most {MAX_PATH}"
            )));
        }
        if !word(host) || host.len() > MAX_HOST {
            return Err(Error::Invalid(format!(
                "{host:?} is not a host: printable ASCII, at most {MAX_HOST}"
            )));
        }
        Ok(Request {
            path: path.to_owned(),
            host: host.to_owned(),
        })
    }

    /// The requested path.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The bytes of a GET request, for a server on `port`.
    pub fn get(&self, port: u16) -> Vec<u8> {
        self.bytes("GET", port, "")
    }

    /// The bytes of a POST request without a body, for a server on `port`.
    pub fn post(&self, port: u16) -> Vec<u8> {
        self.bytes("POST", port, "Content-Length: 0\r\n")
    }

    fn bytes(&self, method: &str, port: u16, more: &str) -> Vec<u8> {
        let host = match self.host.as_str() {
            "" => format!("localhost:{port}"),
            host => host.to_owned(),
        };
        let agent = concat!("thaw-agent/", env!("CARGO_PKG_VERSION"));
        let path = &self.path;
        format!(
            "{method} {path} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: {agent}\r\nAccept: */*\r\n{more}Connection: close\r\n\r\n"
        )
        .into_bytes()
    }
}

/// Sends a request, and reads until the status of the answer is known. Returns the status and all bytes read.
///
/// # Errors
/// A description of the failure.
pub async fn ask(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    request: &[u8],
) -> Result<(u16, Vec<u8>), &'static str> {
    let broke = |_| "broke off the connection";
    stream.write_all(request).await.map_err(broke)?;
    let mut answer = Vec::with_capacity(1024);
    loop {
        let read = stream.read_buf(&mut answer).await.map_err(broke)?;
        match parse(&answer) {
            Parsed::Status(status) => return Ok((status, answer)),
            Parsed::Nonsense => return Err("answered something that is not HTTP"),
            Parsed::Unfinished if read == 0 => return Err("closed the connection without an answer"),
            Parsed::Unfinished if answer.len() > MAX_ANSWER => return Err("sent no status"),
            Parsed::Unfinished => {}
        }
    }
}

/// Parses the beginning of an answer: the status of the first answer that is not interim (RFC 9110, 15.2). Once
/// the result is final, more bytes do not change it.
pub fn parse(mut bytes: &[u8]) -> Parsed {
    loop {
        let Some(end) = bytes.iter().position(|b| *b == b'\n') else {
            return match could_begin(bytes) {
                true => Parsed::Unfinished,
                false => Parsed::Nonsense,
            };
        };
        let Some(status) = status(&bytes[..end]) else {
            return Parsed::Nonsense;
        };
        if !is_interim(status) {
            return Parsed::Status(status);
        }
        match after_head(&bytes[end + 1..]) {
            Some(rest) => bytes = rest,
            None => return Parsed::Unfinished,
        }
    }
}

/// What was received of the body of the first answer that is not interim.
pub fn body(mut bytes: &[u8]) -> &[u8] {
    loop {
        let line = bytes.iter().position(|b| *b == b'\n');
        let Some((line, rest)) = line.map(|end| (&bytes[..end], &bytes[end + 1..])) else {
            return &[];
        };
        match (after_head(rest), status(line).is_some_and(is_interim)) {
            (Some(next), true) => bytes = next,
            (Some(body), false) => return body,
            (None, _) => return &[],
        }
    }
}

/// 101 is not an interim answer: another protocol follows.
fn is_interim(status: u16) -> bool {
    (100..200).contains(&status) && status != 101
}

const VERSION: &[u8] = b"HTTP/1.";

fn could_begin(bytes: &[u8]) -> bool {
    let common = bytes.len().min(VERSION.len());
    bytes[..common] == VERSION[..common]
}

/// Parses a status line without its end: `HTTP/1.x NNN`, optionally followed by a space and a reason.
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

/// Returns what follows the header fields, whose lines end with CRLF or LF.
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
