//! The way of a request to another node.

use axum::extract::Request;
use axum::response::Response;

use super::super::failure::Failure;
use super::super::members::Member;
use super::super::members::endpoint::Stream;
use super::super::members::proof::Step;
use super::super::proxy::{Failed, Sent};
use super::super::service::Service;
use super::mark::is_forwarded;

/// Passes a request on to another node, with the credentials of its caller, and returns the answer of that node. `step` is the request's
/// next one.
///
/// # Errors
/// [`Failure::Unreachable`]: the node does not answer, or another node has passed the request on already. [`Failure::Broken`]: the connection
/// broke. There are too many connections.
pub async fn forward(
    service: &Service,
    member: &Member,
    step: Step,
    request: Request,
) -> Result<Response, Failure> {
    if step == Step::First && is_forwarded(&request) {
        let name = service.members.as_ref().map_or("", |members| members.name());
        return Err(Failure::Unreachable(format!(
            "the sandbox is on node {}, and another node asked {name} for it: the lists of nodes differ",
            member.name
        )));
    }
    let Some(members) = &service.members else {
        return Err(gone(member));
    };
    let reused = match members.outgoing(member, step, request, service.daemon.closing()) {
        Ok(outgoing) => members.reuse(member, outgoing).await,
        Err(failed) => Err(failed),
    };
    let sent = match reused {
        Ok(Sent::Answered(answer)) => Ok(answer),
        Ok(Sent::NotYet(outgoing)) => {
            let stream = connect(service, member, outgoing.is_http2()).await?;
            members.pass_on(member, stream, outgoing).await
        }
        Err(failed) => Err(failed),
    };
    answered(service, member, sent)
}

/// Opens a connection to another node, of HTTP/2 or of HTTP/1.1.
///
/// # Errors
/// [`Failure::Unreachable`]: the node does not answer.
pub async fn connect(service: &Service, member: &Member, is_http2: bool) -> Result<Box<dyn Stream>, Failure> {
    let Some(members) = &service.members else {
        return Err(gone(member));
    };
    members.connect(member, is_http2).await.map_err(|why| {
        tracing::warn!(node = member.name, "a node does not answer: {why}");
        service.daemon.metrics.forwarded(false);
        // Callers without a key get this too, so it does not say why.
        Failure::Unreachable(format!("node {} does not answer", member.name))
    })
}

/// Passes a request on over a new connection.
///
/// # Errors
/// [`Failure::Broken`]: the connection broke. There are too many connections.
pub async fn send(
    service: &Service,
    member: &Member,
    stream: Box<dyn Stream>,
    request: Request,
) -> Result<Response, Failure> {
    let Some(members) = &service.members else {
        return Err(gone(member));
    };
    let sent = match members.outgoing(member, Step::First, request, service.daemon.closing()) {
        Ok(outgoing) => members.pass_on(member, stream, outgoing).await,
        Err(failed) => Err(failed),
    };
    answered(service, member, sent)
}

/// Counts a request that was passed on, or not.
fn answered(service: &Service, member: &Member, sent: Result<Response, Failed>) -> Result<Response, Failure> {
    service.daemon.metrics.forwarded(sent.is_ok());
    sent.map_err(|failed| match failed {
        Failed::Refused(refusal) => refusal.into(),
        Failed::NotOpen => gone(member),
        Failed::Broken(why) => {
            tracing::warn!(node = member.name, "the connection to a node broke: {why}");
            Failure::Broken(format!("the connection to node {} broke", member.name))
        }
    })
}

fn gone(member: &Member) -> Failure {
    Failure::Unreachable(format!("node {} cannot be reached from here", member.name))
}
