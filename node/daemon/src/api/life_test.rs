use axum::Router;
use thaw_protocol::api::{ContainerExit, Sandbox, SandboxAction};

use crate::api::container_monitor::ContainerLife;
use crate::api::fake::Fake;
use crate::api::request_gate::{Bounds, Gate};
use crate::api::router::router;
use crate::api::test_client::{JSON, ask, read, send};

const CONTAINER: &str = r#"{"image":"x","cpus":1,"memory_mib":128,"name":"web","container":{}}"#;

async fn post(routes: &Router, path: &str, body: &str) -> u16 {
    let request = ask("POST", &format!("/v1/sandboxes/{path}"), JSON, body.to_owned());
    send(routes, request).await.status().as_u16()
}

#[tokio::test]
async fn stop_and_restart_reach_the_container_and_refuse_bad_bodies() {
    let (fake, daemon) = Fake::daemon(true);
    let routes = router(daemon, Gate::new(Bounds::default()));
    send(&routes, ask("POST", "/v1/sandboxes", JSON, CONTAINER)).await;
    assert_eq!(
        post(&routes, "web/stop", r#"{"signal":2,"timeout_s":-1}"#).await,
        204
    );
    assert_eq!(post(&routes, "web/restart", "{}").await, 204);
    for wrong in [
        r#"{"signal":0}"#,
        r#"{"timeout_s":-2}"#,
        r#"{"timeout_s":86401}"#,
        r#"{"x":1}"#,
    ] {
        assert_eq!(post(&routes, "web/stop", wrong).await, 422, "{wrong}");
        assert_eq!(post(&routes, "web/restart", wrong).await, 422, "{wrong}");
    }
    assert_eq!(post(&routes, "none/stop", "{}").await, 404);
    let heard = fake.counts.heard.borrow().clone();
    assert_eq!(heard.len(), 2, "{heard:?}");
    assert!(
        heard[0].contains("Some(2)") && heard[1].starts_with("restart"),
        "{heard:?}"
    );
}

#[tokio::test]
async fn restarts_are_shown_and_the_exit_is_the_last_one() {
    let (fake, daemon) = Fake::daemon(true);
    let routes = router(daemon, Gate::new(Bounds::default()));
    send(&routes, ask("POST", "/v1/sandboxes", JSON, CONTAINER)).await;
    let until = async |state: &str| loop {
        let shown: Sandbox = read(&routes, "/v1/sandboxes/web").await;
        if shown.state == state {
            return shown;
        }
        tokio::task::yield_now().await;
    };
    fake.life.send_modify(|life| life.restarting = Some(1));
    until("restarting").await;
    assert_eq!(post(&routes, "web/signal", r#"{"signal":1}"#).await, 409);
    assert_eq!(post(&routes, "web/stop", "{}").await, 204, "ends the policy");
    fake.life.send_replace(ContainerLife {
        restarts: 1,
        starts: 1,
        restarting: None,
        last_exit: Some(1),
        out_of_memory: false,
    });
    assert_eq!(until("running").await.restarts, 1);
    let exits = async { fake.exit.send_replace(Some(7)) };
    let (exit, _) = tokio::join!(read::<ContainerExit>(&routes, "/v1/sandboxes/web/exit"), exits);
    assert_eq!(exit.exit_code, 7);
    assert_eq!(until("exited").await.exit_code, Some(7));
}

#[tokio::test]
async fn exit_of_a_container_that_is_not_monitored_is_refused() {
    let (_fake, daemon) = Fake::daemon(true);
    let routes = router(daemon, Gate::new(Bounds::default()));
    let bare = r#"{"image":"x","cpus":1,"memory_mib":128,"name":"bare"}"#;
    send(&routes, ask("POST", "/v1/sandboxes", JSON, bare)).await;
    let answer = send(&routes, ask("GET", "/v1/sandboxes/bare/exit", JSON, "")).await;
    assert_eq!(answer.status(), 404);
}

#[tokio::test]
async fn oom_comes_before_the_end_of_each_process_it_ended() {
    let (fake, daemon) = Fake::daemon(true);
    let routes = router(daemon.clone(), Gate::new(Bounds::default()));
    let since = daemon.cache.version();
    send(&routes, ask("POST", "/v1/sandboxes", JSON, CONTAINER)).await;
    let events = || {
        let changes = daemon.cache.changes(since, 100).unwrap();
        let events = changes.iter().filter_map(|change| change.after.as_ref()?.event);
        events.map(|event| event.action).collect::<Vec<_>>()
    };
    let until = async |count: usize| {
        while events().len() < count {
            tokio::task::yield_now().await;
        }
        events()
    };
    until(1).await;
    fake.life
        .send_modify(|life| (life.out_of_memory, life.restarting) = (true, Some(137)));
    until(3).await;
    fake.life.send_replace(ContainerLife {
        restarts: 1,
        starts: 1,
        restarting: None,
        last_exit: Some(137),
        out_of_memory: true,
    });
    until(4).await;
    // Its program is started again and ends by itself; the next time memory runs out, for good.
    fake.life
        .send_modify(|life| (life.out_of_memory, life.restarting) = (false, Some(1)));
    until(5).await;
    fake.life
        .send_modify(|life| (life.starts, life.restarting) = (2, None));
    until(6).await;
    fake.life.send_modify(|life| life.out_of_memory = true);
    fake.exit.send_replace(Some(137));
    use SandboxAction::{Create, Die, Oom, Start};
    let expected = [Create, Oom, Die, Start, Die, Start, Oom, Die];
    assert_eq!(until(expected.len()).await, expected);
}
