use axum::Router;
use axum::http::StatusCode;
use futures_util::poll;
use thaw_protocol::api::{Problem, Sandbox, SandboxList};

use super::*;
use crate::api::fake::Fake;
use crate::api::request_gate::{Bounds, Gate};
use crate::api::router::router;
use crate::api::scope::{Scope, Wanted};
use crate::api::test_client::{JSON, ask, read, refused, send, whole};
use crate::api::watch::{Selector, Watcher};

const PROBED: &str = r#"{"image":"x","cpus":1,"memory_mib":128,"name":"web",
    "container":{"readiness":{"tcp":{"port":8080}}}}"#;

fn daemon() -> (std::sync::Arc<Fake>, std::sync::Arc<Daemon>, Router) {
    let (fake, daemon) = Fake::daemon(true);
    let routes = router(daemon.clone(), Gate::new(Bounds::default()));
    (fake, daemon, routes)
}

fn create(key: Option<&str>) -> axum::extract::Request {
    let mut request = ask("POST", "/v1/sandboxes", JSON, PROBED);
    if let Some(key) = key {
        request
            .headers_mut()
            .insert("idempotency-key", key.parse().unwrap());
    }
    request
}

/// The sandboxes and readiness in the watch events since a version.
async fn changes(daemon: &Daemon, since: u64) -> Vec<String> {
    let mut watcher = Watcher::start(
        daemon.cache.clone(),
        Some(since),
        Selector::parse(Scope::node(), "", "").unwrap(),
    )
    .unwrap();
    let lines = watcher.next().await.unwrap().unwrap();
    let lines = serde_json::Deserializer::from_slice(&lines).into_iter::<serde_json::Value>();
    let said = |event: serde_json::Value| {
        let (kind, readiness) = (&event["type"], &event["object"]["readiness"]);
        format!("{} {}", kind.as_str().unwrap(), readiness.as_str().unwrap())
    };
    lines.map(|event| said(event.unwrap())).collect()
}

/// Waits until the first request is waiting: nothing else runs here.
macro_rules! waits {
    ($making:expr) => {
        for _ in 0..100 {
            assert!(poll!($making).is_pending());
            tokio::task::yield_now().await;
        }
    };
}

#[tokio::test]
async fn sandbox_is_listed_at_once_and_answered_when_ready() {
    let (fake, daemon, routes) = daemon();
    let before = daemon.cache.version();
    let mut making = Box::pin(send(&routes, create(None)));
    waits!(&mut making);
    let shown: Sandbox = read(&routes, "/v1/sandboxes/web").await;
    assert_eq!(
        (shown.readiness, shown.state.as_str()),
        (Some(Readiness::Waiting), "running")
    );
    fake.ready.send_replace(Some(true));
    let answer = making.await;
    assert_eq!(answer.status(), StatusCode::CREATED);
    let timing = answer.headers()["server-timing"].to_str().unwrap();
    assert!(timing.contains("ready;dur="), "{timing}");
    let made: CreatedSandbox = serde_json::from_slice(&whole(answer).await).unwrap();
    assert_eq!(made.sandbox.readiness, Some(Readiness::Ready));
    assert_eq!(
        changes(&daemon, before).await,
        ["ADDED waiting", "MODIFIED ready"]
    );
    assert_eq!(fake.living(), 1);
}

#[tokio::test]
async fn what_does_not_become_ready_is_gone_when_that_is_said() {
    let (fake, daemon, routes) = daemon();
    let before = daemon.cache.version();
    fake.ready.send_replace(Some(false));
    let answer = send(&routes, create(Some("k"))).await;
    assert_eq!(answer.status(), StatusCode::UNPROCESSABLE_ENTITY);
    let problem: Problem = serde_json::from_slice(&whole(answer).await).unwrap();
    assert_eq!((problem.code.as_str(), problem.exit), ("not-ready", 107));
    assert!(
        problem.detail.contains("nothing listens on port 8080"),
        "{}",
        problem.detail
    );
    let listed: SandboxList = read(&routes, "/v1/sandboxes").await;
    assert_eq!((listed.items.len(), fake.living()), (0, 0));
    let expected = ["ADDED waiting", "MODIFIED failed", "DELETED failed"];
    assert_eq!(changes(&daemon, before).await, expected);

    // The failed creation is not remembered: the same key creates another sandbox.
    fake.ready.send_replace(Some(true));
    assert_eq!(
        send(&routes, create(Some("k"))).await.status(),
        StatusCode::CREATED
    );
    assert_eq!((fake.made(), fake.living()), (2, 1));
}

#[tokio::test]
async fn who_hangs_up_while_it_is_waited_for_leaves_nothing() {
    let (fake, daemon, routes) = daemon();
    let mut making = Box::pin(send(&routes, create(None)));
    waits!(&mut making);
    assert_eq!((fake.living(), daemon.table().len()), (1, 1));
    drop(making);
    assert_eq!((fake.living(), daemon.table().len()), (0, 0));
    assert!(
        daemon.cache.find(&Wanted::on_node("web")).is_none(),
        "its name may be taken again"
    );
    assert_eq!(daemon.drained().making, 0);
}

#[tokio::test]
async fn one_key_is_one_sandbox_also_while_it_is_waited_for() {
    let (fake, _daemon, routes) = daemon();
    let mut first = Box::pin(send(&routes, create(Some("k"))));
    let mut second = Box::pin(send(&routes, create(Some("k"))));
    waits!(&mut first);
    waits!(&mut second);
    assert_eq!(fake.made(), 1);
    fake.ready.send_replace(Some(true));
    let (first, second) = tokio::join!(first, second);
    assert_eq!(whole(first).await, whole(second).await);
    assert_eq!((fake.made(), fake.living()), (1, 1));
}

#[tokio::test]
async fn creation_fails_if_its_sandbox_is_deleted_before_ready() {
    let (fake, _daemon, routes) = daemon();
    let mut making = Box::pin(send(&routes, create(None)));
    waits!(&mut making);
    let deleted = send(&routes, ask("DELETE", "/v1/sandboxes/web", JSON, "")).await;
    assert_eq!(deleted.status(), StatusCode::NO_CONTENT);
    fake.ready.send_replace(Some(true));
    assert_eq!(making.await.status(), StatusCode::NOT_FOUND);
    assert_eq!(fake.living(), 0);
}

#[tokio::test]
async fn what_cannot_be_asked_for_is_refused() {
    let (fake, _daemon, routes) = daemon();
    for probe in [
        "{}",
        "[]",
        r#"{"tcp":{"port":0}}"#,
        r#"{"tcp":{"port":65536}}"#,
        r#"{"tcp":{"port":80},"http":{"port":80}}"#,
        r#"{"tcp":{"port":80,"path":"/"}}"#,
        r#"{"http":{"port":80,"path":"x"}}"#,
        r#"{"http":{"port":80,"path":"/\r\nX: y"}}"#,
        r#"{"http":{"port":80,"host":""}}"#,
        r#"{"http":{"port":80,"scheme":"https"}}"#,
        r#"{"tcp":{"port":80},"timeout_s":0}"#,
        r#"{"tcp":{"port":80},"period_ms":1}"#,
        r#"{"exec":{"command":["true"]}}"#,
    ] {
        let body = PROBED.replace(r#"{"tcp":{"port":8080}}"#, probe);
        let asked = ask("POST", "/v1/sandboxes", JSON, body);
        refused(&routes, asked, 422, "invalid-body", probe).await;
    }
    assert_eq!(fake.made(), 0);
}
