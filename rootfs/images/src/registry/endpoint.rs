//! An endpoint is a place that has blobs: a registry or a mirror of it. This file makes one attempt to read from an
//! endpoint.
//!
//! Invariants: an attempt appends only bytes that the answer's head says are the next wanted ones. A body that comes too slowly is given
//! up. Every attempt ends, whatever the server does, and tells whether the endpoint is to blame.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::BytesMut;
use futures_util::future::BoxFuture;
use reqwest::header::{HeaderName, HeaderValue};
use reqwest::{Response, StatusCode, Url};
use thaw_imagefs::digest::Digest;
use thaw_sys::lock::Lock;
use tokio::time::{Instant, timeout, timeout_at};

use crate::error::Error;
use crate::ranges::{Priority, StoredBlob, Urgency};

use super::account::Observer;
use super::answer::{Cut, Misfit, Terms, judge};
use super::breaker::{Admission, Breaker, Permit};
use super::budget::Budget;
use super::connection::{Connection, Unanswered};
use super::gate::Gate;
use super::redirect::Redirects;
use super::refusal::{passing, refusal, retry_after};
use super::request::Request;
use super::stats::{Count, EndpointStats};
use super::wire::{Failure, Wire, drain, same_origin};

/// Consecutive answers within one attempt that are shorter than requested.
const MAX_PARTS: u32 = 16;
/// How long an endpoint is not asked for a blob that it lacks, if there is another endpoint.
const MISSING_FOR: Duration = Duration::from_secs(60);
/// The same if the endpoint denies access, which the next token may change.
const DENIED_FOR: Duration = Duration::from_secs(5);
const MAX_MISSING: usize = 4096;
const LAST_PIECE: Duration = Duration::from_secs(1);

/// How slow a server may be.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Until the start of an answer.
    pub answer: Duration,
    /// Bytes of a body, or its rest, in each...
    pub bytes: u64,
    /// ...of this length.
    pub window: Duration,
}

/// Where the endpoint keeps blobs.
pub enum Place {
    /// `{base}/blobs/DIGEST{query}`.
    Repository { base: String, query: String },
    /// One blob, by a descriptor's `urls`.
    Foreign(String),
}

pub struct Endpoint {
    pub connection: Connection,
    pub place: Place,
    pub headers: Vec<(HeaderName, HeaderValue)>,
    pub terms: Terms,
    pub pace: Pace,
    pub breaker: Arc<Breaker>,
    pub stats: Arc<EndpointStats>,
    pub redirects: Redirects,
    pub missing: Mutex<HashMap<Digest, Instant>>,
}

/// A range to read, and its priority.
pub struct Want<'a> {
    pub blob: &'a StoredBlob,
    pub range: Range<u64>,
    /// Its name in messages.
    pub what: String,
    pub priority: Priority,
    /// Makes a prefetch a demand once it is raised.
    pub urgency: Option<&'a Urgency>,
    pub gate: &'a Gate,
    pub budget: &'a Budget,
}

impl Want<'_> {
    /// Whether it has to wait now: it is a prefetch, and there are demands.
    fn stands_back(&self) -> bool {
        let is_urgent = self.urgency.is_some_and(Urgency::is_raised);
        self.priority == Priority::Prefetch && !is_urgent && self.gate.is_busy()
    }

    /// Waits until it need not stand back.
    async fn wait(&self) {
        match self.urgency {
            Some(urgency) => tokio::select! {
                () = self.gate.idle() => {}
                () = urgency.raised() => {}
            },
            None => self.gate.idle().await,
        }
    }
}

/// Why an attempt failed.
pub struct Fault {
    pub kind: Kind,
    pub error: Error,
}

/// What a fault means for the endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// It may recover soon, perhaps after a time that it gave.
    Passing(Option<Duration>),
    /// It works, and will not give this blob or range.
    Refused,
    /// It sends wrong data.
    Wrong,
}

impl Fault {
    fn wrong(connection: &Connection, what: &str, problem: &str) -> Self {
        let what = format!("the answer of {} for {what}", connection.registry);
        Self {
            kind: Kind::Wrong,
            error: Error::malformed(what, problem),
        }
    }
}

/// Bounds the wait for an answer, and counts.
pub struct Timed {
    pub wire: Arc<dyn Wire>,
    pub answer: Duration,
    pub stats: Arc<EndpointStats>,
}

impl Wire for Timed {
    fn send(&self, request: reqwest::Request) -> BoxFuture<'_, Result<Response, Failure>> {
        self.stats.count(Count::Request);
        Box::pin(async move {
            timeout(self.answer, self.wire.send(request))
                .await
                .unwrap_or_else(|_| {
                    self.stats.count(Count::TooSlow);
                    let seconds = self.answer.as_secs_f32();
                    Err(Failure::timeout(format!("no answer within {seconds} seconds")))
                })
        })
    }
}

impl Observer for EndpointStats {
    fn login(&self) {
        self.count(Count::Login);
    }
}

impl Endpoint {
    /// Whether it lately did not have the blob.
    pub fn misses(&self, blob: &Digest) -> bool {
        let missing = self.missing.locked();
        missing.get(blob).is_some_and(|until| Instant::now() < *until)
    }

    fn missed(&self, blob: Digest, time: Duration) {
        let now = Instant::now();
        let mut missing = self.missing.locked();
        if missing.len() >= MAX_MISSING {
            missing.retain(|_, until| now < *until);
        }
        if missing.len() < MAX_MISSING {
            missing.insert(blob, now + time);
        }
    }

    /// Its bytes were wrong: forget its redirect, so that the next read asks the registry.
    pub fn distrust(&self, blob: &Digest) {
        self.stats.count(Count::Wrong);
        self.redirects.forget(blob);
    }

    /// Requests the whole blob once, if the circuit breaker allows; the caller compares its digest and reports the outcome
    /// of the body to the permit.
    pub async fn whole(&self, blob: Digest, size: u64, what: &str) -> Option<(Response, Permit)> {
        let Place::Repository { base, query } = &self.place else {
            return None;
        };
        let Admission::Pass(permit) = self.breaker.admit() else {
            return None;
        };
        if self.misses(&blob) {
            return None;
        }
        let url = format!("{base}/blobs/{blob}{query}");
        let request = Request {
            headers: &self.headers,
            ..Request::get(&url, what)
        };
        let response = match self.connection.exchange(&request).await {
            Ok(sent) => sent.response,
            Err(_) => {
                permit.failed();
                return None;
            }
        };
        match response.status() {
            StatusCode::OK if response.content_length().is_none_or(|length| length == size) => {
                return Some((response, permit.answered()));
            }
            status if status.is_client_error() && !passing(status) => {
                permit.succeeded();
                self.missed(blob, DENIED_FOR);
            }
            _ => permit.failed(),
        }
        drain(response).await;
        None
    }

    /// Counts bytes of a [`Self::whole`] blob.
    pub fn count(&self, bytes: u64) {
        self.stats.bytes(Priority::Demand, bytes);
    }

    /// A [`Self::whole`] blob was another.
    pub fn sent_wrong(&self, blob: Digest) {
        self.distrust(&blob);
        self.missed(blob, MISSING_FOR);
        tracing::warn!(mirror = self.connection.registry, %blob, "wrong bytes");
    }

    /// Reads the wanted bytes that follow those in `got`.
    pub async fn read(&self, want: &Want<'_>, got: &mut BytesMut) -> Result<(), Fault> {
        for _ in 0..MAX_PARTS {
            let rest = want.range.start + got.len() as u64..want.range.end;
            if rest.is_empty() {
                return Ok(());
            }
            let answer = self.ask(want, &rest).await?;
            let cut = match judge(
                answer.status(),
                answer.headers(),
                &rest,
                want.blob.size,
                self.terms,
            ) {
                Ok(cut) => cut,
                Err(Misfit::Lie(problem)) => {
                    self.distrust(&want.blob.digest);
                    return Err(Fault::wrong(&self.connection, &want.what, &problem));
                }
                Err(Misfit::Whole) => {
                    self.missed(want.blob.digest, MISSING_FOR);
                    let problem = "it ignores ranges and would send the whole blob";
                    let kind = Kind::Refused;
                    return Err(Fault {
                        kind,
                        ..Fault::wrong(&self.connection, &want.what, problem)
                    });
                }
            };
            self.receive(want, answer, cut, got).await?;
        }
        if got.len() as u64 == want.range.end - want.range.start {
            return Ok(());
        }
        Err(self.broken(want, &Failure::timeout("it sends too little at a time")))
    }

    fn broken(&self, want: &Want<'_>, failure: &Failure) -> Fault {
        self.redirects.forget(&want.blob.digest);
        Fault {
            kind: if failure.may_pass {
                Kind::Passing(None)
            } else {
                Kind::Wrong
            },
            error: self.connection.unreachable(failure),
        }
    }

    /// A successful answer: from the last target of the registry's redirect, or else from the registry itself.
    async fn ask(&self, want: &Want<'_>, range: &Range<u64>) -> Result<Response, Fault> {
        let own = match &self.place {
            Place::Repository { base, query } => format!("{base}/blobs/{}{query}", want.blob.digest),
            Place::Foreign(url) => url.clone(),
        };
        let mut cached = self.redirects.get(&want.blob.digest);
        loop {
            let from_cache = cached.is_some();
            let url = cached.take().unwrap_or_else(|| own.clone());
            let request = Request {
                range: Some((range.start, Some(range.end))),
                // These headers are for the mirror only.
                headers: if from_cache { &[] } else { &self.headers },
                foreign: matches!(self.place, Place::Foreign(_)),
                ..Request::get(&url, &want.what)
            };
            let sent = match self.connection.exchange(&request).await {
                Ok(sent) => sent,
                Err(Unanswered::Failure(failure)) => return Err(self.broken(want, &failure)),
                Err(Unanswered::Access(error)) => {
                    let kind = match error {
                        Error::RegistryUnreachable { .. } | Error::RegistryFailed { .. } => {
                            Kind::Passing(None)
                        }
                        Error::RegistryRateLimited { retry_after, .. } => {
                            Kind::Passing(retry_after.map(Duration::from_secs))
                        }
                        _ => Kind::Refused,
                    };
                    return Err(Fault { kind, error });
                }
            };
            let status = sent.response.status();
            if status.is_success() {
                if sent.redirects > 0 {
                    self.stats.count(Count::Redirect);
                    // One at the same place wants credentials again, and costs little.
                    if Url::parse(&own).is_ok_and(|own| !same_origin(&own, &sent.url)) {
                        self.redirects.put(want.blob.digest, &sent.url);
                    }
                }
                return Ok(sent.response);
            }
            self.redirects.forget(&want.blob.digest);
            // A signed address has expired.
            if from_cache && status.is_client_error() && !passing(status) {
                drain(sent.response).await;
                continue;
            }
            let wait = retry_after(sent.response.headers());
            let kind = match status {
                _ if passing(status) => Kind::Passing(wait),
                StatusCode::RANGE_NOT_SATISFIABLE => Kind::Wrong,
                StatusCode::NOT_FOUND | StatusCode::GONE => {
                    self.missed(want.blob.digest, MISSING_FOR);
                    Kind::Refused
                }
                StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                    self.missed(want.blob.digest, DENIED_FOR);
                    Kind::Refused
                }
                _ => Kind::Refused,
            };
            let error = refusal(&self.connection.registry, &want.what, sent.response, 1).await;
            return Err(Fault { kind, error });
        }
    }

    /// Takes the bytes out of a body, as long as it keeps the pace.
    async fn receive(
        &self,
        want: &Want<'_>,
        mut response: Response,
        cut: Cut,
        got: &mut BytesMut,
    ) -> Result<(), Fault> {
        let Cut { mut skip, take } = cut;
        let mut left = take;
        let mut window = Instant::now() + self.pace.window;
        let mut received = 0;
        while left > 0 {
            if want.stands_back() {
                let ((), waited) = want.budget.without(want.wait()).await;
                window += waited;
            }
            let Ok(piece) = timeout_at(window, response.chunk()).await else {
                if received < self.pace.bytes {
                    self.stats.count(Count::TooSlow);
                    let seconds = self.pace.window.as_secs_f32();
                    let reason = format!("it sent only {received} bytes in {seconds} seconds");
                    return Err(self.broken(want, &Failure::timeout(reason)));
                }
                received = 0;
                window = Instant::now() + self.pace.window;
                continue;
            };
            let mut piece = match piece {
                Ok(Some(piece)) => piece,
                Ok(None) => {
                    let failure = Failure {
                        may_pass: true,
                        ..Failure::lasting(format!("the body ended {left} bytes early"))
                    };
                    return Err(self.broken(want, &failure));
                }
                Err(error) => return Err(self.broken(want, &error.into())),
            };
            let length = piece.len() as u64;
            received += length;
            self.stats.bytes(want.priority, length);
            let unwanted = skip.min(length);
            skip -= unwanted;
            let mut piece = piece.split_off(unwanted as usize);
            piece.truncate(left.min(piece.len() as u64) as usize);
            left -= piece.len() as u64;
            got.extend_from_slice(&piece);
        }
        // A body without a length is at its end when that has been read; then the connection serves again.
        if response.content_length().is_none()
            && cut.skip == 0
            && response.status() == StatusCode::PARTIAL_CONTENT
        {
            let _ = timeout(LAST_PIECE, response.chunk()).await;
        }
        Ok(())
    }
}
