//! The messages of a request.
//!
//! Invariants: one message is held at a time, of at most [`MAX_MESSAGE`] bytes, also once it is decompressed; a body that stops coming is an
//! error after [`BODY_LIMIT`], except in a stream, whose caller may take its time.

use std::io::Read;
use std::marker::PhantomData;

use axum::body::{Body, BodyDataStream, Bytes, to_bytes};
use flate2::read::MultiGzDecoder;
use futures_util::StreamExt;
use prost::{Message, Name};
use thaw_protocol::connect::Code;
use thaw_protocol::connect::envelope::{Decoder, Envelope, EnvelopeError};

use super::super::failure::Failure;
use super::MAX_MESSAGE;
use super::headers::Form;
use crate::api::extract::BODY_LIMIT;

/// The message of a unary call.
///
/// # Errors
/// The body is too large, too slow, or not such a message.
pub async fn message<M: Message + Name + Default>(form: Form, body: Body) -> Result<M, Failure> {
    let read = tokio::time::timeout(BODY_LIMIT, to_bytes(body, MAX_MESSAGE)).await;
    let bytes = read.map_err(|_| slow())?.map_err(|e| {
        let what = format!("the body breaks off, or has more than {MAX_MESSAGE} bytes: {e}");
        Failure::new(Code::OutOfRange, what)
    })?;
    match form.is_gzip {
        true => form.codec.decode(&inflate(&bytes)?),
        false => form.codec.decode(&bytes),
    }
}

/// The only message of a stream's request.
///
/// # Errors
/// There is another number of messages, or it is too large, too slow, or not such a message.
pub async fn only_message<M: Message + Name + Default>(form: Form, body: Body) -> Result<M, Failure> {
    let mut messages = Messages::new(form, body);
    let read = async {
        let message = messages.next().await?;
        let message = message.ok_or_else(|| Failure::invalid("the request has no message"))?;
        match messages.next().await? {
            None => Ok(message),
            Some(_) => Err(Failure::invalid("the request has more than one message")),
        }
    };
    tokio::time::timeout(BODY_LIMIT, read).await.map_err(|_| slow())?
}

fn slow() -> Failure {
    let what = format!("the body did not come within {} s", BODY_LIMIT.as_secs());
    Failure::new(Code::DeadlineExceeded, what)
}

/// The messages of a stream.
pub struct Messages<M> {
    form: Form,
    body: BodyDataStream,
    /// Bytes that came and are not decoded yet.
    rest: Bytes,
    decoder: Decoder,
    of: PhantomData<fn() -> M>,
}

impl<M: Message + Name + Default> Messages<M> {
    pub fn new(form: Form, body: Body) -> Messages<M> {
        Messages {
            form,
            body: body.into_data_stream(),
            rest: Bytes::new(),
            decoder: Decoder::new(MAX_MESSAGE),
            of: PhantomData,
        }
    }

    /// The next message; `None` at the end.
    ///
    /// # Errors
    /// The stream breaks off, or is not one of such messages.
    pub async fn next(&mut self) -> Result<Option<M>, Failure> {
        loop {
            let mut input = &self.rest[..];
            let envelope = self.decoder.next(&mut input).map_err(broken)?;
            let left = input.len();
            self.rest = self.rest.slice(self.rest.len() - left..);
            if let Some(envelope) = envelope {
                return self.decode(&envelope).map(Some);
            }
            match self.body.next().await {
                Some(Ok(bytes)) => self.rest = bytes,
                Some(Err(e)) => {
                    return Err(Failure::new(
                        Code::Canceled,
                        format!("the request breaks off: {e}"),
                    ));
                }
                None => {
                    self.decoder.finish().map_err(broken)?;
                    return Ok(None);
                }
            }
        }
    }

    fn decode(&self, envelope: &Envelope) -> Result<M, Failure> {
        if envelope.is_last {
            return Err(Failure::invalid("a caller sends no end-of-stream message"));
        }
        match (envelope.is_compressed, self.form.is_gzip) {
            (false, _) => self.form.codec.decode(&envelope.data),
            (true, true) => self.form.codec.decode(&inflate(&envelope.data)?),
            (true, false) => Err(Failure::invalid(
                "a message is compressed, but Connect-Content-Encoding names no compression",
            )),
        }
    }
}

fn broken(error: EnvelopeError) -> Failure {
    match error {
        EnvelopeError::TooLarge { .. } => Failure::new(Code::OutOfRange, error),
        EnvelopeError::Flags(_) | EnvelopeError::Truncated => Failure::invalid(error),
    }
}

/// Decompresses a message.
fn inflate(bytes: &[u8]) -> Result<Vec<u8>, Failure> {
    let mut inflated = Vec::new();
    let mut source = MultiGzDecoder::new(bytes).take(MAX_MESSAGE as u64 + 1);
    let read = source.read_to_end(&mut inflated);
    read.map_err(|e| Failure::invalid(format!("the message is not gzip: {e}")))?;
    match inflated.len() <= MAX_MESSAGE {
        true => Ok(inflated),
        false => Err(Failure::new(
            Code::OutOfRange,
            format!("a message has more than {MAX_MESSAGE} bytes once it is decompressed"),
        )),
    }
}

#[cfg(test)]
#[path = "incoming_test.rs"]
mod tests;
