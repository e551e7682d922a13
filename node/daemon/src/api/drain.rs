//! Draining: no more sandboxes are made here; those there are go on.
//!
//! It is not written down: a thawd that is started again makes sandboxes.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use thaw_protocol::api::{Drain, Problem};

use super::daemon::Daemon;
use super::problem::Refusal;

/// Whether this thawd makes sandboxes.
#[utoipa::path(get, path = "/v1/node/drain", operation_id = "getDrain", tag = "node", responses((status = 200, body = Drain)))]
pub async fn show(State(daemon): State<Arc<Daemon>>) -> Json<Drain> {
    Json(daemon.drained())
}

/// Makes no more sandboxes, and answers when those being made are made, or were given up.
#[utoipa::path(post, path = "/v1/node/drain", operation_id = "startDrain", tag = "node", responses(
    (status = 200, body = Drain),
    (status = 409, description = "This process makes none anyway", body = Problem, content_type = "application/problem+json"),
    (status = 429, description = "Too many requests", body = Problem, content_type = "application/problem+json"),
))]
pub async fn begin(State(daemon): State<Arc<Daemon>>) -> Result<Json<Drain>, Refusal> {
    daemon.drain().await.map(Json)
}

/// Makes sandboxes again.
#[utoipa::path(delete, path = "/v1/node/drain", operation_id = "endDrain", tag = "node", responses(
    (status = 200, body = Drain),
    (status = 409, description = "This process makes none anyway", body = Problem, content_type = "application/problem+json"),
    (status = 429, description = "Too many requests", body = Problem, content_type = "application/problem+json"),
))]
pub async fn end(State(daemon): State<Arc<Daemon>>) -> Result<Json<Drain>, Refusal> {
    daemon.undrain().map(Json)
}
