//! Readiness probes: they succeed when the container is ready, and fail at once when it cannot become ready.

use thaw_protocol::agent::MessageField;
use thaw_protocol::agent::oci;
use thaw_protocol::agent::readiness::wait_ready_response::Outcome;
use thaw_protocol::agent::readiness::*;
use thaw_protocol::agent::readiness_ttrpc::ReadinessClient;
use thaw_protocol::handshake::Greeting;
use ttrpc::Code;

use super::support::{Guest, code_of, context, spec};
use super::with_guest;

async fn client(g: &Guest) -> ReadinessClient {
    let address = format!("unix://{}", g.dir().join("1024").display());
    ReadinessClient::new(ttrpc::r#async::Client::connect(&address).await.unwrap())
}

fn tcp(id: &str, port: u32) -> ExpectReadyRequest {
    ExpectReadyRequest {
        container_id: id.into(),
        port,
        period_ms: 10,
        ..Default::default()
    }
}

fn http(id: &str, path: &str) -> ExpectReadyRequest {
    ExpectReadyRequest {
        http: MessageField::some(HttpProbe {
            path: path.into(),
            ..Default::default()
        }),
        ..tcp(id, 8080)
    }
}

fn limit(id: &str, timeout_ms: u32) -> WaitReadyRequest {
    WaitReadyRequest {
        container_id: id.into(),
        timeout_ms,
        ..Default::default()
    }
}

/// Starts a shell with a probe.
async fn begin(g: &Guest, id: &str, script: &str, probe: &ExpectReadyRequest) -> ReadinessClient {
    let client = client(g).await;
    g.create(id, spec(g, &["sh", "-c", script])).await.unwrap();
    client.expect(context(), probe).await.unwrap();
    g.start(id).await.unwrap();
    client
}

async fn wait(client: &ReadinessClient, id: &str, timeout_ms: u32) -> WaitReadyResponse {
    client.wait(context(), &limit(id, timeout_ms)).await.unwrap()
}

#[test]
fn probe_is_ready_once_the_port_accepts() {
    with_guest(|g| async move {
        // The listener is a child, also in a container with its own network.
        for (id, own) in [("guests", false), ("own", true)] {
            let client = client(&g).await;
            let mut s = spec(&g, &["sh", "-c", "read go; busybox nc -l -p 8080; true"]);
            if own {
                s.Linux.as_mut().unwrap().Namespaces.push(oci::LinuxNamespace {
                    Type: "network".into(),
                    ..Default::default()
                });
            }
            g.create(id, s).await.unwrap();
            client.expect(context(), &tcp(id, 8080)).await.unwrap();
            g.start(id).await.unwrap();
            let (waiting, asked) = (client.clone(), limit(id, 60_000));
            let waits = tokio::spawn(async move { waiting.wait(context(), &asked).await });
            // A stop of the whole guest in between loses no report.
            g.greet(&Greeting::Quiesce);
            g.greet(&Greeting::Continue);
            assert!(!waits.is_finished());
            g.write(id, id, b"go\n").await.unwrap();
            assert_eq!(waits.await.unwrap().unwrap().outcome, Outcome::READY.into());
            let again = client.wait(context(), &limit(id, 1)).await.unwrap_err();
            assert_eq!(code_of(&again), Code::FAILED_PRECONDITION);
            g.remove(id).await.unwrap();
        }
        g.assert_clean().await;
    });
}

#[test]
fn earlier_listening_of_an_exec_is_seen() {
    with_guest(|g| async move {
        let client = begin(&g, "c", "read end", &tcp("c", 8080)).await;
        g.exec(
            "c",
            "e",
            &["sh", "-c", "busybox nc -l -p 8080 & echo begun; wait"],
            false,
        )
        .await
        .unwrap();
        g.read_until("c", "e", "begun\n").await;
        assert_eq!(wait(&client, "c", 60_000).await.outcome, Outcome::READY.into());
        g.remove("c").await.unwrap();
        g.assert_clean().await;
    });
}

#[test]
fn probe_reports_exit_of_its_container_at_once() {
    with_guest(|g| async move {
        let client = begin(&g, "c", "exit 3", &tcp("c", 8080)).await;
        let told = wait(&client, "c", 3_600_000).await;
        assert_eq!((told.outcome, told.exit_code), (Outcome::EXITED.into(), 3));
        g.remove("c").await.unwrap();

        // Also for a container that is removed meanwhile.
        let client = begin(&g, "d", "sleep 1000", &http("d", "/")).await;
        let asked = limit("d", 3_600_000);
        let waits = tokio::spawn(async move { client.wait(context(), &asked).await });
        g.remove("d").await.unwrap();
        if let Ok(told) = waits.await.unwrap() {
            assert_eq!((told.outcome, told.exit_code), (Outcome::EXITED.into(), 137));
        }
        g.assert_clean().await;
    });
}

const UP: &str =
    "busybox nc -l -p 3000 & while ! busybox netstat -ltn | grep -q :3000; do :; done; echo up; wait";

#[test]
fn timed_out_probe_names_other_listening_ports() {
    with_guest(|g| async move {
        let client = begin(&g, "c", UP, &tcp("c", 8080)).await;
        g.read_until("c", "c", "up\n").await;
        let told = wait(&client, "c", 1).await;
        assert_eq!(told.outcome, Outcome::TIMED_OUT.into());
        assert_eq!(told.seen, "nothing listens on port 8080; what listens is on 3000");
        g.remove("c").await.unwrap();
        g.assert_clean().await;
    });
}

const SERVE: &str = "busybox httpd -f -p 8080 -h /tmp";

#[test]
fn bad_http_status_is_retried_until_good() {
    with_guest(|g| async move {
        let client = begin(&g, "c", SERVE, &http("c", "/ready")).await;
        let (waiting, asked) = (client.clone(), limit("c", 60_000));
        let waits = tokio::spawn(async move { waiting.wait(context(), &asked).await });
        g.exec("c", "e", &["touch", "/tmp/ready"], false).await.unwrap();
        assert_eq!(waits.await.unwrap().unwrap().outcome, Outcome::READY.into());
        g.remove("c").await.unwrap();

        // The last answer is reported.
        let script =
            format!("{SERVE} & while ! busybox netstat -ltn | grep -q :8080; do :; done; echo up; wait");
        let client = begin(&g, "d", &script, &http("d", "/missing")).await;
        g.read_until("d", "d", "up\n").await;
        let told = wait(&client, "d", 2000).await;
        assert_eq!(told.outcome, Outcome::TIMED_OUT.into());
        assert!(
            told.seen.ends_with(":8080 answered 404 to GET /missing"),
            "{}",
            told.seen
        );
        g.remove("d").await.unwrap();
        g.assert_clean().await;
    });
}

#[test]
fn probe_of_a_running_container_sees_earlier_listening() {
    with_guest(|g| async move {
        let client = client(&g).await;
        let script = format!(
            "touch /tmp/on; {SERVE} & while ! busybox netstat -ltn | grep -q :8080; do :; done; echo up; wait"
        );
        g.create("c", spec(&g, &["sh", "-c", &script])).await.unwrap();
        g.start("c").await.unwrap();
        g.read_until("c", "c", "up\n").await;
        for probe in [tcp("c", 8080), http("c", "/on")] {
            client.expect(context(), &probe).await.unwrap();
            assert_eq!(wait(&client, "c", 60_000).await.outcome, Outcome::READY.into());
        }
        client.expect(context(), &tcp("c", 3000)).await.unwrap();
        let told = wait(&client, "c", 100).await;
        assert_eq!(told.outcome, Outcome::TIMED_OUT.into());
        assert_eq!(told.seen, "nothing listens on port 3000; what listens is on 8080");
        g.remove("c").await.unwrap();
        g.assert_clean().await;
    });
}

#[test]
fn invalid_probes_are_refused_and_end_with_their_container() {
    with_guest(|g| async move {
        let client = client(&g).await;
        g.create("c", spec(&g, &["true"])).await.unwrap();
        let path = |path: &str| http("c", path);
        for bad in [
            tcp("c", 0),
            tcp("c", 65536),
            ExpectReadyRequest {
                period_ms: 0,
                ..tcp("c", 1)
            },
            ExpectReadyRequest {
                period_ms: u32::MAX,
                ..tcp("c", 1)
            },
            path(""),
            path("/\r\nX: y"),
            tcp("nobody", 1),
        ] {
            let e = client.expect(context(), &bad).await.unwrap_err();
            assert_eq!(code_of(&e), Code::INVALID_ARGUMENT, "{bad:?}: {e}");
        }
        for bad in [0, u32::MAX] {
            let e = client.wait(context(), &limit("c", bad)).await.unwrap_err();
            assert_eq!(code_of(&e), Code::INVALID_ARGUMENT, "{e}");
        }
        let early = client.wait(context(), &limit("c", 1)).await.unwrap_err();
        assert_eq!(code_of(&early), Code::FAILED_PRECONDITION, "it was not started");
        client.expect(context(), &tcp("c", 8080)).await.unwrap();
        g.start("c").await.unwrap();
        g.remove("c").await.unwrap();
        g.assert_clean().await;
    });
}
