//! The header [`MARK`], whose value only nodes know. It marks a request that another node has passed on.
//!
//! Invariant: no inner layer sees the header, and a request with a wrong value is refused. So a request makes two steps at most, also between
//! nodes whose keys or lists of nodes differ.

use axum::extract::Request;
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
///
/// # Errors
/// It is not from a node of the list.
pub fn take(members: Option<&Members>, request: &mut Request) -> Result<(), Failure> {
    let mut given = request.headers().get_all(MARK).iter();
    let (first, second) = (given.next().cloned(), given.next().is_some());
    let Some(first) = first else {
        return Ok(());
    };
    let step = members.and_then(|members| members.step(&first));
    let step = step.filter(|_| !second).ok_or_else(|| {
        Failure::Forbidden(format!(
            "the header {MARK} is not from a node of this list: give all nodes of [e2b.cluster] the same key, and list no others"
        ))
    })?;
    request.headers_mut().remove(MARK);
    request.extensions_mut().insert(step);
    Ok(())
}
