//! The handlers that list sandboxes.
//!
//! Invariant: a page is bounded, and a list in pages costs no memory between requests.

use std::cmp::Reverse;
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::HeaderValue;
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::Serialize;
use thaw_protocol::api::Sandbox;
use thaw_sandbox::id;

use super::answer::Listed;
use super::extract::{Query, pairs};
use super::failure::Failure;
use super::notes::Notes;
use super::service::{Service, is_living, is_paused};
use crate::api::logs::parse_moment;
use crate::api::scope::Scope;
use crate::api::watch::{Query as CacheQuery, Selector};

/// The header with the token of the next page.
pub const NEXT: &str = "x-next-token";
const SECOND_NS: u64 = 1_000_000_000;

/// Which sandboxes a caller wants.
#[derive(Debug, Default)]
struct Filter {
    /// Not those in these states.
    without_running: bool,
    without_paused: bool,
    metadata: Vec<(String, String)>,
    template: Option<String>,
    /// Nanoseconds since the Unix epoch.
    started_after: Option<u64>,
}

impl Filter {
    fn read(query: &Query) -> Result<Filter, Failure> {
        let states = query.list("state");
        if let Some(other) = states.iter().find(|state| !["running", "paused"].contains(state)) {
            return Err(Failure::Bad(format!(
                "state is {other:?}; it may be running or paused"
            )));
        }
        let is_without = |state: &str| !states.is_empty() && !states.contains(&state);
        let started_after = query.text("startedAfter").map(|text| {
            let why = format!("startedAfter is {text:?}, not a time of RFC 3339");
            parse_moment(text).ok_or(Failure::Bad(why))
        });
        Ok(Filter {
            without_running: is_without("running"),
            without_paused: is_without("paused"),
            metadata: query.text("metadata").map(metadata).unwrap_or_default(),
            template: query.text("template").map(str::to_owned),
            started_after: started_after.transpose()?,
        })
    }

    fn wants(&self, sandbox: &Sandbox) -> bool {
        let is_without = match is_paused(sandbox) {
            true => self.without_paused,
            false => self.without_running,
        };
        let started = sandbox.created.saturating_mul(SECOND_NS);
        // Its start is known to the second.
        let is_late = |after: u64| started.saturating_add(SECOND_NS) > after;
        is_living(sandbox) && !is_without && self.started_after.is_none_or(is_late)
    }

    fn wants_notes(&self, notes: &Notes) -> bool {
        let is_of = |template: &String| notes.template == *template || notes.alias.as_ref() == Some(template);
        notes.has(&self.metadata) && self.template.as_ref().is_none_or(is_of)
    }
}

/// Metadata in a query: pairs of a form whose names and values are encoded a second time.
fn metadata(text: &str) -> Vec<(String, String)> {
    let once = pairs(text).into_iter();
    once.flat_map(|(name, value)| pairs(&format!("{name}={value}")))
        .collect()
}

/// The matching sandboxes of a caller, ordered by their start and then by id, with what this API knows of them.
fn matching(service: &Service, scope: Scope, filter: &Filter) -> Result<Vec<(Arc<Sandbox>, Notes)>, Failure> {
    let selector = Selector::parse(scope, "", "").map_err(|e| Failure::Bad(e.to_string()))?;
    let all = service.daemon.cache.list(&CacheQuery {
        selector,
        limit: None,
        from: None,
    });
    let wanted = all.map_err(crate::api::problem::Refusal::from)?.items.into_iter();
    let wanted = wanted.filter(|sandbox| filter.wants(sandbox)).map(|sandbox| {
        let notes = service.notes(&sandbox);
        (sandbox, notes)
    });
    let mut wanted: Vec<_> = wanted.filter(|(_, notes)| filter.wants_notes(notes)).collect();
    wanted.sort_by(|(one, _), (other, _)| place(one).cmp(&place(other)));
    Ok(wanted)
}

/// Where a sandbox stands in a list: its start, and its id.
fn place(sandbox: &Sandbox) -> (u64, &str) {
    (sandbox.created, &sandbox.id)
}

/// `GET /sandboxes`: those that run, all of them.
pub async fn list_running(
    State(service): State<Arc<Service>>,
    scope: Scope,
    query: Query,
) -> Result<Json<Vec<Listed>>, Failure> {
    query.only(&["metadata"])?;
    let filter = Filter {
        without_paused: true,
        ..Filter::read(&query)?
    };
    let mut all = matching(&service, scope, &filter)?;
    all.reverse();
    Ok(Json(
        all.into_iter()
            .map(|(sandbox, notes)| service.listed(&sandbox, notes))
            .collect(),
    ))
}

/// `GET /v2/sandboxes`: a page of those that match, the last that was started first.
pub async fn list(
    State(service): State<Arc<Service>>,
    scope: Scope,
    query: Query,
) -> Result<Response, Failure> {
    query.only(&[
        "metadata",
        "state",
        "order",
        "startedAfter",
        "template",
        "nextToken",
        "limit",
    ])?;
    let is_ascending = match query.text("order") {
        None | Some("desc") => false,
        Some("asc") => true,
        Some(other) => return Err(Failure::Bad(format!("order is {other:?}; it may be asc or desc"))),
    };
    let mut all = matching(&service, scope, &Filter::read(&query)?)?;
    let after = query
        .text("nextToken")
        .map(|token| decode(token).ok_or_else(no_token));
    let after = after.transpose()?;
    if !is_ascending {
        all.sort_by(|(one, _), (other, _)| Reverse(place(one)).cmp(&Reverse(place(other))));
    }
    let is_beyond = |sandbox: &Sandbox| {
        after.as_ref().is_none_or(|(start, id)| match is_ascending {
            true => place(sandbox) > (*start, id.as_str()),
            false => place(sandbox) < (*start, id.as_str()),
        })
    };
    all.retain(|(sandbox, _)| is_beyond(sandbox));
    let limit = query.limit()?;
    let next = (all.len() > limit).then(|| all.get(limit - 1)).flatten();
    let next = next.map(|(sandbox, _)| encode(place(sandbox)));
    all.truncate(limit);
    let page = all
        .into_iter()
        .map(|(sandbox, notes)| service.listed(&sandbox, notes))
        .collect();
    Ok(paged::<Listed>(page, next))
}

/// A page, and the token of the next one if there is one.
pub fn paged<T: Serialize>(page: Vec<T>, next: Option<String>) -> Response {
    let mut answer = Json(page).into_response();
    if let Some(next) = next.and_then(|next| HeaderValue::try_from(next).ok()) {
        answer.headers_mut().insert(NEXT, next);
    }
    answer
}

/// The error for a token that this API did not give.
pub fn no_token() -> Failure {
    Failure::Bad("nextToken is not the x-next-token of another answer".into())
}

/// The token of the page after a sandbox, by its start and its id.
pub fn encode((start, id): (u64, &str)) -> String {
    URL_SAFE_NO_PAD.encode(format!("{start}.{id}"))
}

fn decode(token: &str) -> Option<(u64, String)> {
    let text = String::from_utf8(URL_SAFE_NO_PAD.decode(token).ok()?).ok()?;
    let (start, id) = text.split_once('.')?;
    id::is_id(id).then_some(())?;
    Some((start.parse().ok()?, id.to_owned()))
}

#[cfg(test)]
#[path = "list_test.rs"]
mod tests;
