//! Extracts from requests what several handlers need.

use std::borrow::Cow;

use axum::extract::{FromRequest, FromRequestParts, Path, Request};
use axum::http::request::Parts;
use serde::de::DeserializeOwned;
use thaw_sandbox::id;

use super::failure::Failure;
use crate::api::extract::{parse, read_body};
use crate::api::scope::Wanted;

/// A JSON body. An empty one is `{}`.
#[derive(Debug)]
pub struct Body<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for Body<T> {
    type Rejection = Failure;

    async fn from_request(request: Request, _: &S) -> Result<Self, Failure> {
        let body = read_body(request).await?;
        let json: &[u8] = if body.is_empty() { b"{}" } else { &body };
        Ok(Body(parse(json)?))
    }
}

/// The sandbox that the path names by its id, within the caller's scope.
#[derive(Debug)]
pub struct Addressed(pub Wanted);

impl<S: Send + Sync> FromRequestParts<S> for Addressed {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Failure> {
        let wanted = Wanted::from_request_parts(parts, state).await?;
        match id::is_id(&wanted.text) {
            true => Ok(Addressed(wanted)),
            false => Err(Failure::no_sandbox(&wanted.text)),
        }
    }
}

/// The build that the path names: the template, and the id of the build or the hash of an upload.
#[derive(Debug)]
pub struct OfTemplate(pub String, pub String);

impl<S: Send + Sync> FromRequestParts<S> for OfTemplate {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Failure> {
        let segments = Path::<(String, String)>::from_request_parts(parts, state).await;
        let Path((template, other)) = segments.map_err(|e| Failure::Bad(e.body_text()))?;
        Ok(OfTemplate(template, other))
    }
}

/// The parameters of the query, decoded, in their order.
#[derive(Debug)]
pub struct Query(Vec<(String, String)>);

impl<S: Send + Sync> FromRequestParts<S> for Query {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Failure> {
        Ok(Query::of(parts.uri.query().unwrap_or_default()))
    }
}

impl Query {
    /// The parameters of a query.
    pub fn of(query: &str) -> Query {
        Query(pairs(query))
    }

    /// Checks that it has no other parameters than these.
    pub fn only(&self, known: &[&str]) -> Result<(), Failure> {
        match self.0.iter().find(|(name, _)| !known.contains(&name.as_str())) {
            Some((name, _)) => Err(Failure::Bad(format!(
                "the parameter {name:?} is unknown here; known are {}",
                known.join(", ")
            ))),
            None => Ok(()),
        }
    }

    /// The last value of a parameter. An empty one counts as absent.
    pub fn text(&self, name: &str) -> Option<&str> {
        let mut values = self.0.iter().filter(|(given, _)| given == name);
        values
            .next_back()
            .map(|(_, value)| value.as_str())
            .filter(|value| !value.is_empty())
    }

    /// The value of a parameter that is a number.
    pub fn number(&self, name: &str) -> Result<Option<u64>, Failure> {
        let wrong = |value: &str| Failure::Bad(format!("{name} is {value:?}, not a number"));
        self.text(name)
            .map(|value| value.parse().map_err(|_| wrong(value)))
            .transpose()
    }

    /// How many items a page may have: 1 to 100, and 100 unless the caller says.
    pub fn limit(&self) -> Result<usize, Failure> {
        const MOST: u64 = 100;
        match self.number("limit")? {
            None => Ok(MOST as usize),
            Some(limit @ 1..=MOST) => Ok(limit as usize),
            Some(limit) => Err(Failure::Bad(format!("limit is {limit}; it may be 1 to {MOST}"))),
        }
    }

    /// Whether a log is wanted in the order of its lines, or the last first.
    pub fn is_forward(&self) -> Result<bool, Failure> {
        match self.text("direction") {
            None | Some("forward") => Ok(true),
            Some("backward") => Ok(false),
            Some(other) => {
                let why = format!("direction is {other:?}; it may be forward or backward");
                Err(Failure::Bad(why))
            }
        }
    }

    /// All values of a parameter, also those in one text with commas.
    pub fn list(&self, name: &str) -> Vec<&str> {
        let values = self.0.iter().filter(|(given, _)| given == name);
        values
            .flat_map(|(_, value)| value.split(','))
            .filter(|value| !value.is_empty())
            .collect()
    }
}

/// The pairs of a form-encoded text.
pub fn pairs(text: &str) -> Vec<(String, String)> {
    let owned = |(name, value): (Cow<str>, Cow<str>)| (name.into_owned(), value.into_owned());
    form_urlencoded::parse(text.as_bytes()).map(owned).collect()
}
