use axum::body::Body;
use axum::http::{Method, Response, StatusCode};
use http_body_util::BodyExt;
use thaw_protocol::api::{CreatedSandbox, PROBLEM_TYPE, Sandbox, SandboxList};

use super::*;
use crate::api::fake::Fake;
use crate::api::request_gate::{Bounds, Share};
use crate::api::test_client::{JSON, ask, read, refused, routes, send, whole};

#[path = "router_refusals_test.rs"]
mod refusals;

const GOOD: &str = r#"{"image":"x","cpus":1,"memory_mib":128}"#;

async fn make(routes: &Router, key: Option<&str>, body: String) -> Response<Body> {
    let mut request = ask("POST", "/v1/sandboxes", JSON, body);
    if let Some(key) = key {
        request
            .headers_mut()
            .insert("idempotency-key", key.parse().unwrap());
    }
    send(routes, request).await
}

fn labelled(label: &str) -> String {
    format!(r#"{{"image":"x","cpus":1,"memory_mib":128,"labels":{{"app":"{label}"}}}}"#)
}

#[tokio::test]
async fn the_same_key_is_the_same_answer_and_makes_one_sandbox() {
    let (fake, routes) = routes();
    let first = make(&routes, Some("k"), GOOD.into()).await;
    assert_eq!(first.status(), StatusCode::CREATED);
    assert_eq!(first.headers()["server-timing"], "total;dur=0.000");
    let first = whole(first).await;
    let spaced = GOOD.replace(',', " , ");
    let second = make(&routes, Some("k"), spaced).await;
    assert!(
        !second.headers().contains_key("server-timing"),
        "nothing was made"
    );
    assert_eq!(whole(second).await, first);
    assert_eq!(fake.made(), 1);
    let reused = make(&routes, Some("k"), labelled("a")).await;
    assert_eq!(reused.status(), StatusCode::UNPROCESSABLE_ENTITY);
    let problem: Problem = serde_json::from_slice(&whole(reused).await).unwrap();
    assert_eq!(problem.code, "idempotency-key-reused");
    let bad = make(&routes, Some("two words"), GOOD.into()).await;
    assert_eq!(bad.status(), StatusCode::BAD_REQUEST);
    make(&routes, None, GOOD.into()).await;
    make(&routes, None, GOOD.into()).await;
    assert_eq!(fake.made(), 3);
}

#[tokio::test]
async fn lists_go_by_labels_and_in_pieces_and_watches_go_on_from_them() {
    let (_fake, routes) = routes();
    for label in ["a", "b", "a", "c", "a"] {
        assert_eq!(
            make(&routes, None, labelled(label)).await.status(),
            StatusCode::CREATED
        );
    }
    let path = "/v1/sandboxes?labelSelector=app%20in%20(a,c)&limit=3";
    let first: SandboxList = read(&routes, path).await;
    let token = first.continue_token.clone().unwrap();
    let extra: CreatedSandbox =
        serde_json::from_slice(&whole(make(&routes, None, labelled("a")).await).await).unwrap();
    let second: SandboxList = read(&routes, &format!("{path}&continue={token}")).await;
    let labels = |list: &SandboxList| {
        list.items
            .iter()
            .map(|s| s.labels["app"].clone())
            .collect::<Vec<_>>()
    };
    assert_eq!(
        (labels(&first), labels(&second)),
        (vec!["a".into(), "a".into(), "c".into()], vec!["a".into()])
    );
    assert_eq!(
        (second.resource_version, second.continue_token),
        (first.resource_version, None)
    );
    let one: Sandbox = read(&routes, &format!("/v1/sandboxes/{}", first.items[0].id)).await;
    assert_eq!(one, first.items[0]);

    let watch = format!(
        "/v1/sandboxes?watch=1&labelSelector=app&resourceVersion={}",
        first.resource_version
    );
    let response = send(&routes, ask("GET", &watch, JSON, "")).await;
    assert_eq!(response.headers()["content-type"], "application/x-ndjson");
    let mut body = response.into_body();
    let line = body.frame().await.unwrap().unwrap().into_data().unwrap();
    let event: WatchEvent = serde_json::from_slice(&line).unwrap();
    assert_eq!(event, WatchEvent::Added(extra.sandbox));
    assert!(line.ends_with(b"\n"));
}

#[tokio::test]
async fn more_than_is_served_is_turned_away_with_a_time_to_come_back() {
    let (_fake, daemon) = Fake::daemon(true);
    let none = Share {
        running: 0,
        of_one: 0,
        waiting: 0,
    };
    let routes = router(
        daemon,
        Gate::new(Bounds {
            read: none,
            ..Bounds::default()
        }),
    );
    let response = send(&routes, ask("GET", "/v1/sandboxes", JSON, "")).await;
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(response.headers()["retry-after"], "1");
    assert_eq!(response.headers()["content-type"], PROBLEM_TYPE);
    let created = make(&routes, None, GOOD.into()).await;
    assert_eq!(created.status(), StatusCode::CREATED, "the other lanes are open");
}

#[test]
fn the_document_is_the_routes() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/openapi.json");
    if std::env::var_os("THAW_WRITE_DOCS").is_some() {
        std::fs::write(path, document()).unwrap();
    }
    let written = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        written == document(),
        "docs/openapi.json is stale: run the tests with THAW_WRITE_DOCS=1"
    );
}

#[test]
fn operation_ids_are_unique_and_a_verb_with_a_noun() {
    let verbs = "change create delete end exec fork freeze get list monitor move open pause pull push read reset resume restart set signal start \
                 stop thaw verify watch write";
    let verbs: Vec<_> = verbs.split(' ').collect();
    let document: serde_json::Value = serde_json::from_str(&document()).unwrap();
    let mut names = std::collections::BTreeSet::new();
    for (path, methods) in document["paths"].as_object().unwrap() {
        for (method, operation) in methods.as_object().unwrap() {
            let name = operation["operationId"].as_str().unwrap_or_default();
            let noun_at = name.find(|c: char| c.is_ascii_uppercase()).unwrap_or(0);
            let (verb, noun) = name.split_at(noun_at);
            assert!(
                verbs.contains(&verb),
                "{method} {path}: {name:?} begins with a verb"
            );
            let plain = noun.chars().all(|c| c.is_ascii_alphanumeric());
            assert!(noun.len() > 2 && plain, "{method} {path}: {name:?} has a noun");
            assert!(names.insert(name.to_owned()), "{name} is another operation's too");
        }
    }
}

#[test]
fn document_requires_each_body_but_those_that_may_be_absent() {
    let document: serde_json::Value = serde_json::from_str(&document()).unwrap();
    let operations = document["paths"].as_object().unwrap().values();
    let operations = operations.flat_map(|methods| methods.as_object().unwrap().values());
    let optional: Vec<&str> = operations
        .filter(|operation| operation["requestBody"]["required"] == false)
        .filter_map(|operation| operation["operationId"].as_str())
        .collect();
    assert_eq!(optional, ["pauseSandbox"]);
}

#[tokio::test]
async fn every_route_is_in_the_document_with_its_methods() {
    let (_fake, routes) = routes();
    let served: serde_json::Value = read(&routes, "/openapi.json").await;
    assert_eq!(served["openapi"].as_str().unwrap()[..3], *"3.1");
    let paths = served["paths"].as_object().unwrap();
    assert!(paths.len() >= 7);
    for (path, methods) in paths {
        // A request with an unsupported method gets the list of supported methods.
        let asked = path.replace(['{', '}'], "");
        let response = send(&routes, ask("TRACE", &asked, JSON, "")).await;
        assert_eq!(response.status(), StatusCode::METHOD_NOT_ALLOWED, "{path}");
        let allow = response.headers()["allow"].to_str().unwrap();
        let mut allowed: Vec<_> = allow
            .split(',')
            .map(str::to_lowercase)
            .filter(|m| m != "head")
            .collect();
        let mut said: Vec<_> = methods.as_object().unwrap().keys().cloned().collect();
        allowed.sort();
        said.sort();
        assert_eq!(allowed, said, "{path}");
    }
    let page = whole(send(&routes, ask(Method::GET.as_str(), "/openapi.html", JSON, "")).await).await;
    let page = String::from_utf8(page.to_vec()).unwrap();
    assert!(page.contains("openapi.json") && !page.contains("http:") && !page.contains("https:"));
}
