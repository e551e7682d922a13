use serde_json::{Value, json};

use crate::e2b::test_api::{ACME, ACME_READ, ADMIN, Api, OTHER};

/// Every call of one sandbox: method, what follows the sandbox's path, a body that is accepted, and the status of success.
fn calls() -> Vec<(&'static str, &'static str, Value, u16)> {
    vec![
        ("GET", "", Value::Null, 200),
        ("POST", "/timeout", json!({"timeout": 60}), 204),
        ("POST", "/refreshes", json!({"duration": 60}), 204),
        ("POST", "/fork", json!({}), 201),
        ("POST", "/snapshots", json!({}), 201),
        ("PUT", "/network", json!({}), 204),
        ("GET", "/metrics", Value::Null, 200),
        ("GET", "/logs", Value::Null, 200),
        ("POST", "/connect", json!({"timeout": 60}), 200),
        ("POST", "/pause", json!({}), 204),
        ("POST", "/resume", json!({}), 201),
        ("DELETE", "", Value::Null, 204),
    ]
}

fn paths(id: &str, what: &str) -> Vec<String> {
    let mut paths = vec![format!("/sandboxes/{id}{what}")];
    if ["/connect", "/logs"].contains(&what) {
        paths.push(format!("/v2/sandboxes/{id}{what}"));
    }
    paths
}

#[tokio::test]
async fn sandbox_of_another_tenant_is_not_there_on_any_call() {
    let api = Api::new();
    let id = api.make(ACME, json!({"metadata": {"secret": "x"}})).await;
    let before = api.daemon.cache.version();
    for (method, what, body, _) in calls() {
        for path in paths(&id, what) {
            let theirs = api
                .ask(OTHER, method, &path, body.clone())
                .await
                .refused(404, &path);
            let nothing = paths("0123456789ab", what).remove(0);
            let none = api
                .ask(OTHER, method, &nothing, body.clone())
                .await
                .refused(404, &nothing);
            assert_eq!(
                theirs.replace(&id, "ID"),
                none.replace("0123456789ab", "ID"),
                "{path}"
            );
            // A name is no id, so that no path leads to a sandbox of thawd's own API by its name.
            let named = paths("web", what).remove(0);
            api.ask(ACME, method, &named, body.clone())
                .await
                .refused(404, &named);
        }
    }
    assert_eq!(api.daemon.cache.version(), before, "nothing has changed");
    for key in [ADMIN, ACME] {
        for (method, what, body, status) in calls() {
            // The sandbox is deleted by the last call, so an administrator has another.
            let id = if key == ADMIN && what.is_empty() {
                api.make(ACME, json!({})).await
            } else {
                id.clone()
            };
            for path in paths(&id, what) {
                api.ask(key, method, &path, body.clone()).await.ok(status);
            }
        }
    }
}

#[tokio::test]
async fn request_without_an_api_key_of_this_node_gets_401() {
    let api = Api::new();
    let id = api.make(ACME, json!({})).await;
    let bearer = format!("Bearer {ACME}");
    let all = [
        ("GET", "/v2/sandboxes".to_owned()),
        ("POST", "/v2/sandboxes".into()),
        ("GET", "/volumes".into()),
    ];
    let of_one = [("DELETE", format!("/sandboxes/{id}")), ("GET", "/nothing".into())];
    for (method, path) in all.into_iter().chain(of_one) {
        for headers in [
            vec![],
            vec![("x-api-key", "")],
            vec![("x-api-key", &ACME[1..])],
            vec![("x-api-key", "acme")],
            vec![("x-api-key", ACME), ("x-api-key", ACME)],
            vec![("authorization", bearer.as_str())],
        ] {
            let answer = api.send(method, &path, &headers, "{}").await;
            assert!(!answer.headers.contains_key("www-authenticate"));
            let message = answer.refused(401, &format!("{method} {path} {headers:?}"));
            assert!(
                message.contains("E2B_API_KEY") && !message.contains(&ACME[1..]),
                "{message}"
            );
        }
    }
    assert_eq!((api.fake.made(), api.fake.living()), (1, 1));
}

#[tokio::test]
async fn reader_changes_nothing() {
    let api = Api::new();
    let id = api.make(ACME, json!({})).await;
    for (method, what, body, _) in calls() {
        for path in paths(&id, what) {
            let answer = api.ask(ACME_READ, method, &path, body.clone()).await;
            match method {
                "GET" => drop(answer.ok(200)),
                _ => drop(answer.refused(403, &path)),
            }
        }
    }
    for path in [
        "/sandboxes",
        "/v2/sandboxes",
        "/snapshots",
        "/templates",
        "/templates/aliases/base",
    ] {
        api.ask(ACME_READ, "GET", path, Value::Null).await.ok(200);
    }
    for (method, path) in [
        ("POST", "/sandboxes"),
        ("POST", "/v2/sandboxes"),
        ("DELETE", "/templates/x"),
        ("POST", "/v3/templates"),
        ("PATCH", "/templates/x"),
        ("PATCH", "/v2/templates/x"),
        ("POST", "/v2/templates/x/builds/y"),
        ("GET", "/templates/x/files/y"),
        ("POST", "/templates/tags"),
        ("DELETE", "/templates/tags"),
    ] {
        let answer = api
            .ask(ACME_READ, method, path, json!({"templateID": "base"}))
            .await;
        answer.refused(403, path);
    }
    assert_eq!(api.fake.made(), 1);
}

#[tokio::test]
async fn call_that_is_not_implemented_gets_501_with_its_name() {
    let api = Api::new();
    for (method, path) in [
        ("GET", "/sandboxes/metrics"),
        ("PATCH", "/sandboxes/0123456789ab"),
        ("POST", "/sandboxes/0123456789ab/secrets"),
        ("POST", "/templates"),
        ("POST", "/v2/templates"),
        ("POST", "/templates/base/builds/x"),
        ("GET", "/templates/base/tags/count"),
        ("GET", "/default-templates"),
        ("GET", "/volumes"),
        ("POST", "/volumes"),
        ("DELETE", "/secrets/x"),
        ("GET", "/teams"),
    ] {
        let message = api.ask(ACME, method, path, json!({})).await.refused(501, path);
        assert!(message.starts_with(&format!("{method} {path}:")), "{message}");
    }
    for path in ["/", "/nothing", "/v1/sandboxes2", "/metrics"] {
        api.ask(ACME, "GET", path, Value::Null).await.refused(404, path);
    }
}
