//! Sandboxes across a change of thawd: to another release, and with records that cannot be read.
//!
//! The tests of the previous release run its real programs, which `tests/upgrade/build-previous` makes; `THAW_PREVIOUS` names their
//! directory, and `make test-upgrade` does both.

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use thaw_daemon::api::client::Client;
use thaw_pools::process::ProcessRecord;
use thaw_protocol::api::{CreateSandbox, FreezeSandbox, Sandbox, ThawSandbox};
use thaw_sandbox::error::ErrorKind;
use thaw_tiny_guest::bare::lasting;
use thaw_tiny_node::daemon::{eventually, log};
use thaw_tiny_node::{Place, Thawd, asked};

/// The directory with the programs of the previous release.
const PREVIOUS: &str = "THAW_PREVIOUS";

fn current() -> PathBuf {
    Path::new(env!("CARGO_BIN_EXE_thawd"))
        .parent()
        .unwrap()
        .to_owned()
}

fn place() -> Option<Place> {
    let place = Place::new(&current(), &lasting())?;
    place.fill_pools_to(0..=0, 0..=0);
    Some(place)
}

fn client(place: &Place) -> Client {
    Client::connect(&place.socket()).unwrap()
}

async fn create(place: &Place) -> Sandbox {
    let request: CreateSandbox = serde_json::from_value(place.request()).unwrap();
    let made = client(place).create(&request).await;
    made.unwrap_or_else(|e| panic!("{e}: {}", log(place))).sandbox
}

fn vmm(sandbox: &Sandbox) -> ProcessRecord {
    ProcessRecord::of(sandbox.vmm_pid.unwrap()).unwrap()
}

fn directory(place: &Place, sandbox: &Sandbox) -> PathBuf {
    place.path("run/sandboxes").join(&sandbox.id)
}

/// Changes a sandbox's record on disk.
fn edit(place: &Place, sandbox: &Sandbox, change: impl FnOnce(&mut Value)) {
    let path = directory(place, sandbox).join("record.json");
    let mut record = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    change(&mut record);
    std::fs::write(path, record.to_string()).unwrap();
}

fn ps(place: &Place) -> Vec<Value> {
    let output = place.command("thaw").args(["--json", "ps"]).output().unwrap();
    serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"))
}

/// Checks that a sandbox runs without an owner: its VMM lives, its directory exists, and thawd does not have it.
async fn is_left_running(place: &Place, sandbox: &Sandbox, vmm: ProcessRecord) {
    assert!(vmm.lives(), "{}", log(place));
    assert!(directory(place, sandbox).is_dir());
    let unknown = client(place).get(&sandbox.id).await.unwrap_err();
    assert_eq!(unknown.kind, ErrorKind::SandboxNotFound);
    assert!(
        log(place).contains(&format!("thaw rm {}", sandbox.id)),
        "{}",
        log(place)
    );
}

#[tokio::test]
async fn torn_record_keeps_its_sandbox_until_it_is_removed() {
    let Some(place) = place() else { return };
    let thawd = Thawd::start(&place);
    let (by_api, by_command) = (create(&place).await, create(&place).await);
    let vmms = [vmm(&by_api), vmm(&by_command)];
    thawd.kill();
    let tear = |sandbox: &Sandbox, length: usize| {
        let path = directory(&place, sandbox).join("record.json");
        let record = std::fs::read(&path).unwrap();
        std::fs::write(path, &record[..length]).unwrap();
    };
    tear(&by_api, 100);
    tear(&by_command, 0);
    let thawd = Thawd::start(&place);
    is_left_running(&place, &by_api, vmms[0]).await;
    is_left_running(&place, &by_command, vmms[1]).await;
    let listed = ps(&place);
    let shown = listed.iter().find(|s| s["id"] == by_api.id.as_str()).unwrap();
    assert_eq!(
        (&shown["state"], &shown["vmm_pid"]),
        (&json!("unreadable"), &json!(vmms[0].pid))
    );
    client(&place).delete(&by_api.id).await.unwrap();
    assert!(!vmms[0].lives() && !directory(&place, &by_api).exists());
    assert!(thawd.stop().success());
    let removed = place
        .command("thaw")
        .args(["rm", &by_command.id])
        .output()
        .unwrap();
    assert!(removed.status.success(), "{removed:?}");
    assert!(!vmms[1].lives() && !directory(&place, &by_command).exists());
    assert!(ps(&place).is_empty());
}

#[tokio::test]
async fn vmm_of_an_unknown_protocol_is_left_running_and_adopted_later() {
    let Some(place) = place() else { return };
    let thawd = Thawd::start(&place);
    let sandbox = create(&place).await;
    let vmm = vmm(&sandbox);
    thawd.kill();
    let mut known = Value::Null;
    edit(&place, &sandbox, |record| {
        known = std::mem::replace(&mut record["control"], json!(3));
    });
    let thawd = Thawd::start(&place);
    is_left_running(&place, &sandbox, vmm).await;
    assert!(
        log(&place).contains("control version 3 is not understood"),
        "{}",
        log(&place)
    );
    // A cleanup meanwhile leaves it alone.
    assert_eq!(ps(&place).len(), 1);
    thawd.kill();
    edit(&place, &sandbox, |record| record["control"] = known);
    let thawd = Thawd::start(&place);
    assert_eq!(client(&place).get(&sandbox.id).await.unwrap().state, "running");
    client(&place).delete(&sandbox.id).await.unwrap();
    assert!(!vmm.lives());
    assert!(thawd.stop().success());
}

/// A snapshot frozen by this release thaws without the guest image, kernel and thaw-vmm of the node that made it.
#[tokio::test]
async fn snapshot_thaws_after_the_guest_image_was_replaced() {
    let Some(place) = place() else { return };
    let thawd = Thawd::start(&place);
    let sandbox = create(&place).await;
    let at: Value = json!({"directory": place.path("frozen")});
    let freeze: FreezeSandbox = serde_json::from_value(at.clone()).unwrap();
    client(&place).freeze(&sandbox.id, &freeze).await.unwrap();
    client(&place).delete(&sandbox.id).await.unwrap();
    assert!(thawd.stop().success());

    std::fs::write(place.path("guest.erofs"), vec![1u8; 8192]).unwrap();
    std::fs::remove_dir_all(place.path("data/templates")).unwrap();
    let thawd = Thawd::start(&place);
    let thaw: ThawSandbox = serde_json::from_value(at).unwrap();
    let thawed = client(&place).thaw(&thaw).await;
    let thawed = thawed.unwrap_or_else(|e| panic!("{e}: {}", log(&place))).sandbox;
    client(&place).delete(&thawed.id).await.unwrap();
    // A new sandbox uses the new image.
    let new = create(&place).await;
    client(&place).delete(&new.id).await.unwrap();

    // As for a snapshot from another node: the error names what is missing.
    let manifest: Value =
        serde_json::from_slice(&std::fs::read(place.path("frozen/manifest.json")).unwrap()).unwrap();
    let image = manifest["guest_image"].as_str().unwrap();
    std::fs::remove_file(place.path("data/components").join(image)).unwrap();
    let refused = client(&place).thaw(&thaw).await.unwrap_err();
    assert_eq!(refused.kind, ErrorKind::SnapshotIncompatible);
    assert!(refused.what.contains(image), "{refused}");
    assert!(ps(&place).is_empty());
    assert!(thawd.stop().success());
}

/// Clones a sandbox. Returns the clone's id.
fn fork(place: &Place, id: &str) -> String {
    let request = format!("POST /v1/sandboxes/{id}/fork");
    let asked = asked::ask(place, &request, None, &json!({"count": 1})).unwrap();
    let (status, body) = asked::answer(asked).unwrap();
    assert!(status.contains("201"), "{status} {body}; {}", log(place));
    let forked: Value = serde_json::from_str(&body).unwrap();
    forked["items"][0]["sandbox"]["id"].as_str().unwrap().to_owned()
}

/// Creates sandboxes with the programs of one release, then performs all operations on them with those of another.
async fn goes_from_to(before: &Path, after: &Path) {
    let Some(mut place) = place() else { return };
    place.use_binaries(before);
    let thawd = Thawd::start(&place);
    let (first, second) = (create(&place).await, create(&place).await);
    let at: Value = json!({"directory": place.path("frozen-before")});
    let freeze: FreezeSandbox = serde_json::from_value(at.clone()).unwrap();
    client(&place).freeze(&first.id, &freeze).await.unwrap();
    let vmms = [vmm(&first), vmm(&second)];
    thawd.kill();

    place.use_binaries(after);
    let thawd = Thawd::start(&place);
    let client = client(&place);
    for (sandbox, vmm) in [&first, &second].into_iter().zip(vmms) {
        let adopted = client.get(&sandbox.id).await;
        let adopted = adopted.unwrap_or_else(|e| panic!("{e}: {}", log(&place)));
        assert_eq!(
            (adopted.state.as_str(), adopted.vmm_pid),
            ("running", Some(vmm.pid))
        );
        assert!(vmm.lives());
    }
    client.pause(&first.id).await.unwrap();
    assert_eq!(client.get(&first.id).await.unwrap().state, "paused");
    client.resume(&first.id).await.unwrap();
    assert_eq!(client.get(&first.id).await.unwrap().state, "running");
    // A snapshot frozen by the earlier release, and one frozen now from a VMM of the earlier release.
    let now: Value = json!({"directory": place.path("frozen-after")});
    let freeze: FreezeSandbox = serde_json::from_value(now.clone()).unwrap();
    let frozen = client.freeze(&first.id, &freeze).await;
    frozen.unwrap_or_else(|e| panic!("{e}: {}", log(&place)));
    for snapshot in [at, now] {
        let thaw: ThawSandbox = serde_json::from_value(snapshot).unwrap();
        let thawed = client
            .thaw(&thaw)
            .await
            .unwrap_or_else(|e| panic!("{e}: {}", log(&place)));
        client.delete(&thawed.sandbox.id).await.unwrap();
    }
    let clone = fork(&place, &second.id);
    client.delete(&clone).await.unwrap();
    // A new sandbox of the later release beside them.
    let third = create(&place).await;
    for sandbox in [&first, &second, &third] {
        client.delete(&sandbox.id).await.unwrap();
    }
    eventually("their VMMs are gone", || !vmms.iter().any(ProcessRecord::lives));
    assert!(thawd.stop().success());
    assert!(!place.path("run/sandboxes").exists());
}

fn previous() -> Option<PathBuf> {
    let previous = std::env::var_os(PREVIOUS).map(PathBuf::from);
    if previous.is_none() {
        thaw_test_skip::skip(format!(
            "{PREVIOUS} names no programs of the previous release; make test-upgrade makes them"
        ));
    }
    previous
}

#[tokio::test]
async fn sandboxes_of_the_previous_release_are_adopted_and_used() {
    let Some(previous) = previous() else { return };
    goes_from_to(&previous, &current()).await;
}

#[tokio::test]
async fn previous_release_adopts_and_uses_the_sandboxes_of_this() {
    let Some(previous) = previous() else { return };
    goes_from_to(&current(), &previous).await;
}
