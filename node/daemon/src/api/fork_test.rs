//! Tests of forks: either all clones are made or none, and no snapshot remains.

use std::sync::atomic::Ordering;

use axum::http::StatusCode;
use thaw_protocol::api::{ForkedSandbox, HookResult, Sandbox, SandboxList};

use super::fake::Fake;
use super::test_client::{JSON, ask, read, refused, routes, send, whole};

const FORK: &str = "/v1/sandboxes/web/fork";

async fn with_sandbox() -> (std::sync::Arc<Fake>, axum::Router) {
    let (fake, routes) = routes();
    let body = r#"{"image":"x","cpus":1,"memory_mib":128,"name":"web"}"#;
    let made = send(&routes, ask("POST", "/v1/sandboxes", JSON, body)).await;
    assert_eq!(made.status(), StatusCode::CREATED);
    (fake, routes)
}

/// A separate thread removes the directory.
async fn place_is_gone(fake: &Fake) {
    let place = fake.place.lock().unwrap().take().unwrap();
    while place.exists() {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_fork_is_as_many_clones_as_were_asked_for() {
    let (fake, routes) = with_sandbox().await;
    let mut asked = ask(
        "POST",
        FORK,
        JSON,
        r#"{"count":3,"labels":{"app":"clone"},"timeout_s":60}"#,
    );
    asked
        .headers_mut()
        .insert("idempotency-key", "k".parse().unwrap());
    let forked = send(&routes, asked).await;
    assert_eq!(forked.status(), StatusCode::CREATED);
    let first = whole(forked).await;
    let forked: ForkedSandbox = serde_json::from_slice(&first).unwrap();
    assert_eq!((forked.items.len(), forked.frozen.memory_bytes), (3, 1));
    let listed: SandboxList = read(&routes, "/v1/sandboxes?labelSelector=app=clone").await;
    let mut ids: Vec<_> = forked.items.iter().map(|made| made.sandbox.id.clone()).collect();
    ids.sort();
    assert_eq!(listed.items.iter().map(|s| s.id.clone()).collect::<Vec<_>>(), ids);
    assert!(listed.items.iter().all(|s| s.timeout_s == Some(60)));
    place_is_gone(&fake).await;
    let mut again = ask(
        "POST",
        FORK,
        JSON,
        r#"{"count":3,"labels":{"app":"clone"},"timeout_s":60}"#,
    );
    again
        .headers_mut()
        .insert("idempotency-key", "k".parse().unwrap());
    assert_eq!(whole(send(&routes, again).await).await, first);
    assert_eq!(fake.living(), 4);
}

#[tokio::test]
async fn where_one_clone_fails_there_is_none() {
    let (fake, routes) = with_sandbox().await;
    fake.most.store(2, Ordering::SeqCst);
    refused(
        &routes,
        ask("POST", FORK, JSON, r#"{"count":3}"#),
        507,
        "disk-full",
        "fork",
    )
    .await;
    assert_eq!(fake.living(), 1);
    let listed: SandboxList = read(&routes, "/v1/sandboxes").await;
    assert_eq!(listed.items.len(), 1);
    place_is_gone(&fake).await;
}

#[tokio::test]
async fn required_hook_must_be_there_and_succeed_in_each_clone() {
    let (fake, routes) = with_sandbox().await;
    let fork = || ask("POST", FORK, JSON, r#"{"count":2,"require_hook":true}"#);
    refused(&routes, fork(), 409, "hook-missing", "none").await;
    let failed = HookResult {
        failure: Some("it exited with 3".into()),
        output: "no entropy\n".into(),
        ..HookResult::default()
    };
    *fake.counts.hook.lock().unwrap() = Some(failed.clone());
    refused(&routes, fork(), 422, "hook-failed", "failed").await;
    place_is_gone(&fake).await;
    assert_eq!(fake.living(), 1);

    // Where none is required, the answer and the description say that it failed.
    let forked = send(&routes, ask("POST", FORK, JSON, r#"{"count":1}"#)).await;
    let forked: ForkedSandbox = serde_json::from_slice(&whole(forked).await).unwrap();
    let clone = &forked.items[0].sandbox;
    assert_eq!(clone.after_thaw.as_ref(), Some(&failed));
    let shown: Sandbox = read(&routes, &format!("/v1/sandboxes/{}", clone.id)).await;
    assert_eq!(shown.after_thaw, Some(failed));

    *fake.counts.hook.lock().unwrap() = Some(HookResult::default());
    assert_eq!(send(&routes, fork()).await.status(), StatusCode::CREATED);
}

#[tokio::test]
async fn what_cannot_be_forked_is_refused() {
    let (fake, routes) = with_sandbox().await;
    for body in [
        r#"{"count":0}"#,
        r#"{"count":33}"#,
        r#"{"count":256}"#,
        r#"{"count":"2"}"#,
        r#"{"directory":"/x"}"#,
        r#"{"sign":"key"}"#,
        r#"{"memory_mode":"uffd"}"#,
        r#"{"timeout_s":0}"#,
        r#"{"require_hook":1}"#,
        r#"{"labels":{"a b":""}}"#,
        "[]",
    ] {
        refused(&routes, ask("POST", FORK, JSON, body), 422, "invalid-body", body).await;
    }
    let nobody = ask("POST", "/v1/sandboxes/nobody/fork", JSON, "{}");
    refused(&routes, nobody, 404, "sandbox-not-found", "nobody").await;
    refused(&routes, ask("GET", FORK, JSON, ""), 405, "wrong-method", "GET").await;
    assert_eq!((fake.made(), fake.living()), (1, 1));
}
