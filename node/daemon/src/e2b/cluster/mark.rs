//! The header [`MARK`], whose value only nodes know. It marks a request that another node has passed on.
//!
//! Invariant: no inner layer sees the header, and a request with a wrong value is refused. So a request makes two steps at most, also between
//! nodes whose keys or lists of nodes differ.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use thaw_protocol::nodes::MARK;

use super::super::failure::Failure;
use super::super::members::Members;
use super::super::members::proof::Step;

/// The step that a request has made, if another node has passed it on.
pub fn step_of(request: &Request) -> Option<Step> {
    request.extensions().get::<Step>().copied()
}

/// Whether another node has passed a request on.
pub fn is_forwarded(request: &Request) -> bool {
    step_of(request).is_some()
}

/// Takes the header out of a request.
pub async fn check(
    State(members): State<Option<Arc<Members>>>,
    mut request: Request,
    next: Next,
) -> Response {
    let mut given = request.headers().get_all(MARK).iter();
    let (first, second) = (given.next().cloned(), given.next().is_some());
    if let Some(first) = first {
        let step = members.and_then(|members| members.step(&first));
        let Some(step) = step.filter(|_| !second) else {
            let why = format!(
                "the header {MARK} is not from a node of this list: give all nodes of [e2b.cluster] the same key, and list no others"
            );
            return Failure::Forbidden(why).into_response();
        };
        request.headers_mut().remove(MARK);
        request.extensions_mut().insert(step);
    }
    next.run(request).await
}
