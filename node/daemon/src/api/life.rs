//! The handlers that stop and restart a sandbox's container, and that wait for its end.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use thaw_protocol::api::{ContainerExit, Problem, StopContainer};

use super::check;
use super::daemon::Daemon;
use super::extract::Body;
use super::problem::Refusal;
use super::scope::Wanted;

/// Stops the process of a sandbox's container: sends its stop signal, and after its timeout SIGKILL.
///
/// The answer comes when the process has ended. Its program is not started again.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/stop", operation_id = "stopContainer", tag = "processes", request_body = StopContainer,
    params(("id" = String, Path, description = "Id or name", max_length = 253, pattern = r"^[^\x00-\x1f\x7f-\x9f]+$")), responses(
    (status = 204, description = "The process has ended"),
    (status = 404, description = "There is no such sandbox, or it has no container", body = Problem, content_type = "application/problem+json"),
    (status = 409, description = "The sandbox is not running", body = Problem, content_type = "application/problem+json"),
    (status = 422, description = "The body does not match the schema", body = Problem, content_type = "application/problem+json"),
    (status = 429, description = "Too many requests", body = Problem, content_type = "application/problem+json"),
))]
pub async fn stop(
    State(daemon): State<Arc<Daemon>>,
    wanted: Wanted,
    Body(how): Body<StopContainer>,
) -> Result<StatusCode, Refusal> {
    check::stop(&how)?;
    daemon.stop(&wanted, how).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Stops the process of a sandbox's container, and starts its program again in the same machine, with the same layer and settings.
///
/// The answer comes when the program runs again. Only a container that the API or `thaw run -d` started can be restarted.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/restart", operation_id = "restartContainer", tag = "processes", request_body = StopContainer,
    params(("id" = String, Path, description = "Id or name", max_length = 253, pattern = r"^[^\x00-\x1f\x7f-\x9f]+$")), responses(
    (status = 204, description = "The program runs again"),
    (status = 404, description = "There is no such sandbox, or it has no container", body = Problem, content_type = "application/problem+json"),
    (status = 409, description = "The sandbox is not running", body = Problem, content_type = "application/problem+json"),
    (status = 422, description = "The body does not match the schema", body = Problem, content_type = "application/problem+json"),
    (status = 429, description = "Too many requests", body = Problem, content_type = "application/problem+json"),
))]
pub async fn restart(
    State(daemon): State<Arc<Daemon>>,
    wanted: Wanted,
    Body(how): Body<StopContainer>,
) -> Result<StatusCode, Refusal> {
    check::stop(&how)?;
    daemon.restart(&wanted, how).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Waits until the process of a sandbox's container has ended and is not started again.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/exit", operation_id = "getContainerExit", tag = "processes",
    params(("id" = String, Path, description = "Id or name", max_length = 253, pattern = r"^[^\x00-\x1f\x7f-\x9f]+$")), responses(
    (status = 200, body = ContainerExit),
    (status = 404, description = "There is no such sandbox, or its container is not monitored", body = Problem, content_type = "application/problem+json"),
    (status = 429, description = "Too many requests", body = Problem, content_type = "application/problem+json"),
))]
pub async fn exit(State(daemon): State<Arc<Daemon>>, wanted: Wanted) -> Result<Json<ContainerExit>, Refusal> {
    let exit_code = daemon.exit_of(&wanted).await?;
    Ok(Json(ContainerExit { exit_code }))
}

#[cfg(test)]
#[path = "life_test.rs"]
mod tests;
