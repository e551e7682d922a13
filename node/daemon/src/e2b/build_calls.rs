//! The handlers for builds of templates: requesting, starting and following one.
//!
//! Invariants: a build of another tenant's template does not exist; a body that asks for something this node does not do is refused, never
//! ignored.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::{Extension, Json};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use thaw_protocol::api::DEFAULT_DISK_MIB;
use thaw_sandbox::config::e2b::E2bTemplate;

use super::builds::base::Base;
use super::builds::log::{Entry, Level};
use super::builds::make::Job;
use super::builds::names::{check_name, split, tags};
use super::builds::ready::Commands;
use super::builds::record::{Build, Reason, Shape, Status, Template};
use super::builds::step::{NewStep, Step};
use super::context::Context;
use super::extract::{Body, OfTemplate, Query};
use super::failure::Failure;
use super::found::{Found, find};
use super::service::Service;
use super::tags::own;
use super::template::{BUILD_LABEL, Source, of_image};
use crate::api::check;
use crate::api::logs::parse_moment;
use crate::api::peer::Peer;
use crate::api::reserved;
use crate::api::sandboxes::encoded;
use crate::api::scope::Scope;

/// Most bytes that the snapshots of a tenant's templates have before a build begins.
const MAX_BYTES: u64 = 128 << 30;
/// Largest disk of a template, MiB.
const MAX_DISK_MIB: u32 = 128 << 10;
/// Most entries of a log in one answer.
const MOST_ENTRIES: u64 = 100;
const MILLISECOND_NS: u64 = 1_000_000;

/// A request for a build.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct NewBuild {
    name: Option<String>,
    /// The former name of `name`.
    alias: Option<String>,
    tags: Option<Vec<String>>,
    /// Ignored: an API key is of one tenant.
    #[serde(rename = "teamID")]
    _team_id: Option<Value>,
    cpu_count: Option<u8>,
    #[serde(rename = "memoryMB")]
    memory_mib: Option<u32>,
    #[serde(rename = "minFreeDiskMb")]
    min_free_disk_mib: Option<u32>,
}

impl NewBuild {
    /// The name, and the tags that the build gets.
    fn names(&self) -> Result<(String, Vec<String>), Failure> {
        let text = self.name.as_ref().or(self.alias.as_ref());
        let text = text.ok_or_else(|| Failure::Bad("name is missing".into()))?;
        let (name, tag) = split(text);
        check_name(name)?;
        let tags = tags(tag, self.tags.as_deref().unwrap_or_default())?;
        Ok((name.to_owned(), tags))
    }

    fn machine(&self) -> Result<Shape, Failure> {
        // The layer is as large as a build may need, and what is to be left.
        let disk_mib = self
            .min_free_disk_mib
            .map(|free| DEFAULT_DISK_MIB.saturating_add(free));
        match disk_mib {
            Some(size) if size > MAX_DISK_MIB => Err(Failure::Bad(format!(
                "minFreeDiskMb is too large; it may be {}",
                MAX_DISK_MIB - DEFAULT_DISK_MIB
            ))),
            _ => Ok(Shape {
                cpus: self.cpu_count,
                memory_mib: self.memory_mib,
                disk_mib,
            }),
        }
    }
}

/// `POST /v3/templates`: requests a build of a template, which is made if the caller's tenant has none of this name.
pub async fn request(
    State(service): State<Arc<Service>>,
    Extension(peer): Extension<Peer>,
    Body(asked): Body<NewBuild>,
) -> Result<(StatusCode, Json<Value>), Failure> {
    let (name, tags) = asked.names()?;
    if service.templates.get(&name).is_some() {
        let why = format!("template {name:?} is in the node's configuration: choose another name");
        return Err(Failure::Conflict(why));
    }
    let machine = asked.machine()?;
    // Checked with an image that is never used.
    image("x", machine)?;
    let (builds, tenant) = (service.builds.clone(), peer.tenant().cloned());
    let (of_build, named) = (tags.clone(), name.clone());
    let requested = async move { builds.store.request(tenant, &named, of_build, machine).await };
    let (template, build) = service.finish(requested).await?;
    let answer = json!({
        "templateID": template.id, "buildID": build, "public": template.public, "names": [name], "aliases": [name], "tags": tags,
    });
    Ok((StatusCode::ACCEPTED, Json(answer)))
}

/// What to build.
#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
pub struct StartBuild {
    from_image: Option<String>,
    from_template: Option<String>,
    #[serde(skip_serializing)]
    from_image_registry: Option<Value>,
    #[serde(skip_serializing)]
    force: bool,
    steps: Vec<NewStep>,
    start_cmd: Option<String>,
    ready_cmd: Option<String>,
}

/// `POST /v2/templates/{id}/builds/{build}`: starts a build that was requested.
pub async fn start(
    State(service): State<Arc<Service>>,
    Extension(peer): Extension<Peer>,
    scope: Scope,
    OfTemplate(template, build): OfTemplate,
    Body(asked): Body<StartBuild>,
) -> Result<StatusCode, Failure> {
    let (template, build) = own_build(&service, &scope, &template, &build)?;
    if build.status != Status::Waiting {
        return Err(Failure::Conflict(format!(
            "build {} was started already",
            build.id
        )));
    }
    let steps = Step::all(&asked.steps)?;
    let base = base(&service, &peer, &scope, &asked, build.machine).await?;
    for (at, files) in steps
        .iter()
        .enumerate()
        .filter_map(|(at, step)| Some((at, step.files()?)))
    {
        if service
            .builds
            .uploads
            .find(template.tenant.as_ref(), files)
            .await
            .is_none()
        {
            let why = format!(
                "step {}: the files with the hash {files} are not uploaded",
                at + 1
            );
            return Err(Failure::Bad(why));
        }
    }
    check_size(&service, &template).await?;
    let given = |command: &Option<String>| command.clone().filter(|command| !command.is_empty());
    let job = Job {
        tenant: template.tenant.clone(),
        template: template.id.clone(),
        build: build.id.clone(),
        base,
        steps,
        commands: Commands {
            start: given(&asked.start_cmd),
            ready: given(&asked.ready_cmd),
        },
        force: asked.force || asked.steps.iter().any(|step| step.force),
        said: encoded(&asked)?.to_vec(),
    };
    service.builds.begin(&service.daemon, job)?;
    Ok(StatusCode::ACCEPTED)
}

/// A sandbox of an image, as a build asks for it.
fn image(image: &str, machine: Shape) -> Result<Source, Failure> {
    let template = E2bTemplate {
        cpus: machine.cpus,
        memory_mib: machine.memory_mib,
        disk_mib: machine.disk_mib,
        ..E2bTemplate::default()
    };
    of_image(image, &template).map_err(Failure::Bad)
}

/// What a build begins with.
async fn base(
    service: &Service,
    peer: &Peer,
    scope: &Scope,
    asked: &StartBuild,
    machine: Shape,
) -> Result<Base, Failure> {
    if asked
        .from_image_registry
        .as_ref()
        .is_some_and(|given| !given.is_null())
    {
        return Err(Failure::unsupported("fromImageRegistry"));
    }
    let given = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
    match (given(&asked.from_image), given(&asked.from_template)) {
        (Some(name), None) => {
            let source = image(&name, machine)?;
            if let Source::Image(request) = &source {
                reserved::check(peer, request.as_ref())?;
            }
            Ok(Base {
                source,
                context: Context::default(),
            })
        }
        (None, Some(name)) => of_template(find(service, &name, scope).await?, machine),
        _ => Err(Failure::Bad("give either fromImage or fromTemplate".into())),
    }
}

/// A sandbox of a template, as a build asks for it.
fn of_template(found: Found, machine: Shape) -> Result<Base, Failure> {
    let source = match found.source {
        Source::Image(mut request) => {
            request.cpus = machine.cpus.unwrap_or(request.cpus);
            request.memory_mib = machine.memory_mib.unwrap_or(request.memory_mib);
            request.disk_mib = machine.disk_mib.unwrap_or(request.disk_mib);
            check::create(&request)?;
            Source::Image(request)
        }
        source if machine == Shape::default() => source,
        Source::Snapshot(..) => {
            let why = "the template was frozen, so its machine stays: leave out cpuCount, memoryMB and minFreeDiskMb";
            return Err(Failure::Bad(why.into()));
        }
    };
    Ok(Base {
        source,
        context: found.context,
    })
}

/// Checks that the tenant's templates are not too large already.
async fn check_size(service: &Service, template: &Template) -> Result<(), Failure> {
    let stored = service.daemon.factory()?.snapshots(template.owner()).await?;
    let tenant = template.tenant.as_ref().map(|tenant| tenant.as_str());
    let of_builds = stored
        .iter()
        .filter(|snapshot| snapshot.tenant.as_deref() == tenant && snapshot.labels.contains_key(BUILD_LABEL));
    let bytes = of_builds
        .map(|snapshot| snapshot.disk_bytes)
        .fold(0, u64::saturating_add);
    match bytes > MAX_BYTES {
        true => Err(Failure::Conflict(format!(
            "the templates have {bytes} bytes, more than {MAX_BYTES}: delete some, or remove tags of old builds"
        ))),
        false => Ok(()),
    }
}

/// A template of the caller, and a build of it.
fn own_build(
    service: &Service,
    scope: &Scope,
    template: &str,
    build: &str,
) -> Result<(Arc<Template>, Build), Failure> {
    let found = own(service, scope, template)?;
    match found.build(build).cloned() {
        Some(build) => Ok((found, build)),
        None => Err(Failure::NotFound(format!(
            "template {template:?} has no build {build:?}"
        ))),
    }
}

/// The least level of the entries that a caller wants.
fn least(query: &Query) -> Result<Level, Failure> {
    let name = query.text("level").unwrap_or("debug");
    let wrong = || Failure::Bad("level is one of debug, info, warn, error".into());
    Level::parse(name).ok_or_else(wrong)
}

fn most(query: &Query) -> Result<usize, Failure> {
    let limit = query.number("limit")?.unwrap_or(MOST_ENTRIES);
    Ok(limit.min(MOST_ENTRIES) as usize)
}

/// A build whose end could not be written to the disk.
fn unrecorded(build: Build) -> Build {
    Build {
        status: Status::Error,
        reason: Some(Reason {
            message: "the node could not record how the build ended: build the template again".into(),
            step: "finalize".into(),
        }),
        ..build
    }
}

/// `GET /templates/{id}/builds/{build}/status`: the status, and the log from the entry `logsOffset` on.
pub async fn status(
    State(service): State<Arc<Service>>,
    scope: Scope,
    OfTemplate(template, build): OfTemplate,
    query: Query,
) -> Result<Json<Value>, Failure> {
    query.only(&["logsOffset", "limit", "level"])?;
    let (least, most) = (least(&query)?, most(&query)?);
    let offset = usize::try_from(query.number("logsOffset")?.unwrap_or(0)).unwrap_or(usize::MAX);
    // First: a build ends before it is not in progress any more.
    let is_running = service.builds.running(&build).is_some();
    let (template, build) = own_build(&service, &scope, &template, &build)?;
    let build = match build.status {
        Status::Building if !is_running => unrecorded(build),
        _ => build,
    };
    let mut log = service.builds.log(&template.id, &build.id).await;
    log.retain(|entry| entry.level >= least);
    let shown: Vec<&Entry> = log.iter().skip(offset).take(most).collect();
    let mut answer = json!({
        "templateID": template.id, "buildID": build.id, "status": build.status, "logs": [], "logEntries": shown,
    });
    if let Some(reason) = &build.reason {
        let of_step: Vec<&Entry> = log.iter().filter(|entry| entry.step == reason.step).collect();
        let last = &of_step[of_step.len().saturating_sub(20)..];
        answer["reason"] = json!({"message": reason.message, "step": reason.step, "logEntries": last});
    }
    Ok(Json(answer))
}

/// `GET /templates/{id}/builds/{build}/logs`: the entries from `cursor` on, in milliseconds since the Unix epoch; or with
/// `direction=backward` those before it, the last first.
pub async fn logs(
    State(service): State<Arc<Service>>,
    scope: Scope,
    OfTemplate(template, build): OfTemplate,
    query: Query,
) -> Result<Json<Value>, Failure> {
    query.only(&["cursor", "limit", "direction", "level", "source"])?;
    let (least, most) = (least(&query)?, most(&query)?);
    let is_forward = query.is_forward()?;
    let cursor = query
        .number("cursor")?
        .map(|at| at.saturating_mul(MILLISECOND_NS));
    let (template, build) = own_build(&service, &scope, &template, &build)?;
    let mut log = service.builds.log(&template.id, &build.id).await;
    log.retain(|entry| {
        let at = parse_moment(&entry.timestamp).unwrap_or_default();
        let is_in = cursor.is_none_or(|cursor| if is_forward { at >= cursor } else { at < cursor });
        is_in && entry.level >= least
    });
    if !is_forward {
        log.reverse();
    }
    log.truncate(most);
    Ok(Json(json!({"logs": log})))
}

#[cfg(test)]
#[path = "build_calls_test.rs"]
mod tests;
