use serde_json::{Value, json};
use thaw_protocol::api::{CreateSandbox, FreezeSandbox};
use thaw_sandbox::state::Behalf;

use super::*;
use crate::api::fake::request;
use crate::api::scope::Wanted;
use crate::e2b::test_api::{ACME, Api, OTHER, SOON};

/// Waits until this is so.
async fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let so = async {
        while !is_so() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(SOON, so).await.expect(what);
}

#[tokio::test]
async fn builds_of_a_tenant_are_bounded() {
    let api = Api::new();
    api.fake.open.send_replace(false);
    for n in 0..MOST_OF_TENANT {
        api.start_build(ACME, &format!("web{n}"), json!({"fromImage": "x"}))
            .await;
    }
    let (template, build) = api.request_build(ACME, "more").await;
    let path = format!("/v2/templates/{template}/builds/{build}");
    let more = api.ask(ACME, "POST", &path, json!({"fromImage": "x"})).await;
    more.refused(429, "one more");
    // Those that wait take no places of others.
    let other = api.start_build(OTHER, "web", json!({"fromImage": "x"})).await;
    until("others run", || {
        *api.fake.making.borrow() == AT_ONCE_OF_TENANT + 1
    })
    .await;
    let status = api.ask(OTHER, "GET", &other, Value::Null).await.ok(200);
    assert_eq!(status["status"], "building");
    api.fake.open.send_replace(true);
    let builds = &api.service.builds;
    until("all end", || builds.running.locked().is_empty()).await;
    assert_eq!((api.fake.living(), api.fake.made()), (0, MOST_OF_TENANT + 1));
    // It may be tried again.
    api.ask(ACME, "POST", &path, json!({"fromImage": "x"}))
        .await
        .ok(202);
}

#[tokio::test]
async fn end_of_thawd_ends_builds() {
    let (api, _guest) = Api::with_guest();
    let sleep = json!({"fromImage": "x", "steps": [{"type": "RUN", "args": ["sleep 600"]}]});
    let status = api.start_build(ACME, "web", sleep).await;
    until("it runs", || api.fake.living() == 1).await;
    api.daemon.end();
    until("it ends", || api.service.builds.running.locked().is_empty()).await;
    let status = api.ask(ACME, "GET", &status, Value::Null).await.ok(200);
    assert_eq!((&status["status"], api.fake.living()), (&json!("error"), 0));
    assert!(
        status["reason"]["message"].as_str().unwrap().contains("thawd"),
        "{status}"
    );
}

#[tokio::test]
async fn what_a_dead_thawd_left_of_builds_is_removed() {
    let api = Api::new();
    api.build(ACME, "web", json!({"fromImage": "x"})).await;
    let labels: BTreeMap<_, _> = [(BUILD_LABEL.to_owned(), "gone".to_owned())].into();
    let sandbox = CreateSandbox {
        labels: labels.clone(),
        ..request("x")
    };
    let left = api
        .daemon
        .create(sandbox, Behalf::default())
        .await
        .unwrap()
        .sandbox
        .id;
    let other = api.make(ACME, json!({})).await;
    for (sandbox, labels) in [(&left, labels), (&other, BTreeMap::new())] {
        let freeze = FreezeSandbox {
            labels,
            ..FreezeSandbox::default()
        };
        api.daemon
            .freeze(&Wanted::on_node(sandbox), freeze)
            .await
            .unwrap();
    }
    assert_eq!(sandboxes(&api.daemon), [left]);
    let builds = api.service.builds.clone();
    let cleaning = tokio::spawn(builds.keep_clean(api.daemon.clone(), sandboxes(&api.daemon)));
    until("both are gone", || {
        api.fake.living() == 1 && api.fake.counts.stored.lock().unwrap().len() == 2
    })
    .await;
    assert!(api.daemon.cache.get(&other).is_some());
    api.ask(ACME, "POST", "/v2/sandboxes", json!({"templateID": "web"}))
        .await
        .ok(201);
    api.daemon.end();
    tokio::time::timeout(SOON, cleaning).await.unwrap().unwrap();
}
