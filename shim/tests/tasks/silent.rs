//! Guests that do not answer.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use thaw_shim::agent::{CALL_LIMIT, CHANGE_LIMIT, STATS_LIMIT};
use thaw_shim::pod::life::KILLED_LIMIT;
use tokio::task::JoinHandle;

use super::*;

/// Waits until the guest has received this call.
pub(super) async fn heard(rig: &Rig, call: &str) {
    while !rig.agent.heard.lock().unwrap().iter().any(|heard| heard == call) {
        tokio::task::yield_now().await;
    }
}

/// Advances the clock past a limit.
pub(super) async fn pass(limit: Duration) {
    tokio::time::pause();
    tokio::time::advance(limit + Duration::from_millis(1)).await;
    tokio::time::resume();
}

async fn ended_with_its_machine(rig: &Rig) {
    while rig.thawd.ended.lock().unwrap().is_empty() {
        tokio::task::yield_now().await;
    }
    assert_eq!(*rig.thawd.ended.lock().unwrap(), ["sandbox-1"]);
    rig.thawd.machine.send_replace(Some("it was ended".into()));
    for id in ["hung", "well"] {
        assert_eq!(rig.wait(id, "").await.unwrap(), 137);
    }
}

pub(super) fn delete(rig: &Rig, id: &str) -> JoinHandle<ttrpc::Result<u32>> {
    let (client, id) = (rig.client.clone(), id.to_owned());
    tokio::spawn(async move {
        let request = DeleteRequest {
            id,
            ..Default::default()
        };
        Ok(client.delete(Context::default(), &request).await?.exit_status)
    })
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
async fn guest_that_does_not_kill_a_container_is_ended() {
    let rig = rig().await;
    let killed = kill(&rig, "hung", libc::SIGKILL);
    heard(&rig, "signal hung").await;
    pass(CALL_LIMIT).await;
    killed.await.unwrap().unwrap();
    assert!(rig.thawd.ended.lock().unwrap().is_empty());
    pass(KILLED_LIMIT).await;
    ended_with_its_machine(&rig).await;
}

#[tokio::test]
async fn guest_is_ended_if_a_killed_container_does_not_exit() {
    let rig = rig().await;
    rig.agent.hung.lock().unwrap().clear();
    rig.agent.lies.store(true, Ordering::Relaxed);
    rig.kill("hung", "", libc::SIGKILL).await.unwrap();
    pass(KILLED_LIMIT).await;
    ended_with_its_machine(&rig).await;
}

#[tokio::test]
async fn silent_guest_is_ended_when_a_container_is_removed() {
    let rig = rig().await;
    rig.agent.hung.lock().unwrap().clear();
    rig.kill("hung", "", libc::SIGKILL).await.unwrap();
    rig.wait("hung", "").await.unwrap();
    rig.agent
        .hung
        .lock()
        .unwrap()
        .extend(["hung".into(), Rig::HEALTH.into()]);
    let deleted = delete(&rig, "hung");
    heard(&rig, "remove hung").await;
    pass(CHANGE_LIMIT).await;
    heard(&rig, "check health").await;
    assert!(rig.thawd.ended.lock().unwrap().is_empty());
    pass(CALL_LIMIT).await;
    deleted.await.unwrap().unwrap();
    assert_eq!(*rig.thawd.ended.lock().unwrap(), ["sandbox-1"]);
}

#[tokio::test]
async fn slow_container_removal_times_out_and_can_be_retried() {
    let rig = rig().await;
    rig.agent.hung.lock().unwrap().clear();
    rig.kill("hung", "", libc::SIGKILL).await.unwrap();
    rig.wait("hung", "").await.unwrap();
    rig.agent.hung.lock().unwrap().insert("hung".into());
    let deleted = delete(&rig, "hung");
    heard(&rig, "remove hung").await;
    pass(CHANGE_LIMIT).await;
    assert_eq!(code(deleted.await.unwrap()), Code::DEADLINE_EXCEEDED);
    assert!(rig.thawd.ended.lock().unwrap().is_empty());
    rig.agent.hung.lock().unwrap().clear();
    rig.agent.has_removed.store(true, Ordering::Relaxed);
    assert_eq!(rig.delete("hung", "").await.unwrap(), 137);
}

#[tokio::test]
async fn lost_agent_ends_its_machine() {
    let rig = rig().await;
    rig.lose_agent().await;
    assert_eq!(rig.wait("hung", "").await.unwrap(), 137);
    tokio::time::pause();
    while rig.thawd.ended.lock().unwrap().is_empty() {
        tokio::time::advance(Duration::from_secs(1)).await;
    }
    assert_eq!(*rig.thawd.ended.lock().unwrap(), ["sandbox-1"]);
}

#[tokio::test]
async fn silent_guest_survives_signals_and_calls_time_out() {
    let rig = rig().await;
    rig.agent.hung.lock().unwrap().insert(Rig::HEALTH.into());
    let told = kill(&rig, "hung", libc::SIGTERM);
    heard(&rig, "signal hung").await;
    pass(CALL_LIMIT).await;
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

#[tokio::test]
async fn oom_events_are_for_known_containers_and_rate_limited() {
    let rig = Rig::new().await;
    rig.pod(&["well", "hung", "last"]).await;
    for said in ["hun", "other", "well"] {
        rig.agent.say_out_of_memory(said);
    }
    assert_eq!(ooms_until(&rig, "oom well").await, ["oom well"]);
    let began = Instant::now();
    for said in ["hung", "hung", "last"] {
        rig.agent.say_out_of_memory(said);
    }
    let told = ooms_until(&rig, "oom last").await;
    // On a busy host, the shim may come to the second one when it may publish it again.
    let may_repeat = began.elapsed() >= Duration::from_secs(1) && told.len() == 4;
    let expected: &[&str] = match may_repeat {
        true => &["oom well", "oom hung", "oom hung", "oom last"],
        false => &["oom well", "oom hung", "oom last"],
    };
    assert_eq!(told, expected);
}

/// Waits until containerd has received this event, and returns all events of OOM kills. Those of the pod's start may come late.
async fn ooms_until(rig: &Rig, last: &str) -> Vec<String> {
    let mut events = rig.events(1).await;
    while !events.iter().any(|event| event == last) {
        events = rig.events(events.len() + 1).await;
    }
    events.retain(|event| event.starts_with("oom "));
    events
}
