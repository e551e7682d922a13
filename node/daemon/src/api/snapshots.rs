//! The handlers for stored snapshots.
//!
//! Invariant: a snapshot of another tenant does not exist for a caller. A list reads the disk, which another process may have changed.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::{StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::Deserialize;
use thaw_protocol::api::{
    ChangeSnapshot, Problem, PullSnapshot, PushSnapshot, PushedSnapshot, Snapshot, SnapshotEvent,
    SnapshotList, VerifiedSnapshot,
};
use utoipa::IntoParams;

use super::check;
use super::daemon::Daemon;
use super::extract::{Body, Parameters};
use super::listing::{ListParameters, check_limit};
use super::problem::{ApiCode, Refusal};
use super::scope::{Scope, Wanted};
use super::watch::Source as _;

/// Lists the stored snapshots, or with `watch` sends their changes.
#[utoipa::path(get, path = "/v1/snapshots", operation_id = "listSnapshots", tag = "snapshots", params(ListParameters), responses(
    (status = 200, description = "The snapshots, or with `watch` one SnapshotEvent per line", content(
        (SnapshotList = "application/json"), (SnapshotEvent = "application/x-ndjson"))),
    (status = 400, description = "A parameter is invalid", body = Problem, content_type = "application/problem+json"),
    (status = 410, description = "The version is too old", body = Problem, content_type = "application/problem+json"),
    (status = 429, description = "Too many requests", body = Problem, content_type = "application/problem+json"),
))]
pub async fn list(
    State(daemon): State<Arc<Daemon>>,
    uri: Uri,
    scope: Scope,
    Parameters(asked): Parameters<ListParameters>,
) -> Result<Response, Refusal> {
    let bad = |what: &str| Refusal::new(ApiCode::BadParameter, what);
    check_limit(asked.limit)?;
    let selector = asked.selector(scope.clone())?;
    if selector.has_state() {
        return Err(bad("a snapshot has no state: name, image or tenant"));
    }
    let after = asked.continue_token.as_deref().map(decode);
    let after = after.map(|id| id.ok_or_else(|| bad("this is no continue token")));
    let after = after.transpose()?;
    if asked.is_watch()? {
        // Without it, the first change of a snapshot would seem to add it.
        if !daemon.snapshots.is_complete() {
            look(&daemon, &scope).await?;
        }
        return asked.follow(daemon.snapshots.clone(), selector, &uri);
    }
    look(&daemon, &scope).await?;
    let limit = asked.limit.map_or(usize::MAX, |limit| limit as usize);
    let page = daemon.snapshots.list(&selector, after.as_deref(), limit);
    let last = page.items.last().filter(|_| page.more);
    let continue_token = last.map(|last| URL_SAFE_NO_PAD.encode(&last.id));
    let list = SnapshotList {
        resource_version: page.version,
        items: page.items,
        continue_token,
    };
    Ok(Json(list).into_response())
}

/// Takes over the stored snapshots of a scope from the disk; the first time those of the whole node.
async fn look(daemon: &Daemon, scope: &Scope) -> Result<(), Refusal> {
    let scope = match daemon.snapshots.is_complete() {
        true => scope.clone(),
        false => Scope::node(),
    };
    let before = daemon.snapshots.version();
    let found = daemon.factory()?.snapshots(scope.viewer()).await?;
    daemon.snapshots.reconcile(before, &scope, found);
    Ok(())
}

/// The last id of the page before.
fn decode(token: &str) -> Option<String> {
    let id = String::from_utf8(URL_SAFE_NO_PAD.decode(token).ok()?).ok()?;
    thaw_sandbox::id::is_id(&id).then_some(id)
}

/// Describes a stored snapshot.
#[utoipa::path(get, path = "/v1/snapshots/{id}", operation_id = "getSnapshot", tag = "snapshots",
    params(("id" = String, Path, description = "Id, name, or an unambiguous beginning of an id", max_length = 253, pattern = r"^[^\x00-\x1f\x7f-\x9f]+$")), responses(
    (status = 200, body = Snapshot),
    (status = 404, description = "There is no such snapshot", body = Problem, content_type = "application/problem+json"),
    (status = 429, description = "Too many requests", body = Problem, content_type = "application/problem+json"),
))]
pub async fn get(State(daemon): State<Arc<Daemon>>, wanted: Wanted) -> Result<Json<Snapshot>, Refusal> {
    let viewer = wanted.scope.viewer();
    Ok(Json(daemon.factory()?.snapshot(wanted.text, viewer).await?))
}

/// Changes the name and the labels of a stored snapshot. Fields that the body omits keep their values.
#[utoipa::path(patch, path = "/v1/snapshots/{id}", operation_id = "changeSnapshot", tag = "snapshots", request_body = ChangeSnapshot,
    params(("id" = String, Path, description = "Id, name, or an unambiguous beginning of an id", max_length = 253, pattern = r"^[^\x00-\x1f\x7f-\x9f]+$")), responses(
    (status = 200, body = Snapshot),
    (status = 404, description = "There is no such snapshot", body = Problem, content_type = "application/problem+json"),
    (status = 409, description = "The name is in use", body = Problem, content_type = "application/problem+json"),
    (status = 422, description = "The body does not match the schema", body = Problem, content_type = "application/problem+json"),
))]
pub async fn change(
    State(daemon): State<Arc<Daemon>>,
    wanted: Wanted,
    Body(change): Body<ChangeSnapshot>,
) -> Result<Json<Snapshot>, Refusal> {
    check::change_snapshot(&change)?;
    let factory = daemon.factory()?.clone();
    let viewer = wanted.scope.viewer();
    let changed = async move { factory.change_snapshot(wanted.text, viewer, change).await };
    Ok(Json(daemon.finish(changed).await?))
}

/// Compares every byte of a stored snapshot with its manifest. The answer names what is damaged.
#[utoipa::path(post, path = "/v1/snapshots/{id}/verify", operation_id = "verifySnapshot", tag = "snapshots",
    params(("id" = String, Path, description = "Id, name, or an unambiguous beginning of an id", max_length = 253, pattern = r"^[^\x00-\x1f\x7f-\x9f]+$")), responses(
    (status = 200, body = VerifiedSnapshot),
    (status = 404, description = "There is no such snapshot", body = Problem, content_type = "application/problem+json"),
    (status = 429, description = "Too many requests", body = Problem, content_type = "application/problem+json"),
))]
pub async fn verify(
    State(daemon): State<Arc<Daemon>>,
    wanted: Wanted,
) -> Result<Json<VerifiedSnapshot>, Refusal> {
    let viewer = wanted.scope.viewer();
    Ok(Json(
        daemon.factory()?.verify_snapshot(wanted.text, viewer).await?,
    ))
}

/// Pushes a stored snapshot to a registry. What the registry has already is not sent again.
#[utoipa::path(post, path = "/v1/snapshots/{id}/push", operation_id = "pushSnapshot", tag = "snapshots", request_body = PushSnapshot,
    params(("id" = String, Path, description = "Id, name, or an unambiguous beginning of an id", max_length = 253, pattern = r"^[^\x00-\x1f\x7f-\x9f]+$")), responses(
    (status = 200, body = PushedSnapshot),
    (status = 400, description = "The reference is invalid", body = Problem, content_type = "application/problem+json"),
    (status = 404, description = "There is no such snapshot", body = Problem, content_type = "application/problem+json"),
    (status = 409, description = "The snapshot is a delta", body = Problem, content_type = "application/problem+json"),
    (status = 422, description = "The snapshot is damaged or too large, the reference cannot be written to, or the body does not match the schema", body = Problem, content_type = "application/problem+json"),
    (status = 502, description = "The registry failed", body = Problem, content_type = "application/problem+json"),
))]
pub async fn push(
    State(daemon): State<Arc<Daemon>>,
    wanted: Wanted,
    Body(request): Body<PushSnapshot>,
) -> Result<Json<PushedSnapshot>, Refusal> {
    check::push_snapshot(&request)?;
    let viewer = wanted.scope.viewer();
    let pushed = daemon.factory()?.push_snapshot(wanted.text, viewer, request);
    Ok(Json(pushed.await?))
}

/// Pulls a snapshot from a registry into the store, with the images that it needs. It belongs to the caller's tenant.
#[utoipa::path(post, path = "/v1/snapshots", operation_id = "pullSnapshot", tag = "snapshots", request_body = PullSnapshot, responses(
    (status = 201, body = Snapshot),
    (status = 400, description = "The reference is invalid", body = Problem, content_type = "application/problem+json"),
    (status = 404, description = "There is nothing by this reference, or an image of the snapshot is neither stored nor in a registry", body = Problem, content_type = "application/problem+json"),
    (status = 409, description = "The name is in use", body = Problem, content_type = "application/problem+json"),
    (status = 422, description = "It is no snapshot, is malformed, is not signed as required, or needs another processor or guest image; or the body does not match the schema", body = Problem, content_type = "application/problem+json"),
    (status = 502, description = "The registry failed", body = Problem, content_type = "application/problem+json"),
    (status = 507, description = "The disk or the disk budget is full", body = Problem, content_type = "application/problem+json"),
))]
pub async fn pull(
    State(daemon): State<Arc<Daemon>>,
    scope: Scope,
    Body(request): Body<PullSnapshot>,
) -> Result<(StatusCode, Json<Snapshot>), Refusal> {
    check::pull_snapshot(&request)?;
    let factory = daemon.factory()?.clone();
    let pulled = factory.pull_snapshot(scope.viewer(), request).await?;
    // The caller does not wait for it.
    tokio::spawn(async move { factory.retire_snapshots().await });
    Ok((StatusCode::CREATED, Json(pulled)))
}

/// How a stored snapshot is removed.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct RemoveParameters {
    /// Remove it even if a sandbox was thawed from it. That sandbox runs on, but cannot be frozen as a delta.
    #[serde(default)]
    force: bool,
}

/// Removes a stored snapshot.
#[utoipa::path(delete, path = "/v1/snapshots/{id}", operation_id = "deleteSnapshot", tag = "snapshots", params(RemoveParameters,
    ("id" = String, Path, description = "Id, name, or an unambiguous beginning of an id", max_length = 253, pattern = r"^[^\x00-\x1f\x7f-\x9f]+$")), responses(
    (status = 204, description = "The snapshot is removed"),
    (status = 400, description = "A parameter is invalid", body = Problem, content_type = "application/problem+json"),
    (status = 404, description = "There is no such snapshot", body = Problem, content_type = "application/problem+json"),
    (status = 409, description = "Another snapshot or a paused sandbox lies on it, or a sandbox was thawed from it", body = Problem, content_type = "application/problem+json"),
))]
pub async fn remove(
    State(daemon): State<Arc<Daemon>>,
    wanted: Wanted,
    Parameters(how): Parameters<RemoveParameters>,
) -> Result<StatusCode, Refusal> {
    let factory = daemon.factory()?.clone();
    let viewer = wanted.scope.viewer();
    let removed = async move { factory.remove_snapshot(wanted.text, viewer, how.force).await };
    daemon.finish(removed).await?;
    Ok(StatusCode::NO_CONTENT)
}

#[cfg(test)]
#[path = "snapshots_test.rs"]
mod tests;
