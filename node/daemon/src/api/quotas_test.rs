use std::sync::atomic::Ordering;

use axum::Router;
use axum::http::StatusCode;
use futures_util::future::join_all;
use serde_json::{Value, json};
use thaw_sandbox::admission::Admission;

use super::*;
use crate::api::fake::Fake;
use crate::api::grant::{Grant, Role};
use crate::api::peer::Peer;
use crate::api::request_gate::{Bounds, Gate};
use crate::api::router::router;
use crate::api::test_client::{JSON, ask, send, whole};

/// An answer: status, seconds of Retry-After, body.
struct Answer(StatusCode, Option<u64>, Value);

impl Answer {
    /// Checks that it is a refusal with this status and code, and returns its detail.
    fn refused(self, status: u16, code: &str) -> String {
        assert_eq!(
            (self.0.as_u16(), &self.2["code"]),
            (status, &json!(code)),
            "{}",
            self.2
        );
        self.2["detail"].as_str().unwrap().to_owned()
    }

    fn made(self) -> String {
        assert_eq!(self.0, StatusCode::CREATED, "{}", self.2);
        self.2["sandbox"]["id"].as_str().unwrap().to_owned()
    }
}

struct Api {
    fake: Arc<Fake>,
    routes: Router,
}

impl Api {
    fn within(admission: Admission) -> Api {
        let (fake, daemon) = Fake::daemon_within(true, admission);
        let routes = router(daemon, Gate::new(Bounds::default()));
        Api { fake, routes }
    }

    /// With these limits of the tenant acme.
    async fn with(limits: Value) -> Api {
        let api = Api::within(Admission::default());
        let set = api
            .asks(&Peer::user(0), "PUT", "/v1/tenants/acme/limits", limits)
            .await;
        assert_eq!(set.0, StatusCode::OK, "{}", set.2);
        api
    }

    async fn asks(&self, peer: &Peer, method: &str, path: &str, body: Value) -> Answer {
        let body = if body.is_null() {
            String::new()
        } else {
            body.to_string()
        };
        let mut request = ask(method, path, JSON, body);
        request.extensions_mut().insert(peer.clone());
        let response = send(&self.routes, request).await;
        let retry = response.headers().get("retry-after");
        let retry = retry.map(|seconds| seconds.to_str().unwrap().parse().unwrap());
        let status = response.status();
        let body = serde_json::from_slice(&whole(response).await).unwrap_or_default();
        Answer(status, retry, body)
    }

    async fn creates(&self, peer: &Peer) -> Answer {
        let body = json!({"image": "x", "cpus": 1, "memory_mib": 128});
        self.asks(peer, "POST", "/v1/sandboxes", body).await
    }

    async fn quota(&self, peer: &Peer) -> Value {
        let Answer(status, _, quota) = self.asks(peer, "GET", "/v1/quota", Value::Null).await;
        assert_eq!(status, StatusCode::OK);
        quota
    }
}

fn of(tenant: &str) -> Peer {
    let grant = Grant::new(Role::Operate, Some(tenant.parse().unwrap()));
    Peer::token(tenant, grant.unwrap())
}

#[tokio::test]
async fn last_place_is_given_once_and_freed_by_a_delete() {
    let api = Api::with(json!({"running": 2})).await;
    let acme = of("acme");
    let answers = join_all((0..8).map(|_| api.creates(&acme))).await;
    let (made, refused): (Vec<_>, Vec<_>) = answers.into_iter().partition(|a| a.0.is_success());
    assert_eq!((made.len(), refused.len(), api.fake.living()), (2, 6, 2));
    for refused in refused {
        assert_eq!(refused.1, None);
        let detail = refused.refused(429, "tenant-quota");
        assert!(detail.contains("running is 2: 2 used, 0 free"), "{detail}");
    }
    api.creates(&of("other")).await.made();
    let id = made.into_iter().next().unwrap().made();
    let path = format!("/v1/sandboxes/{id}");
    let deleted = api.asks(&acme, "DELETE", &path, Value::Null).await;
    assert_eq!(deleted.0, StatusCode::NO_CONTENT);
    api.creates(&acme).await.made();
    api.creates(&acme).await.refused(429, "tenant-quota");
}

#[tokio::test]
async fn failed_creation_gives_its_place_back() {
    let api = Api::with(json!({"running": 1})).await;
    for _ in 0..3 {
        let body = json!({"image": "missing", "cpus": 1, "memory_mib": 128});
        let failed = api.asks(&of("acme"), "POST", "/v1/sandboxes", body).await;
        failed.refused(404, "image-not-found");
    }
    api.creates(&of("acme")).await.made();
}

#[tokio::test]
async fn rate_refuses_until_the_seconds_of_retry_after() {
    let api = Api::with(json!({"creations_per_minute": 1})).await;
    api.creates(&of("acme")).await.made();
    let refused = api.creates(&of("acme")).await;
    assert!(matches!(refused.1, Some(1..=61)), "{:?}", refused.1);
    let detail = refused.refused(429, "creation-rate");
    assert!(detail.contains("creations_per_minute is 1"), "{detail}");
    api.creates(&of("other")).await.made();
}

#[tokio::test]
async fn full_node_refuses_all_tenants() {
    let capacity = TenantLimits {
        memory_mib: Some(200),
        ..TenantLimits::default()
    };
    let api = Api::within(Admission::with(TenantLimits::default(), capacity));
    api.creates(&of("acme")).await.made();
    for peer in [of("acme"), of("other"), Peer::user(0)] {
        let detail = api.creates(&peer).await.refused(503, "node-capacity");
        assert!(
            detail.contains("memory_mib is 200: 128 used, 72 free"),
            "{detail}"
        );
    }
    let of_node = &api.quota(&Peer::user(0)).await["node"];
    assert_eq!(
        of_node,
        &json!({"used_vcpus": 1, "memory_mib": 200, "used_memory_mib": 128})
    );
    assert_eq!(api.quota(&of("acme")).await["node"], Value::Null);
}

#[tokio::test]
async fn fork_without_room_freezes_nothing() {
    let api = Api::with(json!({"running": 3})).await;
    let id = api.creates(&of("acme")).await.made();
    let path = format!("/v1/sandboxes/{id}/fork");
    let forks = async |count: u8| {
        api.asks(&of("acme"), "POST", &path, json!({"count": count}))
            .await
    };
    let detail = forks(3).await.refused(429, "tenant-quota");
    assert!(detail.contains("2 free, 3 asked for"), "{detail}");
    assert!(api.fake.place.lock().unwrap().is_none(), "nothing was frozen");
    assert_eq!(forks(2).await.0, StatusCode::CREATED);
    // The clones count against the original's tenant.
    api.creates(&of("acme")).await.refused(429, "tenant-quota");
}

#[tokio::test]
async fn paused_and_resumed_sandboxes_take_their_places() {
    let api = Api::with(json!({"running": 1, "paused": 1})).await;
    let acme = of("acme");
    let first = api.creates(&acme).await.made();
    let does = async |id: &str, what: &str, body: Value| {
        let path = format!("/v1/sandboxes/{id}/{what}");
        api.asks(&acme, "POST", &path, body).await
    };
    let release = || json!({"memory": "release"});
    assert_eq!(does(&first, "pause", release()).await.0, StatusCode::NO_CONTENT);
    let second = api.creates(&acme).await.made();
    let used = &api.quota(&acme).await["used"];
    assert_eq!(
        (&used["running"], &used["paused"], &used["disk_mib"]),
        (&json!(1), &json!(1), &json!(128))
    );
    let detail = does(&second, "pause", release())
        .await
        .refused(429, "tenant-quota");
    assert!(detail.contains("paused is 1"), "{detail}");
    does(&first, "resume", Value::Null)
        .await
        .refused(429, "tenant-quota");
    let path = format!("/v1/sandboxes/{second}");
    api.asks(&acme, "DELETE", &path, Value::Null).await;
    assert_eq!(
        does(&first, "resume", Value::Null).await.0,
        StatusCode::NO_CONTENT
    );
    let used = &api.quota(&acme).await["used"];
    assert_eq!(
        (&used["running"], &used["paused"], &used["disk_mib"]),
        (&json!(1), &json!(0), &json!(64))
    );
}

#[tokio::test]
async fn failed_fork_and_deleted_pause_give_places_back() {
    let api = Api::with(json!({"running": 4})).await;
    let acme = of("acme");
    let id = api.creates(&acme).await.made();
    let path = format!("/v1/sandboxes/{id}");
    // One clone is made, and the next fails.
    api.fake.most.store(2, Ordering::SeqCst);
    let forked = api
        .asks(&acme, "POST", &format!("{path}/fork"), json!({"count": 3}))
        .await;
    forked.refused(507, "disk-full");
    let used = &api.quota(&acme).await["used"];
    assert_eq!(
        (&used["running"], &used["disk_mib"]),
        (&json!(1), &json!(64)),
        "the original's"
    );
    let release = json!({"memory": "release"});
    let paused = api.asks(&acme, "POST", &format!("{path}/pause"), release).await;
    assert_eq!(paused.0, StatusCode::NO_CONTENT);
    let deleted = api.asks(&acme, "DELETE", &path, Value::Null).await;
    assert_eq!(deleted.0, StatusCode::NO_CONTENT);
    let used = &api.quota(&acme).await["used"];
    assert_eq!((&used["paused"], &used["disk_mib"]), (&json!(0), &json!(0)));
}

#[tokio::test]
async fn administrator_sets_lists_and_resets_limits() {
    let default = TenantLimits {
        running: Some(7),
        ..TenantLimits::default()
    };
    let api = Api::within(Admission::with(default, TenantLimits::default()));
    let admin = Peer::user(0);
    let path = "/v1/tenants/acme/limits";
    let set = api.asks(&admin, "PUT", path, json!({"vcpus": 4})).await;
    let own = json!({"vcpus": 4});
    assert_eq!((&set.2["limits"], &set.2["is_set"]), (&own, &json!(true)));
    api.creates(&of("other")).await.made();
    let listed = api.asks(&admin, "GET", "/v1/tenants", Value::Null).await;
    let items = listed.2["items"].as_array().unwrap().iter();
    let listed: Vec<_> = items
        .map(|q| (q["tenant"].clone(), q["limits"].clone()))
        .collect();
    assert_eq!(
        listed,
        [(json!("acme"), own), (json!("other"), json!({"running": 7}))]
    );
    let reset = api.asks(&admin, "DELETE", path, Value::Null).await;
    assert_eq!(
        (&reset.2["limits"], &reset.2["is_set"]),
        (&json!({"running": 7}), &json!(false))
    );
    for (path, body, status, code) in [
        ("/v1/tenants/-/limits", json!({}), 400, "bad-parameter"),
        (path, json!({"creations_per_minute": 0}), 422, "invalid-body"),
        (path, json!({"running": -1}), 422, "invalid-body"),
        (path, json!({"sandboxes": 1}), 422, "invalid-body"),
    ] {
        api.asks(&admin, "PUT", path, body).await.refused(status, code);
    }
}
