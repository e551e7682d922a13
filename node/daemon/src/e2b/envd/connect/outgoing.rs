//! The messages of an answer.
//!
//! Invariant: a message is made when the caller's connection has room for it, so a slow caller slows what makes the messages.

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use prost::{Message, Name};
use thaw_protocol::connect::EndOfStream;
use thaw_protocol::connect::envelope::Envelope;

use super::super::failure::Failure;
use super::codec::Codec;

/// The messages of a stream, until the first error.
pub type Outgoing<M> = BoxStream<'static, Result<M, Failure>>;

/// The answer with one message.
pub fn message<M: Message + Name>(codec: Codec, message: &M) -> Response {
    match codec.encode(message) {
        Ok(bytes) => of_type(codec.media_type(false), Body::from(bytes)),
        Err(failure) => failure.into_response(),
    }
}

/// The answer with a stream of messages and its end.
pub fn stream<M: Message + Name + 'static>(codec: Codec, messages: Outgoing<M>) -> Response {
    let frames = futures_util::stream::unfold(Some(messages), move |messages| async move {
        let mut messages = messages?;
        let (frame, messages) = match messages.next().await {
            Some(Ok(message)) => match frame(codec, &message) {
                Ok(frame) => (frame, Some(messages)),
                Err(failure) => (end(Some(failure)), None),
            },
            Some(Err(failure)) => (end(Some(failure)), None),
            None => (end(None), None),
        };
        Some((Ok::<_, std::convert::Infallible>(Bytes::from(frame)), messages))
    });
    of_type(codec.media_type(true), Body::from_stream(frames))
}

/// The answer to a stream's request that has one message.
pub fn single<M: Message + Name + 'static>(codec: Codec, answer: Result<M, Failure>) -> Response {
    stream(codec, futures_util::stream::iter([answer]).boxed())
}

/// The answer to a stream's request that was refused before it was read. It is no HTTP status, of which clients would show only the number.
pub fn refusal(codec: Codec, failure: Failure) -> Response {
    of_type(codec.media_type(true), Body::from(end(Some(failure))))
}

fn frame<M: Message + Name>(codec: Codec, message: &M) -> Result<Vec<u8>, Failure> {
    let bytes = codec.encode(message)?;
    Envelope::encode(false, &bytes).ok_or_else(|| Failure::invalid("a message has more than 4 GiB"))
}

/// The last frame.
fn end(failure: Option<Failure>) -> Vec<u8> {
    let end = EndOfStream {
        error: failure.map(Failure::into_body),
        ..EndOfStream::default()
    };
    let json = serde_json::to_vec(&end).expect("codes and texts are JSON");
    Envelope::encode(true, &json).expect("an error is shorter than 4 GiB")
}

fn of_type(media_type: &'static str, body: Body) -> Response {
    (
        [(header::CONTENT_TYPE, HeaderValue::from_static(media_type))],
        body,
    )
        .into_response()
}
