//! Searches for the node that has a sandbox which the node in its id does not have. No node knows which one has it, so all are asked.
//!
//! Callers without a key can cause searches, so searches that wait share a round of questions. Invariants: at most [`ROUNDS`] rounds are under
//! way, and one begins [`SPACING`] after another at the earliest. A node that was found is asked no more for [`KNOWN_FOR`], while it is a
//! member. That no node has a sandbox is not remembered, because one may take it over at any time.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::http::StatusCode;
use futures_util::stream::{FuturesUnordered, StreamExt};
use thaw_protocol::nodes::HOLDER;
use thaw_sys::lock::Lock;
use tokio::sync::{Semaphore, SemaphorePermit, oneshot};
use tokio::time::{Instant, sleep_until};

use super::asking::Answer;
use super::{Member, Members};
use crate::e2b::whole_id::WholeId;

/// Most rounds at once. A node that does not answer holds up those that are under way.
const ROUNDS: usize = 4;
/// Time between the beginnings of two rounds.
const SPACING: Duration = Duration::from_millis(100);
/// Most sandboxes that one round asks for.
const MOST_IDS: usize = 128;
/// Most searches that wait. A search beyond them finds nothing.
const MOST_WAITING: usize = 4096;
/// How long a node that was found is assumed to have the sandbox.
const KNOWN_FOR: Duration = Duration::from_secs(10);
/// Most sandboxes whose node is known.
const MOST_KNOWN: usize = 4096;
/// Largest answer, bytes.
const MAX_ANSWER: usize = 16 << 10;

type Found = Option<Arc<Member>>;

/// See the module.
#[derive(Debug)]
pub(super) struct Searches {
    /// Those that no round has asked for yet, the oldest first.
    waiting: Mutex<Vec<Search>>,
    rounds: Semaphore,
    /// When the last round began.
    began: tokio::sync::Mutex<Option<Instant>>,
    known: Mutex<HashMap<WholeId, Known>>,
}

impl Default for Searches {
    fn default() -> Searches {
        Searches {
            waiting: Mutex::default(),
            rounds: Semaphore::new(ROUNDS),
            began: tokio::sync::Mutex::default(),
            known: Mutex::default(),
        }
    }
}

#[derive(Debug)]
struct Search {
    whole: WholeId,
    found: oneshot::Sender<Found>,
}

#[derive(Debug)]
struct Known {
    member: Arc<Member>,
    until: Instant,
}

impl Searches {
    /// Waits for a round. `None`: too many wait.
    fn begin(&self, whole: &WholeId) -> Option<oneshot::Receiver<Found>> {
        let (found, search) = oneshot::channel();
        let mut waiting = self.waiting.locked();
        if waiting.len() >= MOST_WAITING {
            waiting.retain(|search| !search.found.is_closed());
        }
        (waiting.len() < MOST_WAITING).then(|| {
            let whole = whole.clone();
            waiting.push(Search { whole, found });
            search
        })
    }

    /// The searches that a round asks for, and their sandboxes.
    fn take(&self) -> (Vec<Search>, HashSet<WholeId>) {
        let mut waiting = self.waiting.locked();
        let mut ids = HashSet::new();
        let all = waiting.drain(..).filter(|search| !search.found.is_closed());
        let (now, later) = all.partition(|search| {
            if ids.len() < MOST_IDS {
                ids.insert(search.whole.clone());
            }
            ids.contains(&search.whole)
        });
        *waiting = later;
        (now, ids)
    }

    fn known(&self, whole: &WholeId, others: &[Arc<Member>]) -> Found {
        let known = self.known.locked();
        let found = known.get(whole).filter(|known| known.until > Instant::now())?;
        let mut others = others.iter();
        others.find(|&member| Arc::ptr_eq(member, &found.member)).cloned()
    }

    fn note(&self, whole: &WholeId, member: &Arc<Member>) {
        let (mut known, now) = (self.known.locked(), Instant::now());
        if known.len() >= MOST_KNOWN {
            known.retain(|_, known| known.until > now);
        }
        if known.len() < MOST_KNOWN {
            let (member, until) = (member.clone(), now + KNOWN_FOR);
            known.insert(whole.clone(), Known { member, until });
        }
    }
}

impl Members {
    /// Another node that has a sandbox. `None`: no node that answers has it, or too many searches wait. Nodes take sandboxes over only
    /// if these are copied to a registry, so without one no node is asked.
    pub async fn holder(&self, whole: &WholeId) -> Found {
        if !self.has_copies() {
            return None;
        }
        let searches = &self.searches;
        if let Some(known) = searches.known(whole, &self.others()) {
            return Some(known);
        }
        let mut search = searches.begin(whole)?;
        loop {
            let has_asked = tokio::select! {
                biased;
                found = &mut search => match found {
                    Ok(found) => return found,
                    // The caller whose search asked has hung up.
                    Err(_) => {
                        search = searches.begin(whole)?;
                        continue;
                    }
                },
                permit = searches.rounds.acquire() => self.ask_all(permit.ok()?).await,
            };
            if !has_asked {
                // Another round asks for it.
                match (&mut search).await {
                    Ok(found) => return found,
                    Err(_) => search = searches.begin(whole)?,
                }
            }
        }
    }

    /// Asks all nodes for the sandboxes that are looked for now. Returns false if there are none.
    async fn ask_all(&self, _permit: SemaphorePermit<'_>) -> bool {
        let searches = &self.searches;
        if searches.waiting.locked().is_empty() {
            return false;
        }
        {
            let mut began = searches.began.lock().await;
            if let Some(before) = *began {
                sleep_until(before + SPACING).await;
            }
            *began = Some(Instant::now());
        }
        let (mut asked, ids) = searches.take();
        if asked.is_empty() {
            return false;
        }
        let ids: Vec<String> = ids.iter().map(WholeId::to_string).collect();
        let path = &format!("{HOLDER}?ids={}", ids.join(","));
        let others = self.others();
        let questions = others.iter().map(|member| async move {
            let answer = self.ask(member, path, None, MAX_ANSWER).await;
            (member, read(answer))
        });
        let mut answers: FuturesUnordered<_> = questions.collect();
        while let Some((member, has)) = answers.next().await {
            let (found, left): (Vec<Search>, Vec<Search>) =
                asked.into_iter().partition(|search| has.contains(&search.whole));
            for Search { whole, found } in found {
                searches.note(&whole, member);
                // Its caller may have hung up.
                let _ = found.send(Some(member.clone()));
            }
            asked = left;
            if asked.is_empty() {
                break;
            }
        }
        for search in asked {
            let _ = search.found.send(None);
        }
        true
    }
}

/// The sandboxes that a node says it has.
fn read(answer: Result<Answer, String>) -> HashSet<WholeId> {
    let answer = answer.ok().filter(|answer| answer.status == StatusCode::OK);
    let ids = answer.and_then(|answer| serde_json::from_slice::<Vec<String>>(&answer.body).ok());
    let ids = ids.unwrap_or_default();
    ids.iter().filter_map(|id| WholeId::parse(id)).collect()
}

#[cfg(test)]
#[path = "searches_test.rs"]
mod tests;
