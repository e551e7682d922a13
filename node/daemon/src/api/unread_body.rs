//! Reads the rest of a request's body that its handler did not read.
//!
//! hyper closes a connection if the body of a request was not read to its end. A caller that is still sending then fails, and may never
//! see the answer. So a short rest is read first.
//! Invariant: at most [`MOST`] bytes are read, for at most [`LONGEST`].

use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Error;
use axum::body::{Body, Bytes, HttpBody};
use axum::extract::Request;
use axum::http::header::EXPECT;
use axum::middleware::Next;
use axum::response::Response;
use http_body_util::BodyExt;
use hyper::body::{Frame, SizeHint};
use thaw_sys::lock::Lock;

/// Most bytes to read. If more are left the connection is closed, which costs the sender less than sending them.
const MOST: u64 = 64 << 10;
/// Longest time to wait for them.
const LONGEST: Duration = Duration::from_secs(1);

/// Answers after the request's body was read or, if it is short, its rest has arrived.
pub async fn read_rest(request: Request, next: Next) -> Response {
    // A caller that sends `Expect` sends its body only after a 100 response.
    if request.body().is_end_stream() || request.headers().contains_key(EXPECT) {
        return next.run(request).await;
    }
    let rest = Rest::default();
    let lent = rest.clone();
    let request = request.map(|body| Body::new(Lent { body, rest: lent }));
    let response = next.run(request).await;
    if let Some(body) = rest.taken() {
        // If it is late or too long, the connection is closed.
        let _ = tokio::time::timeout(LONGEST, discard(body)).await;
    }
    response
}

/// Reads a body to its end, unless it is longer than [`MOST`] bytes or breaks off.
async fn discard(mut body: Body) {
    let mut taken = 0;
    while taken + body.size_hint().lower() <= MOST {
        match body.frame().await {
            Some(Ok(frame)) => taken += frame.data_ref().map_or(0, |data| data.len() as u64),
            Some(Err(_)) | None => return,
        }
    }
}

/// The part of a body that its handler did not read.
#[derive(Clone, Default)]
struct Rest(Arc<Mutex<Option<Body>>>);

impl Rest {
    /// `None` if it was read, or is still being read.
    fn taken(&self) -> Option<Body> {
        self.0.locked().take()
    }
}

/// A body that goes back to `rest` when it is dropped.
struct Lent {
    body: Body,
    rest: Rest,
}

impl HttpBody for Lent {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if !self.body.is_end_stream() {
            let body = std::mem::take(&mut self.body);
            *self.rest.0.locked() = Some(body);
        }
    }
}

#[cfg(test)]
#[path = "unread_body_test.rs"]
mod tests;
