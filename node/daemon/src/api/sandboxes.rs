//! The handlers for sandboxes: creating, showing, changing and deleting them.
//!
//! Invariants: reads use the cache. If the caller of a creation hangs up, the creation is dropped and leaves nothing. Other operations run
//! to their end on a separate task, because a sandbox must not stay half frozen.

use std::sync::{Arc, OnceLock};
use std::time::{Instant, SystemTime};

use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use serde::Deserialize;
use thaw_protocol::api::{
    Account, ChangeSandbox, CreateSandbox, CreatedSandbox, ForkSandbox, ForkedSandbox, FreezeSandbox,
    FrozenSandbox, NetworkPolicy, PauseSandbox, PausedMemory, Problem, Sandbox, ThawSandbox,
};
use thaw_sandbox::snapshot::Hash;
use thaw_sandbox::state::{Asked, Behalf};
use utoipa::IntoParams;

use super::check;
use super::daemon::{Daemon, Keep};
use super::extract::{Body, BodyIfAny, Key, Parameters};
use super::peer::Peer;
use super::problem::{ApiCode, Refusal};
use super::scope::{Scope, Wanted};
use super::timing::{SERVER_TIMING, server_timing};
use crate::metrics::How;
use crate::spans::{self, Creation, Told};

/// The media type of a watch.
pub const LINES: &str = "application/x-ndjson";

/// Returns one sandbox, by id or name.
#[utoipa::path(get, path = "/v1/sandboxes/{id}", operation_id = "getSandbox", tag = "sandboxes", params(("id" = String, Path, description = "Id or name", max_length = 253, pattern = r"^[^\x00-\x1f\x7f-\x9f]+$")), responses(
    (status = 200, body = Sandbox),
    (status = 404, description = "There is no such sandbox", body = Problem, content_type = "application/problem+json"),
))]
pub async fn get(State(daemon): State<Arc<Daemon>>, wanted: Wanted) -> Result<Json<Sandbox>, Refusal> {
    Ok(Json(daemon.described(&wanted)?))
}

/// Creates a sandbox from an image.
///
/// The answer comes once the sandbox's agent accepts containers or, if the request has a container, once that container is ready.
#[utoipa::path(post, path = "/v1/sandboxes", operation_id = "createSandbox", tag = "sandboxes", request_body = CreateSandbox,
    params(
        ("Idempotency-Key" = Option<String>, Header, description = "A repeated request with the same key creates nothing and gets the first answer", max_length = 255, pattern = "^[!-~]+$"),
        ("traceparent" = Option<String>, Header, description = "The caller's span (W3C Trace Context)"),
    ), responses(
    (status = 201, body = CreatedSandbox, headers(("Server-Timing" = String, description = "The duration of each stage"))),
    (status = 404, description = "There is no such image", body = Problem, content_type = "application/problem+json"),
    (status = 409, description = "The name is in use", body = Problem, content_type = "application/problem+json"),
    (status = 422, description = "The body does not match the schema, or the container did not become ready", body = Problem, content_type = "application/problem+json"),
    (status = 429, description = "Too many requests", body = Problem, content_type = "application/problem+json"),
    (status = 502, description = "The registry cannot be reached, or refuses", body = Problem, content_type = "application/problem+json"),
    (status = 503, description = "thawd makes no more sandboxes because it drains or ends, or this host cannot make one", body = Problem, content_type = "application/problem+json"),
))]
pub async fn create(
    State(daemon): State<Arc<Daemon>>,
    Extension(peer): Extension<Peer>,
    Key(key): Key,
    headers: HeaderMap,
    Body(request): Body<CreateSandbox>,
) -> Result<Response, Refusal> {
    check::create(&request)?;
    check::name(&request.name, &peer)?;
    let said = encoded(&("sandbox", &request))?;
    let behalf = behalf(&peer, key, &said, request.container.is_none());
    let making = daemon.create(request, behalf.clone());
    once(&daemon, behalf.asked, || {
        traced(&daemon, How::Create, &headers, making)
    })
    .await
}

/// Creates a sandbox from a snapshot. The frozen processes continue in it with all that was in their memory; it has an identity of its own. Its
/// `after_thaw` hook runs before the answer, which says how that ended.
#[utoipa::path(post, path = "/v1/thaws", operation_id = "thawSandbox", tag = "sandboxes", request_body = ThawSandbox,
    params(
        ("Idempotency-Key" = Option<String>, Header, description = "A repeated request with the same key creates nothing and gets the first answer", max_length = 255, pattern = "^[!-~]+$"),
        ("traceparent" = Option<String>, Header, description = "The caller's span (W3C Trace Context)"),
    ), responses(
    (status = 201, body = CreatedSandbox, headers(("Server-Timing" = String, description = "The duration of each stage"))),
    (status = 404, description = "There is no such snapshot", body = Problem, content_type = "application/problem+json"),
    (status = 409, description = "The name is in use, or a hook is required and there is none", body = Problem, content_type = "application/problem+json"),
    (status = 422, description = "The body does not match the schema, or the hook after the thaw failed", body = Problem, content_type = "application/problem+json"),
    (status = 429, description = "Too many requests", body = Problem, content_type = "application/problem+json"),
))]
pub async fn thaw(
    State(daemon): State<Arc<Daemon>>,
    Extension(peer): Extension<Peer>,
    scope: Scope,
    Key(key): Key,
    headers: HeaderMap,
    Body(request): Body<ThawSandbox>,
) -> Result<Response, Refusal> {
    check::thaw(&request)?;
    check::name(&request.name, &peer)?;
    let said = encoded(&("thaw", &request))?;
    let behalf = behalf(&peer, key, &said, true);
    let making = daemon.thaw(request, behalf.clone(), scope.viewer());
    once(&daemon, behalf.asked, || {
        traced(&daemon, How::Thaw, &headers, making)
    })
    .await
}

/// Sends a creation as a span, successful or not.
pub(crate) async fn traced(
    daemon: &Daemon,
    how: How,
    headers: &HeaderMap,
    making: impl Future<Output = Result<CreatedSandbox, Refusal>>,
) -> Result<CreatedSandbox, Refusal> {
    let (began, since) = (SystemTime::now(), Instant::now());
    let made = making.await;
    daemon.send_spans(|| Creation {
        what: how.name(),
        parent: spans::parent(headers),
        began,
        took: since.elapsed(),
        outcome: match &made {
            Ok(created) => Ok(Told {
                id: Some(created.sandbox.id.clone()),
                account: created.account.clone(),
                clones: Vec::new(),
            }),
            Err(refusal) => Err(refusal.slug()),
        },
    });
    made
}

/// The result of a creation.
trait Made: serde::Serialize {
    /// The account of where the time went, if there is a single one.
    fn account(&self) -> Option<&Account>;
    fn sandboxes(&self) -> Vec<&Sandbox>;
}

impl Made for CreatedSandbox {
    fn account(&self) -> Option<&Account> {
        Some(&self.account)
    }

    fn sandboxes(&self) -> Vec<&Sandbox> {
        vec![&self.sandbox]
    }
}

impl Made for ForkedSandbox {
    /// `None`: each clone has its own account.
    fn account(&self) -> Option<&Account> {
        None
    }

    fn sandboxes(&self) -> Vec<&Sandbox> {
        self.items.iter().map(|made| &made.sandbox).collect()
    }
}

/// The caller, and the idempotency key of the request, if there is one. `said` is the request.
pub(crate) fn behalf(peer: &Peer, key: Option<String>, said: &[u8], ready_is_all: bool) -> Behalf {
    let asked = key.map(|key| Asked {
        client: peer.client(),
        share: peer.share(),
        key,
        request: Hash::of(said),
        ready_is_all,
    });
    Behalf {
        tenant: peer.tenant().cloned(),
        asked,
        ..Behalf::default()
    }
}

/// Answers a creation. A request with a repeated idempotency key gets the stored answer, even after a restart of thawd. Only the request
/// that creates the sandbox also gets a `Server-Timing` header.
async fn once<T: Made, F: Future<Output = Result<T, Refusal>>>(
    daemon: &Daemon,
    asked: Option<Asked>,
    make: impl FnOnce() -> F,
) -> Result<Response, Refusal> {
    let timing = OnceLock::new();
    let is_kept = asked.is_some();
    let make = || async {
        let made = make().await?;
        if let Some(account) = made.account() {
            timing.get_or_init(|| server_timing(account));
        }
        let answer = encoded(&made)?;
        if is_kept {
            let made = made.sandboxes().into_iter();
            made.for_each(|sandbox| daemon.note_answer(&sandbox.id, &answer));
        }
        Ok(answer)
    };
    let answer = match asked {
        Some(asked) => daemon.answers.once(&asked, Instant::now(), make).await?,
        None => make().await?,
    };
    let json = (header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    let timing = timing.into_inner().map(|timing| (SERVER_TIMING, timing));
    let headers: HeaderMap = [Some(json), timing].into_iter().flatten().collect();
    Ok((StatusCode::CREATED, headers, answer).into_response())
}

/// A value as JSON.
pub(crate) fn encoded(value: &impl serde::Serialize) -> Result<Bytes, Refusal> {
    let encoded = serde_json::to_vec(value).map_err(|e| Refusal::new(ApiCode::Broken, e))?;
    Ok(encoded.into())
}

/// What stays of a deleted sandbox.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct DeleteParameters {
    /// `keep`: keep the record of a sandbox that ended without a request, in state `failed`. If absent, the record is removed too.
    #[param(pattern = "^keep$")]
    failed: Option<String>,
    /// `keep`: if its container's process has exited, keep the record, in state `exited`, and the output. If absent, both are removed too.
    #[param(pattern = "^keep$")]
    exited: Option<String>,
}

impl DeleteParameters {
    fn keep(&self) -> Result<Keep, Refusal> {
        let kept = |name: &str, value: &Option<String>| match value.as_deref() {
            None => Ok(false),
            Some("keep") => Ok(true),
            Some(_) => Err(Refusal::new(
                ApiCode::BadParameter,
                format!("{name} is keep, or left out"),
            )),
        };
        Ok(Keep {
            failed: kept("failed", &self.failed)?,
            exited: kept("exited", &self.exited)?,
        })
    }
}

/// Ends a sandbox and removes all its resources, or removes the record of an ended sandbox.
#[utoipa::path(delete, path = "/v1/sandboxes/{id}", operation_id = "deleteSandbox", tag = "sandboxes", params(DeleteParameters, ("id" = String, Path, description = "Id or name", max_length = 253, pattern = r"^[^\x00-\x1f\x7f-\x9f]+$")), responses(
    (status = 204, description = "The sandbox is deleted"),
    (status = 400, description = "A parameter is invalid", body = Problem, content_type = "application/problem+json"),
    (status = 404, description = "There is no such sandbox", body = Problem, content_type = "application/problem+json"),
))]
pub async fn delete(
    State(daemon): State<Arc<Daemon>>,
    wanted: Wanted,
    Parameters(asked): Parameters<DeleteParameters>,
) -> Result<StatusCode, Refusal> {
    let keep = asked.keep()?;
    let deleting = daemon.clone();
    let deleted = async move {
        match keep == Keep::default() {
            true => deleting.delete(&wanted).await,
            false => deleting.delete_keeping(&wanted, keep).await,
        }
    };
    daemon.finish(deleted).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Changes a running sandbox. Fields that the body omits keep their values.
#[utoipa::path(patch, path = "/v1/sandboxes/{id}", operation_id = "changeSandbox", tag = "sandboxes", request_body = ChangeSandbox,
    params(("id" = String, Path, description = "Id or name", max_length = 253, pattern = r"^[^\x00-\x1f\x7f-\x9f]+$")), responses(
    (status = 200, body = Sandbox),
    (status = 404, description = "There is no such sandbox, or its container's output is not kept", body = Problem, content_type = "application/problem+json"),
    (status = 409, description = "The sandbox's thaw-vmm is of a release that does not support this", body = Problem, content_type = "application/problem+json"),
    (status = 422, description = "The body does not match the schema", body = Problem, content_type = "application/problem+json"),
))]
pub async fn change(
    State(daemon): State<Arc<Daemon>>,
    wanted: Wanted,
    Body(change): Body<ChangeSandbox>,
) -> Result<Json<Sandbox>, Refusal> {
    check::change(&change)?;
    let changed = daemon
        .clone()
        .finish(async move { daemon.change(&wanted, &change).await })
        .await?;
    Ok(Json(Sandbox::clone(&changed)))
}

/// Pauses a sandbox: stops its CPUs, and releases its memory if the body says so. Without a body its memory is kept.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/pause", operation_id = "pauseSandbox", tag = "sandboxes", request_body = PauseSandbox, params(("id" = String, Path, description = "Id or name", max_length = 253, pattern = r"^[^\x00-\x1f\x7f-\x9f]+$")), responses(
    (status = 204, description = "The sandbox is paused"),
    (status = 404, description = "There is no such sandbox", body = Problem, content_type = "application/problem+json"),
    (status = 409, description = "Its memory cannot be released, or is already", body = Problem, content_type = "application/problem+json"),
    (status = 422, description = "The body does not match the schema, or the hook before the freeze failed", body = Problem, content_type = "application/problem+json"),
    (status = 507, description = "The disk is full, or its budget used up", body = Problem, content_type = "application/problem+json"),
))]
pub async fn pause(
    State(daemon): State<Arc<Daemon>>,
    wanted: Wanted,
    BodyIfAny(how): BodyIfAny<PauseSandbox>,
) -> Result<StatusCode, Refusal> {
    let pausing = daemon.clone();
    let paused = async move {
        match how.memory {
            PausedMemory::Keep => Ok(pausing.pause(&wanted).await?),
            PausedMemory::Release => pausing.release_memory(&wanted).await,
        }
    };
    daemon.finish(paused).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Resumes a paused sandbox. If its memory is released, it is thawed under the same id; if that fails, it stays paused.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/resume", operation_id = "resumeSandbox", tag = "sandboxes", params(("id" = String, Path, description = "Id or name", max_length = 253, pattern = r"^[^\x00-\x1f\x7f-\x9f]+$")), responses(
    (status = 204, description = "The sandbox runs"),
    (status = 404, description = "There is no such sandbox, or an image that it needs is gone", body = Problem, content_type = "application/problem+json"),
    (status = 409, description = "A port that it has published is in use", body = Problem, content_type = "application/problem+json"),
    (status = 422, description = "The hook after the thaw failed, and ends the sandbox", body = Problem, content_type = "application/problem+json"),
    (status = 503, description = "thawd makes no more machines because it drains or ends", body = Problem, content_type = "application/problem+json"),
))]
pub async fn resume(State(daemon): State<Arc<Daemon>>, wanted: Wanted) -> Result<StatusCode, Refusal> {
    daemon
        .clone()
        .finish(async move { daemon.resume(&wanted).await })
        .await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Replaces a sandbox's network policy. The new policy applies at once, also to existing connections.
#[utoipa::path(patch, path = "/v1/sandboxes/{id}/network", operation_id = "setNetworkPolicy", tag = "sandboxes", request_body = NetworkPolicy,
    params(("id" = String, Path, description = "Id or name", max_length = 253, pattern = r"^[^\x00-\x1f\x7f-\x9f]+$")), responses(
    (status = 200, body = Sandbox),
    (status = 404, description = "There is no such sandbox", body = Problem, content_type = "application/problem+json"),
    (status = 422, description = "The body does not match the schema", body = Problem, content_type = "application/problem+json"),
))]
pub async fn set_network_policy(
    State(daemon): State<Arc<Daemon>>,
    wanted: Wanted,
    Body(policy): Body<NetworkPolicy>,
) -> Result<Json<Sandbox>, Refusal> {
    check::network(Some(&policy), &[])?;
    let changed = daemon
        .clone()
        .finish(async move { daemon.set_network_policy(&wanted, policy).await })
        .await?;
    Ok(Json(Sandbox::clone(&changed)))
}

/// Freezes a running sandbox: writes its memory and disk to a snapshot. Without a directory, the node stores the snapshot.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/freeze", operation_id = "freezeSandbox", tag = "sandboxes", request_body = FreezeSandbox,
    params(("id" = String, Path, description = "Id or name", max_length = 253, pattern = r"^[^\x00-\x1f\x7f-\x9f]+$")), responses(
    (status = 200, body = FrozenSandbox),
    (status = 404, description = "There is no such sandbox", body = Problem, content_type = "application/problem+json"),
    (status = 409, description = "The snapshot's name is in use, or the sandbox cannot be frozen", body = Problem, content_type = "application/problem+json"),
    (status = 422, description = "The body does not match the schema, or the hook before the freeze failed", body = Problem, content_type = "application/problem+json"),
))]
pub async fn freeze(
    State(daemon): State<Arc<Daemon>>,
    wanted: Wanted,
    Body(request): Body<FreezeSandbox>,
) -> Result<Json<FrozenSandbox>, Refusal> {
    check::freeze(&request)?;
    daemon
        .clone()
        .finish(async move { daemon.freeze(&wanted, request).await })
        .await
        .map(Json)
}

/// Creates clones of a running sandbox, which keeps running. Creates either all requested clones or none. Each clone has everything that is in the
/// memory of the original's processes: keys, tokens, sessions, and the state of their own random generators, which then give the same values
/// in each. The hooks of the container, or its generation file, are how a program renews such state: docs/snapshots.md.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/fork", operation_id = "forkSandbox", tag = "sandboxes", request_body = ForkSandbox,
    params(
        ("id" = String, Path, description = "Id or name", max_length = 253, pattern = r"^[^\x00-\x1f\x7f-\x9f]+$"),
        ("Idempotency-Key" = Option<String>, Header, description = "A repeated request with the same key creates nothing and gets the first answer", max_length = 255, pattern = "^[!-~]+$"),
        ("traceparent" = Option<String>, Header, description = "The caller's span (W3C Trace Context)"),
    ), responses(
    (status = 201, body = ForkedSandbox),
    (status = 404, description = "There is no such sandbox", body = Problem, content_type = "application/problem+json"),
    (status = 409, description = "This process is not thawd and creates no sandboxes, or a hook is required and there is none", body = Problem, content_type = "application/problem+json"),
    (status = 422, description = "The body does not match the schema, or a hook failed", body = Problem, content_type = "application/problem+json"),
    (status = 429, description = "Too many requests", body = Problem, content_type = "application/problem+json"),
))]
pub async fn fork(
    State(daemon): State<Arc<Daemon>>,
    Extension(peer): Extension<Peer>,
    wanted: Wanted,
    Key(key): Key,
    headers: HeaderMap,
    Body(request): Body<ForkSandbox>,
) -> Result<Response, Refusal> {
    check::fork(&request)?;
    let said = encoded(&("fork", &wanted.text, &request))?;
    let asked = behalf(&peer, key, &said, false).asked;
    let making = daemon.fork(wanted, request, asked.clone(), spans::parent(&headers));
    once(&daemon, asked, || making).await
}
