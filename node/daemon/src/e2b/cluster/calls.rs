//! Which node a call of the control plane is for.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::uri::PathAndQuery;
use axum::http::{Method, StatusCode, Uri};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use thaw_sandbox::error::ErrorKind;

use super::super::api_key;
use super::super::failure::Failure;
use super::super::members::Members;
use super::super::members::proof::Step;
use super::super::service::Service;
use super::super::whole_id::WholeId;
use super::forward::forward;
use super::holder::Way;
use super::mark::{is_forwarded, step_of};
use super::takeover::Takeovers;
use super::{holder, lists, placement, takeover};
use crate::api::credentials::Credentials;
use crate::api::extract::read_body;
use crate::api::grant::Role;
use crate::api::peer::Peer;
use crate::api::problem;
use crate::api::request_gate::{Bounds, Gate, Share, Verb};
use crate::api::scope::Scope;

/// What it takes to pass calls on.
#[derive(Clone)]
pub struct Calls {
    service: Arc<Service>,
    credentials: Arc<Credentials>,
    takeovers: Takeovers,
    /// For calls of which more is in memory here than their heads, before the gate of the node that answers them.
    gate: Arc<Gate>,
}

impl Calls {
    /// The calls of a service, whose callers have these credentials.
    pub fn new(service: Arc<Service>, credentials: Arc<Credentials>) -> Calls {
        Calls {
            service,
            credentials,
            takeovers: Takeovers::default(),
            gate: Gate::new(bounds()),
        }
    }
}

/// Most calls whose bodies are in memory here, 1 MiB each, and most lists, for which other nodes' answers are. All nodes together make more
/// sandboxes at once than one does.
fn bounds() -> Bounds {
    let share = |running, of_one, waiting| Share {
        running,
        of_one,
        waiting,
    };
    Bounds {
        running: 1280,
        create: share(1024, 896, 1024),
        read: share(4, 3, 1024),
        ..Bounds::default()
    }
}

/// A call that does not concern this node alone.
#[derive(Debug, PartialEq, Eq)]
enum Call {
    OfSandbox(WholeId),
    List,
    Create,
}

/// Passes a call on to the node that it is for, or asks all nodes. Callers are authenticated here before, and by the other node again.
pub async fn pass_on(State(calls): State<Calls>, request: Request, next: Next) -> Response {
    if let Some(answer) = holder::answered(&calls.service, &request) {
        return answer;
    }
    let members = calls.service.members.clone().filter(|_| !is_forwarded(&request));
    let answered = match (call(&request), members) {
        (Some(Call::OfSandbox(whole)), _) => of_sandbox(&calls, &whole, request, next).await,
        (Some(call), Some(members)) => of_all(&calls, &members, call, request, next).await,
        _ => return next.run(request).await,
    };
    answered.unwrap_or_else(Failure::into_response)
}

async fn of_all(
    calls: &Calls,
    members: &Members,
    call: Call,
    request: Request,
    next: Next,
) -> Result<Response, Failure> {
    let Calls {
        service,
        credentials,
        gate,
        ..
    } = calls;
    let (peer, key) = api_key::admit(credentials, request.headers())?;
    let verb = match call {
        Call::Create => Verb::Create,
        Call::List | Call::OfSandbox(_) => Verb::Read,
    };
    let _permit = gate.enter(peer.share(), verb).await?;
    match verb {
        Verb::Create => placement::place(service, members, (peer, key), request, next).await,
        _ => lists::gather(members, &key, request, next).await,
    }
}

async fn of_sandbox(
    calls: &Calls,
    whole: &WholeId,
    request: Request,
    next: Next,
) -> Result<Response, Failure> {
    if holder::has(&calls.service, whole) {
        return local(calls, whole, request, next).await;
    }
    let (peer, _) = api_key::admit(&calls.credentials, request.headers())?;
    match holder::way(&calls.service, whole, step_of(&request)).await {
        Way::Here => here(whole, request, next).await,
        Way::Other(member, step) => {
            let is_creation = creates(&request);
            let forwarded = forward(&calls.service, &member, step, request).await;
            forwarded.map_err(|failure| match is_creation {
                true => failure.of_creation(),
                false => failure,
            })
        }
        Way::Nowhere => of_gone(calls, whole, &peer, request, next).await,
    }
}

/// Answers a call for a sandbox that this node has. If another node has taken it over meanwhile, a call that resumes or deletes it finds that
/// out, and goes on to that node.
async fn local(calls: &Calls, whole: &WholeId, request: Request, next: Next) -> Result<Response, Failure> {
    let service = &calls.service;
    let shown = service.daemon.cache.get(&whole.id);
    let is_released = shown.is_some_and(|shown| shown.memory_released);
    let deletes = takeover::deletes(&request, whole);
    let members = service.members.as_ref().filter(|members| members.has_copies());
    let may_be_old = members.is_some() && is_released && (deletes || takeover::resumes(&request));
    if !may_be_old || step_of(&request) == Some(Step::Last) {
        return here(whole, request, next).await;
    }
    let (peer, _) = api_key::admit(&calls.credentials, request.headers())?;
    let _permit = calls.gate.enter(peer.share(), Verb::Change).await?;
    let (head, body) = request.into_parts();
    let body = read_body(Request::from_parts(head.clone(), body)).await?;
    let request = || Request::from_parts(head.clone(), Body::from(body.clone()));
    let answer = here(whole, request(), next).await?;
    let may_be_elsewhere = match deletes {
        true => answer.status() == StatusCode::NO_CONTENT,
        false => problem::is(&answer, ErrorKind::SandboxClaimed),
    };
    if !may_be_elsewhere {
        return Ok(answer);
    }
    match holder::found(service, whole).await {
        Some(Way::Other(member, step)) => forward(service, &member, step, request()).await,
        _ => Ok(answer),
    }
}

/// Answers a call for a sandbox that no node has. If there is a copy, a call that resumes the sandbox takes it over, and one that deletes it
/// claims it.
async fn of_gone(
    calls: &Calls,
    whole: &WholeId,
    peer: &Peer,
    request: Request,
    next: Next,
) -> Result<Response, Failure> {
    if peer.role().suffices(Role::Operate) {
        let (service, scope) = (&calls.service, Scope::of(peer));
        if takeover::resumes(&request) {
            calls.takeovers.take(service, whole, &scope).await?;
        }
        if takeover::deletes(&request, whole) && calls.takeovers.discard(service, whole, &scope).await? {
            return Ok(StatusCode::NO_CONTENT.into_response());
        }
    }
    here(whole, request, next).await
}

async fn here(whole: &WholeId, mut request: Request, next: Next) -> Result<Response, Failure> {
    *request.uri_mut() = shortened(request.uri(), whole)?;
    Ok(next.run(request).await)
}

/// The same address with the sandbox's id as this node has it.
fn shortened(uri: &Uri, whole: &WholeId) -> Result<Uri, Failure> {
    let bad = |e: &dyn std::fmt::Display| Failure::Bad(e.to_string());
    let path = uri.path_and_query().map_or("/", |path| path.as_str());
    let path = path.replacen(&whole.to_string(), &whole.id, 1);
    let mut parts = uri.clone().into_parts();
    parts.path_and_query = Some(path.parse::<PathAndQuery>().map_err(|e| bad(&e))?);
    Uri::from_parts(parts).map_err(|e| bad(&e))
}

/// Whether a call for a sandbox creates something each time.
fn creates(request: &Request) -> bool {
    let path = request.uri().path();
    request.method() == Method::POST && (path.ends_with("/fork") || path.ends_with("/snapshots"))
}

/// The call of a request, if it is one of those here.
fn call(request: &Request) -> Option<Call> {
    let path = request.uri().path();
    match (request.method(), path) {
        (&Method::GET, "/sandboxes" | "/v2/sandboxes") => return Some(Call::List),
        (&Method::POST, "/sandboxes" | "/v2/sandboxes") => return Some(Call::Create),
        _ => {}
    }
    let rest = path
        .strip_prefix("/v2")
        .unwrap_or(path)
        .strip_prefix("/sandboxes/")?;
    let id = rest.split('/').next().unwrap_or_default();
    let whole = WholeId::parse(id).filter(|whole| whole.home.is_some());
    whole.map(Call::OfSandbox)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn call_is_of_a_sandbox_a_list_or_a_creation() {
        let whole = || WholeId::parse("0123456789ab00ff").unwrap();
        for (method, path, expected) in [
            ("GET", "/v2/sandboxes?limit=1", Some(Call::List)),
            ("GET", "/sandboxes", Some(Call::List)),
            ("POST", "/v2/sandboxes", Some(Call::Create)),
            ("PUT", "/v2/sandboxes", None),
            (
                "GET",
                "/sandboxes/0123456789ab00ff",
                Some(Call::OfSandbox(whole())),
            ),
            (
                "POST",
                "/v2/sandboxes/0123456789ab00ff/connect",
                Some(Call::OfSandbox(whole())),
            ),
            ("GET", "/sandboxes/0123456789ab", None),
            ("GET", "/sandboxes/metrics", None),
            ("GET", "/templates/0123456789ab00ff", None),
            ("GET", "/v1/sandboxes/0123456789ab00ff", None),
        ] {
            let request = axum::http::Request::builder().method(method).uri(path);
            assert_eq!(
                call(&request.body(Body::empty()).unwrap()),
                expected,
                "{method} {path}"
            );
        }
    }

    #[test]
    fn address_has_the_id_of_this_node() {
        let whole = WholeId::parse("0123456789ab00ff").unwrap();
        let uri = "/sandboxes/0123456789ab00ff/logs?a=0123456789ab00ff"
            .parse()
            .unwrap();
        let shorter = shortened(&uri, &whole).unwrap();
        assert_eq!(shorter, "/sandboxes/0123456789ab/logs?a=0123456789ab00ff");
    }
}
