//! Reading from a registry and its mirrors: who is asked, in which order, and how often.
//!
//! Invariants: the mirrors are asked in their order and the registry last; one that fails is asked again only after all others
//! and a pause; one that gave wrong bytes twice is not asked again for this read; the read ends within its budget.

use std::ops::Range;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use tokio::time::{Instant, sleep_until};

use crate::error::Error;

use super::backoff::Backoff;
use super::breaker::{Admission, Permit};
use super::budget::Budget;
use super::endpoint::{Endpoint, Kind, Want};
use super::stats::Count;
use super::{Check, Fetcher, Priority, Ranges, StoredBlob, checked_range, run_check};

/// Wrong answers of one endpoint after which it is not asked again for a read.
const MAX_WRONG: u32 = 2;
/// Addresses of a descriptor that are tried.
const MAX_FOREIGN: usize = 4;

pub struct Remote {
    pub fetcher: Arc<Fetcher>,
    /// Mirrors first.
    pub endpoints: Vec<Arc<Endpoint>>,
}

/// An endpoint in one read.
struct Candidate {
    endpoint: Arc<Endpoint>,
    /// It lately did not have the blob.
    missing: bool,
    /// Asked in this round.
    tried: bool,
    wrong: u32,
    /// Not to be asked again.
    out: bool,
}

enum Choice {
    Try(usize, Permit),
    /// All that can be asked have been, in this round.
    Pause,
    /// All breakers are open, at least until then.
    Wait(Option<Instant>),
    Nobody,
}

fn choose(candidates: &[Candidate]) -> Choice {
    let avoid_missing = candidates.iter().any(|it| !it.out && !it.missing);
    let (mut any, mut tried, mut soonest) = (false, false, None);
    for (index, candidate) in candidates.iter().enumerate() {
        if candidate.out || (avoid_missing && candidate.missing) {
            continue;
        }
        any = true;
        if candidate.tried {
            tried = true;
            continue;
        }
        match candidate.endpoint.breaker.admit() {
            Admission::Pass(permit) => return Choice::Try(index, permit),
            Admission::Later(Some(until)) => {
                soonest = Some(soonest.map_or(until, |soonest: Instant| soonest.min(until)));
            }
            Admission::Later(None) => {}
        }
    }
    match (any, tried) {
        (false, _) => Choice::Nobody,
        (true, true) => Choice::Pause,
        (true, false) => Choice::Wait(soonest),
    }
}

#[async_trait]
impl Ranges for Remote {
    async fn read(
        &self,
        blob: &StoredBlob,
        range: Range<u64>,
        priority: Priority,
        check: Check,
    ) -> Result<Bytes, Error> {
        let length = checked_range(blob, &range)?;
        let gate = &self.fetcher.gate;
        let (_demand, _turn) = match priority {
            Priority::Demand => (Some(gate.demand()), None),
            Priority::Prefetch => (None, Some(gate.prefetch(length).await.ok_or(Error::Cancelled)?)),
        };
        let what = format!("bytes {}-{} of blob {}", range.start, range.end - 1, blob.digest);
        let budget = Budget::new(self.fetcher.config.budget());
        let want = Want {
            blob,
            range: range.clone(),
            what,
            priority,
            gate,
            budget: &budget,
        };
        self.attempts(&want, check)
            .await
            .map_err(|source| Error::Unreadable {
                blob: blob.digest,
                start: range.start,
                end: range.end,
                source: Box::new(source),
            })
    }
}

impl Remote {
    fn candidates(&self, blob: &StoredBlob) -> Result<Vec<Candidate>, Error> {
        let foreign = blob
            .urls
            .iter()
            .filter(|url| url.starts_with("https://") || url.starts_with("http://"))
            .take(MAX_FOREIGN)
            .map(|url| self.fetcher.foreign(url));
        let endpoints = self.endpoints.iter().cloned().map(Ok).chain(foreign);
        endpoints
            .map(|endpoint| {
                let endpoint = endpoint?;
                Ok(Candidate {
                    missing: endpoint.misses(&blob.digest),
                    endpoint,
                    tried: false,
                    wrong: 0,
                    out: false,
                })
            })
            .collect()
    }

    async fn attempts(&self, want: &Want<'_>, check: Check) -> Result<Bytes, Error> {
        let config = &self.fetcher.config;
        let length = (want.range.end - want.range.start) as usize;
        let mut candidates = self.candidates(want.blob)?;
        let mut backoff = Backoff::new(config.pause(), config.longest_pause());
        // What came of an attempt that broke off, and whom it came from: the same endpoint continues it.
        let mut begun: Option<(usize, BytesMut)> = None;
        let mut last: Option<Error> = None;
        // Who failed last, and the pause that was asked for.
        let mut failed: Option<usize> = None;
        let mut asked_pause = None;
        let mut attempt = 0;
        loop {
            let changed = self.fetcher.breakers.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            match choose(&candidates) {
                Choice::Try(index, permit) => {
                    if let Some(failed) = failed.take() {
                        candidates[failed].endpoint.stats.count(Count::Retry);
                    }
                    let candidate = &mut candidates[index];
                    candidate.tried = true;
                    let endpoint = &candidate.endpoint;
                    let mut got = match begun.take() {
                        Some((whose, got)) if whose == index => got,
                        _ => BytesMut::with_capacity(length),
                    };
                    attempt += 1;
                    let read = want.budget.within(endpoint.read(want, &mut got));
                    let kind = match endpoint.connection.wait_for(attempt, read).await {
                        None => {
                            permit.failed();
                            break;
                        }
                        Some(Ok(())) => match run_check(&check, got.freeze()).await? {
                            Ok(bytes) => {
                                permit.succeeded();
                                return Ok(bytes);
                            }
                            Err(problem) => {
                                endpoint.distrust(&want.blob.digest);
                                let what =
                                    format!("{} as {} sent it", want.what, endpoint.connection.registry);
                                tracing::warn!(what, problem, "wrong bytes");
                                last = Some(Error::malformed(what, problem));
                                Kind::Wrong
                            }
                        },
                        Some(Err(fault)) => {
                            tracing::debug!(what = want.what, error = %fault.error, "a range could not be read");
                            if matches!(fault.kind, Kind::Passing(_)) {
                                begun = Some((index, got));
                            }
                            // What says most is what the last one who had the blob said.
                            if fault.kind != Kind::Refused
                                || last.is_none()
                                || index + 1 == self.endpoints.len()
                            {
                                last = Some(fault.error);
                            }
                            fault.kind
                        }
                    };
                    failed = Some(index);
                    match kind {
                        Kind::Refused => {
                            candidate.out = true;
                            permit.succeeded();
                        }
                        Kind::Wrong => {
                            candidate.wrong += 1;
                            candidate.out = candidate.wrong >= MAX_WRONG;
                            permit.failed();
                        }
                        Kind::Passing(pause) => {
                            let until = Instant::now() + pause.unwrap_or_default();
                            match until < want.budget.deadline() {
                                true => asked_pause = asked_pause.max(pause),
                                // Others may do it before.
                                false => candidate.out = true,
                            }
                            permit.failed();
                        }
                    }
                }
                Choice::Pause => {
                    let own = backoff.next();
                    let pause = asked_pause.take().map_or(own, |asked| own.max(asked));
                    if Instant::now() + pause >= want.budget.deadline() {
                        break;
                    }
                    if let Some(failed) = failed {
                        let reason = last.as_ref().map(ToString::to_string).unwrap_or_default();
                        candidates[failed].endpoint.connection.retrying(pause, reason);
                    }
                    tokio::time::sleep(pause).await;
                    candidates.iter_mut().for_each(|it| it.tried = false);
                }
                Choice::Wait(until) => {
                    let deadline = want.budget.deadline();
                    let until = until.map_or(deadline, |until| until.min(deadline));
                    tokio::select! {
                        () = sleep_until(until) => {}
                        () = changed => {}
                    }
                    if Instant::now() >= deadline {
                        break;
                    }
                }
                Choice::Nobody => break,
            }
        }
        Err(last.unwrap_or_else(|| self.silence()))
    }

    /// The budget was spent without an answer.
    fn silence(&self) -> Error {
        let registry = self
            .endpoints
            .last()
            .map_or_else(String::new, |it| it.connection.registry.clone());
        let seconds = self.fetcher.config.budget().as_secs_f32();
        Error::RegistryUnreachable {
            registry,
            reason: format!("no answer within the {seconds} seconds a read may take"),
            advice: "check the network, and whether it runs".into(),
        }
    }
}
