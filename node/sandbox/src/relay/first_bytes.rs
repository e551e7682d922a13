//! The first bytes that a guest sends over a TCP connection: which host they ask for.
//!
//! | they are | the host |
//! |---|---|
//! | a TLS handshake (RFC 8446, 5246) | the server name of its ClientHello (RFC 6066). Of an encrypted ClientHello, that of the outer one |
//! | a request of HTTP/1 (RFC 9112) | its only `Host` |
//! | what else a server could take for TLS | none: refused |
//! | something else | none: refused on the ports of HTTP and HTTPS, and let through on others |
//!
//! A request is written anew, so that the server reads what was read here, and with `Connection: close`, so that it reads no other request.
//!
//! Invariants: what could be TLS or HTTP is never let through without a name; no input makes this panic or keep more than [`MOST`] bytes.

use rustls::server::Acceptor;

/// Most bytes that are read for the name. A ClientHello with keys that withstand quantum computers has about 2000.
pub const MOST: usize = 16 << 10;
/// Most header fields of an HTTP request.
const MAX_FIELDS: usize = 96;
/// The type of a TLS record with a handshake message.
const HANDSHAKE: u8 = 22;
/// The type of the first handshake message of a client.
const CLIENT_HELLO: u8 = 1;
/// The first byte of the version of SSL 3 and TLS.
const MAJOR: u8 = 3;
/// Fields that say how a connection goes on, which is decided here.
const CONNECTION_FIELDS: [&str; 6] = [
    "connection",
    "keep-alive",
    "proxy-connection",
    "te",
    "upgrade",
    "http2-settings",
];

/// How a connection begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Opening {
    /// The host that it asks for: in lower case, without a port and without a dot at its end. `None`: the protocol names none.
    pub name: Option<String>,
    /// What the server is to get of it.
    pub bytes: Vec<u8>,
}

/// Why a connection is refused, whatever the policy allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("its first {MOST} bytes name no host")]
    TooLong,
    #[error("it has no server name or Host")]
    NoName,
    #[error("it is neither a ClientHello nor a request of HTTP/1 that can be read")]
    Malformed,
}

/// Reads how a connection begins; `None` if more bytes are needed. `is_web`: its port is one of HTTP or HTTPS.
///
/// # Errors
/// The connection must be refused.
pub fn read(bytes: &[u8], is_web: bool) -> Result<Option<Opening>, Refusal> {
    let opening = match bytes.first() {
        None => None,
        Some(&HANDSHAKE) => tls(bytes)?,
        Some(_) if is_web => http(bytes)?,
        Some(_) => match (is_nameless_tls(bytes), is_http(bytes)) {
            (Some(true), _) => return Err(Refusal::Malformed),
            (_, Some(true)) => http(bytes)?,
            (Some(false), Some(false)) => Some(Opening {
                name: None,
                bytes: bytes.to_vec(),
            }),
            _ => None,
        },
    };
    match opening {
        None if bytes.len() >= MOST => Err(Refusal::TooLong),
        opening => Ok(opening),
    }
}

fn tls(bytes: &[u8]) -> Result<Option<Opening>, Refusal> {
    let mut acceptor = Acceptor::default();
    let mut rest = bytes;
    while !rest.is_empty() {
        let read = acceptor.read_tls(&mut rest).map_err(|_| Refusal::Malformed)?;
        if read == 0 {
            return Err(Refusal::Malformed);
        }
        if let Some(accepted) = acceptor.accept().map_err(|_| Refusal::Malformed)? {
            let hello = accepted.client_hello();
            let name = hello.server_name().ok_or(Refusal::NoName)?;
            return Ok(Some(Opening {
                name: Some(host(name.as_bytes())?),
                bytes: bytes.to_vec(),
            }));
        }
    }
    Ok(None)
}

/// Whether a server could take this for TLS, though it begins with no handshake: with another record, such as a warning, which servers pass
/// over, or with a ClientHello of SSL 2, which has no server name (RFC 5246, appendix E.2). `None` if more bytes are needed.
fn is_nameless_tls(bytes: &[u8]) -> Option<bool> {
    let is_tls = |major: &u8| *major == MAJOR;
    match bytes.first()? {
        0x14..=0x18 => bytes.get(1).map(is_tls),
        0x80.. => match bytes.get(2)? {
            &CLIENT_HELLO => bytes.get(3).map(is_tls),
            _ => Some(false),
        },
        _ => Some(false),
    }
}

/// Whether a server could take this for a request of HTTP; `None` if more bytes are needed. Servers skip empty lines before a request.
fn is_http(bytes: &[u8]) -> Option<bool> {
    let begin = bytes.iter().position(|b| !b"\r\n".contains(b))?;
    let text = &bytes[begin..];
    let end = text.iter().position(|b| *b == b'\n');
    let line = &text[..end.unwrap_or(text.len())];
    // No request line has one of these.
    if line.iter().any(|b| b.is_ascii_control() && !b"\r\t".contains(b)) {
        return Some(false);
    }
    end.map(|_| line.to_ascii_lowercase().windows(5).any(|part| part == b"http/"))
}

fn http(bytes: &[u8]) -> Result<Option<Opening>, Refusal> {
    let mut fields = [httparse::EMPTY_HEADER; MAX_FIELDS];
    let mut request = httparse::Request::new(&mut fields);
    let length = match request.parse(bytes) {
        Ok(httparse::Status::Complete(length)) => length,
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(_) => return Err(Refusal::Malformed),
    };
    let (Some(method), Some(target), Some(version)) = (request.method, request.path, request.version) else {
        return Err(Refusal::Malformed);
    };
    // A whole URL would name a host that outdoes `Host`.
    if !target.starts_with('/') && target != "*" {
        return Err(Refusal::Malformed);
    }
    let mut head = format!("{method} {target} HTTP/1.{version}\r\n").into_bytes();
    let mut name = None;
    for field in request.headers.iter() {
        let is = |other: &str| field.name.eq_ignore_ascii_case(other);
        if is("host") && name.replace(host(field.value)?).is_some() {
            return Err(Refusal::Malformed);
        }
        if !CONNECTION_FIELDS.iter().any(|other| is(other)) {
            for part in [field.name.as_bytes(), &b": "[..], field.value, &b"\r\n"[..]] {
                head.extend_from_slice(part);
            }
        }
    }
    head.extend_from_slice(b"Connection: close\r\n\r\n");
    head.extend_from_slice(&bytes[length..]);
    let name = name.ok_or(Refusal::NoName)?;
    Ok(Some(Opening {
        name: Some(name),
        bytes: head,
    }))
}

/// The host of a server name or a `Host`, whose port is left out.
fn host(value: &[u8]) -> Result<String, Refusal> {
    let text = std::str::from_utf8(value).map_err(|_| Refusal::Malformed)?;
    let host = match text.rsplit_once(':') {
        Some((host, port)) if port.bytes().all(|b| b.is_ascii_digit()) => host,
        _ => text,
    };
    let host = host.strip_suffix('.').unwrap_or(host);
    let is_plain = |b: u8| b.is_ascii_alphanumeric() || b"-_.".contains(&b);
    match host.is_empty() {
        true => Err(Refusal::NoName),
        false if host.bytes().all(is_plain) => Ok(host.to_ascii_lowercase()),
        false => Err(Refusal::Malformed),
    }
}

#[cfg(test)]
#[path = "first_bytes_test.rs"]
mod tests;
