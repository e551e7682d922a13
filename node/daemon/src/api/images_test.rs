use axum::Router;
use axum::http::StatusCode;
use thaw_sandbox::paths::Paths;
use thaw_sandbox::{Node, Tenants};

use super::*;
use crate::api::daemon::Daemon;
use crate::api::request_gate::{Bounds, Gate};
use crate::api::router::router;
use crate::api::test_client::{JSON, ask, read, refused, routes, send, whole};

#[tokio::test]
async fn images_are_pulled_listed_shown_and_removed() {
    let (_fake, routes) = routes();
    let list: ImageList = read(&routes, "/v1/images").await;
    assert!(list.items.is_empty());
    let pull = ask(
        "POST",
        "/v1/images",
        JSON,
        r#"{"image":"registry.example/a/b:1"}"#,
    );
    let pulled = send(&routes, pull).await;
    assert_eq!(pulled.status(), StatusCode::CREATED);
    let pulled: Image = serde_json::from_slice(&whole(pulled).await).unwrap();
    let list: ImageList = read(&routes, "/v1/images").await;
    assert_eq!(list.items, [pulled]);
    let one = "/v1/images/registry.example%2Fa%2Fb:1";
    let detail: ImageDetail = read(&routes, one).await;
    assert_eq!(detail.reference, "registry.example/a/b:1");
    let removed = send(&routes, ask("DELETE", one, JSON, "")).await;
    assert_eq!(removed.status(), StatusCode::NO_CONTENT);
    refused(&routes, ask("GET", one, JSON, ""), 404, "image-not-stored", one).await;
    refused(
        &routes,
        ask("DELETE", one, JSON, ""),
        404,
        "image-not-stored",
        one,
    )
    .await;
}

async fn is_refused(routes: &Router, method: &str, path: &str, body: &str, status: u16, code: &str) {
    let shown = format!("{method} {path} {body}");
    let asked = ask(method, path, JSON, body.to_owned());
    refused(routes, asked, status, code, &shown).await;
}

#[tokio::test]
async fn what_is_no_image_or_template_is_refused() {
    let (_fake, routes) = routes();
    let long = format!("/v1/images/{}", "x".repeat(5000));
    for (method, path, body, status, code) in [
        ("POST", "/v1/images", "", 400, "malformed-request"),
        ("POST", "/v1/images", "{}", 422, "invalid-body"),
        ("POST", "/v1/images", r#"{"image":""}"#, 422, "invalid-body"),
        (
            "POST",
            "/v1/images",
            r#"{"image":"a\u0000"}"#,
            422,
            "invalid-body",
        ),
        (
            "POST",
            "/v1/images",
            r#"{"image":"a","pull":"never"}"#,
            422,
            "invalid-body",
        ),
        (
            "POST",
            "/v1/images",
            r#"{"image":"missing"}"#,
            404,
            "image-not-found",
        ),
        ("PUT", "/v1/images", "", 405, "wrong-method"),
        ("GET", &long, "", 400, "bad-parameter"),
        ("GET", "/v1/images/a%00", "", 400, "bad-parameter"),
        ("GET", "/v1/images/a%ff", "", 400, "bad-parameter"),
        ("GET", "/v1/images/a/b", "", 404, "no-such-route"),
        ("POST", "/v1/templates", "", 405, "wrong-method"),
        ("DELETE", "/v1/templates/none", "", 404, "snapshot-not-found"),
        ("DELETE", "/v1/templates/a%0a", "", 400, "bad-parameter"),
    ] {
        is_refused(&routes, method, path, body, status, code).await;
    }
}

/// The same for a new node without images and templates.
#[tokio::test]
async fn an_empty_node_has_nothing_and_says_so() {
    let root = tempfile::tempdir().unwrap();
    let path = |name: &str| root.path().join(name);
    let paths = Paths {
        data: path("d"),
        run: path("r"),
        kernel: path("k"),
        guest_image: path("g"),
    };
    let daemon = Daemon::start(Tenants::open(Node::open(paths).unwrap()))
        .await
        .unwrap();
    let routes = router(daemon, Gate::new(Bounds::default()));
    let images: ImageList = read(&routes, "/v1/images").await;
    let templates: TemplateList = read(&routes, "/v1/templates").await;
    assert!(images.items.is_empty() && templates.items.is_empty());
    for (method, path, body, status, code) in [
        ("GET", "/v1/images/busybox", "", 404, "image-not-stored"),
        ("DELETE", "/v1/images/busybox", "", 404, "image-not-stored"),
        ("GET", "/v1/images/Not%20One!", "", 400, "bad-reference"),
        (
            "POST",
            "/v1/images",
            r#"{"image":"oci:/nowhere"}"#,
            404,
            "image-not-found",
        ),
        (
            "POST",
            "/v1/images",
            r#"{"image":"Not One!"}"#,
            400,
            "bad-reference",
        ),
        ("DELETE", "/v1/templates/abc", "", 404, "snapshot-not-found"),
        ("POST", "/v1/sandboxes/none/fork", "{}", 404, "sandbox-not-found"),
    ] {
        is_refused(&routes, method, path, body, status, code).await;
    }
    assert!(!path("d").join("forks").exists(), "no place is left");
}
