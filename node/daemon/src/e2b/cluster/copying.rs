//! Copies of this node's paused sandboxes in a registry, from which other nodes take them over when this one is gone.
//!
//! Invariants: at most [`AT_ONCE`] copies are made at once, each within [`LONGEST`], so that one that hangs does not hold up the others for good. A
//! copy that failed is tried again after a pause that doubles. One that cannot succeed is tried again only after the sandbox has changed.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use thaw_protocol::api::Sandbox;
use thaw_sandbox::CopyPlace;
use thaw_sandbox::error::ErrorKind;
use thaw_sys::backoff::Backoff;
use tokio::task::{JoinError, JoinSet};
use tokio::time::{sleep, timeout};

use super::super::service::{Service, is_living, is_paused};
use crate::api::problem::Refusal;
use crate::api::scope::Scope;
use crate::api::watch::{Query, Selector};

/// How often sandboxes without a copy are looked for.
const PERIOD: Duration = Duration::from_secs(2);
/// How long after a failure a copy is tried again.
const RETRY: Backoff = Backoff {
    first: Duration::from_secs(60),
    longest: Duration::from_secs(60 * 60),
};
/// Copies that are made at once.
const AT_ONCE: usize = 2;
/// How long one copy may take.
const LONGEST: Duration = Duration::from_secs(60 * 60);

/// How a copy ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ended {
    /// There is one, or the sandbox needs none.
    Made,
    Failed,
    /// It will fail again, as long as the sandbox stays as it is.
    Refused,
}

/// When a sandbox is copied again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    /// It is being copied.
    Running,
    At(Instant),
    /// When it has changed.
    Never,
}

/// What became of the copies of one version of a sandbox.
#[derive(Clone, Copy, Debug)]
struct Tried {
    version: u64,
    failures: u32,
    next: Next,
}

/// The versions of sandboxes that were tried, by id.
#[derive(Debug, Default)]
struct Tries(HashMap<String, Tried>);

impl Tries {
    /// Forgets what concerns other versions than these. What is being copied is remembered until that ends.
    fn retain(&mut self, versions: &HashMap<&str, u64>) {
        self.0.retain(|id, tried| {
            tried.next == Next::Running || versions.get(id.as_str()) == Some(&tried.version)
        });
    }

    fn is_due(&self, id: &str, now: Instant) -> bool {
        self.0.get(id).is_none_or(|tried| match tried.next {
            Next::At(at) => at <= now,
            Next::Running | Next::Never => false,
        })
    }

    fn begin(&mut self, id: &str, version: u64) {
        let failures = self.0.get(id).map_or(0, |tried| tried.failures);
        let tried = Tried {
            version,
            failures,
            next: Next::Running,
        };
        self.0.insert(id.to_owned(), tried);
    }

    fn end(&mut self, id: &str, ended: Ended, now: Instant) {
        let Some(tried) = self.0.get_mut(id) else { return };
        tried.next = match ended {
            Ended::Made | Ended::Refused => Next::Never,
            Ended::Failed => {
                tried.failures = tried.failures.saturating_add(1);
                Next::At(now + RETRY.pause(tried.failures))
            }
        };
    }
}

/// The copies in progress, and those that were tried.
#[derive(Debug, Default)]
struct Copies {
    running: JoinSet<(String, Ended)>,
    tries: Tries,
}

impl Copies {
    /// Begins as many copies as may be made.
    fn begin(&mut self, service: &Arc<Service>) {
        let paused = paused(service);
        let versions = paused.iter().map(|it| (it.id.as_str(), it.resource_version));
        self.tries.retain(&versions.collect());
        let now = Instant::now();
        for sandbox in &paused {
            if self.running.len() >= AT_ONCE {
                return;
            }
            if !self.tries.is_due(&sandbox.id, now) {
                continue;
            }
            self.tries.begin(&sandbox.id, sandbox.resource_version);
            match place(service, &sandbox.id) {
                Some(place) => {
                    let copy = copy(service.clone(), sandbox.id.clone(), place);
                    self.running.spawn(copy);
                }
                // It is not of this API, and needs no copy.
                None => self.tries.end(&sandbox.id, Ended::Made, now),
            }
        }
    }

    fn end(&mut self, ended: Result<(String, Ended), JoinError>) {
        // A panic ends thawd.
        if let Ok((id, ended)) = ended {
            self.tries.end(&id, ended, Instant::now());
        }
    }
}

/// Copies each paused sandbox of this API to the registry, until thawd ends.
pub async fn keep_copied(service: Arc<Service>) {
    let mut closing = service.daemon.closing();
    let mut copies = Copies::default();
    loop {
        copies.begin(&service);
        tokio::select! {
            _ = closing.wait_for(|closing| *closing) => return,
            Some(ended) = copies.running.join_next() => copies.end(ended),
            () = sleep(PERIOD) => {}
        }
    }
}

/// Where the copy of a sandbox is; `None`: it is not of this API.
fn place(service: &Service, id: &str) -> Option<CopyPlace> {
    let notes = service.own_notes(id)?;
    let whole = service.whole_id(id, Some(&notes));
    service.members.as_ref()?.copy_place(&whole)
}

/// The sandboxes whose memory is released.
fn paused(service: &Service) -> Vec<Arc<Sandbox>> {
    let Ok(selector) = Selector::parse(Scope::node(), "", "") else {
        return Vec::new();
    };
    let all = service.daemon.cache.list(&Query {
        selector,
        limit: None,
        from: None,
    });
    let all = all.map(|all| all.items).unwrap_or_default().into_iter();
    all.filter(|it| is_living(it) && is_paused(it) && it.memory_released)
        .collect()
}

async fn copy(service: Arc<Service>, id: String, place: CopyPlace) -> (String, Ended) {
    let copied = timeout(LONGEST, service.daemon.copy_paused(&id, &place)).await;
    let (ended, why) = match copied {
        Ok(Ok(_)) => return (id, Ended::Made),
        Ok(Err(refusal)) if is_final(&refusal) => (Ended::Refused, refusal.to_string()),
        Ok(Err(refusal)) => (Ended::Failed, refusal.to_string()),
        Err(_) => (
            Ended::Failed,
            format!("it was not complete after {} s", LONGEST.as_secs()),
        ),
    };
    // It may be running again, and will then not be tried.
    if service.daemon.cache.get(&id).is_some() {
        let is_tried_again = ended == Ended::Failed;
        tracing::warn!(
            sandbox = id,
            is_tried_again,
            "a paused sandbox is not copied: {why}"
        );
    }
    (id, ended)
}

/// Whether a copy fails again as long as the sandbox stays as it is.
fn is_final(refusal: &Refusal) -> bool {
    let is_one = |kind| {
        matches!(
            kind,
            ErrorKind::PushRefused
                | ErrorKind::SnapshotDelta
                | ErrorKind::SnapshotDamaged
                | ErrorKind::SnapshotNotFound
                | ErrorKind::BadReference
        )
    };
    matches!(refusal, Refusal::Failure(e) if is_one(e.kind))
}

#[cfg(test)]
#[path = "copying_test.rs"]
mod tests;
