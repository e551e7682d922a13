//! Counters of requests, bytes and errors, by endpoint.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use serde::Serialize;
use thaw_sys::lock::Lock;

use crate::ranges::Priority;

/// Counters of a process, by endpoint (a registry's or mirror's host; `local` for files).
#[derive(Debug, Default)]
pub struct Stats(Mutex<BTreeMap<String, Arc<EndpointStats>>>);

/// Counters of one endpoint.
#[derive(Debug, Default)]
pub struct EndpointStats {
    requests: AtomicU64,
    demand_bytes: AtomicU64,
    prefetch_bytes: AtomicU64,
    retries: AtomicU64,
    wrong_bytes: AtomicU64,
    breaker_opens: AtomicU64,
    breaker_probes: AtomicU64,
    redirects: AtomicU64,
    logins: AtomicU64,
    too_slow: AtomicU64,
}

/// The counters of one endpoint at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct EndpointCounts {
    pub endpoint: String,
    /// Requests sent for ranges of blobs, redirected ones included.
    pub requests: u64,
    /// Bytes of bodies received for reads on demand, wrong ones included.
    pub demand_bytes: u64,
    /// The same for prefetches.
    pub prefetch_bytes: u64,
    /// Requests that failed and were followed by another, here or elsewhere.
    pub retries: u64,
    /// Answers whose bytes were not the blob's.
    pub wrong_bytes: u64,
    /// Times the breaker opened.
    pub breaker_opens: u64,
    /// Requests that tried whether the endpoint is back.
    pub breaker_probes: u64,
    /// Redirects followed, except cached ones.
    pub redirects: u64,
    /// Tokens requested, or passwords read again.
    pub logins: u64,
    /// Answers given up because they came too slowly.
    pub too_slow: u64,
}

/// A counter of [`EndpointStats`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Count {
    Request,
    Retry,
    Wrong,
    BreakerOpen,
    BreakerProbe,
    Redirect,
    Login,
    TooSlow,
}

impl Stats {
    /// The counters of `endpoint`, created at its first use.
    pub(crate) fn endpoint(&self, endpoint: &str) -> Arc<EndpointStats> {
        let mut endpoints = self.0.locked();
        endpoints.entry(endpoint.to_owned()).or_default().clone()
    }

    /// All counters now, by name.
    pub fn snapshot(&self) -> Vec<EndpointCounts> {
        let endpoints = self.0.locked();
        endpoints
            .iter()
            .map(|(name, counters)| counters.snapshot(name))
            .collect()
    }
}

impl EndpointStats {
    /// It sent other data than requested.
    pub(crate) fn sent_wrong(&self) {
        self.count(Count::Wrong);
    }

    pub(crate) fn count(&self, what: Count) {
        let counter = match what {
            Count::Request => &self.requests,
            Count::Retry => &self.retries,
            Count::Wrong => &self.wrong_bytes,
            Count::BreakerOpen => &self.breaker_opens,
            Count::BreakerProbe => &self.breaker_probes,
            Count::Redirect => &self.redirects,
            Count::Login => &self.logins,
            Count::TooSlow => &self.too_slow,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn bytes(&self, priority: Priority, bytes: u64) {
        let counter = match priority {
            Priority::Demand => &self.demand_bytes,
            Priority::Prefetch => &self.prefetch_bytes,
        };
        counter.fetch_add(bytes, Ordering::Relaxed);
    }

    fn snapshot(&self, endpoint: &str) -> EndpointCounts {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        EndpointCounts {
            endpoint: endpoint.to_owned(),
            requests: get(&self.requests),
            demand_bytes: get(&self.demand_bytes),
            prefetch_bytes: get(&self.prefetch_bytes),
            retries: get(&self.retries),
            wrong_bytes: get(&self.wrong_bytes),
            breaker_opens: get(&self.breaker_opens),
            breaker_probes: get(&self.breaker_probes),
            redirects: get(&self.redirects),
            logins: get(&self.logins),
            too_slow: get(&self.too_slow),
        }
    }
}
