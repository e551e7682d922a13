//! An open connection over which the proxy sends requests: of HTTP/1.1, or of HTTP/2 with prior knowledge.
//!
//! Invariant: the other end, which may be a hostile guest, fills no more than the buffers here, and does not hold a write longer than
//! [`WRITE_TIMEOUT`].

use axum::body::Body;
use axum::extract::Request;
use futures_util::future::BoxFuture;
use hyper::body::Incoming;
use hyper::client::conn::{TrySendError, http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::{AsyncRead, AsyncWrite};

use crate::api::write_timeout::{WRITE_TIMEOUT, WriteTimeout};

/// Largest head of an answer, bytes.
const MAX_HEAD: u32 = 64 << 10;
/// Most header fields of an answer over HTTP/1.1. Over HTTP/2 each takes at least 32 bytes of [`MAX_HEAD`].
const MAX_FIELDS: usize = 128;
/// How much of an answer may wait over HTTP/2 for a client that does not read it, bytes.
const WINDOW: u32 = 256 << 10;
/// How much of a request may wait over HTTP/2 for a guest that does not read it, bytes.
const MAX_SEND_BUFFER: usize = 64 << 10;

/// The future of a connection, which is to run on a task of its own.
pub type Http = BoxFuture<'static, hyper::Result<()>>;

/// See the module. The connection closes when this is dropped and its answers have been read.
#[derive(Debug)]
pub enum Sender {
    Http1(http1::SendRequest<Body>),
    Http2(http2::SendRequest<Body>),
}

impl Sender {
    /// Begins to speak HTTP on a connection.
    ///
    /// # Errors
    /// It broke.
    pub async fn open(
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        is_http2: bool,
    ) -> hyper::Result<(Sender, Http)> {
        let io = TokioIo::new(WriteTimeout::new(stream, WRITE_TIMEOUT));
        if is_http2 {
            let mut http = http2::Builder::new(TokioExecutor::new());
            http.max_header_list_size(MAX_HEAD)
                .initial_stream_window_size(WINDOW)
                .initial_connection_window_size(WINDOW)
                .max_send_buf_size(MAX_SEND_BUFFER);
            let (sender, http) = http.handshake(io).await?;
            let http: Http = Box::pin(http);
            return Ok((Sender::Http2(sender), http));
        }
        let mut http = http1::Builder::new();
        http.max_buf_size(MAX_HEAD as usize).max_headers(MAX_FIELDS);
        let (sender, http) = http.handshake(io).await?;
        let http: Http = Box::pin(http.with_upgrades());
        Ok((Sender::Http1(sender), http))
    }

    /// Whether the connection speaks HTTP/2.
    pub fn is_http2(&self) -> bool {
        matches!(self, Sender::Http2(_))
    }

    /// Sends a request.
    ///
    /// # Errors
    /// The connection broke. The error has the request if nothing of it was sent.
    pub async fn try_send(
        &mut self,
        request: Request,
    ) -> Result<hyper::Response<Incoming>, Box<TrySendError<Request>>> {
        let sent = match self {
            Sender::Http1(sender) => sender.try_send_request(request).await,
            Sender::Http2(sender) => sender.try_send_request(request).await,
        };
        sent.map_err(Box::new)
    }

    /// Whether another request can be sent now.
    pub fn is_ready(&self) -> bool {
        match self {
            Sender::Http1(sender) => sender.is_ready(),
            Sender::Http2(sender) => sender.is_ready(),
        }
    }

    /// Whether the connection has ended.
    pub fn is_closed(&self) -> bool {
        match self {
            Sender::Http1(sender) => sender.is_closed(),
            Sender::Http2(sender) => sender.is_closed(),
        }
    }

    /// Waits until another request can be sent.
    ///
    /// # Errors
    /// The connection has ended.
    pub async fn ready(&mut self) -> hyper::Result<()> {
        match self {
            Sender::Http1(sender) => sender.ready().await,
            Sender::Http2(sender) => sender.ready().await,
        }
    }
}
