use serde_json::json;
use thaw_protocol::api::{CreateSandbox, TenantLimits};

use super::*;
use crate::e2b::test_api::{ACME, ADMIN, Answer, Api, DOMAIN, OTHER};

async fn create(api: &Api, body: Value) -> Answer {
    api.ask(ACME, "POST", "/v2/sandboxes", body).await
}

#[tokio::test]
async fn answer_has_what_a_client_needs_to_reach_the_sandbox() {
    let api = Api::new();
    let made = create(&api, json!({"templateID": "base"})).await.ok(201);
    let id = made["sandboxID"].as_str().unwrap();
    let expected = json!({
        "templateID": "base", "alias": "base", "sandboxID": id, "clientID": "thaw", "envdVersion": "0.6.4",
        "envdAccessToken": api.service.tokens.access_token(id), "trafficAccessToken": null, "domain": DOMAIN,
    });
    assert_eq!(made, expected);
    let shown = api.daemon.cache.get(id).unwrap();
    assert_eq!(
        (shown.tenant.as_deref(), shown.timeout_s),
        (Some("acme"), Some(300))
    );
    // The first version has another timeout, and `secure` changes nothing.
    let body = json!({"templateID": "base", "secure": false});
    let first = api.ask(ACME, "POST", "/sandboxes", body).await.ok(201);
    let id = first["sandboxID"].as_str().unwrap();
    assert_eq!(api.daemon.cache.get(id).unwrap().timeout_s, Some(15));
    assert_eq!(first["envdAccessToken"], api.service.tokens.access_token(id));
}

#[tokio::test]
async fn every_field_of_a_creation_is_shown_again() {
    let api = Api::new();
    let metadata = json!({"owner": "Zoë & co", "": "=", "a/b": "100%\n"});
    let fields = json!({
        "timeout": 60, "autoPause": true, "autoResume": {"enabled": true}, "allow_internet_access": true,
        "metadata": metadata, "envVars": {"A": "b=c d", "EMPTY": ""}, "network": {"denyOut": ["192.0.2.0/24"]},
        "mcp": null, "volumeMounts": [],
    });
    let id = api.make(ACME, fields).await;
    let shown = api.shown(ACME, &id).await;
    assert_eq!(shown["metadata"], metadata);
    assert_eq!(
        shown["lifecycle"],
        json!({"autoResume": true, "onTimeout": "pause"})
    );
    assert_eq!(
        (&shown["allowInternetAccess"], &shown["diskSizeMB"]),
        (&json!(true), &json!(1024))
    );
    assert_eq!(
        (&shown["state"], &shown["cpuCount"]),
        (&json!("running"), &json!(1))
    );
    assert_eq!(api.notes(&id).environment(), ["A=b=c d", "EMPTY="]);
    assert!(api.notes(&id).auto_pause);
}

#[tokio::test]
async fn image_of_a_template_runs_a_program_that_waits() {
    let template = Api::new().service.templates.get("base").cloned();
    let Some(Source::Image(request)) = template else {
        panic!("base is of an image");
    };
    let container = request.container.clone().unwrap();
    assert_eq!(
        (
            container.entrypoint.as_deref(),
            container.command.join(" ").as_str()
        ),
        (Some(""), "sleep infinity")
    );
    assert!(container.settings.init && container.on_exit == thaw_protocol::api::OnExit::Delete);
    let CreateSandbox {
        cpus,
        memory_mib,
        disk_mib,
        ..
    } = *request;
    assert_eq!((cpus, memory_mib, disk_mib), (2, 512, 1024));
}

#[tokio::test]
async fn creation_that_cannot_be_is_refused() {
    let api = Api::new();
    let with = |fields: Value| {
        let mut body = json!({"templateID": "base"});
        body.as_object_mut()
            .unwrap()
            .extend(fields.as_object().unwrap().clone());
        body
    };
    for (body, status, word) in [
        (json!({}), 400, "templateID"),
        (json!([]), 400, "object"),
        (with(json!({"timeout": -1})), 400, "timeout"),
        (with(json!({"timeout": "1"})), 400, "timeout"),
        (with(json!({"metadata": {"a": 1}})), 400, "metadata"),
        (
            with(json!({"metadata": {"a": "x".repeat(70_000)}})),
            400,
            "metadata",
        ),
        (with(json!({"envVars": {"": "x"}})), 400, "env[0]"),
        (with(json!({"envVars": {"A": "\u{0}"}})), 400, "env[0]"),
        (with(json!({"colour": "blue"})), 400, "colour"),
        (
            with(json!({"network": {"allowOut": ["pypi.org"]}})),
            400,
            "network",
        ),
        (json!({"templateID": "nothing"}), 404, "nothing"),
        (json!({"templateID": ""}), 404, "template"),
        (json!({"templateID": "gone"}), 404, "missing"),
        (with(json!({"mcp": {"x": {}}})), 501, "mcp"),
        (with(json!({"iam": {"tokens": {}}})), 501, "iam"),
        (
            with(json!({"volumeMounts": [{"name": "v", "path": "/v"}]})),
            501,
            "volumeMounts",
        ),
        (
            with(json!({"autoPause": true, "autoPauseMemory": false})),
            501,
            "autoPauseMemory",
        ),
        (
            with(json!({"network": {"egressProxy": {"address": "x:1"}}})),
            501,
            "egressProxy",
        ),
    ] {
        let message = create(&api, body.clone())
            .await
            .refused(status, &body.to_string());
        assert!(message.contains(word), "{body}: {message}");
    }
    let broken = api
        .send("POST", "/v2/sandboxes", &[("x-api-key", ACME)], "{")
        .await;
    broken.refused(400, "no JSON");
    assert_eq!((api.fake.made(), api.fake.living()), (0, 0));
}

#[tokio::test]
async fn repeated_creation_with_a_key_makes_one_sandbox() {
    let api = Api::new();
    let body = json!({"templateID": "base", "metadata": {"a": "b"}}).to_string();
    let headers = [("x-api-key", ACME), ("idempotency-key", "key-1")];
    let once = api.send("POST", "/v2/sandboxes", &headers, &body).await.ok(201);
    let again = api.send("POST", "/v2/sandboxes", &headers, &body).await.ok(201);
    assert_eq!((&once, api.fake.made()), (&again, 1));
    let other = json!({"templateID": "base"}).to_string();
    let reused = api.send("POST", "/v2/sandboxes", &headers, &other).await;
    assert_eq!(reused.body["error_code"], "idempotency_request_mismatch");
    reused.refused(422, "another request");
}

#[tokio::test]
async fn drained_node_asks_the_client_to_come_again() {
    let api = Api::new();
    api.daemon.close();
    let answer = create(&api, json!({"templateID": "base"})).await;
    assert_eq!(answer.headers["retry-after"], "30");
    answer.refused(503, "draining");
}

#[tokio::test]
async fn stored_snapshot_of_the_tenant_is_a_template() {
    let api = Api::new();
    let id = api.make(ACME, json!({})).await;
    let path = format!("/sandboxes/{id}/snapshots");
    let stored = api
        .ask(ACME, "POST", &path, json!({"name": "warm"}))
        .await
        .ok(201);
    let snapshot = stored["snapshotID"].as_str().unwrap();
    for name in [snapshot, "warm"] {
        let body = json!({"templateID": name, "timeout": 60, "autoPause": true, "metadata": {"k": "v"}, "envVars": {"A": "1"}});
        let made = create(&api, body).await.ok(201);
        assert_eq!(
            (&made["templateID"], &made["alias"]),
            (&json!(snapshot), &json!("warm"))
        );
        let shown = api.shown(ACME, made["sandboxID"].as_str().unwrap()).await;
        assert_eq!(
            (&shown["metadata"], &shown["lifecycle"]["onTimeout"]),
            (&json!({"k": "v"}), &json!("pause"))
        );
        let bad = json!({"templateID": name, "envVars": {"": "1"}});
        create(&api, bad).await.refused(400, name);
        // Another tenant's does not exist.
        let theirs = api
            .ask(OTHER, "POST", "/v2/sandboxes", json!({"templateID": name}))
            .await;
        theirs.refused(404, name);
    }
    // Not by the beginning of its id, nor by its name for an administrator without the tenant.
    create(&api, json!({"templateID": &snapshot[..6]}))
        .await
        .refused(404, "a beginning");
    let named = api
        .ask(ADMIN, "POST", "/v2/sandboxes", json!({"templateID": "warm"}))
        .await;
    named.refused(404, "an administrator");
}

#[tokio::test]
async fn creation_beyond_the_quota_gets_429_with_the_numbers() {
    let api = Api::new();
    let limits = TenantLimits {
        running: Some(1),
        ..TenantLimits::default()
    };
    let admission = &api.fake.counts.admission;
    admission
        .set_limits(&"acme".parse().unwrap(), Some(limits))
        .unwrap();
    api.make(ACME, json!({})).await;
    let refused = create(&api, json!({"templateID": "base"})).await;
    let message = refused.refused(429, "a second sandbox");
    assert!(message.contains("running is 1: 1 used, 0 free"), "{message}");
    api.make(OTHER, json!({})).await;
}
