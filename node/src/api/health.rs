//! That thawd lives.

use axum::Json;
use thaw_protocol::api::Health;

/// Which thawd this is.
#[utoipa::path(get, path = "/v1/health", tag = "node", responses((status = 200, body = Health)))]
pub async fn health() -> Json<Health> {
    Json(Health {
        version: env!("CARGO_PKG_VERSION").into(),
        pid: std::process::id(),
    })
}
