//! How much room this node has for sandboxes of a template: what other nodes ask before they create one.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use thaw_protocol::nodes::Room;

use super::super::extract::Query;
use super::super::found::find;
use super::super::service::Service;
use super::super::template::Source;
use super::mark::is_forwarded;
use crate::api::problem::no_such_route;
use crate::api::scope::Scope;

/// `GET /thaw/room`, for other nodes alone.
pub async fn show(
    State(service): State<Arc<Service>>,
    scope: Scope,
    query: Query,
    request: Request,
) -> Response {
    if !is_forwarded(&request) {
        return no_such_route(request).await.into_response();
    }
    let template = query.text("template").unwrap_or_default();
    Json(here(&service, template, &scope).await).into_response()
}

/// The room of this node for sandboxes of a template that a caller of this scope names.
pub async fn here(service: &Service, template: &str, scope: &Scope) -> Room {
    let daemon = &service.daemon;
    let states = daemon.cache.counts().states;
    let count = |state: &str| {
        let found = states.iter().find(|(name, _)| *name == state);
        found.map_or(0, |(_, count)| *count as u64)
    };
    let capacity = daemon
        .factory()
        .map(|factory| factory.capacity())
        .unwrap_or_default();
    let free = |limit: Option<u64>, used: u64| limit.map(|limit| limit.saturating_sub(used));
    Room {
        has_template: has_template(service, template, scope).await,
        is_draining: daemon.drained().draining,
        running: count("running"),
        paused: count("paused"),
        free_memory_mib: free(capacity.memory_mib, capacity.used_memory_mib),
        free_vcpus: free(capacity.vcpus, capacity.used_vcpus),
    }
}

/// Whether a sandbox can be made from a template here. The configuration may name a stored snapshot that only other nodes have.
async fn has_template(service: &Service, template: &str, scope: &Scope) -> bool {
    let Ok(found) = find(service, template, scope).await else {
        return false;
    };
    match (found.source, service.daemon.factory()) {
        (Source::Image(_), _) => true,
        // It is in a registry, which each node reaches.
        (Source::Snapshot(snapshot, _), _) if snapshot.contains('/') => true,
        (Source::Snapshot(snapshot, viewer), Ok(factory)) => factory.snapshot(snapshot, viewer).await.is_ok(),
        (Source::Snapshot(..), Err(_)) => false,
    }
}
