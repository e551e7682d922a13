//! The handlers for templates: those of the configuration, those that callers build, and snapshots, which are deleted as templates.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde::Deserialize;
use serde_json::{Value, json};

use super::answer::ENVD_VERSION;
use super::builds::record::{Build, Status, Template};
use super::extract::{Body, Query};
use super::failure::Failure;
use super::moment;
use super::service::Service;
use super::snapshots;
use super::tags::own;
use super::template::{Source, stored};
use crate::api::extract::Named;
use crate::api::scope::Scope;

/// `GET /templates` and `GET /v2/templates`: those of the configuration and of the caller, in one page.
pub async fn list(
    State(service): State<Arc<Service>>,
    scope: Scope,
    query: Query,
) -> Result<Json<Vec<Value>>, Failure> {
    query.only(&["teamID", "limit", "nextToken"])?;
    let configured = service.templates.iter();
    let configured = configured.map(|(name, source)| of_configuration(name, source));
    let viewer = scope.viewer();
    let built = service.builds.store.all();
    let built = built.iter().filter(|template| template.exists_for(&viewer));
    Ok(Json(
        configured
            .chain(built.map(|template| described(template)))
            .collect(),
    ))
}

/// A template of the configuration. It has no builds and no statistics.
fn of_configuration(name: &str, source: &Source) -> Value {
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

/// A template that a caller builds. thawd counts no uses of it.
fn described(template: &Template) -> Value {
    let newest = template.newest();
    let machine = newest.map(|build| build.machine).unwrap_or_default();
    json!({
        "templateID": template.id, "buildID": newest.map(|build| &build.id), "aliases": [template.name],
        "names": [template.name], "public": template.public,
        "buildStatus": newest.map_or(Status::Waiting, |build| build.status),
        "cpuCount": machine.cpus.unwrap_or(0), "memoryMB": machine.memory_mib.unwrap_or(0),
        "diskSizeMB": machine.disk_mib.unwrap_or(0), "envdVersion": ENVD_VERSION,
        "createdAt": moment::of_seconds(template.created), "updatedAt": moment::of_seconds(template.updated),
        "createdBy": null, "lastSpawnedAt": null, "spawnCount": 0, "buildCount": template.builds.len(),
    })
}

/// A build in the description of its template.
fn described_build(build: &Build) -> Value {
    json!({
        "buildID": build.id, "status": build.status, "createdAt": moment::of_seconds(build.created),
        "updatedAt": moment::of_seconds(build.updated), "finishedAt": build.finished.map(moment::of_seconds),
        "cpuCount": build.machine.cpus.unwrap_or(0), "memoryMB": build.machine.memory_mib.unwrap_or(0),
        "diskSizeMB": build.machine.disk_mib.unwrap_or(0), "envdVersion": ENVD_VERSION,
    })
}

/// `GET /templates/{id}`: one template with its builds, the last one first. One of the configuration has none.
pub async fn get(
    State(service): State<Arc<Service>>,
    scope: Scope,
    Named(wanted): Named,
    query: Query,
) -> Result<Json<Value>, Failure> {
    query.only(&["limit", "nextToken"])?;
    if let Some(source) = service.templates.get(&wanted) {
        let mut answer = of_configuration(&wanted, source);
        answer["builds"] = json!([]);
        return Ok(Json(answer));
    }
    let template = own(&service, &scope, &wanted)?;
    let mut answer = described(&template);
    let builds = template.builds.iter().rev().map(described_build);
    answer["builds"] = builds.take(query.limit()?).collect();
    Ok(Json(answer))
}

/// A change of a template.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TemplateChange {
    public: Option<bool>,
}

/// `PATCH /v2/templates/{id}` and `PATCH /templates/{id}`: whether other tenants can create sandboxes from it.
pub async fn update(
    State(service): State<Arc<Service>>,
    scope: Scope,
    Named(wanted): Named,
    Body(asked): Body<TemplateChange>,
) -> Result<Json<Value>, Failure> {
    let template = own(&service, &scope, &wanted)?;
    let (builds, id) = (service.builds.clone(), template.id.clone());
    let changed = async move {
        let edit = |template: &mut Template| {
            template.public = asked.public.unwrap_or(template.public);
            Ok(())
        };
        builds.store.change(&id, edit).await
    };
    service.finish(changed).await?;
    Ok(Json(json!({"names": [template.name]})))
}

/// `DELETE /templates/{id}`: removes a template with its builds, or a snapshot. Sandboxes that were created from it run on.
pub async fn delete(
    State(service): State<Arc<Service>>,
    scope: Scope,
    Named(wanted): Named,
) -> Result<StatusCode, Failure> {
    if service.templates.get(&wanted).is_some() {
        let why =
            format!("template {wanted:?} is in the node's configuration: only its administrator removes it");
        return Err(Failure::Conflict(why));
    }
    match service.builds.store.find(&wanted, &scope.viewer()) {
        Some(template) => {
            let (builds, daemon) = (service.builds.clone(), service.daemon.clone());
            let removed = async move { builds.remove(&daemon, &template.id).await };
            service.finish(removed).await?;
        }
        None => snapshots::remove(&service, &wanted, &scope).await?,
    }
    Ok(StatusCode::NO_CONTENT)
}

/// `GET /templates/aliases/{alias}`: the template with a name.
pub async fn alias(
    State(service): State<Arc<Service>>,
    scope: Scope,
    Named(name): Named,
) -> Result<Json<Value>, Failure> {
    let built = service.builds.store.find_usable(&name, &scope.viewer());
    let (id, is_public) = match (service.templates.get(&name), built) {
        (Some(_), _) => (name, true),
        (None, Some(template)) => (template.id.clone(), template.public),
        (None, None) => (stored(&service.daemon, &name, scope.viewer()).await?.id, false),
    };
    Ok(Json(json!({"templateID": id, "public": is_public})))
}
