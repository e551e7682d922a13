//! Functions as the routes of a Connect service.
//!
//! A function takes a [`Call`] and a message. Its error becomes a Connect error: of a unary call the answer's status and body, of a stream its
//! last message.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, post};
use prost::{Message, Name};

use super::call::Call;
use super::connect::codec::Codec;
use super::connect::headers::{self, Form};
use super::connect::incoming::{self, Messages};
use super::connect::outgoing::{self, Outgoing};
use super::failure::Failure;
use super::open_sandbox::OpenSandboxes;

/// A message of a caller or of an answer.
pub trait Wire: Message + Name + Default + 'static {}
impl<M: Message + Name + Default + 'static> Wire for M {}

/// A function that answers one message with one.
pub fn unary<Q: Wire, A: Wire, F>(
    function: impl Fn(Call, Q) -> F + Clone + Send + Sync + 'static,
) -> MethodRouter<Arc<OpenSandboxes>>
where
    F: Future<Output = Result<A, Failure>> + Send + 'static,
{
    post(
        move |State(open): State<Arc<OpenSandboxes>>, request: Request| async move {
            let work =
                |call, form, body| async move { function(call, incoming::message(form, body).await?).await };
            let answer = |codec, answer: Result<A, Failure>| match answer {
                Ok(message) => outgoing::message(codec, &message),
                Err(failure) => failure.into_response(),
            };
            serve(&open, request, false, work, answer).await
        },
    )
}

/// A function that answers one message with a stream. The stream itself minds the deadline.
pub fn server_stream<Q: Wire, A: Wire, F>(
    function: impl Fn(Call, Q) -> F + Clone + Send + Sync + 'static,
) -> MethodRouter<Arc<OpenSandboxes>>
where
    F: Future<Output = Result<Outgoing<A>, Failure>> + Send + 'static,
{
    post(
        move |State(open): State<Arc<OpenSandboxes>>, request: Request| async move {
            let work = |call, form, body| async move {
                function(call, incoming::only_message(form, body).await?).await
            };
            let answer = |codec, answer: Result<Outgoing<A>, Failure>| match answer {
                Ok(messages) => outgoing::stream(codec, messages),
                Err(failure) => outgoing::single::<A>(codec, Err(failure)),
            };
            serve(&open, request, true, work, answer).await
        },
    )
}

/// A function that answers a stream of messages with one.
pub fn client_stream<Q: Wire, A: Wire, F>(
    function: impl Fn(Call, Messages<Q>) -> F + Clone + Send + Sync + 'static,
) -> MethodRouter<Arc<OpenSandboxes>>
where
    F: Future<Output = Result<A, Failure>> + Send + 'static,
{
    post(
        move |State(open): State<Arc<OpenSandboxes>>, request: Request| async move {
            let work = |call, form, body| function(call, Messages::new(form, body));
            serve(&open, request, true, work, outgoing::single::<A>).await
        },
    )
}

/// Reads a request's headers, and answers with what `work` makes of it before the caller's deadline.
async fn serve<T, W: Future<Output = Result<T, Failure>>>(
    open: &OpenSandboxes,
    request: Request,
    is_stream: bool,
    work: impl FnOnce(Call, Form, Body) -> W,
    answer: impl FnOnce(Codec, Result<T, Failure>) -> Response,
) -> Response {
    let (parts, body) = request.into_parts();
    let Some(codec) = headers::codec(&parts.headers, is_stream) else {
        return headers::other_type(is_stream);
    };
    let done = async {
        let form = Form::read(&parts.headers, codec, is_stream)?;
        let call = Call::of(open, &parts, form.timeout)?;
        let deadline = call.deadline;
        let work = work(call, form, body);
        match deadline {
            None => work.await,
            Some(deadline) => {
                let in_time = tokio::time::timeout_at(deadline, work).await;
                in_time.unwrap_or_else(|_| Err(Failure::late()))
            }
        }
    };
    let done = done.await;
    answer(codec, done)
}
