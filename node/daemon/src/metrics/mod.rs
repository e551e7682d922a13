//! thawd's metrics, for Prometheus. docs/metrics.md describes each.
//!
//! | module | noun |
//! |---|---|
//! | here | metrics that are updated as events happen |
//! | [`families`] | the metrics of one moment, as text |
//! | [`node`] | the node: pools, image store, fetches |
//! | [`process`] | this process |
//!
//! Invariants: collecting metrics touches no disk, no guest and no VMM; every label has a bounded number of values, whatever callers
//! send ([`Names`]); no metric is of one sandbox, of which there may be thousands.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::time::Duration;

use prometheus::{HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, Opts};
use thaw_protocol::api::Account;
use thaw_sandbox::failure::Reason;
use thaw_sys::lock::Lock;

pub mod families;
#[cfg(test)]
pub mod grammar;
pub mod node;
pub mod process;

pub use families::{Families, MEDIA_TYPE};

/// Upper bounds of the buckets of a start, a stage and a request, seconds.
const SECONDS: [f64; 19] = [
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
    20.0, 40.0, 60.0,
];
/// Maximum number of values of a label whose values are not listed in the code.
const MOST_NAMES: usize = 64;
/// The value for all further names.
const OTHER: &str = "other";

/// How a sandbox was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// From an image.
    Create,
    /// From a snapshot.
    Thaw,
}

impl How {
    /// The name in metrics and spans.
    pub fn name(self) -> &'static str {
        match self {
            How::Create => "create",
            How::Thaw => "thaw",
        }
    }
}

/// The first [`MOST_NAMES`] different names; later ones become [`OTHER`].
#[derive(Debug, Default)]
pub struct Names(Mutex<BTreeSet<String>>);

impl Names {
    /// The value of the label for this name.
    pub fn of<'a>(&self, name: &'a str) -> &'a str {
        let mut known = self.0.locked();
        if known.contains(name) {
            return name;
        }
        match known.len() < MOST_NAMES {
            true => {
                known.insert(name.to_owned());
                name
            }
            false => OTHER,
        }
    }
}

/// Metrics that are updated as events happen.
#[derive(Debug)]
pub struct Metrics {
    starts: HistogramVec,
    stages: HistogramVec,
    stage_names: Names,
    failures: IntCounterVec,
    failed: IntCounterVec,
    slow: IntCounterVec,
    slow_names: Names,
    endpoint_names: Names,
    faults: IntCounter,
    populated: IntCounter,
    image_bytes: IntCounter,
    requests: IntCounterVec,
    latencies: HistogramVec,
    forwarded: IntCounterVec,
    connections: IntGauge,
    connections_refused: IntCounter,
}

/// A connection that is being served.
#[derive(Debug)]
pub struct Connected(IntGauge);

impl Drop for Connected {
    fn drop(&mut self) {
        self.0.dec();
    }
}

impl Default for Metrics {
    fn default() -> Metrics {
        Metrics {
            starts: histograms(
                "thaw_start_seconds",
                "From the request for a sandbox to its agent taking containers.",
                &["how"],
            ),
            stages: histograms(
                "thaw_start_stage_seconds",
                "The stages of these; some run beside each other.",
                &["how", "stage"],
            ),
            stage_names: Names::default(),
            failures: counters(
                "thaw_start_failures_total",
                "Sandboxes that could not be made, by the problem's code.",
                &["how", "code"],
            ),
            failed: failed_sandboxes(),
            slow: counters(
                "thaw_start_slow_total",
                "Starts that were slower than they could be, by why.",
                &["how", "reason"],
            ),
            slow_names: Names::default(),
            endpoint_names: Names::default(),
            faults: counter(
                "thaw_start_faults_total",
                "Page faults of thawed guests' CPUs until the end of their creation.",
            ),
            populated: counter(
                "thaw_start_populated_pages_total",
                "Pages that were mapped before thawed guests ran.",
            ),
            image_bytes: counter(
                "thaw_start_image_bytes_total",
                "Bytes transferred to have images before their guests ran.",
            ),
            requests: counters(
                "thaw_api_requests_total",
                "Requests answered.",
                &["route", "method", "status"],
            ),
            latencies: histograms(
                "thaw_api_request_seconds",
                "From a request's head to its answer's head.",
                &["route", "method"],
            ),
            forwarded: forwarded_requests(),
            connections: IntGauge::new("thaw_api_connections", "Connections being served.")
                .expect("the name is good"),
            connections_refused: counter(
                "thaw_api_connections_refused_total",
                "Connections turned away for there were too many.",
            ),
        }
    }
}

impl Metrics {
    /// A sandbox was created.
    pub fn started(&self, how: How, took: Duration, account: &Account) {
        let started = self.starts.with_label_values(&[how.name()]);
        started.observe(took.as_secs_f64());
        self.reported(how, account);
    }

    /// More is known of the start of a sandbox that was counted.
    pub fn reported(&self, how: How, account: &Account) {
        let how = how.name();
        for stage in &account.stages {
            let name = self.stage_names.of(&stage.name);
            let seconds = stage.duration_ns as f64 / 1e9;
            self.stages.with_label_values(&[how, name]).observe(seconds);
        }
        for reason in &account.reasons {
            let name = self.slow_names.of(&reason.code);
            self.slow.with_label_values(&[how, name]).inc();
        }
        let counted = |name: &str| account.counts.get(name).copied().unwrap_or(0);
        self.faults.inc_by(counted("faults"));
        self.populated.inc_by(counted("populated_pages"));
        self.image_bytes.inc_by(counted("image_bytes"));
    }

    /// A creation failed, for a reason with this code.
    pub fn not_started(&self, how: How, code: &'static str) {
        self.failures.with_label_values(&[how.name(), code]).inc();
    }

    /// A sandbox ended without a request, for a reason with this code.
    pub fn failed(&self, reason: &str) {
        self.failed.with_label_values(&[reason]).inc();
    }

    /// A request was answered. `route` is a path's pattern, not the path.
    pub fn answered(&self, route: &str, method: &'static str, status: u16, took: Duration) {
        let status = status.to_string();
        self.requests.with_label_values(&[route, method, &status]).inc();
        self.latencies
            .with_label_values(&[route, method])
            .observe(took.as_secs_f64());
    }

    /// A request for a sandbox of another node was passed on to that node, which answered or did not.
    pub fn forwarded(&self, is_answered: bool) {
        self.forwarded.with_label_values(&[result(is_answered)]).inc();
    }

    /// The names of endpoints seen so far.
    pub fn endpoint_names(&self) -> &Names {
        &self.endpoint_names
    }

    /// A connection was accepted. It counts until the returned value is dropped.
    pub fn connected(&self) -> Connected {
        self.connections.inc();
        Connected(self.connections.clone())
    }

    /// A connection was refused because there are too many.
    pub fn connection_refused(&self) {
        self.connections_refused.inc();
    }

    /// Adds all metrics.
    pub fn collect(&self, families: &mut Families) {
        for histograms in [&self.starts, &self.stages, &self.latencies] {
            families.collected(histograms);
        }
        for counters in [
            &self.failures,
            &self.failed,
            &self.slow,
            &self.requests,
            &self.forwarded,
        ] {
            families.collected(counters);
        }
        for counter in [
            &self.faults,
            &self.populated,
            &self.image_bytes,
            &self.connections_refused,
        ] {
            families.collected(counter);
        }
        families.collected(&self.connections);
    }
}

fn histograms(name: &str, help: &str, labels: &[&str]) -> HistogramVec {
    let options = HistogramOpts::new(name, help).buckets(SECONDS.into());
    HistogramVec::new(options, labels).expect("the names are good and the bounds grow")
}

fn counters(name: &str, help: &str, labels: &[&str]) -> IntCounterVec {
    IntCounterVec::new(Opts::new(name, help), labels).expect("the names are good")
}

/// Every reason has a counter from the start, so that the first failure shows as an increase.
fn failed_sandboxes() -> IntCounterVec {
    let failed = counters(
        "thaw_sandbox_failures_total",
        "Sandboxes that ended unasked, by why.",
        &["reason"],
    );
    for reason in Reason::ALL {
        failed.with_label_values(&[reason.code()]);
    }
    failed
}

/// The value of the label `result`.
fn result(is_answered: bool) -> &'static str {
    if is_answered { "answered" } else { "failed" }
}

/// Both results have a counter from the start, so that the first failure shows as an increase.
fn forwarded_requests() -> IntCounterVec {
    let forwarded = counters(
        "thaw_e2b_forwarded_total",
        "Requests of E2B's API passed on to other nodes, by whether the node answered.",
        &["result"],
    );
    for is_answered in [false, true] {
        forwarded.with_label_values(&[result(is_answered)]);
    }
    forwarded
}

fn counter(name: &str, help: &str) -> IntCounter {
    IntCounter::new(name, help).expect("the name is good")
}

#[cfg(test)]
#[path = "metrics_test.rs"]
mod tests;
