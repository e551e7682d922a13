//! An answer's body with a timeout for its reader.
//!
//! Over HTTP/1.1 a client that reads nothing is noticed by its connection ([`super::write_timeout`]). Over HTTP/2 it can stop reading one
//! answer and go on with others, and hyper then does not poll that body. So a task reads the body, and drops it after the timeout.
//!
//! Invariants: a body, and all that it holds, is dropped if its reader takes nothing for as long as the limit although there is something to take.
//! The reader then gets an error, so it does not mistake a part for the whole.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use http_body_util::BodyExt;
use hyper::body::{Frame, SizeHint};
use tokio::sync::mpsc;
use tokio::time::timeout;

/// The next frame of a body; `None`: there is no other.
struct Part {
    frame: Option<Result<Frame<Bytes>, axum::Error>>,
    is_last: bool,
}

/// What the reader has.
struct Parts {
    parts: mpsc::Receiver<Part>,
    is_over: bool,
    size: SizeHint,
}

/// The same body, which is dropped if its reader takes nothing for as long as `limit`.
pub fn with_timeout(body: Body, limit: Duration) -> Body {
    if body.is_end_stream() {
        return body;
    }
    let size = body.size_hint();
    let (tell, parts) = mpsc::channel(1);
    tokio::spawn(read(body, limit, tell));
    Body::new(Parts {
        parts,
        is_over: false,
        size,
    })
}

async fn read(mut body: Body, limit: Duration, tell: mpsc::Sender<Part>) {
    let mut is_last = false;
    while !is_last {
        let frame = tokio::select! {
            frame = body.frame() => frame,
            () = tell.closed() => return,
        };
        is_last = !matches!(frame, Some(Ok(_))) || body.is_end_stream();
        let Ok(Ok(())) = timeout(limit, tell.send(Part { frame, is_last })).await else {
            return;
        };
    }
}

impl HttpBody for Parts {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if self.is_over {
            return Poll::Ready(None);
        }
        let part = ready!(self.parts.poll_recv(cx)).unwrap_or_else(|| Part {
            frame: Some(Err(axum::Error::new(io::Error::from(io::ErrorKind::TimedOut)))),
            is_last: true,
        });
        self.is_over = part.is_last;
        Poll::Ready(part.frame)
    }

    fn is_end_stream(&self) -> bool {
        self.is_over
    }

    fn size_hint(&self) -> SizeHint {
        self.size
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::Arc;

    use axum::http::{HeaderMap, HeaderValue};
    use futures_util::stream;

    use super::*;
    use crate::api::held_body::holding;
    use crate::api::test_client::until;

    const LIMIT: Duration = Duration::from_secs(30);

    #[tokio::test]
    async fn whole_body_goes_through_with_its_trailers() {
        let trailers = HeaderMap::from_iter([("a".parse().unwrap(), HeaderValue::from_static("1"))]);
        let ends = async move { Some(Ok(trailers)) };
        let body = with_timeout(Body::new(Body::from("text").with_trailers(ends)), LIMIT);
        assert_eq!(body.size_hint().exact(), Some(4));
        let whole = body.collect().await.unwrap();
        assert_eq!(whole.trailers().unwrap()["a"], "1");
        assert_eq!(whole.to_bytes(), "text");
        assert!(with_timeout(Body::empty(), LIMIT).is_end_stream());
    }

    #[tokio::test(start_paused = true)]
    async fn body_that_is_not_read_is_given_up() {
        let held = Arc::new(());
        let endless = stream::repeat(Ok::<_, Infallible>(Bytes::from_static(b"x")));
        let body = holding(Body::from_stream(endless), held.clone());
        let mut body = with_timeout(body, LIMIT);
        body.frame().await.unwrap().unwrap();
        tokio::time::sleep(LIMIT / 2).await;
        assert_eq!(Arc::strong_count(&held), 2);
        tokio::time::sleep(LIMIT).await;
        assert_eq!(Arc::strong_count(&held), 1);
        assert!(body.collect().await.is_err(), "it is not whole");
    }

    #[tokio::test]
    async fn body_is_dropped_when_its_reader_leaves() {
        let held = Arc::new(());
        let silent = stream::pending::<Result<Bytes, Infallible>>();
        let body = with_timeout(holding(Body::from_stream(silent), held.clone()), LIMIT);
        tokio::task::yield_now().await;
        assert_eq!(Arc::strong_count(&held), 2);
        drop(body);
        until(|| Arc::strong_count(&held) == 1).await;
    }
}
