//! Guests that do not answer.

use std::time::Duration;

use thaw_shim::agent::{AT_ONCE_LIMIT, STATS_LIMIT};
use tokio::task::JoinHandle;

use super::*;

/// Waits until the guest has been asked this.
async fn heard(rig: &Rig, call: &str) {
    while !rig.agent.heard.lock().unwrap().iter().any(|heard| heard == call) {
        tokio::task::yield_now().await;
    }
}

/// Lets a limit pass.
async fn pass(limit: Duration) {
    tokio::time::pause();
    tokio::time::advance(limit + Duration::from_millis(1)).await;
    tokio::time::resume();
}

fn kill(rig: &Rig, id: &str, signal: i32) -> JoinHandle<ttrpc::Result<()>> {
    let (client, id) = (rig.client.clone(), id.to_owned());
    tokio::spawn(async move {
        let request = KillRequest {
            id,
            signal: signal as u32,
            ..Default::default()
        };
        client.kill(Context::default(), &request).await.map(drop)
    })
}

async fn rig() -> Rig {
    let rig = Rig::new().await;
    rig.pod(&["hung", "well"]).await;
    rig.start("hung", "").await.unwrap();
    rig.agent.hung.lock().unwrap().insert("hung".into());
    rig
}

#[tokio::test]
async fn a_guest_that_answers_nothing_is_ended_when_a_container_is_to_be_killed() {
    let rig = rig().await;
    rig.agent.hung.lock().unwrap().insert(Rig::HEALTH.into());
    let killed = kill(&rig, "hung", libc::SIGKILL);
    heard(&rig, "signal hung").await;
    pass(AT_ONCE_LIMIT).await;
    heard(&rig, "check health").await;
    assert!(rig.thawd.ended.lock().unwrap().is_empty());
    pass(AT_ONCE_LIMIT).await;
    killed.await.unwrap().unwrap();
    rig.thawd.machine.send_replace(Some("it was ended".into()));
    for id in ["hung", "well"] {
        assert_eq!(rig.wait(id, "").await.unwrap(), 137);
    }
    assert_eq!(*rig.thawd.ended.lock().unwrap(), ["sandbox-1"]);
}

#[tokio::test]
async fn a_guest_that_answers_something_is_left_alone() {
    let rig = rig().await;
    let killed = kill(&rig, "hung", libc::SIGKILL);
    heard(&rig, "signal hung").await;
    pass(AT_ONCE_LIMIT).await;
    assert_eq!(code(killed.await.unwrap()), Code::DEADLINE_EXCEEDED);
    heard(&rig, "check health").await;
    assert!(rig.thawd.ended.lock().unwrap().is_empty());
    rig.start("well", "").await.unwrap();
}

#[tokio::test]
async fn what_does_not_kill_ends_no_guest_and_waits_no_longer_than_its_limit() {
    let rig = rig().await;
    rig.agent.hung.lock().unwrap().insert(Rig::HEALTH.into());
    let told = kill(&rig, "hung", libc::SIGTERM);
    heard(&rig, "signal hung").await;
    pass(AT_ONCE_LIMIT).await;
    let refused = told.await.unwrap();
    let text = refused.as_ref().unwrap_err().to_string();
    assert!(
        text.contains("the guest did not send signal 15 to process hung within 30 s"),
        "{text}"
    );
    assert_eq!(code(refused), Code::DEADLINE_EXCEEDED);

    let client = rig.client.clone();
    let told = tokio::spawn(async move {
        let request = StatsRequest {
            id: "hung".into(),
            ..Default::default()
        };
        client.stats(Context::default(), &request).await
    });
    heard(&rig, "stats hung").await;
    pass(STATS_LIMIT).await;
    assert_eq!(code(told.await.unwrap()), Code::DEADLINE_EXCEEDED);
    assert!(rig.thawd.ended.lock().unwrap().is_empty());
}
