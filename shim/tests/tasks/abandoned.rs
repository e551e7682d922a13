//! Calls whose client disconnects or times out while they run.

use std::fmt::Debug;
use std::time::Duration;

use ttrpc::context::with_duration;

use super::silent::{heard, pass};
use super::*;

/// How long a client waits. The shim waits longer for the guest.
const LIMIT: Duration = Duration::from_secs(20);

/// Sends a request with [`LIMIT`], which passes as soon as the guest has received this call.
async fn gives_up<T: Debug>(rig: &Rig, call: &str, asked: impl Future<Output = ttrpc::Result<T>>) {
    let passes = async {
        heard(rig, call).await;
        pass(LIMIT).await;
    };
    let (answer, ()) = tokio::join!(asked, passes);
    answer.unwrap_err();
}

/// The same with the deletion of container `one`.
pub(super) async fn gives_up_deletion(rig: &Rig) {
    let request = DeleteRequest {
        id: "one".into(),
        ..Default::default()
    };
    let deleted = rig.client.delete(with_duration(LIMIT), &request);
    gives_up(rig, "remove one", deleted).await;
}

fn hang(rig: &Rig, id: &str) {
    rig.agent.hung.lock().unwrap().insert(id.into());
}

#[tokio::test]
async fn start_completes_without_its_caller() {
    let rig = Rig::new().await;
    rig.pod(&["one"]).await;
    hang(&rig, "one");
    let request = StartRequest {
        id: "one".into(),
        ..Default::default()
    };
    let started = rig.client.start(with_duration(LIMIT), &request);
    gives_up(&rig, "start one", started).await;
    rig.agent.release("one");
    let told = rig.events(4).await;
    assert_eq!(told[3], "start one");
    rig.kill("one", "", libc::SIGKILL).await.unwrap();
    assert_eq!(rig.wait("one", "").await.unwrap(), 137);
    rig.delete("one", "").await.unwrap();
}

#[tokio::test]
async fn removal_completes_without_its_caller() {
    let rig = Rig::new().await;
    rig.pod(&["one"]).await;
    rig.start("one", "").await.unwrap();
    rig.kill("one", "", libc::SIGKILL).await.unwrap();
    rig.wait("one", "").await.unwrap();
    hang(&rig, "one");
    gives_up_deletion(&rig).await;
    rig.agent.release("one");
    let told = rig.events(6).await;
    assert_eq!(told[5], "delete one");
}

#[tokio::test]
async fn first_create_that_times_out_leaves_no_shim_or_machine() {
    let rig = Rig::new().await;
    hang(&rig, "one");
    let request = rig.request("one", &["cat"], json!({}));
    let created = rig.client.create(with_duration(LIMIT), &request);
    gives_up(&rig, "create one", created).await;
    assert_eq!(code(rig.delete("one", "").await), Code::NOT_FOUND);
    rig.shutdown(false).await;
    rig.ended().await;
    assert_eq!(*rig.thawd.ended.lock().unwrap(), ["sandbox-1"]);
}

#[tokio::test]
async fn ended_shim_is_not_found_by_the_next_start() {
    let rig = Rig::new().await;
    rig.create(rig.request("one", &["cat"], json!({}))).await.unwrap();
    rig.delete("one", "").await.unwrap();
    assert!(rig.path("shim").exists());
    rig.shutdown(false).await;
    assert!(!rig.path("shim").exists());
    rig.ended().await;
}
