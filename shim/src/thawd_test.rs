//! thawds of other releases.

use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use thaw_protocol::shim::pods_ttrpc::{Pods, create_pods};
use ttrpc::r#async::transport::Listener;
use ttrpc::r#async::{Server, TtrpcContext};

use super::*;

/// Its answer to a greeting, and the requests that it received.
struct Other {
    answer: ttrpc::Result<u32>,
    asked: Mutex<Vec<String>>,
}

impl Other {
    fn note(&self, what: String) {
        self.asked.lock().unwrap().push(what);
    }
}

#[async_trait]
impl Pods for Other {
    async fn version(&self, _: &TtrpcContext, r: VersionRequest) -> ttrpc::Result<VersionResponse> {
        self.note(format!("version {}", r.version));
        let version = self.answer.clone()?;
        Ok(VersionResponse {
            version,
            ..Default::default()
        })
    }

    async fn create(&self, _: &TtrpcContext, _: CreatePodRequest) -> ttrpc::Result<CreatePodResponse> {
        self.note("create".into());
        Ok(CreatePodResponse::new())
    }
}

/// Creates a pod there; returns the requests that thawd received. A thawd from before versions has no such method.
async fn create(answer: Option<ttrpc::Result<u32>>) -> (Result<CreatePodResponse>, Vec<String>) {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("pods.sock");
    let has_versions = answer.is_some();
    let other = Arc::new(Other {
        answer: answer.unwrap_or(Ok(0)),
        asked: Mutex::default(),
    });
    let mut services = create_pods(other.clone());
    if !has_versions {
        let methods = services
            .values_mut()
            .map(|service| service.methods.remove("Version"));
        assert_eq!(methods.filter(Option::is_some).count(), 1);
    }
    let listener = tokio::net::UnixListener::bind(&socket).unwrap();
    let mut server = Server::new()
        .add_listener(Listener::from(listener))
        .register_service(services);
    server.start().await.unwrap();
    let made = Thawd::at(&socket).create(&CreatePodRequest::new()).await;
    server.shutdown().await.unwrap();
    let asked = std::mem::take(&mut *other.asked.lock().unwrap());
    (made, asked)
}

#[tokio::test]
async fn thawd_version_is_agreed_before_a_pod() {
    let greeting = format!("version {}", PODS.current);
    for agreed in PODS.oldest..=PODS.current {
        let (made, asked) = create(Some(Ok(agreed))).await;
        made.unwrap();
        assert_eq!(asked, [greeting.as_str(), "create"]);
    }
    let refusal = ttrpc::get_status(
        ttrpc::Code::FAILED_PRECONDITION,
        "pods version 2 is not understood",
    );
    let refusal = ttrpc::Error::RpcStatus(refusal);
    for answer in [Ok(PODS.current + 1), Ok(0), Err(refusal)] {
        let (made, asked) = create(Some(answer)).await;
        let error = made.unwrap_err();
        assert!(matches!(&error, Error::Thawd(_)), "{error}");
        assert!(error.to_string().contains("is not understood"), "{error}");
        assert_eq!(asked, [greeting.as_str()]);
    }
}

#[tokio::test]
async fn thawd_without_versions_creates_pods() {
    let (made, asked) = create(None).await;
    made.unwrap();
    assert_eq!(asked, ["create"]);
}
