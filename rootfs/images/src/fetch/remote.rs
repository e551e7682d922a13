//! Reads ranges from a registry and its mirrors: chooses the endpoints, their order and the number of attempts.
//!
//! Invariants: mirrors are asked in their order, then the registry, then the URLs of the descriptor. An endpoint that fails is asked again only after
//! all others and a pause. An endpoint that gave wrong bytes twice is not asked again for this read. The read ends
//! within its budget.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use tokio::time::{Instant, sleep_until};

use crate::error::Error;
use crate::ranges::{Check, Priority, Ranges, StoredBlob, Urgency, checked_range, run_check};
use crate::registry::Client;
use crate::registry::breaker::{Admission, Permit};
use crate::registry::budget::Budget;
use crate::registry::endpoint::{Endpoint, Fault, Kind, Want};
use crate::registry::retries::Retries;
use crate::registry::stats::Count;

/// Wrong answers after which an endpoint is not asked again for the same read.
const MAX_WRONG: u32 = 2;
/// Addresses of a descriptor that are tried.
const MAX_FOREIGN: usize = 4;

/// A reader of one repository's blobs.
pub struct Remote {
    client: Arc<Client>,
    /// Mirrors first.
    endpoints: Vec<Arc<Endpoint>>,
}

/// An endpoint in one read.
struct Candidate {
    endpoint: Arc<Endpoint>,
    /// It recently lacked the blob.
    missing: bool,
    /// Already asked in this round.
    tried: bool,
    wrong: u32,
    /// Not asked again for this read.
    out: bool,
}

enum Choice {
    Try(usize, Permit),
    /// All endpoints that can be asked were asked in this round.
    Pause,
    /// All breakers are open, at least until this time.
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
        let gate = &self.client.gate;
        let (_demand, _turn) = match priority {
            Priority::Demand => (Some(gate.demand()), None),
            Priority::Prefetch => (None, Some(gate.prefetch(length).await.ok_or(Error::Cancelled)?)),
        };
        self.read_now(blob, range, priority, None, check).await
    }

    async fn read_ahead(
        &self,
        blob: &StoredBlob,
        range: Range<u64>,
        urgency: &Urgency,
        check: Check,
    ) -> Result<Bytes, Error> {
        let length = checked_range(blob, &range)?;
        let gate = &self.client.gate;
        let _turn = tokio::select! {
            biased;
            () = urgency.raised() => None,
            turn = gate.prefetch(length) => Some(turn.ok_or(Error::Cancelled)?),
        };
        let reading = self.read_now(blob, range, Priority::Prefetch, Some(urgency), check);
        let mut reading = std::pin::pin!(reading);
        tokio::select! {
            biased;
            bytes = &mut reading => return bytes,
            () = urgency.raised() => {}
        }
        let _demand = gate.demand();
        reading.await
    }
}

impl Remote {
    /// Reads a range whose turn has come.
    async fn read_now(
        &self,
        blob: &StoredBlob,
        range: Range<u64>,
        priority: Priority,
        urgency: Option<&Urgency>,
        check: Check,
    ) -> Result<Bytes, Error> {
        let what = format!("bytes {}-{} of blob {}", range.start, range.end - 1, blob.digest);
        let budget = Budget::new(self.client.config.budget());
        let want = Want {
            blob,
            range: range.clone(),
            what,
            priority,
            urgency,
            gate: &self.client.gate,
            budget: &budget,
        };
        let bytes = match self.candidates(blob) {
            Ok(candidates) => Reading::new(self, want, candidates, check).bytes().await,
            Err(error) => Err(error),
        };
        bytes.map_err(|source| Error::Unreadable {
            blob: blob.digest,
            start: range.start,
            end: range.end,
            source: Box::new(source),
        })
    }

    /// Creates a reader that asks these endpoints in their order.
    pub fn new(client: Arc<Client>, endpoints: Vec<Arc<Endpoint>>) -> Self {
        Self { client, endpoints }
    }

    fn candidates(&self, blob: &StoredBlob) -> Result<Vec<Candidate>, Error> {
        let foreign = blob
            .urls
            .iter()
            .filter(|url| url.starts_with("https://") || url.starts_with("http://"))
            .take(MAX_FOREIGN)
            .map(|url| self.client.foreign(url));
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

    /// The budget was spent without an answer.
    fn silence(&self) -> Error {
        let registry = self
            .endpoints
            .last()
            .map_or_else(String::new, |it| it.connection.registry.clone());
        let seconds = self.client.config.budget().as_secs_f32();
        Error::RegistryUnreachable {
            registry,
            reason: format!("no answer within the {seconds} seconds a read may take"),
            advice: "check the network, and whether it runs".into(),
        }
    }
}

/// One read in progress.
struct Reading<'a> {
    remote: &'a Remote,
    want: Want<'a>,
    check: Check,
    candidates: Vec<Candidate>,
    /// The bytes of an attempt that broke off, and the index of its endpoint, which continues it.
    begun: Option<(usize, BytesMut)>,
    /// The error to report if the read fails.
    last: Option<Error>,
    /// The endpoint that failed last.
    failed: Option<usize>,
    /// The longest pause that a server requested in this round.
    asked_pause: Option<Duration>,
    attempt: u32,
}

/// How an attempt ended.
enum Attempt {
    Read(Bytes),
    Failed(Kind),
    /// The read's time has passed.
    TimedOut,
}

impl<'a> Reading<'a> {
    fn new(remote: &'a Remote, want: Want<'a>, candidates: Vec<Candidate>, check: Check) -> Self {
        Self {
            remote,
            want,
            check,
            candidates,
            begun: None,
            last: None,
            failed: None,
            asked_pause: None,
            attempt: 0,
        }
    }

    /// Asks one endpoint after another until one has sent the right bytes or the time is over.
    async fn bytes(mut self) -> Result<Bytes, Error> {
        let config = &self.remote.client.config;
        let budget = self.want.budget;
        let mut retries = Retries::within(budget, config.pause(), config.longest_pause());
        loop {
            let changed = self.remote.client.breaker_changed().notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            match choose(&self.candidates) {
                Choice::Try(index, permit) => match self.attempt(index).await? {
                    Attempt::Read(bytes) => {
                        permit.succeeded();
                        return Ok(bytes);
                    }
                    Attempt::TimedOut => {
                        permit.failed();
                        break;
                    }
                    Attempt::Failed(kind) => self.blame(index, kind, permit),
                },
                Choice::Pause => {
                    let Some(pause) = retries.next(self.asked_pause.take()) else {
                        break;
                    };
                    self.pause(pause).await;
                }
                Choice::Wait(until) => {
                    let deadline = budget.deadline();
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
        Err(self.last.unwrap_or_else(|| self.remote.silence()))
    }

    /// Asks one endpoint once.
    async fn attempt(&mut self, index: usize) -> Result<Attempt, Error> {
        if let Some(failed) = self.failed.take() {
            self.candidates[failed].endpoint.stats.count(Count::Retry);
        }
        self.candidates[index].tried = true;
        let endpoint = self.candidates[index].endpoint.clone();
        let want = &self.want;
        let mut got = match self.begun.take() {
            Some((whose, got)) if whose == index => got,
            _ => BytesMut::with_capacity((want.range.end - want.range.start) as usize),
        };
        self.attempt += 1;
        let read = want.budget.within(endpoint.read(want, &mut got));
        match endpoint.connection.wait_for(self.attempt, read).await {
            None => Ok(Attempt::TimedOut),
            Some(Ok(())) => match run_check(&self.check, got.freeze()).await? {
                Ok(bytes) => Ok(Attempt::Read(bytes)),
                Err(problem) => {
                    endpoint.distrust(&want.blob.digest);
                    let what = format!("{} as {} sent it", want.what, endpoint.connection.registry);
                    tracing::warn!(what, problem, "wrong bytes");
                    self.last = Some(Error::malformed(what, problem));
                    Ok(Attempt::Failed(Kind::Wrong))
                }
            },
            Some(Err(Fault { kind, error })) => {
                tracing::debug!(what = want.what, %error, "a range could not be read");
                if matches!(kind, Kind::Passing(_)) {
                    self.begun = Some((index, got));
                }
                // The most useful error is that of the last endpoint that had the blob.
                let is_registry = index + 1 == self.remote.endpoints.len();
                if kind != Kind::Refused || self.last.is_none() || is_registry {
                    self.last = Some(error);
                }
                Ok(Attempt::Failed(kind))
            }
        }
    }

    /// Decides whether an endpoint that failed is asked again, and informs its breaker.
    fn blame(&mut self, index: usize, kind: Kind, permit: Permit) {
        self.failed = Some(index);
        let candidate = &mut self.candidates[index];
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
                match until < self.want.budget.deadline() {
                    true => self.asked_pause = self.asked_pause.max(pause),
                    // Others may do it before.
                    false => candidate.out = true,
                }
                permit.failed();
            }
        }
    }

    /// Pauses before the next round.
    async fn pause(&mut self, pause: Duration) {
        match self.failed {
            Some(failed) => {
                let reason = self.last.as_ref().map(ToString::to_string).unwrap_or_default();
                let endpoint = self.candidates[failed].endpoint.clone();
                endpoint.connection.pause(pause, reason).await;
            }
            None => tokio::time::sleep(pause).await,
        }
        self.candidates.iter_mut().for_each(|it| it.tried = false);
    }
}
