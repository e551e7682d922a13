//! Who may use the protocol of a sandbox.
//!
//! Invariants: a request without an [`Access`] is refused, so a route that forgot it is closed; secrets are compared in a time that reveals
//! nothing about them.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::SystemTime;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, Method};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use thaw_protocol::connect::Code;
use tokio::sync::OwnedSemaphorePermit;

use super::connect::{headers, outgoing};
use super::failure::Failure;
use super::open_sandbox::{OpenSandbox, OpenSandboxes};
use super::signature::{Operation, Signed, is_same};
use crate::api::held_body::holding;
use crate::api::scope::Wanted;

/// The header with the token of a sandbox.
const TOKEN: &str = "x-access-token";

/// The sandbox that a request is for. An extension of the request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForSandbox {
    pub wanted: Wanted,
}

/// Who may use a sandbox. An extension of the request.
#[derive(Clone)]
pub enum Access {
    /// Everyone who reaches it.
    Open,
    /// Who has this token; or, for one file, a URL that the token signed.
    Token(Arc<str>),
}

impl std::fmt::Debug for Access {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Access::Open => "Open",
            Access::Token(_) => "Token",
        })
    }
}

/// Opens the sandbox of a request, checks its caller, and holds one of the sandbox's places until the answer is written or given up.
pub async fn admit(State(open): State<Arc<OpenSandboxes>>, mut request: Request, next: Next) -> Response {
    match enter(&open, &request) {
        Ok((sandbox, permit)) => {
            request.extensions_mut().insert(sandbox);
            let response = next.run(request).await;
            response.map(|body| holding(body, permit))
        }
        Err(failure) if failure.code == Code::Unavailable => failure.into_plain(),
        Err(failure) => match headers::codec(request.headers(), true) {
            Some(codec) => outgoing::refusal(codec, failure),
            None => failure.into_response(),
        },
    }
}

fn enter(
    open: &OpenSandboxes,
    request: &Request,
) -> Result<(Arc<OpenSandbox>, OwnedSemaphorePermit), Failure> {
    let wanted = request.extensions().get::<ForSandbox>();
    let wanted = wanted.ok_or_else(|| Failure::not_running("none", "the request names no sandbox"))?;
    let sandbox = open.open(&wanted.wanted)?;
    if request.uri().path() != "/health" {
        check(request)?;
    }
    let permit = sandbox.enter()?;
    Ok((sandbox, permit))
}

/// Whether a request has what its [`Access`] asks for.
pub fn is_granted(request: &Request) -> bool {
    check(request).is_ok()
}

fn check(request: &Request) -> Result<(), Failure> {
    let refused = |why| Failure::new(Code::Unauthenticated, why);
    let token = match request.extensions().get::<Access>() {
        Some(Access::Open) => return Ok(()),
        Some(Access::Token(token)) => token,
        None => return Err(refused("it is not known who may use this sandbox")),
    };
    if has_token(request.headers(), token) {
        return Ok(());
    }
    let operation = match (request.uri().path(), request.method()) {
        ("/files", &Method::GET | &Method::HEAD) => Operation::Read,
        ("/files", &Method::POST) => Operation::Write,
        _ => return Err(refused("send the sandbox's token as X-Access-Token")),
    };
    let (mut path, mut user) = (Cow::default(), Cow::default());
    let (mut signature, mut expiration) = (None, None);
    for (name, value) in form_urlencoded::parse(request.uri().query().unwrap_or_default().as_bytes()) {
        match &*name {
            "path" => path = value,
            "username" => user = value,
            "signature" => signature = Some(value),
            "signature_expiration" => expiration = Some(value),
            _ => {}
        }
    }
    let signature =
        signature.ok_or_else(|| refused("send the sandbox's token as X-Access-Token, or a signed URL"))?;
    let expiration = expiration.map(|seconds| seconds.parse::<u64>()).transpose();
    let expiration =
        expiration.map_err(|_| Failure::invalid("signature_expiration is seconds since 1970"))?;
    let signed = Signed {
        path: &path,
        operation,
        user: &user,
        signature: &signature,
        expiration,
    };
    signed.check(token, SystemTime::now()).map_err(refused)
}

fn has_token(headers: &HeaderMap, token: &str) -> bool {
    let given = headers.get(TOKEN);
    given.is_some_and(|given| is_same(token.as_bytes(), given.as_bytes()))
}

#[cfg(test)]
#[path = "access_test.rs"]
mod tests;
