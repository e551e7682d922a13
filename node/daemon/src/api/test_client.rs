//! Sends requests to routes without a server, for tests.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::{Request, Response, StatusCode};
use http_body_util::BodyExt;
use hyper::service::Service;
use hyper_util::service::TowerToHyperService;
use thaw_protocol::api::{PROBLEM_TYPE, Problem};

use super::fake::Fake;
use super::peer::Peer;
use super::request_gate::{Bounds, Gate};
use super::router::router;

pub const JSON: &str = "application/json";

pub fn routes() -> (Arc<Fake>, Router) {
    let (fake, daemon) = Fake::daemon(true);
    (fake, router(daemon, Gate::new(Bounds::default())))
}

pub fn ask(method: &str, path: &str, kind: &str, body: impl Into<Body>) -> Request<Body> {
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header("content-type", kind);
    request.extension(Peer::user(0)).body(body.into()).unwrap()
}

pub async fn send(routes: &Router, request: Request<Body>) -> Response<Body> {
    TowerToHyperService::new(routes.clone())
        .call(request)
        .await
        .unwrap()
}

pub async fn whole(response: Response<Body>) -> Bytes {
    response.into_body().collect().await.unwrap().to_bytes()
}

/// Waits for what must happen.
pub async fn until(what: impl Fn() -> bool) {
    let came = async {
        while !what() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), came)
        .await
        .expect("it does not happen");
}

pub async fn read<T: serde::de::DeserializeOwned>(routes: &Router, path: &str) -> T {
    let response = send(routes, ask("GET", path, JSON, "")).await;
    assert_eq!(response.status(), StatusCode::OK, "{path}");
    serde_json::from_slice(&whole(response).await).unwrap()
}

/// Sends a request, and checks that it is refused with a problem document of this status and code.
pub async fn refused(routes: &Router, request: Request<Body>, status: u16, code: &str, shown: &str) {
    let path = request.uri().path().to_owned();
    let response = send(routes, request).await;
    assert_eq!(response.status().as_u16(), status, "{shown}");
    assert_eq!(response.headers()["content-type"], PROBLEM_TYPE, "{shown}");
    let problem: Problem = serde_json::from_slice(&whole(response).await).unwrap();
    assert_eq!((problem.status, problem.code.as_str()), (status, code), "{shown}");
    assert_eq!(problem.type_uri, format!("urn:thaw:problem:{code}"));
    assert_eq!(problem.instance, path);
    assert!(!problem.title.is_empty() && !problem.detail.is_empty() && !problem.remedy.is_empty());
    assert_ne!(problem.exit, 0);
}
