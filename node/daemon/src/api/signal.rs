//! The handler that sends a signal to the process of a sandbox's container.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use thaw_protocol::api::{Problem, SignalContainer};

use super::check;
use super::daemon::Daemon;
use super::extract::Body;
use super::problem::Refusal;
use super::scope::Wanted;

/// Sends a signal to the process of a sandbox's container.
///
/// As process 1 of the container, it ignores signals for which it has no handler, except SIGKILL and SIGSTOP.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/signal", operation_id = "signalContainer", tag = "processes", request_body = SignalContainer,
    params(("id" = String, Path, description = "Id or name", max_length = 253, pattern = r"^[^\x00-\x1f\x7f-\x9f]+$")), responses(
    (status = 204, description = "The signal was sent"),
    (status = 404, description = "There is no such sandbox, or it has no container", body = Problem, content_type = "application/problem+json"),
    (status = 409, description = "The sandbox is not running", body = Problem, content_type = "application/problem+json"),
    (status = 422, description = "The body does not match the schema", body = Problem, content_type = "application/problem+json"),
    (status = 429, description = "Too many requests", body = Problem, content_type = "application/problem+json"),
))]
pub async fn signal(
    State(daemon): State<Arc<Daemon>>,
    wanted: Wanted,
    Body(request): Body<SignalContainer>,
) -> Result<StatusCode, Refusal> {
    check::signal(request.signal)?;
    daemon.signal(&wanted, request.signal).await?;
    Ok(StatusCode::NO_CONTENT)
}

#[cfg(test)]
mod tests {
    use crate::api::fake::Fake;
    use crate::api::request_gate::{Bounds, Gate};
    use crate::api::router::router;
    use crate::api::test_client::{JSON, ask, send};

    #[tokio::test]
    async fn a_signal_reaches_the_container_of_a_running_sandbox() {
        let (fake, daemon) = Fake::daemon(true);
        let routes = router(daemon, Gate::new(Bounds::default()));
        let body = r#"{"image":"x","cpus":1,"memory_mib":128,"name":"web"}"#;
        send(&routes, ask("POST", "/v1/sandboxes", JSON, body)).await;
        let signal = async |body: &'static str| {
            let request = ask("POST", "/v1/sandboxes/web/signal", JSON, body);
            send(&routes, request).await.status().as_u16()
        };
        assert_eq!(signal(r#"{"signal":15}"#).await, 204);
        for wrong in [
            r#"{"signal":0}"#,
            r#"{"signal":65}"#,
            r#"{"signal":"TERM"}"#,
            "{}",
        ] {
            assert_eq!(signal(wrong).await, 422, "{wrong}");
        }
        send(&routes, ask("POST", "/v1/sandboxes/web/pause", JSON, "")).await;
        assert_eq!(signal(r#"{"signal":9}"#).await, 409);
        assert_eq!(*fake.counts.heard.borrow(), ["signal 15 to the container"]);
    }
}
