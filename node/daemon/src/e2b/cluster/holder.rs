//! The node that has taken over a sandbox of a node that is no member any more.
//!
//! Ids of such sandboxes name no member, so the members are asked. Invariant: there are never more searches at once than
//! [`Members`](super::super::members::Members) permits.

use std::sync::Arc;

use axum::extract::Request;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use futures_util::future::join_all;
use thaw_protocol::nodes::HOLDER;

use super::super::extract::Query;
use super::super::members::Member;
use super::super::service::Service;
use super::mark::is_forwarded;

/// Largest answer, bytes.
const MAX_ANSWER: usize = 16 << 10;

/// Whether this node has a sandbox with this id of thawd's.
pub fn has(service: &Service, id: &str) -> bool {
    service.daemon.cache.get(id).is_some()
}

/// The answer to another node that asks for a sandbox, if the request is that.
pub fn answered(service: &Service, request: &Request) -> Option<Response> {
    let is_asked = request.uri().path() == HOLDER && is_forwarded(request);
    is_asked.then(|| {
        let query = Query::of(request.uri().query().unwrap_or_default());
        match query.text("id").is_some_and(|id| has(service, id)) {
            true => StatusCode::NO_CONTENT.into_response(),
            false => StatusCode::NOT_FOUND.into_response(),
        }
    })
}

/// Another node that has the sandbox with this id of thawd's.
pub async fn find(service: &Service, id: &str) -> Option<Arc<Member>> {
    let members = service.members.as_ref()?;
    let _permit = members.searching.acquire().await.ok()?;
    let path = format!("{HOLDER}?id={id}");
    let others = members.others();
    let asked = others
        .iter()
        .map(|member| members.ask(member, &path, None, MAX_ANSWER));
    let answers = join_all(asked).await;
    let mut found = others.iter().zip(answers);
    let found = found.find(|(_, answer)| {
        answer
            .as_ref()
            .is_ok_and(|answer| answer.status == StatusCode::NO_CONTENT)
    });
    found.map(|(member, _)| member.clone())
}
