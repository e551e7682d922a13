//! A list of the sandboxes of all nodes.
//!
//! Each node answers the same request, and the pages are merged. The token of a page is a place in the order, which means the same to every
//! node, so nothing is kept between two pages.
//!
//! Invariants: a page is bounded; a node that does not answer, or answers with something else, is named in the header [`MISSING`]; a node
//! adds only sandboxes with its own tag, or those that it [may have](Members::may_have) taken over.

use std::collections::HashMap;

use axum::body::{Bytes, to_bytes};
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::middleware::Next;
use axum::response::Response;
use futures_util::future::join_all;
use serde_json::Value;

use super::super::extract::Query;
use super::super::failure::Failure;
use super::super::list::{NEXT, encode, paged};
use super::super::members::{Member, Members};
use super::super::whole_id::{Tag, WholeId};
use crate::api::logs::parse_moment;
use crate::api::problem::{ApiCode, Refusal};

/// The header with the names of the nodes whose sandboxes are not in a list.
const MISSING: &str = "x-thaw-missing-nodes";
/// Largest answer of a node, bytes.
const MAX_PAGE: usize = 16 << 20;
const SECOND_NS: u64 = 1_000_000_000;

/// A sandbox, by its place in a list: its start, and its id.
type Placed = ((u64, WholeId), Value);

/// What one node answers.
#[derive(Debug)]
struct Page {
    node: Tag,
    sandboxes: Vec<Placed>,
    /// Whether there are more on that node.
    has_more: bool,
}

impl Page {
    /// Reads an answer. Sandboxes of nodes that `may_be` does not allow are left out. `None`: it is no list of sandboxes.
    fn read(node: Tag, body: &[u8], headers: &HeaderMap, may_be: impl Fn(Tag) -> bool) -> Option<Page> {
        let sandboxes: Vec<Value> = serde_json::from_slice(body).ok()?;
        let placed = sandboxes.into_iter().map(|sandbox| {
            let id = WholeId::parse(sandbox["sandboxID"].as_str()?)?;
            let started = parse_moment(sandbox["startedAt"].as_str()?)? / SECOND_NS;
            Some(((started, id), sandbox))
        });
        let mut placed: Vec<Placed> = placed.collect::<Option<_>>()?;
        placed.retain(|((_, id), _)| id.home.is_some_and(&may_be));
        Some(Page {
            node,
            sandboxes: placed,
            has_more: headers.contains_key(NEXT),
        })
    }
}

/// How a list is asked for.
struct Wanted {
    is_ascending: bool,
    /// `None`: the list has no pages.
    limit: Option<usize>,
}

impl Wanted {
    fn read(request: &Request) -> Result<Wanted, Failure> {
        let query = Query::of(request.uri().query().unwrap_or_default());
        let has_pages = request.uri().path().starts_with("/v2/");
        Ok(Wanted {
            is_ascending: has_pages && query.text("order") == Some("asc"),
            limit: has_pages.then(|| query.limit()).transpose()?,
        })
    }
}

/// Lists the sandboxes of all nodes, for the caller with this API key.
///
/// # Errors
/// The request is none for a list.
pub async fn gather(
    members: &Members,
    key: &HeaderValue,
    request: Request,
    next: Next,
) -> Result<Response, Failure> {
    let wanted = Wanted::read(&request)?;
    let broken = |e: &dyn std::fmt::Display| Refusal::new(ApiCode::Broken, e);
    let path = request
        .uri()
        .path_and_query()
        .map_or("/", |path| path.as_str())
        .to_owned();
    let others = members.others();
    let asked = join_all(others.iter().map(|member| page(members, member, &path, key)));
    let (here, pages) = tokio::join!(next.run(request), asked);
    if here.status() != StatusCode::OK {
        return Ok(here);
    }
    let (head, body) = here.into_parts();
    let body: Bytes = to_bytes(body, usize::MAX).await.map_err(|e| broken(&e))?;
    let own = Page::read(members.tag(), &body, &head.headers, |_| true);
    let own = own.ok_or_else(|| broken(&"the list of this node cannot be read"))?;
    let mut missing = Vec::new();
    let mut all = vec![own];
    for (member, page) in others.iter().zip(pages) {
        match page {
            Ok(page) => all.push(page),
            Err(why) => {
                tracing::warn!(node = member.name, "its sandboxes are not listed: {why}");
                missing.push(member.name.as_str());
            }
        }
    }
    let mut answer = merged(all, &wanted);
    if !missing.is_empty()
        && let Ok(names) = HeaderValue::try_from(missing.join(", "))
    {
        answer.headers_mut().insert(MISSING, names);
    }
    Ok(answer)
}

async fn page(members: &Members, member: &Member, path: &str, key: &HeaderValue) -> Result<Page, String> {
    let answer = members.ask(member, path, Some(key), MAX_PAGE).await?;
    if answer.status != StatusCode::OK {
        return Err(format!("it answered {}", answer.status));
    }
    let page = Page::read(member.tag, &answer.body, &answer.headers, |home| {
        members.may_have(member.tag, home)
    });
    page.ok_or_else(|| "its answer is not a list of its sandboxes".to_owned())
}

/// The first sandboxes of all pages in the order that is wanted, and whether there are more.
fn merged(pages: Vec<Page>, wanted: &Wanted) -> Response {
    let mut has_more = pages.iter().any(|page| page.has_more);
    // A sandbox that is named twice is added once. If the node in its id and another one name it, the other one has taken it over.
    let mut all: HashMap<(u64, WholeId), Value> = HashMap::new();
    for Page { node, sandboxes, .. } in pages {
        for (place, sandbox) in sandboxes {
            let is_at_home = place.1.home == Some(node);
            if !is_at_home || !all.contains_key(&place) {
                all.insert(place, sandbox);
            }
        }
    }
    let mut all: Vec<Placed> = all.into_iter().collect();
    all.sort_by(|(one, _), (other, _)| match wanted.is_ascending {
        true => one.cmp(other),
        false => other.cmp(one),
    });
    if let Some(limit) = wanted.limit {
        has_more |= all.len() > limit;
        all.truncate(limit);
    }
    let last = all.last().filter(|_| has_more && wanted.limit.is_some());
    let next = last.map(|((started, id), _)| encode((*started, &id.id)));
    paged(
        all.into_iter().map(|(_, sandbox)| sandbox).collect::<Vec<_>>(),
        next,
    )
}
