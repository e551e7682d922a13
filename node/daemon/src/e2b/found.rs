//! The template that a caller names: one of the configuration, a template of its tenant, or a stored snapshot of its tenant.

use super::builds::names::split;
use super::builds::record::{DEFAULT_TAG, Status};
use super::context::Context;
use super::failure::Failure;
use super::service::Service;
use super::template::{Source, stored};
use crate::api::scope::Scope;

/// See the module.
#[derive(Clone, Debug)]
pub struct Found {
    pub id: String,
    pub alias: Option<String>,
    pub disk_mib: Option<u32>,
    pub source: Source,
    pub context: Context,
}

/// A template by its name or its id, with a tag or none (`NAME:TAG`).
///
/// # Errors
/// [`Failure::NotFound`]: it does not exist for the caller, or has no build with the tag.
pub async fn find(service: &Service, wanted: &str, scope: &Scope) -> Result<Found, Failure> {
    if let Some(source) = service.templates.get(wanted) {
        return Ok(Found {
            id: wanted.to_owned(),
            alias: Some(wanted.to_owned()),
            disk_mib: match source {
                Source::Image(request) => Some(request.disk_mib),
                Source::Snapshot(..) => None,
            },
            source: source.clone(),
            context: Context::default(),
        });
    }
    if let Some(found) = built(service, wanted, scope)? {
        return Ok(found);
    }
    let snapshot = stored(&service.daemon, wanted, scope.viewer()).await?;
    Ok(Found {
        id: snapshot.id.clone(),
        alias: snapshot.name,
        disk_mib: None,
        source: Source::Snapshot(snapshot.id, scope.viewer()),
        context: Context::default(),
    })
}

/// The same of the templates that callers build.
fn built(service: &Service, wanted: &str, scope: &Scope) -> Result<Option<Found>, Failure> {
    let (name, tag) = split(wanted);
    let tag = tag.unwrap_or(DEFAULT_TAG);
    let Some(template) = service.builds.store.find_usable(name, &scope.viewer()) else {
        return Ok(None);
    };
    let ready = template.tagged(tag).filter(|build| build.status == Status::Ready);
    let snapshot = ready.and_then(|build| Some((build, build.snapshot.clone()?)));
    let Some((build, snapshot)) = snapshot else {
        let why = format!("template {name:?} has no build with the tag {tag:?} that is ready");
        return Err(Failure::NotFound(why));
    };
    Ok(Some(Found {
        id: template.id.clone(),
        alias: Some(template.name.clone()),
        disk_mib: build.machine.disk_mib,
        source: Source::Snapshot(snapshot, template.owner()),
        context: build.context.clone(),
    }))
}
