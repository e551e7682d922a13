//! Lists, whole or in pages.
//!
//! Every page shows the sandboxes as of the request for the first page: later changes are undone with the ring, so a list in pages costs no
//! memory between requests. If the ring no longer has those changes, the list is [`Gone`].

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use thaw_protocol::api::Sandbox;

use super::cache::{Cache, State};
use super::ring::Gone;
use super::selector::Selector;

/// A request for a page.
#[derive(Clone, Debug)]
pub struct Query {
    pub selector: Selector,
    /// Maximum number of sandboxes in the page; `None`: all.
    pub limit: Option<usize>,
    /// Where the page begins.
    pub from: Option<Token>,
}

/// A page of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page {
    /// The version whose state the page shows.
    pub version: u64,
    /// Ordered by id.
    pub items: Vec<Arc<Sandbox>>,
    /// Where the next page begins, if there is one.
    pub next: Option<Token>,
}

/// Where a list continues. It is opaque to callers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Token {
    pub version: u64,
    /// The last id of the page before.
    pub after: String,
}

impl Token {
    /// Encodes it for a caller.
    pub fn encode(&self) -> String {
        URL_SAFE_NO_PAD.encode(format!("{}.{}", self.version, self.after))
    }

    /// Decodes a token from a caller, which may be invalid.
    pub fn decode(text: &str) -> Option<Token> {
        let text = String::from_utf8(URL_SAFE_NO_PAD.decode(text).ok()?).ok()?;
        let (version, after) = text.split_once('.')?;
        Some(Token {
            version: version.parse().ok()?,
            after: after.to_owned(),
        })
    }
}

impl Cache {
    /// The sandboxes that match, ordered by id. A selector by label visits only those with the label.
    pub fn list(&self, query: &Query) -> Result<Page, Gone> {
        let state = self.read();
        let version = query.from.as_ref().map_or(state.version(), |token| token.version);
        state.known(version)?;
        let after = query.from.as_ref().map(|token| token.after.as_str());
        let mut wanted = as_of(&state, version, after, &query.selector);
        let limit = query.limit.unwrap_or(usize::MAX);
        let items: Vec<Arc<Sandbox>> = wanted.by_ref().take(limit).cloned().collect();
        let more = wanted.next().is_some();
        let next = items.last().filter(|_| more).map(|last| Token {
            version,
            after: last.id.clone(),
        });
        Ok(Page { version, items, next })
    }
}

/// The state at a version of each sandbox that changed after it.
fn since(state: &State, version: u64) -> BTreeMap<&str, Option<&Arc<Sandbox>>> {
    let newest_first = state.ring.after(version).rev();
    newest_first
        .map(|change| (change.id(), change.before.as_ref()))
        .collect()
}

/// The matching sandboxes as of a version, ordered by id, beginning after an id.
fn as_of<'a>(
    state: &'a State,
    version: u64,
    after: Option<&'a str>,
    selector: &'a Selector,
) -> impl Iterator<Item = &'a Arc<Sandbox>> {
    let since = since(state, version);
    let beyond = move |id: &str| after.is_none_or(|after| id > after);
    let then: Vec<&Arc<Sandbox>> = since
        .iter()
        .filter_map(|(id, sandbox)| sandbox.filter(|_| beyond(id)))
        .collect();
    let now: Box<dyn Iterator<Item = &'a Arc<Sandbox>>> = match state.index.candidates(selector) {
        Some(sets) => {
            let mut ids: Vec<&String> = sets.into_iter().flatten().filter(|id| beyond(id)).collect();
            ids.sort_unstable();
            Box::new(ids.into_iter().filter_map(|id| state.objects.get(id)))
        }
        None => {
            let from = after.map_or(Bound::Unbounded, Bound::Excluded);
            let objects = state.objects.range::<str, _>((from, Bound::Unbounded));
            Box::new(objects.map(|(_, sandbox)| sandbox))
        }
    };
    let unchanged = now.filter(move |sandbox| !since.contains_key(sandbox.id.as_str()));
    let all = merge(unchanged.peekable(), then.into_iter().peekable());
    all.filter(|sandbox| selector.wants(sandbox))
}

/// Merges two iterators that are ordered by id.
fn merge<'a>(
    mut one: std::iter::Peekable<impl Iterator<Item = &'a Arc<Sandbox>>>,
    mut other: std::iter::Peekable<impl Iterator<Item = &'a Arc<Sandbox>>>,
) -> impl Iterator<Item = &'a Arc<Sandbox>> {
    std::iter::from_fn(move || match (one.peek(), other.peek()) {
        (Some(a), Some(b)) if b.id < a.id => other.next(),
        (Some(_), _) => one.next(),
        (None, _) => other.next(),
    })
}
