//! Exits are published once. containerd publishes a task's exit again if it finds the task gone when it deletes it, or
//! if the shim ends before it has answered.

use std::time::Duration;

use super::abandoned::gives_up_deletion;
use super::silent::{delete, heard, pass};
use super::*;

/// Longer than a shim takes to end.
const PATIENCE: Duration = Duration::from_millis(200);

/// A pod with a container that has ended, and that the guest does not remove until it is released.
async fn ended() -> Rig {
    let rig = Rig::new().await;
    rig.pod(&["one"]).await;
    rig.start("one", "").await.unwrap();
    rig.kill("one", "", libc::SIGKILL).await.unwrap();
    rig.wait("one", "").await.unwrap();
    rig.agent.hung.lock().unwrap().insert("one".into());
    rig
}

async fn end_pause(rig: &Rig) {
    rig.kill("pause", "", libc::SIGKILL).await.unwrap();
    assert_eq!(rig.wait("pause", "").await.unwrap(), 137);
}

#[tokio::test]
async fn concurrent_deletes_have_one_result() {
    let rig = ended().await;
    let first = delete(&rig, "one");
    heard(&rig, "remove one").await;
    let second = delete(&rig, "one");
    // The second of these is sent after the delete, so that the shim has both when it answers.
    for _ in 0..2 {
        assert_eq!(rig.state("one", "").await.unwrap().status, Status::STOPPED.into());
    }
    rig.agent.release("one");
    for deleted in [first, second] {
        assert_eq!(deleted.await.unwrap().unwrap(), 137);
    }
    assert_eq!(code(rig.delete("one", "").await), Code::NOT_FOUND);
    end_pause(&rig).await;
    assert_eq!(
        rig.events(7).await[4..],
        ["exit one 137", "delete one", "exit pause 137"]
    );
}

/// A pod whose container `one` was removed after the client that deleted it gave up.
async fn removed_without_an_answer() -> Rig {
    let rig = ended().await;
    gives_up_deletion(&rig).await;
    rig.agent.release("one");
    assert_eq!(rig.events(6).await[5], "delete one");
    rig
}

#[tokio::test]
async fn delete_that_timed_out_has_its_result_when_retried() {
    let rig = removed_without_an_answer().await;
    assert_eq!(rig.state("one", "").await.unwrap().status, Status::STOPPED.into());
    assert_eq!(rig.delete("one", "").await.unwrap(), 137);
    assert_eq!(code(rig.delete("one", "").await), Code::NOT_FOUND);
    end_pause(&rig).await;
    assert_eq!(
        rig.events(7).await[4..],
        ["exit one 137", "delete one", "exit pause 137"]
    );
}

#[tokio::test]
async fn removed_task_without_an_answer_does_not_keep_the_shim() {
    let rig = removed_without_an_answer().await;
    end_pause(&rig).await;
    rig.delete("pause", "").await.unwrap();
    rig.shutdown(false).await;
    rig.ended().await;
}

#[tokio::test]
async fn shim_ends_after_the_deletes_in_progress() {
    let rig = ended().await;
    let deleted = delete(&rig, "one");
    heard(&rig, "remove one").await;
    end_pause(&rig).await;
    assert_eq!(rig.delete("pause", "").await.unwrap(), 137);
    rig.shutdown(false).await;
    tokio::time::sleep(PATIENCE).await;
    assert!(rig.serves(), "a task is still being removed");
    rig.agent.release("one");
    assert_eq!(deleted.await.unwrap().unwrap(), 137);
    // No other shutdown is needed.
    rig.ended().await;
    assert!(!rig.path("shim").exists());
    assert_eq!(*rig.thawd.ended.lock().unwrap(), ["sandbox-1"]);
}

#[tokio::test]
async fn task_in_deletion_cannot_be_started() {
    let rig = Rig::new().await;
    rig.pod(&["one"]).await;
    rig.agent.hung.lock().unwrap().insert("one".into());
    let deleted = delete(&rig, "one");
    heard(&rig, "remove one").await;
    assert_eq!(code(rig.start("one", "").await), Code::FAILED_PRECONDITION);
    rig.thawd.machine.send_replace(Some("it was ended".into()));
    assert_eq!(rig.wait("pause", "").await.unwrap(), 137);
    rig.agent.release("one");
    assert_eq!(deleted.await.unwrap().unwrap(), 137);
    let told = rig.events(5).await;
    assert_eq!(
        told[3..],
        ["exit pause 137", "delete one"],
        "nothing ran, so nothing ended"
    );
}

#[tokio::test]
async fn event_that_containerd_answers_late_is_sent_once() {
    let rig = Rig::new().await;
    rig.containerd.holds_on.send_replace(true);
    rig.create(rig.request("one", &["cat"], json!({}))).await.unwrap();
    assert_eq!(rig.events(1).await, ["create one"]);
    pass(LONG).await;
    rig.containerd.holds_on.send_replace(false);
    rig.start("one", "").await.unwrap();
    assert_eq!(rig.events(2).await, ["create one", "start one"]);
}
