//! What tells a request that another node has passed on from one of a caller: the header [`MARK`], whose value only nodes know.
//!
//! Invariant: no inner layer sees the header, and a request with a wrong one goes nowhere. So a request makes one step at most, also between
//! nodes whose keys or lists of nodes differ.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use thaw_protocol::nodes::MARK;

use super::super::failure::Failure;
use super::super::members::Members;

/// Among a request's extensions: another node has passed it on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forwarded;

/// Whether another node has passed a request on.
pub fn is_forwarded(request: &Request) -> bool {
    request.extensions().get::<Forwarded>().is_some()
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
        let is_proof = members.is_some_and(|members| members.is_proof(&first));
        if second || !is_proof {
            let why = format!(
                "the header {MARK} is no proof of a node here: give all nodes of [e2b.cluster] the same key, and list no others"
            );
            return Failure::Forbidden(why).into_response();
        }
        request.headers_mut().remove(MARK);
        request.extensions_mut().insert(Forwarded);
    }
    next.run(request).await
}
