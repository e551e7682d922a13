//! Waits until containers are ready.

use std::sync::Arc;
use std::time::Duration;

use thaw_protocol::agent::readiness::wait_ready_response;
use thaw_protocol::agent::readiness::{ExpectReadyRequest, WaitReadyRequest, WaitReadyResponse};

use super::blocking;
use crate::error::{Error, Result};
use crate::readiness::Outcome;
use crate::sandbox::Sandbox;

/// Longest timeout.
const MAX_TIMEOUT: Duration = Duration::from_secs(60 * 60);

pub async fn expect(sandbox: &Arc<Sandbox>, request: ExpectReadyRequest) -> Result<()> {
    let activity = sandbox.activity().await;
    let container = sandbox.container(&request.container_id)?;
    blocking(move || {
        let _motion = activity;
        container.expect_ready(&request)
    })
    .await
}

/// Changes nothing, so it may last while everything is stopped.
pub async fn wait(sandbox: &Sandbox, request: &WaitReadyRequest) -> Result<WaitReadyResponse> {
    let limit = Duration::from_millis(request.timeout_ms.into());
    if limit.is_zero() || limit > MAX_TIMEOUT {
        return Err(Error::Invalid(format!(
            "a timeout is 1 to {} ms, not {}",
            MAX_TIMEOUT.as_millis(),
            request.timeout_ms
        )));
    }
    let container = sandbox.container(&request.container_id)?;
    let outcome = container.take_probe()?.wait(&container.init.child, limit).await?;
    let mut response = WaitReadyResponse::new();
    response.outcome = match outcome {
        Outcome::Ready => wait_ready_response::Outcome::READY,
        Outcome::Exited(code) => {
            response.exit_code = code;
            wait_ready_response::Outcome::EXITED
        }
        Outcome::TimedOut(seen) => {
            response.seen = seen;
            wait_ready_response::Outcome::TIMED_OUT
        }
    }
    .into();
    Ok(response)
}
