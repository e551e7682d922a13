//! The routes of the control plane, each with the least role of its callers.
//!
//! Invariant: a call of E2B's API without a route here is answered with 501 and its name, so that a client does not take it for a sandbox or
//! a template that does not exist.

use std::sync::Arc;

use axum::Router;
use axum::extract::Request;
use axum::http::Method;
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, delete, get, patch, post, put};
use thaw_protocol::nodes::ROOM;

use super::cluster::room;
use super::failure::Failure;
use super::service::Service;
use super::{
    build_calls, create, fork, list, logs, sandboxes, snapshots, tags, templates, upload_calls, usage,
};
use crate::api::grant::Role;
use crate::api::metrics;
use crate::api::problem::no_such_route;
use crate::api::request_gate::{Gate, Verb, admit};
use crate::api::router::guarded;

/// The resources of E2B's API: the first segment of a path after its version.
const RESOURCES: [&str; 11] = [
    "sandboxes",
    "snapshots",
    "templates",
    "default-templates",
    "volumes",
    "secrets",
    "teams",
    "api-keys",
    "access-tokens",
    "nodes",
    "events",
];

fn read(handlers: MethodRouter<Arc<Service>>) -> MethodRouter<Arc<Service>> {
    guarded(Role::Read, handlers)
}

fn operate(handlers: MethodRouter<Arc<Service>>) -> MethodRouter<Arc<Service>> {
    guarded(Role::Operate, handlers)
}

/// The control plane, behind a gate. Callers must be authenticated before.
pub fn router(service: Arc<Service>, gate: Arc<Gate>) -> Router {
    let daemon = service.daemon.clone();
    Router::new()
        .route(
            "/v2/sandboxes",
            read(get(list::list)).merge(operate(post(create::create::<{ create::SECOND_TIMEOUT_S }>))),
        )
        .route(
            "/sandboxes",
            read(get(list::list_running)).merge(operate(post(create::create::<{ create::FIRST_TIMEOUT_S }>))),
        )
        .route(
            "/sandboxes/{id}",
            read(get(sandboxes::get)).merge(operate(delete(sandboxes::delete))),
        )
        .route("/sandboxes/{id}/timeout", operate(post(sandboxes::set_timeout)))
        .route("/sandboxes/{id}/refreshes", operate(post(sandboxes::refresh)))
        .route("/sandboxes/{id}/pause", operate(post(sandboxes::pause)))
        .route("/sandboxes/{id}/resume", operate(post(sandboxes::resume)))
        .route("/sandboxes/{id}/connect", operate(post(sandboxes::connect)))
        .route("/v2/sandboxes/{id}/connect", operate(post(sandboxes::connect)))
        .route("/sandboxes/{id}/fork", operate(post(fork::fork)))
        .route("/sandboxes/{id}/snapshots", operate(post(snapshots::create)))
        .route("/sandboxes/{id}/network", operate(put(sandboxes::set_network)))
        .route("/sandboxes/{id}/metrics", read(get(usage::measure)))
        .route("/sandboxes/{id}/logs", read(get(logs::first)))
        .route("/v2/sandboxes/{id}/logs", read(get(logs::second)))
        .route("/snapshots", read(get(snapshots::list)))
        .route(ROOM, read(get(room::show)))
        .merge(of_templates())
        // Not a sandbox of that name.
        .route("/sandboxes/metrics", get(unsupported))
        .fallback(unsupported)
        .method_not_allowed_fallback(unsupported)
        .layer(from_fn_with_state(gate, admit))
        .layer(from_fn(classify))
        .layer(from_fn_with_state(daemon, metrics::measure))
        .with_state(service)
}

/// The routes of templates and their builds.
fn of_templates() -> Router<Arc<Service>> {
    Router::new()
        .route("/templates", read(get(templates::list)))
        .route("/v2/templates", read(get(templates::list)))
        .route("/v3/templates", operate(post(build_calls::request)))
        .route(
            "/templates/{id}",
            read(get(templates::get)).merge(operate(patch(templates::update).delete(templates::delete))),
        )
        .route("/v2/templates/{id}", operate(patch(templates::update)))
        .route("/templates/aliases/{alias}", read(get(templates::alias)))
        .route(
            "/templates/tags",
            operate(post(tags::assign).merge(delete(tags::remove))),
        )
        .route("/templates/{id}/tags", read(get(tags::list)))
        .route("/templates/{id}/files/{hash}", operate(get(upload_calls::link)))
        .route(
            "/v2/templates/{id}/builds/{build}",
            operate(post(build_calls::start)),
        )
        .route(
            "/templates/{id}/builds/{build}/status",
            read(get(build_calls::status)),
        )
        .route(
            "/templates/{id}/builds/{build}/logs",
            read(get(build_calls::logs)),
        )
}

/// Says which lane of the gate a request takes.
async fn classify(mut request: Request, next: Next) -> Response {
    let path = request.uri().path();
    let verb = match *request.method() {
        Method::GET | Method::HEAD => Verb::Read,
        Method::POST if path.ends_with("/sandboxes") || path.ends_with("/fork") => Verb::Create,
        _ => Verb::Change,
    };
    request.extensions_mut().insert(verb);
    next.run(request).await
}

/// The answer to a call without a route.
async fn unsupported(request: Request) -> Response {
    let path = request.uri().path();
    let mut segments = path.split('/').skip(1);
    let is_version = |segment: &&str| matches!(*segment, "v1" | "v2" | "v3");
    let resource = segments.find(|segment| !is_version(segment)).unwrap_or_default();
    match RESOURCES.contains(&resource) {
        true => {
            let what = format!(
                "{} {path}: this call of E2B's API is not supported by this node",
                request.method()
            );
            Failure::Unsupported(what).into_response()
        }
        false => no_such_route(request).await.into_response(),
    }
}

#[cfg(test)]
#[path = "router_test.rs"]
mod tests;
