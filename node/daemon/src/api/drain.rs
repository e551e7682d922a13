//! The handlers for draining: thawd creates no more sandboxes; existing ones go on.
//!
//! The state is not stored: a restarted thawd creates sandboxes again.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use thaw_protocol::api::{Drain, Problem};

use super::daemon::Daemon;
use super::problem::Refusal;

/// Returns whether thawd accepts new sandboxes.
#[utoipa::path(get, path = "/v1/node/drain", operation_id = "getDrain", tag = "node", responses((status = 200, body = Drain)))]
pub async fn show(State(daemon): State<Arc<Daemon>>) -> Json<Drain> {
    Json(daemon.drained())
}

/// Stops the creation of sandboxes. The answer comes once no creation is in progress.
#[utoipa::path(post, path = "/v1/node/drain", operation_id = "startDrain", tag = "node", responses(
    (status = 200, body = Drain),
    (status = 409, description = "This process is not thawd and creates no sandboxes", body = Problem, content_type = "application/problem+json"),
    (status = 429, description = "Too many requests", body = Problem, content_type = "application/problem+json"),
))]
pub async fn begin(State(daemon): State<Arc<Daemon>>) -> Result<Json<Drain>, Refusal> {
    daemon.drain().await.map(Json)
}

/// Accepts new sandboxes again.
#[utoipa::path(delete, path = "/v1/node/drain", operation_id = "endDrain", tag = "node", responses(
    (status = 200, body = Drain),
    (status = 409, description = "This process is not thawd and creates no sandboxes", body = Problem, content_type = "application/problem+json"),
    (status = 429, description = "Too many requests", body = Problem, content_type = "application/problem+json"),
))]
pub async fn end(State(daemon): State<Arc<Daemon>>) -> Result<Json<Drain>, Refusal> {
    daemon.undrain().map(Json)
}
