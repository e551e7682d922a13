//! One HTTP/1 connection, and the versions of HTTP that listeners speak.
//!
//! Invariant: a connection holds a bounded buffer, and only while its peer keeps sending heads and reading answers in time.

use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::response::IntoResponse;
use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::Service;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::UnixStream;
use tokio::sync::watch;

use super::problem::{ApiCode, Refusal, write_problems};
use super::write_timeout::{WRITE_TIMEOUT, WriteTimeout};

/// The name of HTTP/2 in a TLS handshake.
pub(super) const HTTP2: &[u8] = b"h2";

/// Which versions of HTTP a listener speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Versions {
    Http1,
    Http1And2,
}

impl Versions {
    /// Their names in a TLS handshake (ALPN, RFC 7301), the preferred one first.
    pub fn names(self) -> Vec<Vec<u8>> {
        let http1 = b"http/1.1".to_vec();
        match self {
            Versions::Http1 => vec![http1],
            Versions::Http1And2 => vec![HTTP2.to_vec(), http1],
        }
    }
}

/// How long a request's head may take to arrive, and how long a connection may be idle.
pub const HEAD_LIMIT: Duration = Duration::from_secs(30);
/// Maximum size of a head, bytes; also of the buffered part of a body.
pub(super) const MAX_HEAD: usize = 64 << 10;
/// Most header fields.
pub(super) const MAX_FIELDS: usize = 64;

fn http() -> http1::Builder {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(HEAD_LIMIT)
        .max_buf_size(MAX_HEAD)
        .max_headers(MAX_FIELDS);
    http
}

/// Serves one connection until it ends, or until its current request ends after `stopped`. `known`, the facts known about the peer, is
/// among the extensions of each request; without it, each request must authenticate itself.
pub async fn serve<K: Clone + Send + Sync + 'static>(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    known: Option<K>,
    routes: Router,
    mut stopped: watch::Receiver<()>,
) {
    let service = TowerToHyperService::new(routes);
    let service = hyper::service::service_fn(move |mut request: Request<Incoming>| {
        if let Some(known) = known.clone() {
            request.extensions_mut().insert(known);
        }
        service.call(request)
    });
    let io = TokioIo::new(WriteTimeout::new(stream, WRITE_TIMEOUT));
    let connection = http().serve_connection(io, service).with_upgrades();
    let mut connection = std::pin::pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        _ = stopped.changed() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(e) = ended {
        tracing::debug!("a connection broke: {e}");
    }
}

/// Answers one request with an error.
pub async fn refuse(stream: UnixStream, code: ApiCode, what: String) {
    let answer = move || {
        let what = what.clone();
        async move { Refusal::new(code, what).into_response() }
    };
    let routes: Router = Router::new()
        .fallback(answer)
        .layer(axum::middleware::from_fn(write_problems));
    let service = TowerToHyperService::new(routes);
    let service =
        hyper::service::service_fn(move |request: Request<Incoming>| service.call(request.map(Body::new)));
    let io = TokioIo::new(WriteTimeout::new(stream, WRITE_TIMEOUT));
    let served = http().keep_alive(false).serve_connection(io, service).await;
    if let Err(e) = served {
        tracing::debug!("a connection broke: {e}");
    }
}
