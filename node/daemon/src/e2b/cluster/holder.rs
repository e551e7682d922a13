//! The node that has a sandbox. That is the node in its id, or one that has taken it over from a registry.
//!
//! Also a member's sandbox may have been taken over: Kubernetes names only nodes that are ready, so a node may be no member for a moment. When it
//! is one again, ids lead to it, and it looks for what it does not have. Invariant: a node that has a sandbox answers for it, whatever the id
//! says.

use std::sync::Arc;

use axum::Json;
use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use thaw_protocol::nodes::HOLDER;

use super::super::extract::Query;
use super::super::members::proof::Step;
use super::super::members::{Member, Owner};
use super::super::service::Service;
use super::super::whole_id::WholeId;
use super::mark::is_forwarded;

/// Whose a request for a sandbox is.
#[derive(Clone, Debug)]
pub enum Way {
    /// This node's: it has the sandbox, or no other node is to be asked.
    Here,
    /// Another node's, to which this is the step.
    Other(Arc<Member>, Step),
    /// No node that answers has the sandbox, and the node in its id is no member.
    Nowhere,
}

/// Whether this node has a sandbox, of its own or taken over.
pub fn has(service: &Service, whole: &WholeId) -> bool {
    if service.daemon.cache.get(&whole.id).is_none() {
        return false;
    }
    match service.owner(whole.home) {
        Owner::Here => true,
        _ => service.whole_id(&whole.id, service.own_notes(&whole.id).as_ref()) == *whole,
    }
}

/// The way of a request that has made this step.
pub async fn way(service: &Service, whole: &WholeId, step: Option<Step>) -> Way {
    if whole.home.is_none() || has(service, whole) {
        return Way::Here;
    }
    match (service.owner(whole.home), step) {
        // It was asked because it had the sandbox, which is gone since.
        (_, Some(Step::Last)) | (Owner::Gone, Some(_)) => Way::Here,
        (Owner::Other(member), _) => Way::Other(member, Step::First),
        (Owner::Here, _) => found(service, whole).await.unwrap_or(Way::Here),
        (Owner::Gone, None) => found(service, whole).await.unwrap_or(Way::Nowhere),
    }
}

/// The way to another node that has the sandbox.
pub async fn found(service: &Service, whole: &WholeId) -> Option<Way> {
    let holder = service.members.as_ref()?.holder(whole).await?;
    Some(Way::Other(holder, Step::Last))
}

/// The answer to another node that asks which of some sandboxes are here, if the request is that.
pub fn answered(service: &Service, request: &Request) -> Option<Response> {
    let is_asked = request.uri().path() == HOLDER && is_forwarded(request);
    is_asked.then(|| {
        let query = Query::of(request.uri().query().unwrap_or_default());
        let asked = query.text("ids").unwrap_or_default().split(',');
        let here = asked
            .filter_map(WholeId::parse)
            .filter(|whole| has(service, whole));
        Json(here.map(|whole| whole.to_string()).collect::<Vec<_>>()).into_response()
    })
}

#[cfg(test)]
#[path = "holder_test.rs"]
mod tests;
