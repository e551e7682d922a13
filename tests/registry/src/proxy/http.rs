//! As much of HTTP/1.1 (RFC 9112) as passing messages on takes.

use std::io::{self, BufRead, Read, Write};

/// Most bytes of a message's head.
const MAX_HEAD: usize = 64 << 10;

/// A message's head: its first line and headers.
#[derive(Clone, Debug)]
pub(crate) struct Head {
    first: String,
    headers: Vec<(String, String)>,
    /// Of a request.
    pub(crate) method: String,
    /// Of a request.
    pub(crate) target: String,
}

/// How long a body is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Body {
    Length(u64),
    Chunked,
    UntilClose,
}

/// A whole response.
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) bytes: Vec<u8>,
}

impl Answer {
    pub(crate) fn new(status: u16, headers: &[(String, String)], body: &[u8]) -> Answer {
        let mut text = format!("HTTP/1.1 {status} Told\r\nContent-Length: {}\r\n", body.len());
        for (name, value) in headers {
            text += &format!("{name}: {value}\r\n");
        }
        let mut bytes = (text + "\r\n").into_bytes();
        bytes.extend_from_slice(body);
        Answer { status, bytes }
    }
}

impl Head {
    /// None at the end of the connection.
    pub(crate) fn read(from: &mut impl BufRead) -> io::Result<Option<Head>> {
        let mut lines = Vec::new();
        let mut length = 0;
        loop {
            let mut line = String::new();
            let read = from
                .by_ref()
                .take((MAX_HEAD - length) as u64)
                .read_line(&mut line)?;
            length += read;
            if read == 0 {
                return match lines.is_empty() {
                    true => Ok(None),
                    false => Err(io::ErrorKind::UnexpectedEof.into()),
                };
            }
            let line = line.trim_end_matches(['\r', '\n']).to_string();
            match line.is_empty() {
                true if lines.is_empty() => {}
                true => break,
                false => lines.push(line),
            }
        }
        let first = lines.remove(0);
        let mut words = first.split(' ');
        let (method, target) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        let header = |line: String| {
            let (name, value) = line.split_once(':')?;
            Some((name.trim().to_string(), value.trim().to_string()))
        };
        Ok(Some(Head {
            method: method.into(),
            target: target.into(),
            headers: lines.into_iter().filter_map(header).collect(),
            first,
        }))
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(n, _)| n.eq_ignore_ascii_case(name));
        found.map(|(_, value)| value.as_str())
    }

    /// As sent, but for one header.
    pub(crate) fn bytes(&self, without: Option<&str>) -> Vec<u8> {
        let mut text = format!("{}\r\n", self.first);
        for (name, value) in &self.headers {
            let dropped =
                name.eq_ignore_ascii_case("expect") || without.is_some_and(|w| name.eq_ignore_ascii_case(w));
            if !dropped {
                text += &format!("{name}: {value}\r\n");
            }
        }
        (text + "\r\n").into_bytes()
    }

    /// Of a response.
    pub(crate) fn status(&self) -> io::Result<u16> {
        self.target
            .parse()
            .map_err(|_| io::Error::other(format!("no status in {:?}", self.first)))
    }

    pub(crate) fn closes(&self) -> bool {
        self.header("connection")
            .is_some_and(|value| value.eq_ignore_ascii_case("close"))
    }

    pub(crate) fn request_body(&self) -> io::Result<Body> {
        Ok(self.framed()?.unwrap_or(Body::Length(0)))
    }

    pub(crate) fn response_body(&self, method: &str) -> io::Result<Body> {
        let status = self.status()?;
        if method == "HEAD" || status == 204 || status == 304 {
            return Ok(Body::Length(0));
        }
        Ok(self.framed()?.unwrap_or(Body::UntilClose))
    }

    fn framed(&self) -> io::Result<Option<Body>> {
        if self
            .header("transfer-encoding")
            .is_some_and(|v| v.eq_ignore_ascii_case("chunked"))
        {
            return Ok(Some(Body::Chunked));
        }
        let length = self.header("content-length").map(str::parse);
        match length.transpose() {
            Ok(length) => Ok(length.map(Body::Length)),
            Err(e) => Err(io::Error::other(format!("Content-Length: {e}"))),
        }
    }
}

impl Body {
    /// Passes it on, framing included; how many bytes.
    pub(crate) fn copy(self, from: &mut impl Read, to: &mut impl Write) -> io::Result<u64> {
        match self {
            Body::Length(length) => {
                let copied = io::copy(&mut from.by_ref().take(length), to)?;
                if copied < length {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                Ok(copied)
            }
            Body::UntilClose => io::copy(from, to),
            Body::Chunked => {
                let mut total = 0;
                loop {
                    let line = line(from)?;
                    let text = line
                        .split(|b| *b == b';' || *b == b'\r')
                        .next()
                        .unwrap_or_default();
                    let size = std::str::from_utf8(text)
                        .ok()
                        .and_then(|t| u64::from_str_radix(t.trim(), 16).ok());
                    let size = size.ok_or_else(|| io::Error::other("a chunk without a size"))?;
                    to.write_all(&line)?;
                    total += Body::Length(size).copy(from, to)?;
                    // The chunk's end, or the trailers and the last empty line.
                    loop {
                        let end = self::line(from)?;
                        to.write_all(&end)?;
                        if size > 0 || end == b"\r\n" {
                            break;
                        }
                    }
                    if size == 0 {
                        return Ok(total);
                    }
                }
            }
        }
    }
}

/// A short line with its end.
fn line(from: &mut impl Read) -> io::Result<Vec<u8>> {
    let mut line = Vec::new();
    while !line.ends_with(b"\n") {
        if line.len() > 4096 {
            return Err(io::Error::other("a line too long"));
        }
        let mut byte = [0];
        from.read_exact(&mut byte)?;
        line.push(byte[0]);
    }
    Ok(line)
}
