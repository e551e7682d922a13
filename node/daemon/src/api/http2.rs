//! One HTTP/2 connection (RFC 9113).
//!
//! Invariants: a connection has a bounded number of requests, and bounded heads and buffers; it ends after [`HEAD_LIMIT`] without a request, and if
//! its peer does not answer pings or reads nothing; an answer is aborted if its client reads nothing of it for [`UNREAD_LIMIT`]. A handler
//! sees the head that the request would have over HTTP/1.1: the authority is in `Host`, cookies are in one field, and there are no more fields
//! than [`MAX_FIELDS`].

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::http::header::{COOKIE, HOST};
use axum::http::{HeaderValue, StatusCode};
use axum::response::IntoResponse;
use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::Service;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::watch;
use tokio::time::timeout;

use super::body_timeout::with_timeout;
use super::connection::{HEAD_LIMIT, MAX_FIELDS};
use super::held_body::holding;
use super::write_timeout::{WRITE_TIMEOUT, WriteTimeout};

/// Most requests at once.
const MAX_STREAMS: u32 = 100;
/// Maximum size of a head, bytes: the lengths of all names and values, and 32 for each field.
const MAX_HEAD: u32 = 32 << 10;
/// How much of a request's body a client may send before a handler reads it, bytes.
const STREAM_WINDOW: u32 = 128 << 10;
/// The same of all requests of a connection.
const CONNECTION_WINDOW: u32 = 256 << 10;
/// How much of an answer waits for a client that does not read it, bytes.
const MAX_SEND_BUFFER: usize = 64 << 10;
/// How long a client may read nothing of an answer that has more. Longer than the limit of a connection, because answers share its bandwidth.
const UNREAD_LIMIT: Duration = Duration::from_secs(120);
/// Most requests that a client may cancel before they are accepted. One that does it for ever makes work that no other bound counts
/// (CVE-2023-44487).
const MAX_CANCELLED: usize = 20;
/// Most violations of the protocol that end one request and not the connection.
const MAX_ERRORS: usize = 100;

fn http() -> http2::Builder<TokioExecutor> {
    let mut http = http2::Builder::new(TokioExecutor::new());
    http.timer(TokioTimer::new())
        .max_concurrent_streams(MAX_STREAMS)
        .max_header_list_size(MAX_HEAD)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_send_buf_size(MAX_SEND_BUFFER)
        .max_pending_accept_reset_streams(MAX_CANCELLED)
        .max_local_error_reset_streams(MAX_ERRORS)
        .keep_alive_interval(HEAD_LIMIT)
        .keep_alive_timeout(HEAD_LIMIT);
    http
}

/// One request, from its head until its answer has been read, all but what is buffered, or given up.
struct Counted(Arc<watch::Sender<usize>>);

impl Counted {
    fn new(requests: &Arc<watch::Sender<usize>>) -> Counted {
        requests.send_modify(|count| *count += 1);
        Counted(requests.clone())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count -= 1);
    }
}

/// Serves one connection until it ends, or until its current requests end after `stopped`. `known` is as for
/// [HTTP/1](super::connection::serve).
pub async fn serve<K: Clone + Send + Sync + 'static>(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    known: Option<K>,
    routes: Router,
    mut stopped: watch::Receiver<()>,
) {
    let (requests, count) = watch::channel(0);
    let requests = Arc::new(requests);
    let service = TowerToHyperService::new(routes);
    let service = hyper::service::service_fn(move |mut request: Request<Incoming>| {
        let counted = Counted::new(&requests);
        let head = convert(&mut request);
        if let Some(known) = known.clone() {
            request.extensions_mut().insert(known);
        }
        let answering = head.map(|()| service.call(request));
        async move {
            let answer = match answering {
                Ok(answering) => answering.await?,
                Err(refused) => refused.into_response(),
            };
            let counting = answer.map(|body| holding(body, counted));
            Ok::<_, Infallible>(counting.map(|body| with_timeout(body, UNREAD_LIMIT)))
        }
    });
    let io = TokioIo::new(WriteTimeout::new(stream, WRITE_TIMEOUT));
    let mut connection = std::pin::pin!(http().serve_connection(io, service));
    let mut is_ending = false;
    let ended = loop {
        tokio::select! {
            ended = connection.as_mut() => break ended,
            _ = stopped.changed(), if !is_ending => {}
            () = idle(count.clone()) => if is_ending {
                // Its client does not confirm the end.
                return;
            },
        }
        is_ending = true;
        connection.as_mut().graceful_shutdown();
    };
    if let Err(e) = ended {
        tracing::debug!("a connection broke: {e}");
    }
}

/// Waits until there was no request for [`HEAD_LIMIT`].
async fn idle(mut requests: watch::Receiver<usize>) {
    while requests.wait_for(|count| *count == 0).await.is_ok() {
        let Ok(Ok(())) = timeout(HEAD_LIMIT, requests.changed()).await else {
            return;
        };
    }
}

/// Makes a head what it would be over HTTP/1.1 (RFC 9113, sections 8.2.3 and 8.3.1).
///
/// # Errors
/// It has too many fields.
fn convert<B>(request: &mut Request<B>) -> Result<(), StatusCode> {
    let authority = request.uri().authority().map(|name| name.as_str());
    let authority = authority.and_then(|name| HeaderValue::try_from(name).ok());
    let headers = request.headers_mut();
    if let Some(authority) = authority {
        headers.insert(HOST, authority);
    }
    let cookies: Vec<_> = headers.get_all(COOKIE).iter().map(|one| one.as_bytes()).collect();
    if cookies.len() > 1 {
        let joined = HeaderValue::from_bytes(&cookies.join(&b"; "[..]));
        let joined = joined.map_err(|_| StatusCode::BAD_REQUEST)?;
        headers.insert(COOKIE, joined);
    }
    match headers.len() <= MAX_FIELDS {
        true => Ok(()),
        false => Err(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE),
    }
}

#[cfg(test)]
#[path = "http2_test.rs"]
mod tests;
