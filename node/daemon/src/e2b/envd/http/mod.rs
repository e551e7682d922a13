//! File transfers and the sandbox's condition over plain HTTP.
//!
//! | module | noun |
//! |---|---|
//! | [`download`], [`upload`] | one file out, files in |
//! | [`multipart`] | files in the parts of a form |
//! | [`condition`] | whether the sandbox runs, its resource usage, its environment |

use std::sync::Arc;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::routing::get;

use super::open_sandbox::OpenSandboxes;

pub mod condition;
pub mod download;
pub mod multipart;
pub mod upload;

#[cfg(test)]
#[path = "http_test.rs"]
mod tests;

/// Its routes.
pub fn routes() -> Router<Arc<OpenSandboxes>> {
    // Uploads have bounds of their own.
    let files = get(download::read)
        .post(upload::write)
        .layer(DefaultBodyLimit::disable());
    Router::new()
        .route("/files", files)
        .route("/health", get(condition::health))
        .route("/metrics", get(condition::metrics))
        .route("/envs", get(condition::environment))
}
