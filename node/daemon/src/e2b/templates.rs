//! The handlers for templates: those of the configuration, and whether a name is one.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::answer::ENVD_VERSION;
use super::extract::Query;
use super::failure::Failure;
use super::moment;
use super::service::Service;
use super::template::{Source, stored};
use crate::api::extract::Named;
use crate::api::scope::Scope;

/// `GET /templates` and `GET /v2/templates`: those of the configuration, in one page.
pub async fn list(State(service): State<Arc<Service>>, query: Query) -> Result<Response, Failure> {
    query.only(&["teamID", "limit", "nextToken"])?;
    let all = service.templates.iter();
    let shown = all
        .map(|(name, source)| described(name, source))
        .collect::<Vec<_>>();
    Ok(Json(shown).into_response())
}

/// A template. thawd keeps no builds and no statistics of templates.
fn described(name: &str, source: &Source) -> Value {
    let (cpus, memory_mib, disk_mib) = match source {
        Source::Image(request) => (request.cpus, request.memory_mib, request.disk_mib),
        Source::Snapshot(..) => (0, 0, 0),
    };
    json!({
        "templateID": name, "buildID": name, "aliases": [name], "names": [name], "public": true, "buildStatus": "ready",
        "cpuCount": cpus, "memoryMB": memory_mib, "diskSizeMB": disk_mib, "envdVersion": ENVD_VERSION,
        "createdAt": moment::of_seconds(0), "updatedAt": moment::of_seconds(0), "createdBy": null, "lastSpawnedAt": null,
        "spawnCount": 0, "buildCount": 1,
    })
}

/// `GET /templates/aliases/{alias}`: the template with a name.
pub async fn alias(
    State(service): State<Arc<Service>>,
    scope: Scope,
    Named(name): Named,
) -> Result<Json<Value>, Failure> {
    let (id, is_public) = match service.templates.get(&name) {
        Some(_) => (name, true),
        None => (stored(&service.daemon, &name, scope.viewer()).await?.id, false),
    };
    Ok(Json(json!({"templateID": id, "public": is_public})))
}
