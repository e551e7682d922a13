//! The handler of `/metrics`, and the metrics of requests.

use std::sync::Arc;
use std::time::Instant;

use axum::Extension;
use axum::extract::{MatchedPath, Request, State};
use axum::http::{Method, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::daemon::Daemon;
use super::problem::{ApiCode, Refusal};
use super::request_gate::Gate;
use crate::metrics::{Families, MEDIA_TYPE, process};

/// The route of a request that has none.
const NOWHERE: &str = "none";

/// Returns thawd's metrics for Prometheus. docs/metrics.md describes each.
#[utoipa::path(get, path = "/metrics", operation_id = "getMetrics", tag = "node", responses(
    (status = 200, description = "Prometheus's text format, 0.0.4", body = String, content_type = "text/plain"),
))]
pub async fn metrics(
    State(daemon): State<Arc<Daemon>>,
    Extension(gate): Extension<Arc<Gate>>,
) -> Result<Response, Refusal> {
    collect(daemon, gate, ()).await
}

/// Collects all metrics. `held` is dropped when they are collected, even if the caller has stopped waiting.
pub async fn collect(
    daemon: Arc<Daemon>,
    gate: Arc<Gate>,
    held: impl Send + 'static,
) -> Result<Response, Refusal> {
    // On a blocking thread: the kernel lists this process's descriptors, which may be many.
    let text = tokio::task::spawn_blocking(move || {
        let text = text(&daemon, &gate);
        drop(held);
        text
    });
    let text = text.await;
    let text = text.map_err(|e| Refusal::new(ApiCode::Broken, e))?;
    Ok(([(header::CONTENT_TYPE, MEDIA_TYPE)], text).into_response())
}

fn text(daemon: &Daemon, gate: &Gate) -> String {
    let mut families = Families::default();
    let version = [("version", env!("CARGO_PKG_VERSION"))];
    families.gauges("thaw_build_info", "Which thawd this is.", [(version, 1.0)]);
    daemon.count(&mut families);
    cache(daemon, &mut families);
    load(gate, &mut families);
    process::collect(&mut families);
    families.text()
}

fn cache(daemon: &Daemon, families: &mut Families) {
    let counts = daemon.cache.counts();
    families.gauges(
        "thaw_sandboxes",
        "Sandboxes, by state.",
        counts
            .states
            .map(|(state, count)| ([("state", state)], count as f64)),
    );
    let ring = counts.ring;
    families.gauge(
        "thaw_watch_changes",
        "Changes kept for watches and lists in pieces.",
        ring.changes as f64,
    );
    families.gauge(
        "thaw_watch_room",
        "Changes there is room for now.",
        ring.room as f64,
    );
    families.gauge(
        "thaw_watch_bytes",
        "What they take in memory, about.",
        ring.bytes as f64,
    );
    families.counter(
        "thaw_watch_dropped_total",
        "Changes dropped for newer ones.",
        ring.dropped,
    );
    let watchers = counts.watchers + daemon.snapshots.watchers();
    families.gauge("thaw_watchers", "Callers that watch.", watchers as f64);
}

fn load(gate: &Gate, families: &mut Families) {
    let load = gate.load();
    families.gauges(
        "thaw_api_running",
        "Requests being served.",
        load.map(|l| ([("verb", l.verb)], l.running as f64)),
    );
    families.gauges(
        "thaw_api_waiting",
        "Requests waiting for their turn.",
        load.map(|l| ([("verb", l.verb)], l.waiting as f64)),
    );
    families.counters(
        "thaw_api_refused_total",
        "Requests turned away for their caller had too many.",
        load.map(|l| ([("verb", l.verb)], l.refused)),
    );
}

/// Counts a request and the time to its answer's head.
pub async fn measure(State(daemon): State<Arc<Daemon>>, request: Request, next: Next) -> Response {
    let began = Instant::now();
    let method = method(request.method());
    let route = request.extensions().get::<MatchedPath>().cloned();
    let response = next.run(request).await;
    let route = route.as_ref().map_or(NOWHERE, MatchedPath::as_str);
    let status = response.status().as_u16();
    daemon.metrics.answered(route, method, status, began.elapsed());
    response
}

/// The method as a label. Callers may send any name.
fn method(method: &Method) -> &'static str {
    match *method {
        Method::GET => "GET",
        Method::HEAD => "HEAD",
        Method::POST => "POST",
        Method::PUT => "PUT",
        Method::PATCH => "PATCH",
        Method::DELETE => "DELETE",
        Method::OPTIONS => "OPTIONS",
        _ => "other",
    }
}

#[cfg(test)]
#[path = "metrics_test.rs"]
mod tests;
