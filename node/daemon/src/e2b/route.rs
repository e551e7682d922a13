//! The way of a request: to the control plane, or to a port of a sandbox, which may be on another node.
//!
//! Invariants: a request for a sandbox that does not exist, or does not run, never reaches another; only sandboxes that this API created, and
//! clones of those, have ports here; a request without the traffic token of a sandbox with private ports neither reaches nor resumes it, but
//! at [`ENVD_PORT`] with its access token.

use std::ops::ControlFlow;
use std::sync::Arc;

use axum::extract::Request;
use axum::http::header::UPGRADE;
use axum::http::{HeaderMap, Method, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use hyper::service::Service as _;
use hyper_util::service::TowerToHyperService;
use serde_json::json;
use thaw_protocol::api::Sandbox;
use tokio::sync::watch;

use super::cluster::forward::forward;
use super::cluster::holder::{self, Way};
use super::cluster::mark::step_of;
use super::envd::access::{self, Access, ForSandbox};
use super::failure::Failure;
use super::lifecycle::is_claimed;
use super::members::Member;
use super::members::proof::Step;
use super::notes::Notes;
use super::places::Party;
use super::proxy::{Failed, Proxy};
use super::service::{Service, is_living, is_paused};
use super::target::{ENVD_PORT, Target, target};
use crate::api::held_body::holding;
use crate::api::scope::Wanted;

/// The timeout of a sandbox that a request resumed, seconds.
const RESUMED_TIMEOUT_S: u32 = 300;

/// The header with a sandbox's access token. The guest does not see it.
const ACCESS_TOKEN: &str = "x-access-token";

/// The header with a sandbox's traffic token. The proxy removes it.
const TRAFFIC_TOKEN: &str = "e2b-traffic-access-token";

/// The ways.
pub struct Routing {
    service: Arc<Service>,
    /// Serves [`ENVD_PORT`] of all sandboxes. `None`: that port is one like the others.
    envd: Option<Router>,
    proxy: Proxy,
}

impl Routing {
    /// The ways to the sandboxes of a service.
    pub fn new(service: Arc<Service>, envd: Option<Router>) -> Routing {
        Routing {
            service,
            envd,
            proxy: Proxy::default(),
        }
    }

    /// Answers a request that is for a sandbox. Continues with any other, which is for the control plane.
    pub async fn answer(&self, request: Request) -> ControlFlow<Response, Request> {
        if request.method() == Method::CONNECT {
            let why = "CONNECT is not supported by this node: ask for a WebSocket with GET, over HTTP/1.1";
            return ControlFlow::Break(Failure::Unsupported(why.to_owned()).into_response());
        }
        match target(&request, self.service.domain.as_ref()) {
            Ok(Some(target)) => ControlFlow::Break(self.of_sandbox(&target, request).await),
            Ok(None) => ControlFlow::Continue(request),
            Err(why) => ControlFlow::Break(Failure::Bad(why).into_response()),
        }
    }

    async fn of_sandbox(&self, target: &Target, mut request: Request) -> Response {
        let step = step_of(&request);
        if let Some(to) = self.other(target, step).await {
            return self.pass_on(target, to, request).await;
        }
        let envd = self.envd.as_ref().filter(|_| target.port == ENVD_PORT);
        // Before a paused sandbox is resumed.
        let Some(is_admitted) = self.is_admitted(target, request.headers()) else {
            return Unavailable::Missing.answer(target);
        };
        if envd.is_none() && !is_admitted {
            return Unavailable::Private.answer(target);
        }
        if envd.is_some() {
            let token = self.service.tokens.access_token(&target.id);
            request.extensions_mut().insert(Access::Token(token.into()));
        }
        // A sandbox with private ports is not resumed by whoever has no token of it at all.
        let may_resume = is_admitted || access::is_granted(&request);
        let wanted = match self.sandbox(target, may_resume).await {
            Ok(wanted) => wanted,
            Err(unavailable) => {
                if unavailable == Unavailable::Claimed
                    && let Some(to) = self.other(target, step).await
                {
                    return self.pass_on(target, to, request).await;
                }
                return unavailable.answer(target);
            }
        };
        match envd {
            Some(envd) => {
                request.extensions_mut().insert(ForSandbox { wanted });
                let answered = TowerToHyperService::new(envd.clone()).call(request).await;
                answered.unwrap_or_else(|never| match never {})
            }
            None => self.proxied(target, request).await,
        }
    }

    /// Sends a request to a port in the guest, and returns the guest's answer. The sandbox is in use until the answer has been read, or an
    /// upgraded connection has ended.
    async fn proxied(&self, target: &Target, mut request: Request) -> Response {
        let daemon = &self.service.daemon;
        // Before the address is read: it is the sandbox's for this period.
        let during = daemon.uninterrupted(&target.id);
        let shown = daemon.cache.get(&target.id);
        let network = shown.as_ref().and_then(|shown| shown.network.as_ref());
        let address = network.and_then(|network| network.address.parse().ok());
        let Some((address, during)) = address.zip(during) else {
            return Unavailable::NotOpen.answer(target);
        };
        let given = request
            .headers()
            .get(ACCESS_TOKEN)
            .and_then(|token| token.to_str().ok());
        if given.is_some_and(|given| self.service.tokens.check(&target.id, given)) {
            request.headers_mut().remove(ACCESS_TOKEN);
        }
        let in_use = Arc::new(daemon.use_port(&target.id));
        let closing = match request.headers().contains_key(UPGRADE) {
            true => until_closed(daemon.closing(), in_use.clone()),
            false => daemon.closing(),
        };
        let to = ((address, target.port), during);
        let tenant = daemon.read_record(&target.id, |record| record.terms.tenant.clone());
        let sandbox = Party {
            name: &target.id,
            tenant: tenant.flatten(),
        };
        match self.proxy.send(sandbox, to, request, closing).await {
            Ok(answer) => answer.map(|body| holding(body, in_use)),
            Err(Failed::NotOpen) => Unavailable::NotOpen.answer(target),
            Err(Failed::Refused(refusal)) => refusal.into_response(),
            Err(Failed::Broken(why)) => {
                Failure::Unreachable(format!("the connection to port {} broke: {why}", target.port))
                    .into_response()
            }
        }
    }

    /// Whether a request may go to the ports of a target's sandbox. `None`: there is no sandbox.
    fn is_admitted(&self, target: &Target, headers: &HeaderMap) -> Option<bool> {
        let daemon = &self.service.daemon;
        let is_private = daemon.read_record(&target.id, |record| Notes::are_private(&record.terms))?;
        let given = headers.get(TRAFFIC_TOKEN).and_then(|token| token.to_str().ok());
        Some(!is_private || given.is_some_and(|given| self.service.tokens.check_traffic(&target.id, given)))
    }

    /// The sandbox of a target. A paused one is resumed if it is to be, and if the request may do that.
    async fn sandbox(&self, target: &Target, may_resume: bool) -> Result<Wanted, Unavailable> {
        let wanted = Wanted::on_node(&target.id);
        let found = self.service.daemon.cache.get(&target.id);
        let found = found
            .filter(|found| is_living(found))
            .ok_or(Unavailable::Missing)?;
        if !self.service.is_own(&target.id) {
            return Err(Unavailable::Missing);
        }
        if is_paused(&found) {
            let notes = self.service.own_notes(&target.id);
            if !may_resume || !notes.is_some_and(|notes| notes.auto_resume) {
                return Err(Unavailable::Paused);
            }
            self.wake(&wanted, &found).await?;
        }
        Ok(wanted)
    }

    /// Another node that the request is for, and the step to it.
    async fn other(&self, target: &Target, step: Option<Step>) -> Option<(Arc<Member>, Step)> {
        match holder::way(&self.service, &target.whole(), step).await {
            Way::Other(member, step) => Some((member, step)),
            Way::Here | Way::Nowhere => None,
        }
    }

    async fn pass_on(&self, target: &Target, to: (Arc<Member>, Step), request: Request) -> Response {
        let (member, step) = to;
        let forwarded = forward(&self.service, &member, step, request).await;
        forwarded.unwrap_or_else(|failure| elsewhere(failure, target))
    }

    async fn wake(&self, wanted: &Wanted, paused: &Sandbox) -> Result<(), Unavailable> {
        match self.service.resume(wanted, RESUMED_TIMEOUT_S, None).await {
            // Another request has resumed it meanwhile.
            Ok(_) | Err(Failure::Conflict(_)) => Ok(()),
            Err(Failure::Refused(refusal)) if is_claimed(&refusal) => Err(Unavailable::Claimed),
            Err(failure) => {
                let why = failure.why();
                tracing::warn!(sandbox = paused.id, "not resumed for a request: {why}");
                Err(Unavailable::NotResumed(why))
            }
        }
    }
}

/// Becomes true when thawd ends. Holds this until then, or until the connection that receives it has ended.
fn until_closed(mut thawd: watch::Receiver<bool>, held: impl Send + 'static) -> watch::Receiver<bool> {
    let (close, closing) = watch::channel(false);
    tokio::spawn(async move {
        tokio::select! {
            () = close.closed() => {}
            _ = thawd.wait_for(|ends| *ends) => {}
        }
        close.send_replace(true);
        drop(held);
    });
    closing
}

/// Why a request does not reach a port.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Unavailable {
    Missing,
    /// It was paused here, and another node has taken it over or deleted it.
    Claimed,
    Paused,
    /// It was to be resumed for the request, which failed for this reason.
    NotResumed(String),
    NotOpen,
    /// Its ports are private, and the request has no token for them.
    Private,
}

impl Unavailable {
    /// The answer, by whose words clients tell one reason from another.
    fn answer(self, target: &Target) -> Response {
        let message = match self {
            Unavailable::Missing | Unavailable::Claimed => "The sandbox was not found".to_owned(),
            Unavailable::Paused => "The sandbox is paused: connect to it first".to_owned(),
            Unavailable::NotResumed(why) => format!("The sandbox is paused, and could not be resumed: {why}"),
            Unavailable::NotOpen => format!("The sandbox is running but port is not open: {}", target.port),
            Unavailable::Private => {
                let message =
                    format!("The sandbox's ports are private: send its traffic token in {TRAFFIC_TOKEN}");
                return unavailable(StatusCode::FORBIDDEN, &message, target);
            }
        };
        bad_gateway(&message, target)
    }
}

fn bad_gateway(message: &str, target: &Target) -> Response {
    unavailable(StatusCode::BAD_GATEWAY, message, target)
}

fn unavailable(code: StatusCode, message: &str, target: &Target) -> Response {
    let body =
        json!({"sandboxId": target.id, "message": message, "code": code.as_u16(), "port": target.port});
    (code, Json(body)).into_response()
}

/// The answer if the node of the sandbox cannot be reached.
fn elsewhere(failure: Failure, target: &Target) -> Response {
    match failure {
        Failure::Unreachable(why) | Failure::Broken(why) => bad_gateway(&why, target),
        other => other.into_response(),
    }
}

#[cfg(test)]
#[path = "route_test.rs"]
mod tests;
