use axum::body::Body;
use axum::http::Request;
use http_body_util::BodyExt;
use serde_json::{Value, json};

use crate::api::fake::Fake;
use crate::api::grant::{Grant, Role};
use crate::api::peer::Peer;
use crate::api::request_gate::{Bounds, Gate};
use crate::api::router::router;
use crate::api::test_client::{JSON, ask, send, whole};

/// What a caller asks a daemon of fakes.
struct Caller(axum::Router, Peer);

impl Caller {
    fn request(&self, method: &str, path: &str, body: String) -> Request<Body> {
        let mut request = ask(method, path, JSON, body);
        request.extensions_mut().insert(self.1.clone());
        request
    }

    /// The first lines of a watch: the type and the id of each.
    async fn watches(&self, query: &str, count: usize) -> Vec<(String, String)> {
        let path = format!("/v1/snapshots?watch=1{query}");
        let mut body = send(&self.0, self.request("GET", &path, String::new()))
            .await
            .into_body();
        let text = |of: &Value| of.as_str().unwrap().to_owned();
        let mut seen = Vec::new();
        while seen.len() < count {
            let piece = body.frame().await.unwrap().unwrap().into_data().unwrap();
            for line in piece.split(|b| *b == b'\n').filter(|line| !line.is_empty()) {
                let event: Value = serde_json::from_slice(line).unwrap();
                seen.push((text(&event["type"]), text(&event["object"]["id"])));
            }
        }
        seen
    }

    async fn asks(&self, method: &str, path: &str, body: Value) -> (u16, Value) {
        let body = match body {
            Value::Null => String::new(),
            body => body.to_string(),
        };
        let response = send(&self.0, self.request(method, path, body)).await;
        let status = response.status().as_u16();
        (
            status,
            serde_json::from_slice(&whole(response).await).unwrap_or_default(),
        )
    }

    async fn freezes(&self, body: Value) -> String {
        let create = json!({"image": "x", "cpus": 1, "memory_mib": 128});
        let (_, made) = self.asks("POST", "/v1/sandboxes", create).await;
        let path = format!("/v1/sandboxes/{}/freeze", made["sandbox"]["id"].as_str().unwrap());
        let (status, frozen) = self.asks("POST", &path, body).await;
        assert_eq!(status, 200, "{frozen}");
        frozen["snapshot"].as_str().unwrap().to_owned()
    }

    async fn lists(&self, query: &str) -> Vec<String> {
        let (status, list) = self
            .asks("GET", &format!("/v1/snapshots{query}"), Value::Null)
            .await;
        assert_eq!(status, 200, "{list}");
        let ids = list["items"].as_array().unwrap().iter();
        ids.map(|item| item["id"].as_str().unwrap().to_owned()).collect()
    }
}

fn callers() -> [Caller; 3] {
    let (_fake, daemon) = Fake::daemon(true);
    let routes = router(daemon, Gate::new(Bounds::default()));
    let of = |name: &str, tenant: &str| {
        Peer::token(
            name,
            Grant::new(Role::Operate, Some(tenant.parse().unwrap())).unwrap(),
        )
    };
    [of("a", "acme"), of("o", "other"), Peer::user(0)].map(|peer| Caller(routes.clone(), peer))
}

#[tokio::test]
async fn operator_freezes_lists_thaws_and_removes_its_own() {
    let [acme, ..] = callers();
    let id = acme
        .freezes(json!({"name": "web", "labels": {"tier": "front"}}))
        .await;
    assert_eq!(acme.lists("").await, std::slice::from_ref(&id));
    for wanted in [id.as_str(), "web"] {
        let (status, shown) = acme
            .asks("GET", &format!("/v1/snapshots/{wanted}"), Value::Null)
            .await;
        assert_eq!((status, shown["labels"]["tier"].as_str()), (200, Some("front")));
        let (status, thawed) = acme.asks("POST", "/v1/thaws", json!({"snapshot": wanted})).await;
        assert_eq!(
            (status, thawed["sandbox"]["tenant"].as_str()),
            (201, Some("acme"))
        );
    }
    let path = format!("/v1/snapshots/{id}");
    let (status, verified) = acme.asks("POST", &format!("{path}/verify"), Value::Null).await;
    assert_eq!((status, &verified["damaged"]), (200, &json!([])));
    let (_, unnamed) = acme.asks("PATCH", &path, json!({"name": null})).await;
    assert_eq!(unnamed["name"], Value::Null);
    assert_eq!(acme.asks("DELETE", &path, Value::Null).await.0, 204);
    assert_eq!(acme.asks("GET", &path, Value::Null).await.0, 404);
}

#[tokio::test]
async fn snapshot_of_another_tenant_is_not_found() {
    let [acme, other, admin] = callers();
    let id = acme.freezes(json!({"name": "web"})).await;
    assert!(other.lists("").await.is_empty());
    assert_eq!(
        admin.lists("?fieldSelector=tenant%3Dacme").await,
        std::slice::from_ref(&id)
    );
    for wanted in [id.as_str(), "web"] {
        let path = format!("/v1/snapshots/{wanted}");
        for (method, path, body) in [
            ("GET", path.clone(), Value::Null),
            ("DELETE", format!("{path}?force=true"), Value::Null),
            ("PATCH", path.clone(), json!({"name": "mine"})),
            ("POST", format!("{path}/verify"), Value::Null),
            (
                "POST",
                format!("{path}/push"),
                json!({"reference": "registry.example/x"}),
            ),
            ("POST", "/v1/thaws".into(), json!({"snapshot": wanted})),
        ] {
            let (status, problem) = other.asks(method, &path, body).await;
            assert_eq!(
                (status, problem["code"].as_str()),
                (404, Some("snapshot-not-found")),
                "{method} {path}"
            );
        }
    }
    assert_eq!(
        admin
            .asks("GET", &format!("/v1/snapshots/{id}"), Value::Null)
            .await
            .0,
        200
    );
}

#[tokio::test]
async fn snapshot_in_use_is_a_conflict_unless_forced() {
    let [acme, ..] = callers();
    let id = acme.freezes(json!({"labels": {"in-use": ""}})).await;
    let path = format!("/v1/snapshots/{id}");
    let (status, problem) = acme.asks("DELETE", &path, Value::Null).await;
    assert_eq!((status, problem["code"].as_str()), (409, Some("snapshot-in-use")));
    assert_eq!(
        acme.asks("DELETE", &format!("{path}?force=maybe"), Value::Null)
            .await
            .0,
        400
    );
    assert_eq!(
        acme.asks("DELETE", &format!("{path}?force=true"), Value::Null)
            .await
            .0,
        204
    );
}

#[tokio::test]
async fn list_is_selected_and_comes_in_pages() {
    let [acme, ..] = callers();
    let mut ids = Vec::new();
    for name in ["a", "b", "c"] {
        ids.push(acme.freezes(json!({"name": name, "labels": {"n": name}})).await);
    }
    assert_eq!(
        acme.lists("?labelSelector=n+in+(a,c)").await,
        [ids[0].clone(), ids[2].clone()]
    );
    assert_eq!(acme.lists("?fieldSelector=name%3Db").await, [ids[1].clone()]);
    let (mut seen, mut query) = (Vec::new(), "?limit=1".to_owned());
    loop {
        let (_, page) = acme
            .asks("GET", &format!("/v1/snapshots{query}"), Value::Null)
            .await;
        seen.push(page["items"][0]["id"].as_str().unwrap().to_owned());
        let Some(token) = page["continue"].as_str() else {
            break;
        };
        query = format!("?limit=1&continue={token}");
    }
    assert_eq!(seen, ids);
    for wrong in [
        "?limit=0",
        "?continue=x",
        "?fieldSelector=state%3Drunning",
        "?watch=2",
        "?watch=1&limit=1",
        "?resourceVersion=1",
        "?watch=1&since=yesterday",
        "?watch=1&since=1&resourceVersion=1",
    ] {
        let (status, _) = acme
            .asks("GET", &format!("/v1/snapshots{wrong}"), Value::Null)
            .await;
        assert_eq!(status, 400, "{wrong}");
    }
}

#[tokio::test]
async fn watch_shows_the_changes_of_ones_own_snapshots() {
    let [acme, other, admin] = callers();
    let first = acme.freezes(json!({"name": "a"})).await;
    let (_, list) = acme.asks("GET", "/v1/snapshots", Value::Null).await;
    let from = format!("&resourceVersion={}", list["resource_version"]);
    let theirs = other.freezes(json!({"name": "theirs"})).await;
    let second = acme.freezes(json!({"name": "b", "labels": {"n": "b"}})).await;
    let path = |id: &str| format!("/v1/snapshots/{id}");
    acme.asks("PATCH", &path(&first), json!({"name": "c"})).await;
    assert_eq!(acme.asks("DELETE", &path(&second), Value::Null).await.0, 204);
    let event = |kind: &str, id: &str| (kind.to_owned(), id.to_owned());
    let (added, removed) = (event("ADDED", &second), event("DELETED", &second));
    let changed = event("MODIFIED", &first);
    let mine = [added.clone(), changed.clone(), removed.clone()];
    assert_eq!(acme.watches(&from, 3).await, mine);
    let every = [event("ADDED", &theirs), added.clone(), changed, removed.clone()];
    assert_eq!(admin.watches(&from, 4).await, every);
    let labelled = acme.watches(&format!("{from}&labelSelector=n"), 2).await;
    assert_eq!(labelled, [added, removed]);
    // Renamed, it matches no longer.
    let named = acme.watches(&format!("{from}&fieldSelector=name%3Da"), 1).await;
    assert_eq!(named, [event("DELETED", &first)]);
    let (status, problem) = acme
        .asks("GET", "/v1/snapshots?watch=1&resourceVersion=1", Value::Null)
        .await;
    assert_eq!(
        (status, problem["code"].as_str()),
        (410, Some("resource-version-gone"))
    );
}

#[tokio::test]
async fn thaw_and_freeze_name_one_snapshot_and_no_host_path() {
    let [acme, _, admin] = callers();
    for (wrong, status) in [
        (json!({}), 422),
        (json!({"snapshot": ""}), 422),
        (json!({"snapshot": "a", "directory": "/x"}), 403),
        (json!({"snapshot": "127.0.0.1:5000/web:1"}), 403),
        (json!({"snapshot": "oci:/srv/web"}), 403),
        (json!({"directory": "/x"}), 403),
    ] {
        assert_eq!(
            acme.asks("POST", "/v1/thaws", wrong.clone()).await.0,
            status,
            "{wrong}"
        );
    }
    let both = json!({"snapshot": "a", "directory": "/x"});
    assert_eq!(admin.asks("POST", "/v1/thaws", both).await.0, 422);
    for (wrong, status) in [
        (json!({"directory": "/x", "name": "a"}), 422),
        (json!({"name": "a/b"}), 422),
        (json!({"name": "0123456789ab"}), 422),
        (json!({"labels": {"-": ""}}), 422),
    ] {
        let (found, _) = admin.asks("POST", "/v1/sandboxes/x/freeze", wrong.clone()).await;
        assert_eq!(found, status, "{wrong}");
    }
}

#[tokio::test]
async fn operator_pushes_and_pulls_for_its_own_tenant() {
    let [acme, other, admin] = callers();
    let id = acme.freezes(json!({"name": "web"})).await;
    let push = format!("/v1/snapshots/{id}/push");
    let reference = "registry.example/web:1";
    let (status, pushed) = acme.asks("POST", &push, json!({"reference": reference})).await;
    assert_eq!((status, pushed["reference"].as_str()), (200, Some(reference)));
    let wanted = json!({"reference": reference, "name": "copy", "labels": {"tier": "front"}});
    let (status, pulled) = other.asks("POST", "/v1/snapshots", wanted).await;
    assert_eq!((status, pulled["tenant"].as_str()), (201, Some("other")));
    assert_eq!(pulled["labels"]["tier"], "front");
    assert_eq!(other.lists("").await.len(), 1);
    assert_eq!(acme.lists("").await, [id]);
    for body in [
        json!({"reference": reference, "plain_http": true}),
        json!({"reference": "oci:/srv/web"}),
        json!({"reference": "127.0.0.1:5000/web"}),
    ] {
        for path in [push.as_str(), "/v1/snapshots"] {
            let (status, problem) = acme.asks("POST", path, body.clone()).await;
            assert_eq!(
                (status, problem["code"].as_str()),
                (403, Some("role-too-low")),
                "{path}"
            );
            assert!(admin.asks("POST", path, body.clone()).await.0 < 300, "{path}");
        }
    }
    for wrong in [
        json!({}),
        json!({"reference": ""}),
        json!({"reference": reference, "name": "a/b"}),
        json!({"reference": reference, "labels": {"-": ""}}),
    ] {
        assert_eq!(
            acme.asks("POST", "/v1/snapshots", wrong.clone()).await.0,
            422,
            "{wrong}"
        );
    }
}
