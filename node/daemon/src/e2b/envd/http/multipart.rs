//! Files in the parts of a form (`multipart/form-data`, RFC 7578).
//!
//! Invariants: the parser, which takes all bytes that are ready, is given one piece of the body at a time; between two pieces of a part, or
//! two parts, it gets at most [`MOST_BETWEEN`] bytes, so the head of a part cannot fill memory.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, BodyDataStream, Bytes};
use axum::extract::multipart::{Field, MultipartError};
use axum::extract::{FromRequest, Multipart, Request};
use futures_util::Stream;

use super::super::failure::Failure;
use crate::api::extract::BODY_LIMIT;
use crate::api::problem::{ApiCode, Refusal};

/// Most bytes between two pieces of a part.
const MOST_BETWEEN: usize = 1 << 20;

/// The parts of a form.
pub struct Form {
    parts: Multipart,
    room: Arc<AtomicUsize>,
}

impl Form {
    /// The form of a request.
    ///
    /// # Errors
    /// It is not one.
    pub async fn of(request: Request) -> Result<Form, Failure> {
        let room = Arc::new(AtomicUsize::new(MOST_BETWEEN));
        let paced = Paced {
            room: room.clone(),
            body: Body::empty().into_data_stream(),
            has_given: false,
        };
        let request = request.map(|body| {
            Body::from_stream(Paced {
                body: body.into_data_stream(),
                ..paced
            })
        });
        let parts = Multipart::from_request(request, &()).await;
        let parts = parts.map_err(|e| {
            Failure::invalid(format!(
                "the body is neither multipart/form-data nor application/octet-stream: {e}"
            ))
        })?;
        Ok(Form { parts, room })
    }

    /// The next part.
    ///
    /// # Errors
    /// The body is not a form, breaks off, or stops coming.
    pub async fn next(&mut self) -> Result<Option<Part<'_>>, Failure> {
        self.room.store(MOST_BETWEEN, Ordering::Relaxed);
        let field = in_time(BODY_LIMIT, self.parts.next_field()).await?;
        let room = &self.room;
        Ok(field.map(|field| Part { field, room }))
    }
}

/// A part of a form.
pub struct Part<'a> {
    field: Field<'a>,
    room: &'a AtomicUsize,
}

impl Part<'_> {
    /// The name of its field.
    pub fn name(&self) -> &str {
        self.field.name().unwrap_or_default()
    }

    /// The name of its file.
    pub fn file_name(&self) -> &str {
        self.field.file_name().unwrap_or_default()
    }

    /// Its next bytes.
    ///
    /// # Errors
    /// Those of [`Form::next`].
    pub async fn next(&mut self) -> Result<Option<Bytes>, Failure> {
        self.room.store(MOST_BETWEEN, Ordering::Relaxed);
        in_time(BODY_LIMIT, self.field.chunk()).await
    }
}

async fn in_time<T>(
    limit: Duration,
    read: impl Future<Output = Result<T, MultipartError>>,
) -> Result<T, Failure> {
    match tokio::time::timeout(limit, read).await {
        Ok(read) => read.map_err(|e| Failure::invalid(format!("the form is not whole: {}", e.body_text()))),
        Err(_) => {
            let what = format!("nothing of the body came for {} s", limit.as_secs());
            Err(Refusal::new(ApiCode::TooSlow, what).into())
        }
    }
}

/// A body that gives one piece, and then lets its reader look at it.
struct Paced {
    body: BodyDataStream,
    room: Arc<AtomicUsize>,
    has_given: bool,
}

impl Stream for Paced {
    type Item = Result<Bytes, axum::Error>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if std::mem::take(&mut self.has_given) {
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        let polled = Pin::new(&mut self.body).poll_next(context);
        if let Poll::Ready(Some(Ok(data))) = &polled {
            self.has_given = true;
            let left = self.room.load(Ordering::Relaxed).checked_sub(data.len());
            let Some(left) = left else {
                let what = format!("the head of a part has more than {MOST_BETWEEN} bytes");
                return Poll::Ready(Some(Err(axum::Error::new(std::io::Error::other(what)))));
            };
            self.room.store(left, Ordering::Relaxed);
        }
        polled
    }
}
