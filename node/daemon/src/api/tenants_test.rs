//! Tests that no tenant sees or reaches the sandboxes of another, on any operation of the OpenAPI document.

use http_body_util::BodyExt;
use thaw_protocol::api::{ForkedSandbox, NodeUsage, SandboxList, WatchEvent};
use thaw_sandbox::id::is_id;

use super::*;
use crate::api::fake::UNOWNED;
use crate::api::scope::Wanted;
use crate::api::watch::page::Token;

/// Two tenants' sandboxes: one running and one failed each, with the same names.
async fn two_tenants() -> (Arc<Fake>, Arc<Daemon>, Router, Vec<Sandbox>) {
    let (fake, daemon, routes) = daemon();
    let mut made = Vec::new();
    for tenant in ["acme", "other"] {
        for name in ["dead", "web"] {
            let sandbox = make(&routes, &operator(tenant), &named(name)).await;
            assert_eq!(sandbox.tenant.as_deref(), Some(tenant));
            made.push(sandbox);
        }
    }
    for dead in made.iter().filter(|s| s.name.as_deref() == Some("dead")) {
        daemon.running(&Wanted::on_node(&dead.id)).unwrap().kill();
        while daemon.cache.get(&dead.id).unwrap().state != "failed" {
            tokio::task::yield_now().await;
        }
    }
    (fake, daemon, routes, made)
}

#[tokio::test]
async fn sandbox_of_another_tenant_is_not_there_on_any_operation() {
    let document = Document::read();
    let (_fake, daemon, routes, made) = two_tenants().await;
    // Names that this tenant does not use.
    let (others, _) = made.split_at(2);
    make(&routes, &operator("acme"), &named("theirs-alone")).await;
    let theirs = others.iter().map(|s| s.id.clone());
    let theirs: Vec<String> = theirs.chain(["theirs-alone".to_owned()]).collect();
    let before = daemon.cache.version();
    let mut asked_of = 0;
    for operation in document.operations().iter().filter(|o| o.is_of_a_sandbox()) {
        for role in [Role::Read, Role::Operate] {
            let caller = peer("intruder", role, "other");
            for subject in &theirs {
                let ask_of = async |subject: &str| {
                    let request = operation.request(subject, document.body(operation));
                    let (status, code, detail) = outcome(send(&routes, of(&caller, request)).await).await;
                    (status, code, detail.replace(subject, "SUBJECT"))
                };
                let (of_theirs, of_nothing) = (ask_of(subject).await, ask_of("0123456789ab").await);
                let name = &operation.name;
                assert_eq!(of_theirs, of_nothing, "{name} as {role} of {subject}");
                let expected = match (role.suffices(operation.least), operation.is_a_session()) {
                    (false, _) => (403, "role-too-low"),
                    (true, true) => (426, "upgrade-required"),
                    (true, false) => (404, "sandbox-not-found"),
                };
                assert_eq!(
                    (of_theirs.0, of_theirs.1.as_str()),
                    expected,
                    "{name} of {subject}"
                );
                asked_of += 1;
            }
        }
    }
    assert!(asked_of > 60, "{asked_of}");
    assert_eq!(daemon.cache.version(), before, "nothing has changed");
}

/// Shows that the test above can fail: the same requests succeed for the tenant that owns the sandbox.
#[tokio::test]
async fn ones_own_sandbox_is_there_on_every_operation() {
    let document = Document::read();
    let all = document.operations();
    let mine = |o: &&Operation| {
        o.is_of_a_sandbox() && o.least < Role::Admin && !o.is_a_session() && !o.waits_for_an_end()
    };
    for operation in all.iter().filter(mine) {
        for by_name in [false, true] {
            let (_fake, _daemon, routes, made) = two_tenants().await;
            let subject = if by_name { "web" } else { &made[3].id };
            let request = operation.request(subject, document.body(operation));
            let response = send(&routes, of(&operator("other"), request)).await;
            let (status, code, detail) = outcome(response).await;
            let is_there = status < 300 || code == "file-not-found";
            assert!(is_there, "{}: {status} {code} {detail}", operation.name);
        }
    }
}

#[tokio::test]
async fn lists_usage_and_watches_have_ones_own_sandboxes_alone() {
    let (_fake, _daemon, routes, made) = two_tenants().await;
    let of_tenant = |tenant: &str| {
        let all = made.iter().filter(|s| s.tenant.as_deref() == Some(tenant));
        all.map(|s| s.id.clone()).collect::<Vec<_>>()
    };
    let ids = |list: SandboxList| list.items.into_iter().map(|s| s.id).collect::<Vec<_>>();
    for role in [Role::Read, Role::Operate] {
        let caller = peer("x", role, "other");
        assert_eq!(
            ids(read(&routes, &caller, "/v1/sandboxes").await),
            of_tenant("other")
        );
        let theirs = "/v1/sandboxes?fieldSelector=tenant=acme";
        assert!(ids(read(&routes, &caller, theirs).await).is_empty());
        // A made-up continue token reveals nothing.
        for after in made.iter().map(|s| &s.id) {
            let version = read::<SandboxList>(&routes, &caller, "/v1/sandboxes").await;
            let token = Token {
                version: version.resource_version,
                after: after.clone(),
            };
            let path = format!("/v1/sandboxes?continue={}", token.encode());
            let listed = ids(read(&routes, &caller, &path).await);
            assert!(
                listed.iter().all(|id| of_tenant("other").contains(id)),
                "{listed:?}"
            );
        }
        let usage: NodeUsage = read(&routes, &caller, "/v1/node/usage").await;
        let used: Vec<_> = usage.sandboxes.iter().map(|s| s.id.clone()).collect();
        assert_eq!((used, usage.pools.len()), (vec![made[3].id.clone()], 0));
    }
    let admin = Peer::user(0);
    assert_eq!(
        read::<SandboxList>(&routes, &admin, "/v1/sandboxes")
            .await
            .items
            .len(),
        4
    );
    let of_acme = ids(read(&routes, &admin, "/v1/sandboxes?fieldSelector=tenant=acme").await);
    assert_eq!(of_acme, of_tenant("acme"));
    let usage: NodeUsage = read(&routes, &admin, "/v1/node/usage").await;
    assert_eq!((usage.sandboxes.len(), usage.pools.len()), (2, 1));

    let watching = asked(&routes, &operator("other"), "GET", "/v1/sandboxes?watch=1", "").await;
    make(&routes, &operator("acme"), &named("unseen")).await;
    make(&routes, &admin, &named("unseen")).await;
    let seen = make(&routes, &operator("other"), &named("seen")).await;
    let line = watching.into_body().frame().await.unwrap().unwrap();
    let event: WatchEvent = serde_json::from_slice(&line.into_data().unwrap()).unwrap();
    assert_eq!(event, WatchEvent::Added(seen));
}

#[tokio::test]
async fn name_means_the_sandbox_of_the_callers_tenant() {
    let (_fake, _daemon, routes, made) = two_tenants().await;
    let id = async |peer: &Peer, wanted: &str| {
        let path = format!("/v1/sandboxes/{wanted}");
        let response = asked(&routes, peer, "GET", &path, "").await;
        let body = whole(response).await;
        serde_json::from_slice::<Sandbox>(&body).ok().map(|s| s.id)
    };
    assert_eq!(id(&operator("acme"), "web").await, Some(made[1].id.clone()));
    assert_eq!(id(&operator("other"), "web").await, Some(made[3].id.clone()));
    // An administrator has its own names; it reaches others' sandboxes by id.
    assert_eq!(id(&Peer::user(0), "web").await, None);
    let of_acme = peer("a", Role::Admin, "acme");
    assert_eq!(id(&of_acme, "web").await, Some(made[1].id.clone()));
    for sandbox in &made {
        assert_eq!(id(&Peer::user(0), &sandbox.id).await, Some(sandbox.id.clone()));
        assert_eq!(id(&of_acme, &sandbox.id).await, Some(sandbox.id.clone()));
    }
    let ours = make(&routes, &Peer::user(0), &named("web")).await;
    assert_eq!(
        (id(&Peer::user(0), "web").await, ours.tenant),
        (Some(ours.id), None)
    );
}

#[tokio::test]
async fn name_of_a_tenants_sandbox_is_never_an_id() {
    let (_fake, _daemon, routes, made) = two_tenants().await;
    assert!(is_id(&made[0].id));
    for name in [made[0].id.as_str(), "0123456789ab"] {
        let asked = asked(&routes, &operator("other"), "POST", "/v1/sandboxes", named(name)).await;
        assert_eq!(
            outcome(asked).await.1,
            "invalid-body",
            "whether there is such an id or not"
        );
    }
}

#[tokio::test]
async fn key_of_another_tenant_answers_nothing() {
    let (fake, _daemon, routes) = daemon();
    let keyed = async |peer: &Peer| {
        let mut request = ask("POST", "/v1/sandboxes", JSON, named("web"));
        let key = "k".parse().unwrap();
        request.headers_mut().insert("idempotency-key", key);
        let response = send(&routes, of(peer, request)).await;
        let made: CreatedSandbox = serde_json::from_slice(&whole(response).await).unwrap();
        (made.sandbox.id, made.sandbox.tenant)
    };
    let first = keyed(&operator("acme")).await;
    assert_eq!(keyed(&operator("acme")).await, first);
    // The same token after its line got another tenant.
    let moved = keyed(&operator("other")).await;
    assert_ne!(moved.0, first.0);
    assert_eq!(moved.1.as_deref(), Some("other"));
    assert_eq!(fake.made(), 2);
}

#[tokio::test]
async fn clone_is_of_the_tenant_of_its_original() {
    let (_fake, _daemon, routes, made) = two_tenants().await;
    for caller in [operator("acme"), Peer::user(0), peer("a", Role::Admin, "other")] {
        let path = format!("/v1/sandboxes/{}/fork", made[1].id);
        let forked = asked(&routes, &caller, "POST", &path, r#"{"count":2}"#).await;
        assert_eq!(forked.status(), StatusCode::CREATED);
        let forked: ForkedSandbox = serde_json::from_slice(&whole(forked).await).unwrap();
        for clone in forked.items {
            assert_eq!(clone.sandbox.tenant.as_deref(), Some("acme"));
        }
    }
}

#[tokio::test]
async fn sandbox_without_an_owner_is_an_administrators_to_end() {
    let (_fake, _daemon, routes) = daemon();
    let path = format!("/v1/sandboxes/{UNOWNED}");
    let of_tenant = asked(&routes, &operator("acme"), "DELETE", &path, "").await;
    assert_eq!(of_tenant.status(), StatusCode::NOT_FOUND);
    let of_node = asked(&routes, &Peer::user(0), "DELETE", &path, "").await;
    assert_eq!(of_node.status(), StatusCode::NO_CONTENT);
}
