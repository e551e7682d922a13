//! The heads of requests and answers that the proxy passes on.
//!
//! Invariants: fields that concern one connection stay on it; a request has one `Host` and one authority, which are the same.

use axum::extract::Request;
use axum::http::header::{
    CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, HOST, TE, TRAILER, TRANSFER_ENCODING, UPGRADE,
};
use axum::http::uri::{Authority, PathAndQuery, Scheme};
use axum::http::{Error, HeaderMap, HeaderName, HeaderValue, Uri, Version};
use hyper::upgrade::OnUpgrade;
use thaw_protocol::nodes::MARK;

/// Fields that concern one connection only (RFC 9110, section 7.6.1), besides those that `Connection` names.
const OF_CONNECTION: [HeaderName; 8] = [
    CONNECTION,
    TE,
    TRAILER,
    TRANSFER_ENCODING,
    UPGRADE,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    HeaderName::from_static("proxy-authorization"),
];
/// How the media types of gRPC begin.
const GRPC: &[u8] = b"application/grpc";

/// An upgrade that the client asks for.
pub struct Upgrade {
    pub protocol: HeaderValue,
    pub client: OnUpgrade,
}

/// Whether a request is one of gRPC, which exists over HTTP/2 alone. gRPC-Web goes over both versions, so its servers need HTTP/1.1 only.
pub fn is_grpc(request: &Request) -> bool {
    let kind = request.headers().get(CONTENT_TYPE).map(HeaderValue::as_bytes);
    let rest = kind.and_then(|kind| kind.strip_prefix(GRPC));
    let is_kind = rest.is_some_and(|rest| matches!(rest.first(), None | Some(b'+' | b';')));
    is_kind && request.version() == Version::HTTP_2
}

/// Prepares a request for a connection of HTTP/1.1. Returns the upgrade that it asks for.
///
/// # Errors
/// Its path is none.
pub fn for_http1(request: &mut Request) -> Result<Option<Upgrade>, Error> {
    let protocol = upgrade_of(request.headers());
    let client = protocol.is_some().then(|| hyper::upgrade::on(&mut *request));
    let authority = request
        .uri()
        .authority()
        .and_then(|a| HeaderValue::try_from(a.as_str()).ok());
    let path = request.uri().path_and_query().map_or("/", |path| path.as_str());
    *request.uri_mut() = Uri::try_from(path)?;
    if request.version() == Version::HTTP_2 {
        *request.version_mut() = Version::HTTP_11;
    }
    let headers = request.headers_mut();
    remove_connection_fields(headers);
    if let Some(authority) = authority {
        headers.insert(HOST, authority);
    }
    let Some((protocol, client)) = protocol.zip(client) else {
        return Ok(None);
    };
    headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(UPGRADE, protocol.clone());
    Ok(Some(Upgrade { protocol, client }))
}

/// Prepares a request for a connection of HTTP/2, whose answer may have trailers.
///
/// # Errors
/// Its host is none.
pub fn for_http2(request: &mut Request) -> Result<(), Error> {
    let headers = request.headers_mut();
    remove_connection_fields(headers);
    headers.insert(TE, HeaderValue::from_static("trailers"));
    let host = headers.remove(HOST);
    let mut parts = std::mem::take(request.uri_mut()).into_parts();
    if parts.authority.is_none() {
        let host = host.as_ref().map_or(&b"localhost"[..], HeaderValue::as_bytes);
        parts.authority = Some(Authority::try_from(host)?);
    }
    parts.scheme = Some(Scheme::HTTP);
    let path = parts.path_and_query.take();
    parts.path_and_query = Some(path.unwrap_or_else(|| PathAndQuery::from_static("/")));
    *request.uri_mut() = Uri::from_parts(parts)?;
    Ok(())
}

/// The protocol that a head asks to change to.
fn upgrade_of(headers: &HeaderMap) -> Option<HeaderValue> {
    let asks = connection_words(headers).any(|word| word.eq_ignore_ascii_case("upgrade"));
    headers.get(UPGRADE).filter(|_| asks).cloned()
}

fn connection_words(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    let fields = headers.get_all(CONNECTION).iter();
    fields
        .filter_map(|field| field.to_str().ok())
        .flat_map(|field| field.split(','))
        .map(str::trim)
}

/// Removes what concerns the connection that a head came over.
pub fn remove_connection_fields(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = connection_words(headers)
        .filter_map(|word| word.parse().ok())
        .collect();
    for name in named.iter().chain(&OF_CONNECTION) {
        // These fields are kept, whatever `Connection` says: the connection frames the body by its own rules, and a caller must not remove a
        // node's mark.
        if *name != CONTENT_LENGTH && *name != MARK {
            headers.remove(name);
        }
    }
}

#[cfg(test)]
mod tests {
    use axum::body::Body;

    use super::*;

    fn request(version: Version, uri: &str, kind: &str) -> Request {
        let request = axum::http::Request::builder().version(version).uri(uri);
        let request = request.header(HOST, "a.example").header(CONTENT_TYPE, kind);
        request.body(Body::empty()).unwrap()
    }

    #[test]
    fn grpc_is_told_by_its_media_type() {
        for (kind, expected) in [
            ("application/grpc", true),
            ("application/grpc+proto", true),
            ("application/grpc;charset=utf-8", true),
            ("application/grpc-web+proto", false),
            ("application/grpcx", false),
            ("application/json", false),
        ] {
            let of = |version| is_grpc(&request(version, "/x", kind));
            assert_eq!(
                (of(Version::HTTP_2), of(Version::HTTP_11)),
                (expected, false),
                "{kind}"
            );
        }
    }

    #[test]
    fn authority_and_host_are_one() {
        for uri in ["/x?y", "https://a.example/x?y"] {
            let mut grpc = request(Version::HTTP_2, uri, "application/grpc");
            for_http2(&mut grpc).unwrap();
            assert_eq!(*grpc.uri(), "http://a.example/x?y");
            assert!(!grpc.headers().contains_key(HOST) && grpc.headers()[TE] == "trailers");
            let mut plain = request(Version::HTTP_2, uri, "text/plain");
            assert!(for_http1(&mut plain).unwrap().is_none());
            assert_eq!(
                (plain.uri().to_string().as_str(), plain.version()),
                ("/x?y", Version::HTTP_11)
            );
            assert_eq!(plain.headers()[HOST], "a.example");
        }
        let mut other = request(Version::HTTP_2, "https://b.example/", "text/plain");
        for_http1(&mut other).unwrap();
        assert_eq!(other.headers()[HOST], "b.example");
    }
}
