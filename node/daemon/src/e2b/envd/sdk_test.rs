//! E2B's own SDKs against the routes of a sandbox, whose guest is this host.

use axum::extract::Request;
use axum::middleware::{Next, from_fn};

use super::access::{Access, ForSandbox};
use super::test_client::Bed;
use crate::e2b::test_sdk::Sdk;

async fn use_a_sandbox(sdk: Sdk) {
    let bed = Bed::new().await;
    let wanted = bed.wanted.clone();
    let name = from_fn(move |mut request: Request, next: Next| {
        let wanted = wanted.clone();
        async move {
            request.extensions_mut().insert(ForSandbox { wanted });
            request.extensions_mut().insert(Access::Open);
            next.run(request).await
        }
    });
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let routes = bed.routes.clone().layer(name);
    tokio::spawn(async move { axum::serve(listener, routes).await });
    let variables = [("E2B_DEBUG", "true"), ("E2B_API_KEY", "e2b_0")];
    sdk.run("src/e2b/envd/sdk_test", &url, &variables).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs E2B's Python SDK"]
async fn python_sdk_uses_a_sandbox() {
    use_a_sandbox(Sdk::Python).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs E2B's JavaScript SDK"]
async fn javascript_sdk_uses_a_sandbox() {
    use_a_sandbox(Sdk::JavaScript).await;
}
