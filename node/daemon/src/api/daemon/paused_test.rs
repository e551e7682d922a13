use std::process::Command;

use axum::http::StatusCode;
use serde_json::json;
use thaw_pools::process::ProcessRecord;
use thaw_protocol::api::{
    ChangeSandbox, CreateSandbox, EXITED, FreezeSandbox, OnExit, OnTimeout, ProcessIdentity, Sandbox,
    StartContainer,
};
use thaw_sandbox::state::Behalf;

use super::*;
use crate::api::fake::{Fake, request};
use crate::api::test_client::{JSON, ask, refused, routes, send, until, whole};

/// A daemon with a sandbox of this name, and its id.
async fn with_sandbox(name: &str) -> (Arc<Fake>, Arc<Daemon>, String) {
    let (fake, daemon) = Fake::daemon(true);
    let id = make(&daemon, name).await.id;
    (fake, daemon, id)
}

async fn make(daemon: &Arc<Daemon>, name: &str) -> Described {
    let asked = CreateSandbox {
        name: Some(name.into()),
        labels: [("app".into(), "web".into())].into(),
        ..request("x")
    };
    daemon.create(asked, Behalf::default()).await.unwrap().sandbox
}

fn shown(daemon: &Daemon, id: &str) -> Arc<Described> {
    daemon.cache.get(id).unwrap()
}

fn on_disk(fake: &Fake) -> usize {
    fake.counts.paused.list().len()
}

#[tokio::test]
async fn released_sandbox_has_no_machine_and_the_same_identity() {
    let (fake, daemon, id) = with_sandbox("web").await;
    let before = shown(&daemon, &id);
    let wanted = Wanted::on_node("web");
    daemon.release_memory(&wanted).await.unwrap();
    let paused = shown(&daemon, &id);
    assert_eq!((paused.state.as_str(), paused.memory_released), ("paused", true));
    assert_eq!((&paused.name, &paused.labels), (&before.name, &before.labels));
    assert_eq!(paused.event.as_ref().unwrap().action, SandboxAction::Pause);
    assert_eq!((fake.living(), on_disk(&fake)), (0, 1));
    daemon.resume(&wanted).await.unwrap();
    let resumed = shown(&daemon, &id);
    assert_eq!(
        (resumed.state.as_str(), resumed.memory_released),
        ("running", false)
    );
    assert_eq!((&resumed.name, &resumed.labels), (&before.name, &before.labels));
    assert_eq!((fake.living(), on_disk(&fake)), (1, 0));
    daemon.release_memory(&wanted).await.unwrap();
    daemon.delete(&wanted).await.unwrap();
    assert_eq!((fake.living(), on_disk(&fake)), (0, 0));
    assert!(daemon.cache.get(&id).is_none());
}

#[tokio::test]
async fn what_needs_a_machine_is_refused_without_one() {
    let (fake, daemon, id) = with_sandbox("web").await;
    let wanted = Wanted::on_node(&id);
    daemon.release_memory(&wanted).await.unwrap();
    let released = |e: Error| assert_eq!(e.kind, ErrorKind::MemoryReleased);
    released(daemon.pause(&wanted).await.unwrap_err());
    released(
        daemon
            .freeze(&wanted, FreezeSandbox::default())
            .await
            .unwrap_err(),
    );
    released(daemon.usage(&wanted).unwrap_err());
    released(daemon.show_image(&wanted, "x").await.unwrap_err());
    let again = daemon.release_memory(&wanted).await.unwrap_err();
    assert_eq!(again.slug(), "memory-released");
    assert_eq!(daemon.running(&wanted).unwrap_err().slug(), "sandbox-not-running");
    assert_eq!((fake.living(), on_disk(&fake)), (0, 1));
}

#[tokio::test]
async fn failed_release_leaves_the_sandbox_running() {
    let (fake, daemon, id) = with_sandbox("fixed").await;
    let refused = daemon.release_memory(&Wanted::on_node(&id)).await.unwrap_err();
    assert_eq!(refused.slug(), "memory-kept");
    assert_eq!(shown(&daemon, &id).state, "running");
    assert_eq!((fake.living(), on_disk(&fake)), (1, 0));
}

#[tokio::test]
async fn sandbox_left_by_its_client_is_released_and_kept_at_its_exit() {
    for on_exit in [OnExit::End, OnExit::Delete] {
        let (fake, daemon) = Fake::daemon(true);
        let mut client = Command::new("sleep").arg("1000").spawn().unwrap();
        let ProcessRecord { pid, start_time } =
            ProcessRecord::of(i32::try_from(client.id()).unwrap()).unwrap();
        let asked = CreateSandbox {
            client: Some(ProcessIdentity { pid, start_time }),
            container: Some(StartContainer::default()),
            ..request("x")
        };
        let made = daemon.create(asked, Behalf::default()).await.unwrap();
        let id = made.sandbox.id;
        let wanted = Wanted::on_node(&id);
        let attached = daemon.release_memory(&wanted).await.unwrap_err();
        assert_eq!(attached.slug(), "memory-kept");
        let leave = ChangeSandbox {
            on_exit: Some(on_exit),
            ..ChangeSandbox::default()
        };
        daemon.change(&wanted, &leave).await.unwrap();
        client.kill().unwrap();
        client.wait().unwrap();
        daemon.release_memory(&wanted).await.unwrap();
        daemon.resume(&wanted).await.unwrap();
        assert_eq!(shown(&daemon, &id).state, "running");
        fake.exit.send_replace(Some(7));
        let ended = |shown: Option<Arc<Described>>| match on_exit {
            OnExit::Delete => shown.is_none(),
            _ => shown.is_some_and(|s| s.ended.is_some() && (&*s.state, s.exit_code) == (EXITED, Some(7))),
        };
        until(|| ended(daemon.cache.get(&id)) && fake.living() == 0).await;
        assert_eq!(on_disk(&fake), 0);
    }
}

#[tokio::test]
async fn end_of_an_unmonitored_container_is_not_thawds() {
    let (fake, daemon, id) = with_sandbox("web").await;
    let change = ChangeSandbox {
        on_exit: Some(OnExit::End),
        ..ChangeSandbox::default()
    };
    let refused = daemon.change(&Wanted::on_node(&id), &change).await.unwrap_err();
    assert_eq!((refused.slug(), fake.living()), ("output-not-kept", 1));
}

#[tokio::test]
async fn failed_resume_leaves_the_sandbox_paused_with_the_reason() {
    let (fake, daemon, id) = with_sandbox("web").await;
    let wanted = Wanted::on_node(&id);
    daemon.release_memory(&wanted).await.unwrap();
    let snapshot = fake.counts.paused.list()[0].snapshot();
    std::fs::rename(&snapshot, snapshot.with_extension("away")).unwrap();
    let failed = daemon.resume(&wanted).await.unwrap_err();
    assert_eq!(failed.slug(), "snapshot-not-found");
    let paused = shown(&daemon, &id);
    assert_eq!((paused.state.as_str(), paused.memory_released), ("paused", true));
    assert!(
        paused.reason.as_ref().unwrap().contains("no snapshot"),
        "{paused:?}"
    );
    std::fs::rename(snapshot.with_extension("away"), &snapshot).unwrap();
    daemon.resume(&wanted).await.unwrap();
    assert_eq!((shown(&daemon, &id).reason.as_ref(), fake.living()), (None, 1));
}

#[tokio::test]
async fn sandbox_deleted_during_its_resume_leaves_nothing() {
    let (fake, daemon, id) = with_sandbox("web").await;
    let wanted = Wanted::on_node(&id);
    daemon.release_memory(&wanted).await.unwrap();
    fake.open.send_replace(false);
    let resuming = tokio::spawn({
        let (daemon, wanted) = (daemon.clone(), wanted.clone());
        async move { daemon.resume(&wanted).await }
    });
    let mut making = fake.making.subscribe();
    making.wait_for(|making| *making == 1).await.unwrap();
    // The resume does not go on meanwhile, as if its hook ran.
    daemon.delete(&wanted).await.unwrap();
    assert_eq!(resuming.await.unwrap().unwrap_err().slug(), "sandbox-not-found");
    assert!(daemon.cache.get(&id).is_none());
    assert_eq!((fake.living(), on_disk(&fake)), (0, 0));
}

#[tokio::test]
async fn draining_thawd_resumes_nothing() {
    let (fake, daemon, id) = with_sandbox("web").await;
    let wanted = Wanted::on_node(&id);
    daemon.release_memory(&wanted).await.unwrap();
    daemon.close();
    assert_eq!(daemon.resume(&wanted).await.unwrap_err().slug(), "draining");
    assert_eq!((fake.living(), on_disk(&fake)), (0, 1));
    daemon.undrain().unwrap();
    daemon.resume(&wanted).await.unwrap();
}

#[tokio::test]
async fn timeouts_go_on_without_a_machine() {
    let (fake, daemon, id) = with_sandbox("web").await;
    let wanted = Wanted::on_node(&id);
    let change = |fields| serde_json::from_value::<ChangeSandbox>(fields).unwrap();
    let pause = change(json!({"timeout_s": 1, "on_timeout": "pause"}));
    daemon.set_timeout(&wanted, &pause).await.unwrap();
    until(|| shown(&daemon, &id).memory_released && fake.living() == 0).await;
    daemon.resume(&wanted).await.unwrap();
    until(|| shown(&daemon, &id).memory_released && fake.living() == 0).await;
    let delete = change(json!({"timeout_s": 1, "on_timeout": "delete"}));
    let changed = daemon.set_timeout(&wanted, &delete).await.unwrap();
    assert_eq!(
        (changed.on_timeout, changed.memory_released),
        (OnTimeout::Delete, true)
    );
    until(|| daemon.cache.get(&id).is_none() && on_disk(&fake) == 0).await;
}

#[tokio::test]
async fn sandbox_whose_memory_cannot_be_released_stops_in_time() {
    let (fake, daemon, id) = with_sandbox("fixed").await;
    let pause = json!({"timeout_s": 1, "on_timeout": "pause"});
    let pause: ChangeSandbox = serde_json::from_value(pause).unwrap();
    daemon.set_timeout(&Wanted::on_node(&id), &pause).await.unwrap();
    until(|| shown(&daemon, &id).state == "paused").await;
    assert!(!shown(&daemon, &id).memory_released);
    assert_eq!((fake.living(), on_disk(&fake)), (1, 0));
}

#[tokio::test]
async fn pause_over_the_api_keeps_or_releases_the_memory() {
    let (_fake, routes) = routes();
    let mut body = serde_json::to_value(request("x")).unwrap();
    body["name"] = "web".into();
    send(&routes, ask("POST", "/v1/sandboxes", JSON, body.to_string())).await;
    let post = async |what: &str, body: &'static str| {
        let path = format!("/v1/sandboxes/web/{what}");
        let answer = send(&routes, ask("POST", &path, JSON, body)).await;
        assert_eq!(answer.status(), StatusCode::NO_CONTENT, "{what} {body}");
        let answer = send(&routes, ask("GET", "/v1/sandboxes/web", JSON, "")).await;
        let shown: Sandbox = serde_json::from_slice(&whole(answer).await).unwrap();
        (shown.state, shown.memory_released)
    };
    for body in ["", "{}", r#"{"memory":"keep"}"#] {
        assert_eq!(post("pause", body).await, ("paused".into(), false), "{body}");
        assert_eq!(post("resume", "").await, ("running".into(), false));
    }
    let release = r#"{"memory":"release"}"#;
    assert_eq!(post("pause", release).await, ("paused".into(), true));
    let exec = ask("POST", "/v1/sandboxes/web/exec", JSON, r#"{"command":["x"]}"#);
    refused(&routes, exec, 409, "sandbox-not-running", "exec").await;
    let fork = ask("POST", "/v1/sandboxes/web/fork", JSON, "{}");
    refused(&routes, fork, 409, "memory-released", "fork").await;
    assert_eq!(post("resume", "").await, ("running".into(), false));
    for (wrong, status, code) in [
        (r#"{"memory":"lose"}"#, 422, "invalid-body"),
        (r#"{"memories":"keep"}"#, 422, "invalid-body"),
        ("release", 400, "malformed-request"),
    ] {
        let request = ask("POST", "/v1/sandboxes/web/pause", JSON, wrong);
        refused(&routes, request, status, code, wrong).await;
    }
}
