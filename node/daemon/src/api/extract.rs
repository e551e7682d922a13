//! Extracts bodies, parameters and callers from requests, or fails with a problem.
//!
//! Invariant: a body is never larger than [`MAX_BODY`] and never awaited longer than [`BODY_LIMIT`]; unknown fields and parameters are
//! errors; a body with fields that its caller may not set is refused ([`reserved`]).

use std::time::Duration;

use axum::body::{Bytes, HttpBody, to_bytes};
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::Extensions;
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use axum::http::request::Parts;
use serde::de::DeserializeOwned;
use serde_json::error::Category;
use thaw_protocol::api::{IDEMPOTENCY_KEY, MAX_BODY};

use super::peer::Peer;
use super::problem::{ApiCode, Refusal};
use super::reserved::{self, Reserved};
use super::scope::{Scope, Wanted};

/// How long a body may take to arrive.
pub const BODY_LIMIT: Duration = Duration::from_secs(30);
/// Longest name or id in a path, characters.
const MAX_NAME: usize = 253;
/// Longest reference in a path, characters.
const MAX_REFERENCE: usize = 1024;
/// Longest idempotency key, bytes.
const MAX_KEY: usize = 255;

/// A JSON body.
#[derive(Debug)]
pub struct Body<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned + Reserved> FromRequest<S> for Body<T> {
    type Rejection = Refusal;

    async fn from_request(request: Request, _: &S) -> Result<Self, Refusal> {
        let peer = peer(request.extensions())?.clone();
        if !says_json(&request) {
            return Err(Refusal::new(
                ApiCode::WrongType,
                "Content-Type is not application/json",
            ));
        }
        let said = parse(&read_body(request).await?)?;
        reserved::check(&peer, &said)?;
        Ok(Body(said))
    }
}

/// Reads a body within its limits of size and time.
pub(crate) async fn read_body(request: Request) -> Result<Bytes, Refusal> {
    let too_large = || {
        Refusal::new(
            ApiCode::BodyTooLarge,
            format!("the body is over {MAX_BODY} bytes"),
        )
    };
    if content_length(&request).is_some_and(|l| l > MAX_BODY as u64) {
        return Err(too_large());
    }
    let body = to_bytes(request.into_body(), MAX_BODY);
    match tokio::time::timeout(BODY_LIMIT, body).await {
        Ok(Ok(body)) => Ok(body),
        Ok(Err(e)) if is_over_limit(&e) => Err(too_large()),
        Ok(Err(e)) => Err(Refusal::new(
            ApiCode::Malformed,
            format!("the body broke off: {e}"),
        )),
        Err(_) => {
            let what = format!("the body did not come within {} s", BODY_LIMIT.as_secs());
            Err(Refusal::new(ApiCode::TooSlow, what))
        }
    }
}

/// A JSON body, or none.
#[derive(Debug)]
pub struct BodyIfAny<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned + Reserved + Default> FromRequest<S> for BodyIfAny<T> {
    type Rejection = Refusal;

    async fn from_request(request: Request, state: &S) -> Result<Self, Refusal> {
        if request.body().is_end_stream() {
            return Ok(BodyIfAny(T::default()));
        }
        Body::from_request(request, state)
            .await
            .map(|Body(body)| BodyIfAny(body))
    }
}

/// A value from a JSON object. Unlike serde's default, an array of its fields is an error.
pub fn parse<T: DeserializeOwned>(json: &[u8]) -> Result<T, Refusal> {
    let is_object = json.trim_ascii_start().starts_with(b"{");
    let mut text = serde_json::Deserializer::from_slice(json);
    let malformed = |e: serde_json::Error| Refusal::new(ApiCode::Malformed, format!("this is not JSON: {e}"));
    match serde_path_to_error::deserialize(&mut text) {
        Ok(said) => {
            text.end().map_err(malformed)?;
            match is_object {
                true => Ok(said),
                false => Err(not_an_object()),
            }
        }
        Err(e) if e.inner().classify() == Category::Data => match is_object {
            true => Err(Refusal::new(ApiCode::Invalid, e)),
            false => Err(not_an_object()),
        },
        Err(e) => Err(malformed(e.into_inner())),
    }
}

fn not_an_object() -> Refusal {
    Refusal::new(ApiCode::Invalid, "the body is not a JSON object")
}

/// The announced length of a body, bytes.
pub fn content_length(request: &Request) -> Option<u64> {
    let length = request.headers().get(CONTENT_LENGTH)?;
    length.to_str().ok()?.parse().ok()
}

fn says_json(request: &Request) -> bool {
    let said = request.headers().get(CONTENT_TYPE).and_then(|v| v.to_str().ok());
    let essence = said.and_then(|s| s.split(';').next()).unwrap_or_default();
    essence.trim().eq_ignore_ascii_case("application/json")
}

fn is_over_limit(error: &axum::Error) -> bool {
    let mut next: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = next {
        if error.is::<http_body_util::LengthLimitError>() {
            return true;
        }
        next = error.source();
    }
    false
}

/// The parameters of the query.
#[derive(Debug)]
pub struct Parameters<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequestParts<S> for Parameters<T> {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Refusal> {
        let query = Query::from_request_parts(parts, state).await;
        let Query(query) = query.map_err(|e| Refusal::new(ApiCode::BadParameter, e.body_text()))?;
        Ok(Parameters(query))
    }
}

/// The caller. Every socket puts it among a request's extensions.
pub fn peer(extensions: &Extensions) -> Result<&Peer, Refusal> {
    let unknown = || Refusal::new(ApiCode::NotAllowed, "nobody knows who asks");
    extensions.get().ok_or_else(unknown)
}

/// The sandbox that the path names, within the caller's scope.
impl<S: Send + Sync> FromRequestParts<S> for Wanted {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Refusal> {
        let text = segment(parts, state, MAX_NAME).await?;
        let scope = Scope::of(peer(&parts.extensions)?);
        Ok(Wanted { scope, text })
    }
}

/// The caller's scope: the sandboxes it can see.
impl<S: Send + Sync> FromRequestParts<S> for Scope {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Refusal> {
        Ok(Scope::of(peer(&parts.extensions)?))
    }
}

/// The key in the path.
#[derive(Debug)]
pub struct Named(pub String);

impl<S: Send + Sync> FromRequestParts<S> for Named {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Refusal> {
        segment(parts, state, MAX_NAME).await.map(Named)
    }
}

/// The image's reference or digest in the path.
#[derive(Debug)]
pub struct Referred(pub String);

impl<S: Send + Sync> FromRequestParts<S> for Referred {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Refusal> {
        segment(parts, state, MAX_REFERENCE).await.map(Referred)
    }
}

async fn segment<S: Send + Sync>(parts: &mut Parts, state: &S, most: usize) -> Result<String, Refusal> {
    let text = Path::<String>::from_request_parts(parts, state).await;
    let Path(text) = text.map_err(|e| Refusal::new(ApiCode::BadParameter, e.body_text()))?;
    match text.chars().count() <= most && !text.chars().any(char::is_control) {
        true => Ok(text),
        false => {
            let what = format!("no name has control characters or more than {most} of others");
            Err(Refusal::new(ApiCode::BadParameter, what))
        }
    }
}

/// The idempotency key, if there is one.
#[derive(Debug)]
pub struct Key(pub Option<String>);

impl<S: Send + Sync> FromRequestParts<S> for Key {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Refusal> {
        let mut keys = parts.headers.get_all(IDEMPOTENCY_KEY).iter();
        let Some(key) = keys.next() else {
            return Ok(Key(None));
        };
        let bytes = key.as_bytes();
        let good = (1..=MAX_KEY).contains(&bytes.len()) && bytes.iter().all(u8::is_ascii_graphic);
        match (good, keys.next(), key.to_str()) {
            (true, None, Ok(key)) => Ok(Key(Some(key.to_owned()))),
            _ => {
                let what =
                    format!("{IDEMPOTENCY_KEY} is to be one word of 1 to {MAX_KEY} visible ASCII characters");
                Err(Refusal::new(ApiCode::BadParameter, what))
            }
        }
    }
}
