//! What the headers of a request say about its messages.

use std::time::Duration;

use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use thaw_protocol::connect::Code;

use super::super::failure::Failure;
use super::codec::Codec;

const VERSION: HeaderName = HeaderName::from_static("connect-protocol-version");
const TIMEOUT: HeaderName = HeaderName::from_static("connect-timeout-ms");
const STREAM_ENCODING: HeaderName = HeaderName::from_static("connect-content-encoding");
const ACCEPT_POST: HeaderName = HeaderName::from_static("accept-post");
/// Most digits of a timeout.
const TIMEOUT_DIGITS: usize = 10;

/// How the messages of a request are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Form {
    pub codec: Codec,
    pub is_stream: bool,
    pub is_gzip: bool,
    /// How long the caller waits.
    pub timeout: Option<Duration>,
}

/// The codec that a request's content type names. `None`: see [`other_type`].
pub fn codec(headers: &HeaderMap, is_stream: bool) -> Option<Codec> {
    let named = text(headers, header::CONTENT_TYPE);
    let media_type = named
        .split(';')
        .next()
        .unwrap_or_default()
        .trim()
        .to_ascii_lowercase();
    Codec::of(&media_type, is_stream)
}

/// The answer to a request of another content type.
pub fn other_type(is_stream: bool) -> Response {
    let accepted = match is_stream {
        true => "application/connect+json, application/connect+proto",
        false => "application/json, application/proto",
    };
    let accepted = [(ACCEPT_POST, HeaderValue::from_static(accepted))];
    (StatusCode::UNSUPPORTED_MEDIA_TYPE, accepted).into_response()
}

impl Form {
    /// Reads the headers of a request with this codec.
    ///
    /// # Errors
    /// They ask for another version of the protocol, or another compression than gzip, or the timeout is not a number.
    pub fn read(headers: &HeaderMap, codec: Codec, is_stream: bool) -> Result<Form, Failure> {
        let version = text(headers, VERSION);
        if !matches!(version, "" | "1") {
            return Err(Failure::invalid("Connect-Protocol-Version is 1"));
        }
        let encoding = match is_stream {
            true => text(headers, STREAM_ENCODING),
            false => text(headers, header::CONTENT_ENCODING),
        };
        let is_gzip = match encoding {
            "" | "identity" => false,
            "gzip" => true,
            _ => {
                let what = "the messages are compressed in a way that is not known; use gzip or identity";
                return Err(Failure::new(Code::Unimplemented, what));
            }
        };
        Ok(Form {
            codec,
            is_stream,
            is_gzip,
            timeout: timeout(text(headers, TIMEOUT))?,
        })
    }
}

fn timeout(text: &str) -> Result<Option<Duration>, Failure> {
    if text.is_empty() {
        return Ok(None);
    }
    let is_number = text.len() <= TIMEOUT_DIGITS && text.bytes().all(|byte| byte.is_ascii_digit());
    let milliseconds = is_number.then(|| text.parse().ok()).flatten();
    let milliseconds = milliseconds
        .ok_or_else(|| Failure::invalid("Connect-Timeout-Ms is a number of at most 10 digits"))?;
    Ok(Some(Duration::from_millis(milliseconds)))
}

fn text(headers: &HeaderMap, name: HeaderName) -> &str {
    match headers.get(name) {
        Some(value) => value.to_str().unwrap_or("?").trim(),
        None => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(headers: &[(HeaderName, &str)], is_stream: bool) -> Result<Form, Code> {
        let headers = headers
            .iter()
            .map(|(name, value)| (name.clone(), value.parse().unwrap()));
        Form::read(&headers.collect(), Codec::Json, is_stream).map_err(|failure| failure.code)
    }

    #[test]
    fn headers_say_how_messages_are_sent() {
        let plain = read(&[], false).unwrap();
        assert!(!plain.is_gzip && plain.timeout.is_none());
        let full = [
            (VERSION, "1"),
            (TIMEOUT, "1500"),
            (header::CONTENT_ENCODING, "gzip"),
        ];
        let form = read(&full, false).unwrap();
        assert!(form.is_gzip && form.timeout == Some(Duration::from_millis(1500)));
        // A stream's own header counts: the other one is of the whole body.
        assert!(!read(&full, true).unwrap().is_gzip);
        assert!(read(&[(STREAM_ENCODING, "gzip")], true).unwrap().is_gzip);
        assert_eq!(read(&[(VERSION, "2")], false), Err(Code::InvalidArgument));
        assert_eq!(read(&[(STREAM_ENCODING, "br")], true), Err(Code::Unimplemented));
        for bad in ["-1", "1.5", "12345678901", "x"] {
            assert_eq!(
                read(&[(TIMEOUT, bad)], false),
                Err(Code::InvalidArgument),
                "{bad}"
            );
        }
    }

    #[test]
    fn content_types_of_the_other_kind_are_refused() {
        let named = |value: &str, is_stream| {
            let headers = HeaderMap::from_iter([(header::CONTENT_TYPE, value.parse().unwrap())]);
            codec(&headers, is_stream)
        };
        assert_eq!(
            named("application/json; charset=utf-8", false).unwrap(),
            Codec::Json
        );
        assert_eq!(named("application/connect+proto", true).unwrap(), Codec::Proto);
        assert_eq!(named("application/json", true), None);
        assert_eq!(named("application/grpc", false), None);
        assert_eq!(other_type(true).status(), 415);
        for codec in [Codec::Json, Codec::Proto] {
            for is_stream in [true, false] {
                assert_eq!(Codec::of(codec.media_type(is_stream), is_stream), Some(codec));
            }
        }
    }
}
