use axum::body::Body;
use axum::http::Request as Asked;
use axum::routing::any;
use serde_json::Value;
use thaw_protocol::api::SandboxNetwork;

use super::*;
use crate::api::test_client::{send, until, whole};
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
async fn private_port_needs_the_traffic_token() {
    let api = api();
    let fields = json!({
        "network": {"allowPublicTraffic": false}, "autoPause": true, "autoResume": {"enabled": true},
    });
    let (id, other) = (api.make(ACME, fields).await, api.make(ACME, json!({})).await);
    let tokens = &api.service.tokens;
    let host = format!("3000-{id}.{DOMAIN}");
    let ask = async |token: Option<String>| {
        let token = token.as_deref().map(|token| (TRAFFIC_TOKEN, token));
        let headers: Vec<_> = [("host", host.as_str())].into_iter().chain(token).collect();
        api.send("GET", "/", &headers, "").await
    };
    for wrong in [
        None,
        Some(String::new()),
        Some(tokens.access_token(&id)),
        Some(tokens.traffic_token(&other)),
    ] {
        let refused = ask(wrong.clone()).await.refused(403, "private");
        assert!(refused.contains(TRAFFIC_TOKEN), "{wrong:?}: {refused}");
    }
    let token = || Some(tokens.traffic_token(&id));
    // It has no network.
    let let_in = ask(token()).await.refused(502, "the token");
    assert!(let_in.contains("port is not open"), "{let_in}");
    by_host(&api, &format!("49983-{id}")).await.ok(200);
    by_host(&api, &format!("3000-{other}"))
        .await
        .refused(502, "public");
    api.service.pause(&Wanted::on_node(&id)).await.unwrap();
    let state = || api.daemon.cache.get(&id).unwrap().state.clone();
    ask(None).await.refused(403, "paused");
    // The port of processes and files has its own token. A request without that token does not resume the sandbox.
    let with = async |token: &str| {
        let host = format!("49983-{id}.{DOMAIN}");
        let headers = [("host", host.as_str()), (ACCESS_TOKEN, token)];
        api.send("GET", "/sandboxes/x", &headers, "").await
    };
    let wrong = tokens.access_token(&other);
    assert!(with(&wrong).await.refused(502, "paused").contains("paused"));
    assert_eq!(state(), "paused");
    with(&tokens.access_token(&id)).await.ok(200);
    assert_eq!(state(), "running");
    api.service.pause(&Wanted::on_node(&id)).await.unwrap();
    ask(token()).await.refused(502, "resumed");
    assert_eq!(state(), "running");
}

#[tokio::test]
async fn websocket_over_http2_is_refused() {
    let refused = Api::new().send("CONNECT", "/ws", &[("host", "x")], "").await;
    assert!(refused.refused(501, "CONNECT").contains("HTTP/1.1"));
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

#[tokio::test]
async fn request_that_cannot_resume_a_sandbox_is_told_why() {
    let api = api();
    let id = api
        .make(ACME, json!({"autoPause": true, "autoResume": {"enabled": true}}))
        .await;
    api.service.pause(&Wanted::on_node(&id)).await.unwrap();
    std::fs::remove_dir(api.fake.counts.paused.list()[0].snapshot()).unwrap();
    let why = by_host(&api, &format!("49983-{id}"))
        .await
        .refused(502, "no snapshot");
    assert!(
        why.contains("could not be resumed") && why.contains("no snapshot"),
        "{why}"
    );
}

#[tokio::test]
async fn answer_that_is_being_read_keeps_its_sandbox_in_use() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    let (api, listener) = (
        Api::new(),
        tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap(),
    );
    let id = api.make(ACME, json!({})).await;
    let network = SandboxNetwork {
        address: "127.0.0.1".into(),
        ..SandboxNetwork::default()
    };
    api.daemon
        .cache
        .update(&id, |shown| shown.network = Some(network));
    let port = listener.local_addr().unwrap().port();
    let guest = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let _ = stream.read(&mut [0; 4096]).await.unwrap();
        let head = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\na";
        stream.write_all(head).await.unwrap();
        stream
    });
    let request = Asked::builder().header("host", format!("{port}-{id}.{DOMAIN}"));
    let answer = send(&api.routes, request.body(Body::empty()).unwrap()).await;
    assert_eq!(answer.status(), StatusCode::OK);
    let is_used = || api.daemon.is_in_use(&id);
    assert!(is_used());
    guest.await.unwrap().write_all(b"b").await.unwrap();
    assert_eq!(whole(answer).await, "ab");
    assert!(!is_used());
}

#[tokio::test]
async fn upgraded_connection_is_held_until_it_has_ended() {
    let (thawd, ends) = watch::channel(false);
    let held = Arc::new(());
    let one = until_closed(ends.clone(), held.clone());
    let mut other = until_closed(ends, held.clone());
    assert_eq!(Arc::strong_count(&held), 3);
    drop(one);
    until(|| Arc::strong_count(&held) == 2).await;
    thawd.send_replace(true);
    assert!(*other.wait_for(|closing| *closing).await.unwrap());
    until(|| Arc::strong_count(&held) == 1).await;
}
