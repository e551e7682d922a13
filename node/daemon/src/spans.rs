//! Creations as OpenTelemetry spans, sent to the configured collector (OTLP over HTTP, JSON).
//!
//! Invariants: a creation never waits for the collector: spans wait in a bounded queue, and those that do not fit are dropped and counted;
//! a creation in a trace that is not sampled is not sent.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use axum::http::HeaderMap;
use opentelemetry::propagation::TextMapPropagator;
use opentelemetry::trace::{SpanContext, SpanId, SpanKind, Status, TraceContextExt, TraceFlags, TraceState};
use opentelemetry::{Context, InstrumentationScope, KeyValue, StringValue, Value};
use opentelemetry_http::HeaderExtractor;
use opentelemetry_otlp::{Protocol, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{
    IdGenerator, RandomIdGenerator, SpanData, SpanEvents, SpanExporter, SpanLinks,
};
use thaw_protocol::api::Account;
use thaw_sandbox::config::TracingConfig;
use thaw_sandbox::error::{Error, ErrorKind};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::metrics::Families;

/// Most creations in the queue.
const WAITING: usize = 1024;
/// Most creations in one request to the collector.
const BATCH: usize = 64;
/// Most stages of a creation.
const STAGES: usize = 64;
/// How long a request to the collector may take.
const LIMIT: Duration = Duration::from_secs(10);
/// How long the queue is flushed at shutdown.
const LINGERS: Duration = Duration::from_secs(2);
/// The path of a collector whose address has none.
const PATH: &str = "/v1/traces";

/// A creation, successful or not.
#[derive(Clone, Debug)]
pub struct Creation {
    /// `create`, `thaw` or `fork`.
    pub what: &'static str,
    /// The caller's span (W3C Trace Context).
    pub parent: Option<SpanContext>,
    pub began: SystemTime,
    pub took: Duration,
    /// Its result, or the problem's code.
    pub outcome: Result<Told, &'static str>,
}

/// The result of a successful creation.
#[derive(Clone, Debug, Default)]
pub struct Told {
    /// The sandbox's id, if there is one sandbox.
    pub id: Option<String>,
    /// How long each step of the whole took.
    pub account: Account,
    /// The clones of a fork.
    pub clones: Vec<Sibling>,
}

/// A clone of a fork.
#[derive(Clone, Debug)]
pub struct Sibling {
    pub id: String,
    /// After the beginning of the whole.
    pub began: Duration,
    pub took: Duration,
    pub account: Account,
}

/// The span that a request names as its parent.
pub fn parent(headers: &HeaderMap) -> Option<SpanContext> {
    let context =
        TraceContextPropagator::new().extract_with_context(&Context::new(), &HeaderExtractor(headers));
    let parent = context.span().span_context().clone();
    parent.is_valid().then_some(parent)
}

/// Sends creations to a collector.
#[derive(Debug)]
pub struct Spans {
    waiting: mpsc::Sender<Creation>,
    counts: Arc<Counts>,
    sending: JoinHandle<()>,
}

#[derive(Debug, Default)]
struct Counts {
    sent: AtomicU64,
    dropped: AtomicU64,
}

impl Spans {
    /// Starts sending, if the configuration names a collector. Call it within a tokio runtime.
    ///
    /// # Errors
    /// `config-invalid`: the collector's address is invalid.
    pub fn start(config: &TracingConfig) -> Result<Option<Spans>, Error> {
        let Some(collector) = &config.otlp else {
            return Ok(None);
        };
        let refuse = |e: &dyn std::fmt::Display| {
            let what = format!("[tracing]: nothing can be sent to {collector}: {e}");
            Error::new(ErrorKind::ConfigInvalid, what)
        };
        let client = thaw_images::registry::http_client(collector).map_err(|e| refuse(&e))?;
        let mut exporter = opentelemetry_otlp::SpanExporter::builder()
            .with_http()
            .with_http_client(client)
            .with_protocol(Protocol::HttpJson)
            .with_timeout(LIMIT)
            .with_endpoint(endpoint(collector))
            .build()
            .map_err(|e| refuse(&e))?;
        let version = KeyValue::new("service.version", env!("CARGO_PKG_VERSION"));
        let resource = Resource::builder_empty().with_service_name("thawd");
        exporter.set_resource(&resource.with_attribute(version).build());
        let (waiting, queue) = mpsc::channel(WAITING);
        let counts = Arc::new(Counts::default());
        Ok(Some(Spans {
            waiting,
            sending: tokio::spawn(send(queue, exporter, counts.clone())),
            counts,
        }))
    }

    /// Puts a creation into the queue.
    pub fn send(&self, creation: Creation) {
        let sampled = creation.parent.as_ref().is_none_or(SpanContext::is_sampled);
        if sampled && self.waiting.try_send(creation).is_err() {
            self.counts.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Adds the numbers of sent and dropped creations.
    pub fn count(&self, families: &mut Families) {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        families.counter(
            "thaw_spans_sent_total",
            "Creations the collector of spans took.",
            get(&self.counts.sent),
        );
        families.counter(
            "thaw_spans_dropped_total",
            "Creations it did not take, or that waited for it in vain.",
            get(&self.counts.dropped),
        );
    }

    /// Flushes the queue, for a limited time.
    pub async fn close(self) {
        drop(self.waiting);
        if tokio::time::timeout(LINGERS, self.sending).await.is_err() {
            tracing::warn!("the collector of spans did not take all of them");
        }
    }
}

fn endpoint(collector: &str) -> String {
    let base = collector.trim_end_matches('/');
    let has_path = base.split_once("://").is_some_and(|(_, rest)| rest.contains('/'));
    match has_path {
        true => base.to_owned(),
        false => format!("{base}{PATH}"),
    }
}

async fn send(mut queue: mpsc::Receiver<Creation>, exporter: impl SpanExporter, counts: Arc<Counts>) {
    let ids = RandomIdGenerator::default();
    let scope = InstrumentationScope::builder("thawd").build();
    let (mut batch, mut fails) = (Vec::new(), false);
    while queue.recv_many(&mut batch, BATCH).await > 0 {
        let count = batch.len() as u64;
        let spans = batch.drain(..).flat_map(|creation| spans(creation, &ids, &scope));
        let sent = tokio::time::timeout(LIMIT, exporter.export(spans.collect())).await;
        let problem = match sent {
            Ok(Ok(())) => None,
            Ok(Err(e)) => Some(e.to_string()),
            Err(_) => Some("it does not answer".into()),
        };
        match problem {
            None => counts.sent.fetch_add(count, Ordering::Relaxed),
            Some(_) => counts.dropped.fetch_add(count, Ordering::Relaxed),
        };
        // Logged when it begins to fail, not for every batch.
        if let Some(problem) = problem.as_ref().filter(|_| !fails) {
            tracing::warn!("the collector of spans takes none: {problem}");
        }
        fails = problem.is_some();
    }
}

/// A span of the whole, one for each stage, and the same for each clone.
fn spans(creation: Creation, ids: &RandomIdGenerator, scope: &InstrumentationScope) -> Vec<SpanData> {
    let Creation {
        what,
        parent,
        began,
        took,
        outcome,
    } = creation;
    let trace = parent
        .as_ref()
        .map_or_else(|| ids.new_trace_id(), SpanContext::trace_id);
    let context =
        |state: TraceState| SpanContext::new(trace, ids.new_span_id(), TraceFlags::SAMPLED, false, state);
    let span = |context: SpanContext, name: String, from: SystemTime, took: Duration| SpanData {
        span_context: context,
        parent_span_id: SpanId::INVALID,
        parent_span_is_remote: false,
        span_kind: SpanKind::Internal,
        name: name.into(),
        start_time: from,
        end_time: from.checked_add(took).unwrap_or(from),
        attributes: Vec::new(),
        dropped_attributes_count: 0,
        events: SpanEvents::default(),
        links: SpanLinks::default(),
        status: Status::Unset,
        instrumentation_scope: scope.clone(),
    };
    let state = parent
        .as_ref()
        .map(|p| p.trace_state().clone())
        .unwrap_or_default();
    let mut whole = span(context(state.clone()), format!("sandbox {what}"), began, took);
    whole.span_kind = SpanKind::Server;
    if let Some(parent) = &parent {
        (whole.parent_span_id, whole.parent_span_is_remote) = (parent.span_id(), true);
    }
    let told = outcome.unwrap_or_else(|code| {
        whole.attributes.push(KeyValue::new("error.type", code));
        whole.status = Status::error(code);
        Told::default()
    });
    let root = whole.span_context.span_id();
    let below = |parent: SpanId, name: String, from: SystemTime, took: Duration| SpanData {
        parent_span_id: parent,
        ..span(context(state.clone()), name, from, took)
    };
    let after = |from: SystemTime, by: Duration| from.checked_add(by).unwrap_or(from);
    // The span of one sandbox, with its stages below it.
    let one = |mut sandbox: SpanData, id: Option<String>, account: Account| {
        let (parent, from) = (sandbox.span_context.span_id(), sandbox.start_time);
        sandbox.attributes.extend(attributes(id, &account));
        let notes = account.notes;
        let stages = account.stages.into_iter().take(STAGES).map(|stage| {
            let (began, took) = (stage.start_ns, stage.duration_ns);
            let note = notes.get(&stage.name).cloned();
            let mut span = below(
                parent,
                stage.name,
                after(from, Duration::from_nanos(began)),
                Duration::from_nanos(took),
            );
            span.attributes
                .extend(note.map(|note| KeyValue::new("thaw.note", note)));
            span
        });
        let stages: Vec<SpanData> = stages.collect();
        std::iter::once(sandbox).chain(stages)
    };
    let clones = told.clones.into_iter().flat_map(|clone| {
        let from = after(began, clone.began);
        let sandbox = below(root, "sandbox thaw".into(), from, clone.took);
        one(sandbox, Some(clone.id), clone.account)
    });
    let clones: Vec<SpanData> = clones.collect();
    one(whole, told.id, told.account).chain(clones).collect()
}

/// The attributes of a sandbox: its id, reasons for slowness, counters.
fn attributes(id: Option<String>, account: &Account) -> Vec<KeyValue> {
    let mut attributes: Vec<KeyValue> = id
        .into_iter()
        .map(|id| KeyValue::new("thaw.sandbox.id", id))
        .collect();
    if !account.reasons.is_empty() {
        let codes = account.reasons.iter().take(STAGES);
        let codes: Vec<StringValue> = codes.map(|r| r.code.clone().into()).collect();
        attributes.push(KeyValue::new("thaw.slow", Value::Array(codes.into())));
    }
    let counts = account.counts.iter().take(STAGES).map(|(name, count)| {
        // No count exceeds it.
        let count = i64::try_from(*count).unwrap_or(i64::MAX);
        KeyValue::new(format!("thaw.{name}"), count)
    });
    attributes.extend(counts);
    attributes
}

#[cfg(test)]
#[path = "spans_test.rs"]
mod tests;
