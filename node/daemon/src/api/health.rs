//! The handler for health checks.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use thaw_protocol::api::Health;

use super::daemon::Daemon;

/// Returns thawd's state and version.
#[utoipa::path(get, path = "/v1/health", operation_id = "getHealth", tag = "node", responses((status = 200, body = Health)))]
pub async fn health(State(daemon): State<Arc<Daemon>>) -> Json<Health> {
    Json(Health {
        version: env!("CARGO_PKG_VERSION").into(),
        pid: std::process::id(),
        draining: daemon.drained().draining,
    })
}
