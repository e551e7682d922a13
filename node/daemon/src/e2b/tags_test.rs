use serde_json::{Value, json};

use crate::e2b::test_api::{ACME, Api};

/// The tags of the template `web` with their builds.
async fn tags(api: &Api) -> Vec<(String, String)> {
    let all = api
        .ask(ACME, "GET", "/templates/web/tags", Value::Null)
        .await
        .ok(200);
    let text = |tag: &Value, field: &str| tag[field].as_str().unwrap().to_owned();
    let all = all.as_array().unwrap().iter();
    all.map(|tag| (text(tag, "tag"), text(tag, "buildID"))).collect()
}

#[tokio::test]
async fn tag_selects_the_build_of_a_sandbox() {
    let api = Api::new();
    let first = api.build(ACME, "web:v1", json!({"fromImage": "x"})).await;
    let second = api.build(ACME, "web", json!({"fromImage": "x"})).await;
    let build = |built: &Value| built["buildID"].as_str().unwrap().to_owned();
    let (first, second) = (build(&first), build(&second));
    assert_eq!(
        tags(&api).await,
        [("default".into(), second.clone()), ("v1".into(), first.clone())]
    );
    let assign = json!({"target": "web:v1", "tags": ["stable", "default"]});
    let assigned = api.ask(ACME, "POST", "/templates/tags", assign).await.ok(201);
    assert_eq!(assigned["buildID"], first.as_str());
    assert!(tags(&api).await.iter().all(|(_, build)| *build == first));
    assert_eq!(
        api.fake.counts.stored.lock().unwrap().len(),
        1,
        "no sandbox can be made of the second"
    );
    for (method, body, status) in [
        ("POST", json!({"target": "web:none", "tags": ["x"]}), 404),
        ("POST", json!({"target": "none", "tags": ["x"]}), 404),
        ("POST", json!({"target": "web", "tags": ["a b"]}), 400),
        (
            "POST",
            json!({"target": "web", "tags": (0..33).map(|n| n.to_string()).collect::<Vec<_>>()}),
            400,
        ),
        ("DELETE", json!({"name": "web", "tags": ["v1", "none"]}), 404),
    ] {
        let refused = api.ask(ACME, method, "/templates/tags", body.clone()).await;
        refused.refused(status, &body.to_string());
    }
    assert_eq!(tags(&api).await.len(), 3);
    let remove = json!({"name": "web", "tags": ["v1", "default"]});
    api.ask(ACME, "DELETE", "/templates/tags", remove).await.ok(204);
    for (template, status) in [("web:stable", 201), ("web", 404), ("web:v1", 404)] {
        let made = api
            .ask(ACME, "POST", "/v2/sandboxes", json!({"templateID": template}))
            .await;
        assert_eq!(made.status.as_u16(), status, "{template}");
    }
}

#[tokio::test]
async fn templates_are_listed_with_their_builds() {
    let api = Api::new();
    api.build(ACME, "web", json!({"fromImage": "x"})).await;
    api.build(ACME, "web", json!({"fromImage": "missing"})).await;
    let all = api.ask(ACME, "GET", "/v2/templates", Value::Null).await.ok(200);
    let web = all
        .as_array()
        .unwrap()
        .iter()
        .find(|one| one["aliases"] == json!(["web"]))
        .unwrap();
    assert_eq!(
        (&web["buildStatus"], &web["buildCount"], &web["public"]),
        (&json!("ready"), &json!(2), &json!(false))
    );
    let path = format!("/templates/{}", web["templateID"].as_str().unwrap());
    let shown = api.ask(ACME, "GET", &path, Value::Null).await.ok(200);
    let builds = shown["builds"].as_array().unwrap();
    assert_eq!(
        (&builds[0]["status"], &builds[1]["status"]),
        (&json!("error"), &json!("ready"))
    );
    let configured = api.ask(ACME, "GET", "/templates/base", Value::Null).await.ok(200);
    assert_eq!(
        (&configured["public"], &configured["builds"]),
        (&json!(true), &json!([]))
    );
    let found = api
        .ask(ACME, "GET", "/templates/aliases/web", Value::Null)
        .await
        .ok(200);
    assert_eq!(found["templateID"], web["templateID"]);
}
