//! Idempotency keys: a creation with a key happens once, however often it is requested.
//!
//! Invariants: while a key of a client is remembered, it creates at most one thing, and every request with that key and the same body gets
//! the same answer. Failures, and creations whose callers all hung up, are not remembered, so a retry starts afresh. Sandboxes outlive this
//! process: the record has the key ([`Asked`]), and a file beside it has the answer ([`note`]), so that a thawd that adopts the sandbox
//! gives the same answer. At most [`MOST`] keys and [`MOST_BYTES`] of answers are remembered, for [`KEPT`]. Beyond that, the tenant with
//! the most bytes loses its oldest answer, so that no tenant can evict another's keys.

use std::collections::{HashMap, VecDeque};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use std::{fs, io};

use axum::body::Bytes;
use thaw_failpoint::{Failpoint, reach};
use thaw_sandbox::snapshot::Hash;
use thaw_sandbox::state::Asked;
use thaw_sys::lock::Lock;
use tokio::sync::OnceCell;

use super::problem::{ApiCode, Refusal};

/// How long an answer is remembered.
pub const KEPT: Duration = Duration::from_secs(24 * 60 * 60);
/// Most keys remembered.
pub const MOST: usize = 4096;
/// Most bytes of answers remembered.
pub const MOST_BYTES: usize = 32 << 20;
/// Minimum weight of a key, bytes: with this, [`MOST`] keys fit into [`MOST_BYTES`].
const LEAST_BYTES: usize = MOST_BYTES / MOST;

/// The file with the answer to a creation, in the sandbox's directory.
const ANSWER: &str = "answer.json";

/// A client and its key.
type Key = (u64, String);

#[derive(Debug)]
struct Entry {
    key: Key,
    /// The share (a tenant's, or a caller's without a tenant) that its weight counts against.
    share: u64,
    /// Hash of the request that came with the key.
    request: Hash,
    asked: Instant,
    answer: OnceCell<Bytes>,
}

impl Entry {
    fn of(asked: &Asked, when: Instant, answer: Option<Bytes>) -> Arc<Entry> {
        Arc::new(Entry {
            key: (asked.client, asked.key.clone()),
            share: asked.share,
            request: asked.request,
            asked: when,
            answer: OnceCell::new_with(answer),
        })
    }

    /// Its weight, bytes.
    fn weight(&self) -> usize {
        self.answer.get().map_or(0, Bytes::len).max(LEAST_BYTES)
    }
}

#[derive(Debug, Default)]
struct Table {
    entries: HashMap<Key, Arc<Entry>>,
    /// The entries with an answer, oldest first.
    answered: VecDeque<Arc<Entry>>,
    /// Total weight of the answers of each share, bytes.
    held: HashMap<u64, usize>,
}

impl Table {
    /// Remembers an answer.
    fn answered(&mut self, entry: Arc<Entry>) {
        *self.held.entry(entry.share).or_default() += entry.weight();
        self.answered.push_back(entry);
    }

    /// Forgets expired answers, and those beyond the limits.
    fn expire(&mut self, now: Instant) {
        let old = |e: &Arc<Entry>| now.saturating_duration_since(e.asked) >= KEPT;
        while self.answered.front().is_some_and(old) {
            self.forget(0);
        }
        while self.held.values().sum::<usize>() > MOST_BYTES {
            let largest = self.held.iter().max_by_key(|(_, weight)| **weight);
            let share = largest.map(|(share, _)| *share);
            match self.answered.iter().position(|entry| Some(entry.share) == share) {
                Some(oldest) => self.forget(oldest),
                None => break,
            }
        }
    }

    fn forget(&mut self, index: usize) {
        let Some(entry) = self.answered.remove(index) else {
            return;
        };
        self.entries.remove(&entry.key);
        if let Some(held) = self.held.get_mut(&entry.share) {
            *held -= entry.weight();
            if *held == 0 {
                self.held.remove(&entry.share);
            }
        }
    }
}

/// The answers to keys.
#[derive(Debug, Default)]
pub struct Answers(Mutex<Table>);

/// A request that waits for an entry's answer. If the last waiting request leaves before there is an answer, it removes the entry.
struct Waiting<'a> {
    answers: &'a Answers,
    entry: Arc<Entry>,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut table = self.answers.table();
        // The two references are the table's and this one.
        if self.entry.answer.get().is_none() && Arc::strong_count(&self.entry) == 2 {
            table.entries.remove(&self.entry.key);
        }
    }
}

impl Answers {
    /// The answer to a client's key: the remembered one, or else the result of `make`. Concurrent requests with the key wait for that
    /// result. If the request that runs `make` fails or hangs up, the next one runs it.
    ///
    /// # Errors
    /// [`ApiCode::KeyReused`] if the key was used with another request; those of `make`.
    pub async fn once<F: Future<Output = Result<Bytes, Refusal>>>(
        &self,
        asked: &Asked,
        now: Instant,
        make: impl FnOnce() -> F,
    ) -> Result<Bytes, Refusal> {
        let waiting = self.wait(asked, now)?;
        let entry = &waiting.entry;
        let mut ours = false;
        let make = async || {
            let made = make().await?;
            ours = true;
            Ok::<_, Refusal>(made)
        };
        let answer = entry.answer.get_or_try_init(make).await?.clone();
        let mut table = self.table();
        if ours {
            table.answered(entry.clone());
        }
        table.expire(now);
        Ok(answer)
    }

    fn wait(&self, asked: &Asked, now: Instant) -> Result<Waiting<'_>, Refusal> {
        let mut table = self.table();
        table.expire(now);
        let key = (asked.client, asked.key.clone());
        let entry = table.entries.entry(key);
        let entry = entry.or_insert_with(|| Entry::of(asked, now, None));
        if entry.request != asked.request {
            let what = format!("the key {:?} came with another request", entry.key.1);
            return Err(Refusal::new(ApiCode::KeyReused, what));
        }
        Ok(Waiting {
            answers: self,
            entry: entry.clone(),
        })
    }

    /// Remembers the answer that an earlier thawd gave at `when`, or would have given.
    pub fn restore(&self, asked: &Asked, answer: Bytes, when: Instant) {
        let key = (asked.client, asked.key.clone());
        let mut table = self.table();
        // The clones of one fork share one answer.
        if table.entries.contains_key(&key) {
            return;
        }
        let entry = Entry::of(asked, when, Some(answer));
        table.entries.insert(key, entry.clone());
        table.answered(entry);
        table.expire(Instant::now());
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.locked()
    }
}

/// Writes the answer to a creation beside the sandbox's record, completely or not at all.
pub fn note(directory: &Path, answer: &[u8]) -> io::Result<()> {
    let (new, path) = (directory.join("answer.new"), directory.join(ANSWER));
    fs::write(&new, answer)?;
    reach(Failpoint::AnswerBegun);
    fs::rename(&new, &path)?;
    reach(Failpoint::AnswerNoted);
    Ok(())
}

/// The moment of a time in seconds since the Unix epoch.
pub fn when(created: u64) -> Instant {
    let age = SystemTime::now()
        .duration_since(UNIX_EPOCH + Duration::from_secs(created))
        .unwrap_or_default();
    let now = Instant::now();
    now.checked_sub(age).unwrap_or(now)
}

/// Reads the answer that [`note`] wrote.
pub fn noted(directory: &Path) -> Option<Bytes> {
    fs::read(directory.join(ANSWER)).ok().map(Bytes::from)
}

#[cfg(test)]
#[path = "idempotency_test.rs"]
mod tests;
