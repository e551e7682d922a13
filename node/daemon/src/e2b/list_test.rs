use serde_json::{Value, json};

use crate::api::scope::Wanted;
use crate::e2b::test_api::{ACME, ADMIN, Api, OTHER, ids};

async fn get(api: &Api, key: &str, path: &str) -> Value {
    api.ask(key, "GET", path, Value::Null).await.ok(200)
}

/// A query as the Python SDK writes it: names and values are quoted, made a form, and that is a parameter's value.
fn of_sdk(metadata: &[(&str, &str)]) -> String {
    let quoted = |text: &str| {
        let bytes = text.bytes().map(|b| match b {
            b if b.is_ascii_alphanumeric() || b"_.-~/".contains(&b) => char::from(b).to_string(),
            b => format!("%{b:02X}"),
        });
        bytes.collect::<String>()
    };
    let mut form = form_urlencoded::Serializer::new(String::new());
    for (key, value) in metadata {
        form.append_pair(&quoted(key), &quoted(value));
    }
    let mut query = form_urlencoded::Serializer::new(String::new());
    query.append_pair("metadata", &form.finish()).finish()
}

#[tokio::test]
async fn filters_select_by_state_metadata_template_and_start() {
    let api = Api::new();
    let odd = "a=b&c d+%2B/\u{1f9ca}";
    let one = api.make(ACME, json!({"metadata": {"k": "v", odd: odd}})).await;
    let two = api.make(ACME, json!({"metadata": {"k": "v"}})).await;
    let theirs = api.make(OTHER, json!({"metadata": {"k": "v"}})).await;
    api.daemon.pause(&Wanted::on_node(&two)).await.unwrap();
    let (both, first, second, none) = (
        vec![two.clone(), one.clone()],
        vec![one.clone()],
        vec![two.clone()],
        vec![],
    );
    for (query, expected) in [
        (String::new(), &both),
        ("state=running".into(), &first),
        ("state=paused".into(), &second),
        ("state=running,paused".into(), &both),
        ("state=running&state=paused".into(), &both),
        (of_sdk(&[("k", "v")]), &both),
        (of_sdk(&[("k", "v"), (odd, odd)]), &first),
        (of_sdk(&[(odd, "x")]), &none),
        ("metadata=k%3Dv".into(), &both),
        ("template=base".into(), &both),
        ("template=else".into(), &none),
        ("startedAfter=1970-01-01T00:00:01%2B00:00".into(), &both),
        ("startedAfter=1970-01-01T02:00:00.123456%2B01:00".into(), &none),
    ] {
        let listed = get(&api, ACME, &format!("/v2/sandboxes?{query}")).await;
        assert_eq!(ids(&listed), *expected, "{query}");
    }
    assert_eq!(ids(&get(&api, ACME, "/sandboxes").await), first);
    assert_eq!(
        ids(&get(&api, ACME, &format!("/sandboxes?{}", of_sdk(&[("k", "v")]))).await),
        first
    );
    assert_eq!(
        ids(&get(&api, OTHER, "/v2/sandboxes").await),
        std::slice::from_ref(&theirs)
    );
    assert_eq!(ids(&get(&api, ADMIN, "/v2/sandboxes").await), [theirs, two, one]);
    for wrong in [
        "state=dead",
        "order=up",
        "startedAfter=now",
        "limit=0",
        "limit=101",
        "limit=x",
        "nextToken=x",
        "page=1",
    ] {
        let refused = api
            .ask(ACME, "GET", &format!("/v2/sandboxes?{wrong}"), Value::Null)
            .await;
        refused.refused(400, wrong);
    }
}

#[tokio::test]
async fn pages_have_every_sandbox_once() {
    let api = Api::new();
    let mut made = Vec::new();
    for _ in 0..7 {
        made.push(api.make(ACME, json!({})).await);
        api.make(OTHER, json!({})).await;
    }
    for (order, limit) in [("asc", 3), ("desc", 3), ("asc", 7), ("desc", 1)] {
        let path = format!("/v2/sandboxes?order={order}&limit={limit}");
        let pages = api.pages(ACME, &path).await;
        assert_eq!(pages.len(), made.len().div_ceil(limit));
        let mut all: Vec<String> = pages.iter().flat_map(ids).collect();
        if order == "desc" {
            all.reverse();
        }
        assert_eq!(all, made, "{order} {limit}");
    }
}

#[tokio::test]
async fn sandbox_of_thawds_own_api_is_listed_with_its_image() {
    let api = Api::new();
    let made = api.daemon.create(
        crate::api::fake::request("x"),
        thaw_sandbox::state::Behalf::default(),
    );
    let id = made.await.unwrap().sandbox.id;
    let listed = get(&api, ADMIN, "/v2/sandboxes").await;
    assert_eq!(
        (ids(&listed), &listed[0]["templateID"]),
        (vec![id], &json!("fake"))
    );
    assert_eq!(
        (&listed[0]["metadata"], &listed[0]["endAt"]),
        (&json!({}), &json!("9999-12-31T23:59:59Z"))
    );
}

#[tokio::test]
async fn ended_sandbox_is_not_listed() {
    let api = Api::new();
    let id = api.make(ACME, json!({})).await;
    api.daemon.running(&Wanted::on_node(&id)).unwrap().kill();
    while api
        .daemon
        .cache
        .get(&id)
        .is_some_and(|shown| shown.state != "failed")
    {
        tokio::task::yield_now().await;
    }
    assert_eq!(get(&api, ACME, "/v2/sandboxes").await, json!([]));
    let path = format!("/sandboxes/{id}");
    api.ask(ACME, "GET", &path, Value::Null)
        .await
        .refused(404, "ended");
    // Its record can be removed.
    api.ask(ACME, "DELETE", &path, Value::Null).await.ok(204);
    assert!(api.daemon.cache.get(&id).is_none());
}
