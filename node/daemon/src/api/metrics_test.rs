use std::collections::BTreeMap;

use axum::body::Body;
use http_body_util::BodyExt;
use hyper::service::Service;
use hyper_util::service::TowerToHyperService;
use thaw_images::registry::EndpointCounts;
use thaw_protocol::api::{Account, Reason, Stage};
use thaw_sandbox::config::TracingConfig;
use thaw_sandbox::paths::Paths;
use thaw_sandbox::{Node, Tenants};

use super::*;
use crate::api::fake::Fake;
use crate::api::peer::Peer;
use crate::api::request_gate::Bounds;
use crate::api::router::router;
use crate::metrics::grammar::{self, Read};
use crate::metrics::{How, node};
use crate::spans::Spans;

async fn ask(routes: &axum::Router, method: &str, path: &str, body: &str) -> Response {
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header("content-type", "application/json")
        .extension(Peer::user(0))
        .body(Body::from(body.to_owned()))
        .unwrap();
    TowerToHyperService::new(routes.clone())
        .call(request)
        .await
        .unwrap()
}

async fn scrape(routes: &axum::Router) -> BTreeMap<String, Read> {
    let response = ask(routes, "GET", "/metrics", "").await;
    assert_eq!(response.headers()["content-type"], MEDIA_TYPE);
    let body = response.into_body().collect().await.unwrap().to_bytes();
    grammar::read(std::str::from_utf8(&body).unwrap()).unwrap()
}

#[tokio::test]
async fn what_was_asked_and_made_is_in_the_exposition() {
    let (_fake, daemon) = Fake::daemon(true);
    let routes = router(daemon, Gate::new(Bounds::default()));
    let good = r#"{"image":"x","cpus":1,"memory_mib":128}"#;
    for _ in 0..3 {
        ask(&routes, "POST", "/v1/sandboxes", good).await;
    }
    ask(
        &routes,
        "POST",
        "/v1/sandboxes",
        &good.replace("\"x\"", "\"missing\""),
    )
    .await;
    ask(&routes, "POST", "/v1/sandboxes/000000000000/pause", "").await;
    for n in 0..100 {
        ask(&routes, "GET", &format!("/v1/sandboxes/none-{n}"), "").await;
        ask(&routes, &format!("METHOD{n}"), &format!("/none-{n}"), "").await;
    }
    let read = scrape(&routes).await;
    let sandboxes = &read["thaw_sandboxes"];
    assert_eq!(sandboxes.value(&[("state", "running")]), Some(2.0));
    assert_eq!(sandboxes.value(&[("state", "paused")]), Some(1.0));
    assert_eq!(sandboxes.value(&[("state", "ended")]), Some(0.0));
    let starts = &read["thaw_start_seconds"];
    assert_eq!(starts.value(&[("how", "create"), ("le", "+Inf")]), Some(3.0));
    let failures = &read["thaw_start_failures_total"];
    assert_eq!(failures.value(&[("code", "image-not-found")]), Some(1.0));
    let requests = &read["thaw_api_requests_total"];
    let counted =
        |route, method, status| requests.value(&[("route", route), ("method", method), ("status", status)]);
    assert_eq!(counted("/v1/sandboxes", "POST", "201"), Some(3.0));
    assert_eq!(counted("/v1/sandboxes", "POST", "404"), Some(1.0));
    assert_eq!(counted("/v1/sandboxes/{id}", "GET", "404"), Some(100.0));
    assert_eq!(counted("none", "other", "404"), Some(100.0));
    assert!(requests.samples.len() < 10, "{:?}", requests.samples);
    assert_eq!(read["thaw_watch_changes"].value(&[]), Some(4.0));
    assert_eq!(
        read["thaw_api_running"].value(&[("verb", "read")]),
        Some(1.0),
        "this one"
    );
    assert!(read["process_resident_memory_bytes"].value(&[]).unwrap() > 1e6);
    assert!(read["process_open_fds"].value(&[]).unwrap() > 2.0);
}

#[tokio::test]
async fn refusals_are_counted_by_kind() {
    let (_fake, daemon) = Fake::daemon(true);
    let mut bounds = Bounds::default();
    (bounds.create.running, bounds.create.waiting) = (0, 0);
    let routes = router(daemon, Gate::new(bounds));
    for _ in 0..2 {
        ask(&routes, "POST", "/v1/sandboxes", "{}").await;
    }
    let refused = &scrape(&routes).await["thaw_api_refused_total"];
    assert_eq!(refused.value(&[("verb", "create")]), Some(2.0));
    assert_eq!(refused.value(&[("verb", "read")]), Some(0.0));
}

/// All metric families, from one thawd that has done a little of everything.
async fn everything() -> BTreeMap<String, Read> {
    let root = tempfile::tempdir().unwrap();
    let path = |name: &str| root.path().join(name);
    let paths = Paths {
        data: path("d"),
        run: path("r"),
        kernel: path("k"),
        guest_image: path("g"),
    };
    let node = Node::open(paths).unwrap();
    let measuring = tokio::spawn(node.images.clone().keep_measured());
    while node.images.size().is_none() {
        tokio::task::yield_now().await;
    }
    measuring.abort();
    let daemon = Daemon::start(Tenants::open(node)).await.unwrap();
    let account = Account {
        stages: vec![Stage {
            name: "thaw".into(),
            start_ns: 0,
            duration_ns: 1,
        }],
        reasons: vec![Reason {
            code: "no-shell".into(),
            text: String::new(),
        }],
        ..Account::default()
    };
    let moment = std::time::Duration::from_millis(1);
    daemon.metrics.started(How::Create, moment, &account);
    daemon.metrics.not_started(How::Create, "internal");
    daemon.metrics.answered("/metrics", "GET", 200, moment);
    let mut read = grammar::read(&text(&daemon, &Gate::new(Bounds::default()))).unwrap();
    let mut fetched = Families::default();
    node::fetches(vec![EndpointCounts::default()], &mut fetched);
    let collector = TracingConfig {
        otlp: Some("http://127.0.0.1:9".into()),
    };
    Spans::start(&collector).unwrap().unwrap().count(&mut fetched);
    read.extend(grammar::read(&fetched.text()).unwrap());
    read
}

const INTRODUCTION: &str = "\
# Metrics

`GET /metrics` on thawd's socket is Prometheus's text format, 0.0.4. Asking for it touches no disk, no guest and no VMM, and
no metric speaks of one sandbox: those are at `/v1/sandboxes/{id}/metrics`, and in `thaw top`.

Prometheus has a listener of its own, which is no way into the API:

```toml
[metrics]
listen = \"127.0.0.1:9464\"
```

It serves `GET /metrics` and `GET /v1/health` over HTTP, to whoever connects, and answers everything else with 404 or 405. No metric names
a sandbox or a tenant, but they tell how much the node does and which registries it uses: choose an address that only Prometheus can
reach. It takes 64 connections, 16 of one address. Over the API `/metrics` takes the role `admin` ([api.md](api.md)).

Labels have few values: `stage`, `reason` and `endpoint` the first 64 names that come, and `other`; `route` is a path's
pattern, `none` where there is no such path; `code` is a problem's ([exit-codes.md](exit-codes.md), [api.md](api.md)).
`pool` is `disk`, `network`, `cgroup`, `shell` (of all shapes of machines together) or `parked` (of all templates).

| metric | type | labels | |
|---|---|---|---|
";

#[tokio::test]
async fn the_document_is_what_there_is() {
    let mut document = String::from(INTRODUCTION);
    for (name, family) in everything().await {
        let labels: Vec<&str> = family.label_names().into_iter().collect();
        let (kind, help, labels) = (&family.kind, &family.help, labels.join(", "));
        document.push_str(&format!("| `{name}` | {kind} | {labels} | {help} |\n"));
    }
    document.push_str("\nThis table is made from what thawd answers; a test keeps them the same.\n");
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/metrics.md");
    if std::env::var_os("THAW_WRITE_DOCS").is_some() {
        std::fs::write(path, &document).unwrap();
    }
    let written = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        written == document,
        "docs/metrics.md is stale: run the tests with THAW_WRITE_DOCS=1"
    );
}

/// The words of an expression.
fn words(expression: &str) -> impl Iterator<Item = &str> {
    expression
        .split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'))
        .filter(|word| !word.is_empty())
}

#[tokio::test]
async fn the_dashboard_asks_for_what_there_is() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../packaging/grafana/thaw.json");
    let dashboard: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let families = everything().await;
    let family = |word: &str| {
        let of_histogram = ["_bucket", "_sum", "_count"]
            .iter()
            .find_map(|suffix| families.get(word.strip_suffix(suffix)?))
            .filter(|f| f.kind == "histogram");
        families
            .get(word)
            .filter(|f| f.kind != "histogram")
            .or(of_histogram)
    };
    let mut asked = 0;
    for panel in dashboard["panels"].as_array().unwrap() {
        for target in panel["targets"].as_array().into_iter().flatten() {
            let expression = target["expr"].as_str().unwrap();
            let named = words(expression).filter(|w| w.starts_with("thaw_") || w.starts_with("process_"));
            for word in named {
                let family = family(word).unwrap_or_else(|| panic!("{word} is no metric: {expression}"));
                for by in expression.split("by (").skip(1) {
                    for label in words(by.split(')').next().unwrap()) {
                        let known =
                            matches!(label, "le" | "instance") || family.label_names().contains(label);
                        assert!(known, "{word} has no label {label}: {expression}");
                    }
                }
                let counts = family.kind != "gauge";
                assert_eq!(
                    counts,
                    expression.contains(&format!("rate({word}")),
                    "{expression}"
                );
                asked += 1;
            }
        }
    }
    assert!(asked > 40, "{asked}");
    let variable = &dashboard["templating"]["list"][1]["query"];
    assert_eq!(variable, "label_values(thaw_build_info, instance)");
}
