//! The agent as PID 1 of new namespaces on this machine, with the test as its host: the handshake, then the
//! API, over unix sockets instead of vsock. Needs root, `unshare` (util-linux), `ip` (iproute2) and `busybox`
//! (busybox-static).

#![allow(clippy::unwrap_used, reason = "a panic is how a test reports")]

mod container;
mod hooks;
mod identity;
mod kata;
mod mounts;
mod process;
mod readiness;
mod sharing;
mod streams;
mod support;

use std::time::Duration;

use support::{Guest, bind, capabilities, code_of, identity, spec, wait_gone};
use thaw_protocol::agent::MessageField;
use thaw_protocol::agent::agent::*;
use thaw_protocol::agent::oci;
use thaw_protocol::handshake::Greeting;
use ttrpc::Code;

/// Runs a test with a guest, or skips it with the reason.
fn with_guest<F: Future<Output = ()>>(test: impl FnOnce(Guest) -> F) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let Some(guest) = Guest::boot().await else { return };
        tokio::time::timeout(Duration::from_secs(120), test(guest))
            .await
            .expect("the test hangs");
    });
}

const TICKS: &[&str] = &["sh", "-c", "while :; do echo tick; sleep 0.02; done"];

/// Returns what is in the pipe, until it is silent.
async fn falls_silent(g: &Guest, id: &str, exec: &str) {
    while tokio::time::timeout(Duration::from_millis(300), g.read(id, exec, 65536))
        .await
        .is_ok()
    {}
}

#[test]
fn container_output_and_exit_code_arrive() {
    with_guest(|g| async move {
        g.create("c", spec(&g, &["sh", "-c", "echo out; echo err >&2; exit 7"]))
            .await
            .unwrap();
        g.start("c").await.unwrap();
        assert_eq!(g.read_all("c", "c", false).await, b"out\n");
        assert_eq!(g.read_all("c", "c", true).await, b"err\n");
        assert_eq!(g.wait("c", "c").await, 7);
        assert_eq!(
            g.wait("c", "").await,
            7,
            "the code is told as often as it is asked for"
        );
        g.remove("c").await.unwrap();
        let e = g.start("c").await.unwrap_err();
        assert_eq!(code_of(&e), Code::INVALID_ARGUMENT);
        g.assert_clean().await;
    });
}

#[test]
fn host_reaches_listeners_on_the_guests_localhost() {
    with_guest(|g| async move {
        let serve = "echo ready; exec busybox nc -l -p 8080 -e echo hello";
        g.create("c", spec(&g, &["sh", "-c", serve])).await.unwrap();
        g.start("c").await.unwrap();
        assert_eq!(g.read("c", "c", 6).await.unwrap(), b"ready\n");
        // It logs this just before it listens.
        let said = loop {
            match g.forwarded(8080) {
                said if said.is_empty() => tokio::time::sleep(Duration::from_millis(10)).await,
                said => break said,
            }
        };
        assert_eq!(said, b"hello\n");
        assert_eq!(g.forwarded(9), b"");
        g.remove("c").await.unwrap();
    });
}

#[test]
fn hooks_and_unsupported_calls_are_refused_as_such() {
    with_guest(|g| async move {
        let mut s = spec(&g, &["true"]);
        let mut hooks = oci::Hooks::new();
        hooks.Prestart.push(oci::Hook {
            Path: "/bin/hook".into(),
            ..Default::default()
        });
        s.Hooks = MessageField::some(hooks);
        let e = g.create("c", s).await.unwrap_err();
        assert!(
            code_of(&e) == Code::UNIMPLEMENTED && e.to_string().contains("hook"),
            "{e}"
        );
        let e = g
            .client
            .set_policy(support::context(), &SetPolicyRequest::new())
            .await
            .unwrap_err();
        assert_eq!(code_of(&e), Code::UNIMPLEMENTED);
        g.assert_clean().await;
    });
}

#[test]
fn destroying_the_sandbox_leaves_nothing() {
    with_guest(|g| async move {
        for id in ["a", "b"] {
            g.create(id, spec(&g, &["sh", "-c", "sleep 1000 & sleep 1000"]))
                .await
                .unwrap();
            g.start(id).await.unwrap();
        }
        g.create("never-started", spec(&g, &["true"])).await.unwrap();
        g.client
            .destroy_sandbox(support::context(), &DestroySandboxRequest::new())
            .await
            .unwrap();
        g.assert_clean().await;
        wait_gone(&g).await;
    });
}
