//! Whether containers are ready.

use std::sync::Arc;
use std::time::Duration;

use thaw_protocol::agent::readiness::wait_ready_response;
use thaw_protocol::agent::readiness::{ExpectReadyRequest, WaitReadyRequest, WaitReadyResponse};

use super::blocking;
use crate::error::{Error, Result};
use crate::readiness::Outcome;
use crate::sandbox::Sandbox;

/// Longest that is waited.
const LONGEST: Duration = Duration::from_secs(60 * 60);

pub async fn expect(sandbox: &Arc<Sandbox>, request: ExpectReadyRequest) -> Result<()> {
    let motion = sandbox.motion().await;
    let container = sandbox.container(&request.container_id)?;
    blocking(move || {
        let _motion = motion;
        container.expect_ready(&request)
    })
    .await
}

/// Sets nothing in motion, so it may last while everything stands still.
pub async fn wait(sandbox: &Sandbox, request: &WaitReadyRequest) -> Result<WaitReadyResponse> {
    let limit = Duration::from_millis(request.timeout_ms.into());
    if limit.is_zero() || limit > LONGEST {
        return Err(Error::Invalid(format!(
            "a timeout is 1 to {} ms, not {}",
            LONGEST.as_millis(),
            request.timeout_ms
        )));
    }
    let container = sandbox.container(&request.container_id)?;
    let outcome = container
        .take_expected()?
        .wait(&container.init.child, limit)
        .await?;
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
