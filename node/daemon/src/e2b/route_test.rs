use axum::routing::any;
use serde_json::Value;

use super::*;
use crate::e2b::test_api::{ACME, Answer, Api, DOMAIN, echo};

fn api() -> Api {
    Api::with(Some(
        Router::new().route("/sandboxes/{id}", any(echo)).fallback(echo),
    ))
}

async fn by_host(api: &Api, label: &str) -> Answer {
    let host = format!("{label}.{DOMAIN}");
    api.send("GET", "/sandboxes/x", &[("host", &host)], "").await
}

#[tokio::test]
async fn request_for_a_sandbox_needs_no_api_key() {
    let api = api();
    let id = api.make(ACME, json!({})).await;
    let expected = Value::String(format!("/sandboxes/x of {id}"));
    assert_eq!(by_host(&api, &format!("49983-{id}")).await.ok(200), expected);
    for headers in [
        vec![("e2b-sandbox-id", id.as_str())],
        vec![
            ("e2b-sandbox-id", &id),
            ("e2b-sandbox-port", "49983"),
            ("host", "localhost:3000"),
        ],
    ] {
        assert_eq!(
            api.send("POST", "/sandboxes/x", &headers, "").await.ok(200),
            expected
        );
    }
    // The control plane still wants one.
    api.send(
        "GET",
        &format!("/sandboxes/{id}"),
        &[("host", "api.sandboxes.example")],
        "",
    )
    .await
    .refused(401, "no key");
    by_host(&api, "49983-nobody").await.refused(400, "no id");
}

#[tokio::test]
async fn sandbox_that_cannot_be_reached_gets_502_with_the_reason() {
    let api = api();
    let id = api.make(ACME, json!({})).await;
    let gone = by_host(&api, "49983-0123456789ab").await;
    assert_eq!(gone.body["sandboxId"], "0123456789ab");
    assert!(gone.refused(502, "gone").contains("was not found"));
    // It has no network.
    let closed = by_host(&api, &format!("3000-{id}")).await.refused(502, "closed");
    assert!(closed.contains("port is not open"), "{closed}");
    api.daemon.pause(&Wanted::on_node(&id)).await.unwrap();
    let paused = by_host(&api, &format!("49983-{id}")).await.refused(502, "paused");
    assert!(paused.contains("paused"), "{paused}");
}

#[tokio::test]
async fn sandbox_of_thawds_own_api_has_no_ports_here() {
    let api = api();
    let made = api.daemon.create(
        crate::api::fake::request("x"),
        thaw_sandbox::state::Behalf::default(),
    );
    let id = made.await.unwrap().sandbox.id;
    by_host(&api, &format!("49983-{id}"))
        .await
        .refused(502, "another API's");
}

#[tokio::test]
async fn request_resumes_a_sandbox_that_is_to_be() {
    let api = api();
    let id = api
        .make(ACME, json!({"autoPause": true, "autoResume": {"enabled": true}}))
        .await;
    api.service.pause(&Wanted::on_node(&id)).await.unwrap();
    by_host(&api, &format!("49983-{id}")).await.ok(200);
    let shown = api.daemon.cache.get(&id).unwrap();
    assert_eq!(
        (shown.state.as_str(), shown.timeout_s),
        ("running", Some(RESUMED_TIMEOUT_S))
    );
}
