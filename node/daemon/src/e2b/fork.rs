//! The handler that forks sandboxes.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use serde::{Deserialize, Serialize};
use serde_json::json;
use thaw_protocol::api::ForkSandbox;

use super::answer::Reached;
use super::extract::{Addressed, Body};
use super::failure::Failure;
use super::service::Service;
use crate::api::check;
use crate::api::problem::{ApiCode, Refusal};
use crate::spans;

/// The timeout of forks whose request names none, seconds.
const TIMEOUT_S: u32 = 15;

/// How to fork a sandbox.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Fork {
    /// Seconds.
    timeout: Option<u32>,
    count: Option<u8>,
}

/// One fork. E2B's API may answer with an error instead; here all forks are made, or none is and the whole request fails.
#[derive(Debug, Serialize)]
pub struct Forked {
    sandbox: Reached,
}

/// `POST /sandboxes/{id}/fork`.
pub async fn fork(
    State(service): State<Arc<Service>>,
    Addressed(wanted): Addressed,
    headers: HeaderMap,
    Body(asked): Body<Fork>,
) -> Result<(StatusCode, Json<Vec<Forked>>), Failure> {
    let sandbox = service.running(&wanted)?;
    let broken = |e: serde_json::Error| Refusal::new(ApiCode::Broken, e);
    let timeout_s = asked.timeout.unwrap_or(TIMEOUT_S).max(1);
    let request = json!({"count": asked.count.unwrap_or(1), "timeout_s": timeout_s});
    let mut request: ForkSandbox = serde_json::from_value(request).map_err(broken)?;
    request.on_timeout = sandbox.on_timeout;
    check::fork(&request)?;
    let forking = service
        .daemon
        .fork(wanted, request, None, spans::parent(&headers));
    let made = forking.await?.items.into_iter();
    let made = made.map(|made| Forked {
        sandbox: service.reached_again(&made.sandbox),
    });
    Ok((StatusCode::CREATED, Json(made.collect())))
}
