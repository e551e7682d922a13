//! The handlers for snapshots. In E2B's API a snapshot is a template: sandboxes are created from it, and it is deleted as one.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use serde::{Deserialize, Serialize};
use thaw_protocol::api::{ChangeSnapshot, FreezeSandbox, Snapshot};
use thaw_sandbox::id;
use thaw_sandbox::snapshot::store::Viewer;

use super::extract::{Addressed, Body, Query};
use super::failure::Failure;
use super::list::{no_token, paged};
use super::service::Service;
use super::template::{BUILD_LABEL, stored};
use super::whole_id::WholeId;
use crate::api::check;
use crate::api::problem::{ApiCode, Refusal};
use crate::api::scope::Scope;

/// What to store.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct NewSnapshot {
    name: Option<String>,
    /// `false`: files only.
    memory: Option<bool>,
}

/// A stored snapshot.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Stored {
    #[serde(rename = "snapshotID")]
    snapshot_id: String,
    names: Vec<String>,
}

impl From<Snapshot> for Stored {
    fn from(snapshot: Snapshot) -> Stored {
        Stored {
            snapshot_id: snapshot.id,
            names: snapshot.name.into_iter().collect(),
        }
    }
}

/// `POST /sandboxes/{id}/snapshots`. The sandbox runs on. If the caller has a snapshot of this name already, the name moves to the new one,
/// and the old one keeps its id.
pub async fn create(
    State(service): State<Arc<Service>>,
    Addressed(wanted): Addressed,
    Body(asked): Body<NewSnapshot>,
) -> Result<(StatusCode, Json<Stored>), Failure> {
    service.running(&wanted)?;
    if asked.memory == Some(false) {
        return Err(Failure::unsupported(
            "memory: false, a snapshot of the files only,",
        ));
    }
    // Checked before the name is moved.
    check::freeze(&FreezeSandbox {
        name: asked.name.clone(),
        ..FreezeSandbox::default()
    })?;
    let (daemon, viewer) = (service.daemon.clone(), wanted.scope.viewer());
    let name = asked.name.clone();
    let freezing = async move {
        let frozen = daemon.freeze(&wanted, FreezeSandbox::default()).await?;
        let stored = frozen
            .snapshot
            .ok_or_else(|| Refusal::new(ApiCode::Broken, "the snapshot has no id"))?;
        if let Some(name) = name {
            move_name(&daemon, name, &stored, viewer).await?;
        }
        Ok::<_, Refusal>(stored)
    };
    let snapshot_id = service.daemon.finish(freezing).await?;
    let names = asked.name.into_iter().collect();
    Ok((StatusCode::CREATED, Json(Stored { snapshot_id, names })))
}

/// Gives a snapshot a name, and takes it from the one that has it.
async fn move_name(
    daemon: &crate::api::daemon::Daemon,
    name: String,
    to: &str,
    viewer: Viewer,
) -> Result<(), Refusal> {
    let factory = daemon.factory()?;
    let named = |name| ChangeSnapshot {
        name: Some(name),
        ..ChangeSnapshot::default()
    };
    if let Ok(before) = factory.snapshot(name.clone(), viewer.clone()).await
        && before.name.as_ref() == Some(&name)
    {
        factory
            .change_snapshot(before.id, viewer.clone(), named(None))
            .await?;
    }
    factory
        .change_snapshot(to.to_owned(), viewer, named(Some(name)))
        .await?;
    Ok(())
}

/// `GET /snapshots`: a page of the caller's, ordered by id.
pub async fn list(
    State(service): State<Arc<Service>>,
    scope: Scope,
    query: Query,
) -> Result<Response, Failure> {
    query.only(&["sandboxID", "name", "limit", "nextToken"])?;
    let limit = query.limit()?;
    let after = match query.text("nextToken") {
        Some(token) if id::is_id(token) => Some(token),
        Some(_) => return Err(no_token()),
        None => None,
    };
    let (sandbox, name) = (query.text("sandboxID"), query.text("name"));
    let sandbox = sandbox.map(|text| WholeId::parse(text).map_or(text.to_owned(), |whole| whole.id));
    let all = service.daemon.factory()?.snapshots(scope.viewer()).await?;
    let mut wanted = all.into_iter().filter(|snapshot| {
        !snapshot.labels.contains_key(BUILD_LABEL)
            && after.is_none_or(|after| snapshot.id.as_str() > after)
            && sandbox
                .as_ref()
                .is_none_or(|sandbox| snapshot.sandbox == *sandbox)
            && name.is_none_or(|name| snapshot.name.as_deref() == Some(name))
    });
    let page: Vec<Stored> = wanted.by_ref().take(limit).map(Stored::from).collect();
    let next = page.last().filter(|_| wanted.next().is_some());
    let next = next.map(|last| last.snapshot_id.clone());
    Ok(paged(page, next))
}

/// Removes a snapshot of the caller. Sandboxes that were created from it run on.
///
/// # Errors
/// It does not exist, or another lies on it.
pub async fn remove(service: &Service, wanted: &str, scope: &Scope) -> Result<(), Failure> {
    let found = stored(&service.daemon, wanted, scope.viewer()).await?;
    let (factory, viewer) = (service.daemon.factory()?.clone(), scope.viewer());
    let removed = async move { factory.remove_snapshot(found.id, viewer, true).await };
    service.daemon.finish(removed).await?;
    Ok(())
}

#[cfg(test)]
#[path = "snapshots_test.rs"]
mod tests;
