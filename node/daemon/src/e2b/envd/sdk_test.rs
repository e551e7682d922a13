//! E2B's own Python SDK against the routes of a sandbox, whose guest is this host.

use axum::extract::Request;
use axum::middleware::{Next, from_fn};

use super::access::{Access, ForSandbox};
use super::test_client::Bed;

/// The variable with the Python interpreter of an environment that has the SDK (`pip install e2b==2.63.0`).
const PYTHON: &str = "THAW_E2B_PYTHON";

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs the SDK: set THAW_E2B_PYTHON"]
async fn sdk_of_python_uses_a_sandbox() {
    let python = std::env::var(PYTHON).expect("THAW_E2B_PYTHON names a Python interpreter");
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
    let mut script = tokio::process::Command::new(python);
    script.args(["-c", include_str!("sdk_test.py")]);
    script
        .env("E2B_SANDBOX_URL", url)
        .env("E2B_DEBUG", "true")
        .env("E2B_API_KEY", "e2b_0");
    let done = script.output().await.unwrap();
    println!("{}", String::from_utf8_lossy(&done.stdout));
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}
