//! The handlers for the tags of templates that callers build.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde::Deserialize;
use serde_json::{Value, json};

use super::builds::names::{check_count, check_tags, split};
use super::builds::record::{DEFAULT_TAG, Status, Template};
use super::builds::store::no_template;
use super::extract::Body;
use super::failure::Failure;
use super::moment::{self, now_s};
use super::service::Service;
use crate::api::extract::Named;
use crate::api::scope::Scope;

/// A template of the caller.
///
/// # Errors
/// [`Failure::NotFound`]: it does not exist for the caller.
pub fn own(service: &Service, scope: &Scope, wanted: &str) -> Result<Arc<Template>, Failure> {
    let found = service.builds.store.find(wanted, &scope.viewer());
    found.ok_or_else(|| no_template(wanted))
}

/// Tags to give to the build that has another tag.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NewTags {
    /// `NAME:TAG`.
    target: String,
    tags: Vec<String>,
}

/// `POST /templates/tags`: a build with one tag gets more, also those that others have.
pub async fn assign(
    State(service): State<Arc<Service>>,
    scope: Scope,
    Body(asked): Body<NewTags>,
) -> Result<(StatusCode, Json<Value>), Failure> {
    check_tags(&asked.tags)?;
    let (name, tag) = split(&asked.target);
    let (name, tag) = (name.to_owned(), tag.unwrap_or(DEFAULT_TAG).to_owned());
    let template = own(&service, &scope, &name)?.id.clone();
    let (builds, daemon, tags) = (service.builds.clone(), service.daemon.clone(), asked.tags.clone());
    let assigned = async move {
        let edit = |template: &mut Template| {
            let build = template
                .tagged(&tag)
                .filter(|build| build.status == Status::Ready);
            let none = || Failure::NotFound(format!("template {name:?} has no build with the tag {tag:?}"));
            let build = build.ok_or_else(none)?.id.clone();
            template.assign(&build, &tags, now_s());
            check_count(template.tags.len())?;
            Ok(build)
        };
        builds.change(&daemon, &template, edit).await
    };
    let build = service.finish(assigned).await?;
    Ok((
        StatusCode::CREATED,
        Json(json!({"tags": asked.tags, "buildID": build})),
    ))
}

/// Tags to remove.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OldTags {
    name: String,
    tags: Vec<String>,
}

/// `DELETE /templates/tags`. The snapshot of a build without a tag is removed.
pub async fn remove(
    State(service): State<Arc<Service>>,
    scope: Scope,
    Body(asked): Body<OldTags>,
) -> Result<StatusCode, Failure> {
    let template = own(&service, &scope, &asked.name)?.id.clone();
    let (builds, daemon) = (service.builds.clone(), service.daemon.clone());
    let removed = async move {
        let edit = |template: &mut Template| {
            for tag in &asked.tags {
                let none = || Failure::NotFound(format!("template {:?} has no tag {tag:?}", asked.name));
                template.tags.remove(tag).ok_or_else(none)?;
            }
            template.updated = now_s();
            template.tidy();
            Ok(())
        };
        builds.change(&daemon, &template, edit).await
    };
    service.finish(removed).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// `GET /templates/{id}/tags`: all tags of a template, by its id or name.
pub async fn list(
    State(service): State<Arc<Service>>,
    scope: Scope,
    Named(wanted): Named,
) -> Result<Json<Value>, Failure> {
    let template = own(&service, &scope, &wanted)?;
    let tags = template.tags.iter().map(|(name, tag)| {
        json!({"tag": name, "buildID": tag.build, "createdAt": moment::of_seconds(tag.assigned)})
    });
    Ok(Json(tags.collect()))
}

#[cfg(test)]
#[path = "tags_test.rs"]
mod tests;
