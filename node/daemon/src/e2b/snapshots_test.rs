use serde_json::{Value, json};

use crate::e2b::test_api::{ACME, Api, OTHER};

async fn store(api: &Api, sandbox: &str, body: Value) -> Value {
    let path = format!("/sandboxes/{sandbox}/snapshots");
    api.ask(ACME, "POST", &path, body).await.ok(201)
}

async fn list(api: &Api, key: &str, query: &str) -> Value {
    let path = format!("/snapshots?{query}");
    api.ask(key, "GET", &path, Value::Null).await.ok(200)
}

#[tokio::test]
async fn name_moves_to_the_newest_snapshot() {
    let api = Api::new();
    let id = api.make(ACME, json!({})).await;
    let first = store(&api, &id, json!({"name": "warm"})).await;
    assert_eq!(first["names"], json!(["warm"]));
    let second = store(&api, &id, json!({"name": "warm", "memory": true})).await;
    let other = store(&api, &id, json!({})).await;
    let all = list(&api, ACME, "").await;
    assert_eq!(all.as_array().unwrap().len(), 3);
    let named = list(&api, ACME, "name=warm").await;
    assert_eq!(
        (&named[0]["snapshotID"], named.as_array().unwrap().len()),
        (&second["snapshotID"], 1)
    );
    assert_eq!(
        (&other["names"], list(&api, ACME, "sandboxID=ffffffffffff").await),
        (&json!([]), json!([]))
    );
    assert_eq!(list(&api, ACME, &format!("sandboxID={id}")).await, all);
    assert_eq!(list(&api, OTHER, "").await, json!([]));
    let path = format!("/sandboxes/{id}/snapshots");
    for (body, status) in [
        (json!({"name": "a/b"}), 400),
        (json!({"name": "0123456789ab"}), 400),
        (json!({"name": ""}), 400),
        (json!({"memory": false}), 501),
    ] {
        api.ask(ACME, "POST", &path, body.clone())
            .await
            .refused(status, &body.to_string());
    }
    assert_eq!(list(&api, ACME, "").await, all);
}

#[tokio::test]
async fn pages_have_every_snapshot_once() {
    let api = Api::new();
    let id = api.make(ACME, json!({})).await;
    for _ in 0..5 {
        store(&api, &id, json!({})).await;
    }
    let pages = api.pages(ACME, "/snapshots?limit=2").await;
    assert_eq!(pages.len(), 3);
    let all = pages
        .into_iter()
        .flat_map(|page| page.as_array().unwrap().clone());
    assert_eq!(Value::Array(all.collect()), list(&api, ACME, "").await);
    let wrong = api.ask(ACME, "GET", "/snapshots?nextToken=x", Value::Null).await;
    wrong.refused(400, "no token");
}

#[tokio::test]
async fn snapshot_is_deleted_as_a_template() {
    let api = Api::new();
    let id = api.make(ACME, json!({})).await;
    let stored = store(&api, &id, json!({"name": "warm"})).await;
    let snapshot = stored["snapshotID"].as_str().unwrap();
    let path = format!("/templates/{snapshot}");
    api.ask(OTHER, "DELETE", &path, Value::Null)
        .await
        .refused(404, "another tenant's");
    api.ask(ACME, "DELETE", &path, Value::Null).await.ok(204);
    api.ask(ACME, "DELETE", &path, Value::Null)
        .await
        .refused(404, "deleted already");
    api.ask(ACME, "DELETE", "/templates/base", Value::Null)
        .await
        .refused(409, "of the configuration");
}

#[tokio::test]
async fn names_of_templates_are_found() {
    let api = Api::new();
    let id = api.make(ACME, json!({})).await;
    let stored = store(&api, &id, json!({"name": "warm"})).await;
    let alias = async |key, name: &str| {
        api.ask(key, "GET", &format!("/templates/aliases/{name}"), Value::Null)
            .await
    };
    assert_eq!(
        alias(ACME, "base").await.ok(200),
        json!({"templateID": "base", "public": true})
    );
    let warm = alias(ACME, "warm").await.ok(200);
    assert_eq!(warm, json!({"templateID": stored["snapshotID"], "public": false}));
    alias(OTHER, "warm").await.refused(404, "another tenant's");
    alias(ACME, "nothing").await.refused(404, "unknown");
    for path in ["/templates", "/v2/templates?limit=10"] {
        let all = api.ask(ACME, "GET", path, Value::Null).await.ok(200);
        assert_eq!(
            (&all[0]["templateID"], &all[0]["memoryMB"]),
            (&json!("base"), &json!(512))
        );
        assert_eq!(all.as_array().unwrap().len(), 2);
    }
}
