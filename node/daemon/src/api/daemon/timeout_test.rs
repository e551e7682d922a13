use std::time::Duration;

use axum::http::StatusCode;
use serde_json::json;
use thaw_protocol::api::Sandbox;
use thaw_sandbox::state::{Terms, TimeLimit, Timeout};

use super::*;
use crate::api::fake::{Fake, FakeMachine, request};
use crate::api::machine::Condition;
use crate::api::test_client::{JSON, ask, routes, send, until, whole};

fn change(fields: serde_json::Value) -> ChangeSandbox {
    serde_json::from_value(fields).unwrap()
}

/// A daemon with one sandbox that has this limit.
fn with_limit(limit: TimeLimit) -> (Arc<Fake>, Arc<Daemon>, Wanted) {
    let (fake, daemon) = Fake::daemon(true);
    let terms = Terms::default().within(limit);
    let machine = Arc::new(FakeMachine::new(7, None, terms, fake.counts.clone()));
    let id = daemon.insert(machine, Condition::Running, None).id.clone();
    (fake, daemon, Wanted::on_node(id))
}

fn shown(daemon: &Daemon, wanted: &Wanted) -> Option<Arc<Described>> {
    daemon.cache.find(wanted)
}

#[tokio::test]
async fn timeout_that_is_set_later_deletes_a_running_sandbox() {
    let (fake, daemon, wanted) = with_limit(TimeLimit::default());
    let changed = daemon
        .set_timeout(&wanted, &change(json!({"timeout_s": 1})))
        .await
        .unwrap();
    assert_eq!(
        (changed.timeout_s, changed.on_timeout),
        (Some(1), OnTimeout::Delete)
    );
    assert!(changed.ends_at.unwrap() >= changed.created);
    until(|| shown(&daemon, &wanted).is_none() && fake.living() == 0).await;
}

#[tokio::test]
async fn timeout_that_is_removed_does_not_delete() {
    let limit = TimeLimit {
        timeout: Some(Timeout::after(1)),
        ..TimeLimit::default()
    };
    let (_fake, daemon, wanted) = with_limit(limit);
    let changed = daemon
        .set_timeout(&wanted, &change(json!({"timeout_s": null})))
        .await
        .unwrap();
    assert_eq!((changed.timeout_s, changed.ends_at), (None, None));
    tokio::time::sleep(Duration::from_millis(1500)).await;
    assert_eq!(shown(&daemon, &wanted).unwrap().state, "running");
}

#[tokio::test]
async fn spent_timeout_pauses_and_starts_again_at_the_resume() {
    let limit = TimeLimit {
        timeout: Some(Timeout { seconds: 600, at: 0 }),
        idle_s: None,
        on_timeout: OnTimeout::Pause,
    };
    let (_fake, daemon, wanted) = with_limit(limit);
    let state = || shown(&daemon, &wanted).unwrap().state.clone();
    until(|| state() == "paused").await;
    let before = shown(&daemon, &wanted).unwrap().ends_at.unwrap();
    daemon.resume(&wanted).await.unwrap();
    let resumed = shown(&daemon, &wanted).unwrap();
    assert_eq!(resumed.state, "running");
    assert!(resumed.ends_at.unwrap() >= before + 590, "{resumed:?}");
    // The task that waits knows the new timeout.
    daemon
        .set_timeout(&wanted, &change(json!({"timeout_s": 1})))
        .await
        .unwrap();
    until(|| state() == "paused").await;
}

#[tokio::test]
async fn timeout_of_a_later_change_is_not_lost_to_a_pause() {
    let (_fake, daemon, wanted) = with_limit(TimeLimit::default());
    let later = change(json!({"timeout_s": 600, "on_timeout": "pause"}));
    daemon.set_timeout(&wanted, &later).await.unwrap();
    daemon.pause_in_time(&wanted.text, Due::TimeIsOver).await;
    assert_eq!(shown(&daemon, &wanted).unwrap().state, "running");
}

#[tokio::test]
async fn change_over_the_api_shows_timeout_action_and_end() {
    let (_fake, routes) = routes();
    let mut body = serde_json::to_value(request("x")).unwrap();
    body["timeout_s"] = 60.into();
    body["on_timeout"] = "pause".into();
    body["name"] = "web".into();
    let made = send(&routes, ask("POST", "/v1/sandboxes", JSON, body.to_string())).await;
    assert_eq!(made.status(), StatusCode::CREATED);
    let patch = async |body: &str| {
        let answer = send(&routes, ask("PATCH", "/v1/sandboxes/web", JSON, body.to_owned())).await;
        let status = answer.status();
        (status, whole(answer).await)
    };
    let (status, answer) = patch(r#"{"timeout_s":3600}"#).await;
    assert_eq!(status, StatusCode::OK);
    let shown: Sandbox = serde_json::from_slice(&answer).unwrap();
    assert_eq!(
        (shown.timeout_s, shown.on_timeout),
        (Some(3600), OnTimeout::Pause)
    );
    assert!(shown.ends_at.is_some());
    let (_, answer) = patch(r#"{"on_timeout":"delete","rate_limits":{"disk":{"ops_per_s":5}}}"#).await;
    let shown: Sandbox = serde_json::from_slice(&answer).unwrap();
    assert_eq!(
        (shown.timeout_s, shown.on_timeout),
        (Some(3600), OnTimeout::Delete)
    );
    assert_eq!(shown.rate_limits.disk.unwrap().ops_per_s, Some(5));
    for wrong in [
        r#"{"timeout_s":0}"#,
        r#"{"timeout_s":4294967296}"#,
        r#"{"on_timeout":"sleep"}"#,
    ] {
        assert_eq!(patch(wrong).await.0, StatusCode::UNPROCESSABLE_ENTITY, "{wrong}");
    }
}
