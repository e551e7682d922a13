//! A caller that follows the changes.
//!
//! Invariant: it costs a cursor and at most [`BATCH`] lines. A caller that reads too slowly falls behind the end of the ring, and gets an
//! error.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use thaw_protocol::api::Bookmark;
use tokio::sync::watch;

use super::cache::Cache;
use super::ring::{Gone, LEAST, encode};
use super::selector::Selector;
use super::source::{Newest, Source};
use super::watched::Watched;

/// Most changes that are read at once.
const BATCH: usize = 64;
/// Number of non-matching changes after which a watch gets a bookmark, long before they leave the ring.
const SKIPPED: u64 = LEAST as u64 / 4;
/// How often an idle watch gets a bookmark.
const IDLE: Duration = Duration::from_secs(30);

/// The position of one caller.
#[derive(Debug)]
pub struct Watcher<C = Cache> {
    cache: Arc<C>,
    newest: watch::Receiver<Newest>,
    selector: Selector,
    cursor: u64,
    /// The last version that it has seen.
    told: u64,
    /// Whether it gets a bookmark when no kept change is left, and none before that.
    marks_present: bool,
}

impl<C: Source> Watcher<C> {
    /// Follows the changes after a version, or from now on.
    pub fn start(cache: Arc<C>, after: Option<u64>, selector: Selector) -> Result<Watcher<C>, Gone> {
        let after = after.unwrap_or(cache.version());
        cache.changes(after, 0)?;
        Ok(Watcher {
            newest: cache.follow(),
            cache,
            selector,
            cursor: after,
            told: after,
            marks_present: false,
        })
    }

    /// Makes the first bookmark come after the changes so far: the caller then has all that were kept.
    pub fn mark_present(&mut self) {
        self.marks_present = true;
    }

    /// The next lines, at least one; `None` when thawd shuts down.
    pub async fn next(&mut self) -> Result<Option<Bytes>, Gone> {
        loop {
            let newest = *self.newest.borrow_and_update();
            if newest.closed {
                return Ok(None);
            }
            let changes = self.cache.changes(self.cursor, BATCH)?;
            let Some(last) = changes.last() else {
                if std::mem::take(&mut self.marks_present) {
                    return Ok(Some(self.bookmark()));
                }
                // Never fails: the cache, which this holds, has the sender.
                match tokio::time::timeout(IDLE, self.newest.changed()).await {
                    Ok(_) => continue,
                    Err(_) => return Ok(Some(self.bookmark())),
                }
            };
            self.cursor = last.version;
            let mut lines = changes.iter().filter_map(|c| c.line(&self.selector));
            if let Some(first) = lines.next() {
                self.told = self.cursor;
                let rest: Vec<Bytes> = lines.collect();
                return Ok(Some(match rest.is_empty() {
                    true => first,
                    false => [vec![first], rest].concat().concat().into(),
                }));
            }
            if !self.marks_present && self.cursor - self.told >= SKIPPED {
                return Ok(Some(self.bookmark()));
            }
            tokio::task::yield_now().await;
        }
    }

    fn bookmark(&mut self) -> Bytes {
        self.told = self.cursor;
        encode(&<C::Object as Watched>::bookmark(Bookmark {
            resource_version: self.cursor,
        }))
    }
}

#[cfg(test)]
#[path = "watcher_test.rs"]
mod tests;
