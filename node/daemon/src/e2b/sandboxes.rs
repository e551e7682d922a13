//! The handlers for one sandbox: showing, deleting and changing it.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;

use super::answer::{Detail, Reached};
use super::extract::{Addressed, Body};
use super::failure::Failure;
use super::lifecycle::Timing;
use super::network::NetworkChange;
use super::service::{Service, is_paused};

/// The timeout of a sandbox that is resumed or kept alive by a request that names none, seconds.
const TIMEOUT_S: u32 = 15;
/// The same of a sandbox that is connected to.
const CONNECT_TIMEOUT_S: u32 = 300;

/// `GET /sandboxes/{id}`.
pub async fn get(
    State(service): State<Arc<Service>>,
    Addressed(wanted): Addressed,
) -> Result<Json<Detail>, Failure> {
    let sandbox = service.living(&wanted)?;
    Ok(Json(service.detail(&sandbox)))
}

/// `DELETE /sandboxes/{id}`. Also removes what is left of a sandbox that has ended.
pub async fn delete(
    State(service): State<Arc<Service>>,
    Addressed(wanted): Addressed,
) -> Result<StatusCode, Failure> {
    let deleting = service.daemon.clone();
    let deleted = async move { deleting.delete(&wanted).await };
    service.daemon.finish(deleted).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// A new timeout.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NewTimeout {
    /// Seconds from now.
    timeout: u32,
}

/// `POST /sandboxes/{id}/timeout`.
pub async fn set_timeout(
    State(service): State<Arc<Service>>,
    Addressed(wanted): Addressed,
    Body(asked): Body<NewTimeout>,
) -> Result<StatusCode, Failure> {
    service.set_timeout(&wanted, asked.timeout, Timing::Exact).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// How long to keep a sandbox alive.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Refresh {
    /// Seconds from now.
    duration: Option<u32>,
}

/// `POST /sandboxes/{id}/refreshes`. Never shortens the timeout.
pub async fn refresh(
    State(service): State<Arc<Service>>,
    Addressed(wanted): Addressed,
    Body(asked): Body<Refresh>,
) -> Result<StatusCode, Failure> {
    let seconds = asked.duration.unwrap_or(TIMEOUT_S);
    service.set_timeout(&wanted, seconds, Timing::Extend).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// How to pause a sandbox.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "camelCase")]
pub struct Pause {
    /// `false`: keep its files only.
    memory: Option<bool>,
    /// Pause it only if its agent answers.
    require_healthy_guest: Option<bool>,
}

/// `POST /sandboxes/{id}/pause`.
pub async fn pause(
    State(service): State<Arc<Service>>,
    Addressed(wanted): Addressed,
    Body(asked): Body<Pause>,
) -> Result<StatusCode, Failure> {
    service.living(&wanted)?;
    if asked.memory == Some(false) {
        return Err(Failure::unsupported(
            "memory: false, a pause that keeps the files only,",
        ));
    }
    if asked.require_healthy_guest == Some(true) {
        return Err(Failure::unsupported("requireHealthyGuest"));
    }
    service.pause(&wanted).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// How to resume or connect to a sandbox.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "camelCase")]
pub struct Resume {
    /// Seconds from now.
    timeout: Option<u32>,
    /// Pause it when its time is over; `false`: delete it.
    auto_pause: Option<bool>,
    /// `false`: boot it from its files.
    memory: Option<bool>,
}

impl Resume {
    fn check(&self) -> Result<(), Failure> {
        match self.memory {
            Some(false) => Err(Failure::unsupported(
                "memory: false, a boot from the files of a paused sandbox,",
            )),
            _ => Ok(()),
        }
    }
}

/// `POST /sandboxes/{id}/resume`.
pub async fn resume(
    State(service): State<Arc<Service>>,
    Addressed(wanted): Addressed,
    Body(asked): Body<Resume>,
) -> Result<Response, Failure> {
    service.living(&wanted)?;
    asked.check()?;
    let timeout = asked.timeout.unwrap_or(TIMEOUT_S);
    let sandbox = service.resume(&wanted, timeout, asked.auto_pause).await?;
    Ok((StatusCode::CREATED, Json(service.reached_again(&sandbox))).into_response())
}

/// `POST /v2/sandboxes/{id}/connect` and `POST /sandboxes/{id}/connect`. The status is 201 if the sandbox was paused.
pub async fn connect(
    State(service): State<Arc<Service>>,
    Addressed(wanted): Addressed,
    Body(asked): Body<Resume>,
) -> Result<(StatusCode, Json<Reached>), Failure> {
    let sandbox = service.living(&wanted)?;
    let timeout = asked.timeout.unwrap_or(CONNECT_TIMEOUT_S);
    if !is_paused(&sandbox) {
        service.set_timeout(&wanted, timeout, Timing::Extend).await?;
        return Ok((StatusCode::OK, Json(service.reached_again(&sandbox))));
    }
    asked.check()?;
    match service.resume(&wanted, timeout, asked.auto_pause).await {
        Ok(sandbox) => Ok((StatusCode::CREATED, Json(service.reached_again(&sandbox)))),
        // Another request has resumed it meanwhile.
        Err(Failure::Conflict(_)) => Ok((StatusCode::OK, Json(service.reached_again(&sandbox)))),
        Err(failure) => Err(failure),
    }
}

/// `PUT /sandboxes/{id}/network`. The new policy applies at once, also to existing connections.
pub async fn set_network(
    State(service): State<Arc<Service>>,
    Addressed(wanted): Addressed,
    Body(asked): Body<NetworkChange>,
) -> Result<StatusCode, Failure> {
    service.living(&wanted)?;
    let policy = asked.policy()?;
    let changing = service.daemon.clone();
    let changed = async move { changing.set_network_policy(&wanted, policy).await };
    service.daemon.finish(changed).await?;
    Ok(StatusCode::NO_CONTENT)
}

#[cfg(test)]
#[path = "sandboxes_test.rs"]
mod tests;
