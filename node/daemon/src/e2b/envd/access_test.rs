use axum::http::StatusCode;

use super::*;
use crate::api::test_client::whole;
use crate::e2b::envd::test_client::Bed;

fn with(access: Option<Access>, mut request: Request) -> Request {
    request.extensions_mut().remove::<Access>();
    if let Some(access) = access {
        request.extensions_mut().insert(access);
    }
    request
}

async fn status(
    bed: &Bed,
    access: Option<Access>,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
) -> u16 {
    let request = with(access, bed.request(method, path, headers, ""));
    bed.send(request).await.status().as_u16()
}

#[tokio::test]
async fn sandbox_with_a_token_needs_it() {
    let bed = Bed::new().await;
    let token = || Some(Access::Token("secret".into()));
    assert_eq!(status(&bed, token(), "GET", "/metrics", &[]).await, 401);
    assert_eq!(
        status(&bed, token(), "GET", "/metrics", &[(TOKEN, "wrong")]).await,
        401
    );
    assert_eq!(
        status(&bed, token(), "GET", "/metrics", &[(TOKEN, "secret")]).await,
        200
    );
    // A route that forgot to say who may use the sandbox is closed.
    assert_eq!(
        status(&bed, None, "GET", "/metrics", &[(TOKEN, "secret")]).await,
        401
    );
    // Whether it runs is not secret.
    assert_eq!(status(&bed, None, "GET", "/health", &[]).await, 204);
    assert_eq!(format!("{:?}", token()), "Some(Token)");
    let refused = with(token(), bed.request("POST", "/process.Process/List", &[], ""));
    let body = whole(bed.send(refused).await).await;
    assert!(String::from_utf8_lossy(&body).contains(r#""code":"unauthenticated""#));
}

#[tokio::test]
async fn signed_url_allows_one_operation_on_one_file() {
    let bed = Bed::new().await;
    std::fs::write(bed.guest.root().join("a"), "x").unwrap();
    let token = || Some(Access::Token("token".into()));
    // Made with the Python SDK, for reading /a as the default user.
    let good = "v1_aplmC4NkJq68ZefW7XTqyoyNGwWxiO32wjsTlW+LEX4";
    let signed = async |method: &str, path: &str, signature: &str| {
        let path = format!("/files?path={path}&signature={}", signature.replace('+', "%2B"));
        status(&bed, token(), method, &path, &[]).await
    };
    assert_eq!(signed("GET", "/a", good).await, 200);
    for (method, path, signature) in [
        ("GET", "/b", good),
        ("POST", "/a", good),
        ("GET", "/a", "v1_"),
        ("GET", "/a&username=root", good),
        ("GET", "/a&signature_expiration=9999999999", good),
    ] {
        assert_eq!(signed(method, path, signature).await, 401, "{method} {path}");
    }
    assert_eq!(signed("GET", "/a&signature_expiration=x", good).await, 400);
    assert_eq!(status(&bed, token(), "GET", "/files?path=/a", &[]).await, 401);
}

#[tokio::test]
async fn sandbox_that_does_not_run_is_not_found() {
    let bed = Bed::new().await;
    bed.daemon.pause(&bed.wanted).await.unwrap();
    let response = bed.send(bed.request("GET", "/health", &[], "")).await;
    assert_eq!(response.status(), StatusCode::BAD_GATEWAY);
    let body: serde_json::Value = serde_json::from_slice(&whole(response).await).unwrap();
    assert!(body["code"] == 502 && body["message"].as_str().unwrap().contains("was not found"));
    bed.daemon.resume(&bed.wanted).await.unwrap();
    let mut unnamed = bed.request("GET", "/health", &[], "");
    unnamed.extensions_mut().remove::<ForSandbox>();
    assert_eq!(bed.send(unnamed).await.status(), StatusCode::BAD_GATEWAY);
    assert_eq!(
        status(&bed, Some(Access::Open), "GET", "/nothing", &[]).await,
        404
    );
}

#[tokio::test]
async fn requests_of_a_sandbox_are_bounded() {
    let bed = Bed::of_fakes().await;
    let message = serde_json::json!({"path": "/quiet", "recursive": true});
    let mut open = Vec::new();
    for _ in 0..128 {
        open.push(
            bed.open("/filesystem.Filesystem/WatchDir", &[], message.clone())
                .await,
        );
    }
    assert_eq!(status(&bed, Some(Access::Open), "GET", "/health", &[]).await, 429);
    // A stream's client would take the status 429 for a sandbox that is gone.
    let mut refused = bed.open("/filesystem.Filesystem/WatchDir", &[], message).await;
    let error = refused.message().await.unwrap_err();
    assert_eq!(error["code"], "resource_exhausted", "{error}");
    open.pop();
    assert_eq!(status(&bed, Some(Access::Open), "GET", "/health", &[]).await, 204);
}
