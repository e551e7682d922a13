//! The handlers for resource usage: of one sandbox, and of all with the pools.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use thaw_protocol::api::{NodeUsage, Problem, Usage};

use super::daemon::Daemon;
use super::problem::{ApiCode, Refusal};
use super::scope::{Scope, Wanted};

/// Returns the resource usage of a sandbox.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/metrics", operation_id = "getSandboxUsage", tag = "sandboxes", params(("id" = String, Path, description = "Id or name", max_length = 253, pattern = r"^[^\x00-\x1f\x7f-\x9f]+$")), responses(
    (status = 200, body = Usage),
    (status = 404, description = "There is no such sandbox", body = Problem, content_type = "application/problem+json"),
    (status = 429, description = "Too many requests", body = Problem, content_type = "application/problem+json"),
))]
pub async fn one(State(daemon): State<Arc<Daemon>>, wanted: Wanted) -> Result<Json<Usage>, Refusal> {
    blocking(daemon, move |daemon| Ok(daemon.usage(&wanted)?)).await
}

/// Returns the resource usage of the caller's sandboxes. Administrators get that of all sandboxes and of the node's pools.
#[utoipa::path(get, path = "/v1/node/usage", operation_id = "getNodeUsage", tag = "node", responses(
    (status = 200, body = NodeUsage),
    (status = 429, description = "Too many requests", body = Problem, content_type = "application/problem+json"),
))]
pub async fn all(State(daemon): State<Arc<Daemon>>, scope: Scope) -> Result<Json<NodeUsage>, Refusal> {
    blocking(daemon, move |daemon| Ok(daemon.usages(&scope))).await
}

/// Collects usage on a blocking thread, because there may be many sandboxes. It holds machines, so a release waits until it is done.
async fn blocking<T: Send + 'static>(
    daemon: Arc<Daemon>,
    work: impl FnOnce(&Daemon) -> Result<T, Refusal> + Send + 'static,
) -> Result<Json<T>, Refusal> {
    let looked_at = daemon.clone();
    let done = async move {
        let done = tokio::task::spawn_blocking(move || work(&looked_at)).await;
        done.map_err(|e| Refusal::new(ApiCode::Broken, e))?
    };
    daemon.finish(done).await.map(Json)
}
