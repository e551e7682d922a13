use std::path::Path;
use std::time::Duration;

use axum::body::Body;
use axum::http::StatusCode;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::watch;

use super::*;
use crate::api::fake::{Fake, Guest};
use crate::api::request_gate::Bounds;
use crate::e2b::members::endpoint::{Endpoint, Stream, Trust};
use crate::e2b::test_api::{ACME, config, keys};
use crate::e2b::test_sdk::Sdk;

fn paths(root: &Path) -> Paths {
    Paths {
        data: root.to_owned(),
        run: root.join("run"),
        kernel: root.join("kernel"),
        guest_image: root.join("guest"),
    }
}

fn api(keys: &tempfile::NamedTempFile) -> ApiConfig {
    ApiConfig {
        tokens: Some(keys.path().to_owned()),
        ..ApiConfig::default()
    }
}

async fn open(config: &E2bConfig, api: &ApiConfig) -> Result<Option<E2b>, Error> {
    let data = tempfile::tempdir().unwrap();
    E2b::open(config, api, None, &paths(data.path())).await
}

#[tokio::test]
async fn incomplete_configuration_is_refused() {
    let keys = keys();
    assert!(open(&E2bConfig::default(), &api(&keys)).await.unwrap().is_none());
    assert!(open(&config(), &api(&keys)).await.unwrap().is_some());
    let with = |change: fn(&mut E2bConfig)| {
        let mut config = config();
        change(&mut config);
        config
    };
    let template = |change: fn(&mut thaw_sandbox::config::e2b::E2bTemplate)| {
        let mut config = config();
        change(config.templates.get_mut("base").unwrap());
        config
    };
    for (config, word) in [
        (with(|c| c.listen = None), "listen"),
        (with(|c| c.listen = Some(([0, 0, 0, 0], 0).into())), "loopback"),
        (with(|c| c.domain = Some("*.example".into())), "domain"),
        (
            with(|c| drop(c.templates.insert("a b".into(), Default::default()))),
            "a b",
        ),
        (template(|t| t.image = None), "base"),
        (template(|t| t.snapshot = Some("s".into())), "base"),
        (
            template(|t| (t.image, t.snapshot) = (None, Some("s".into()))),
            "disk_mib",
        ),
        (template(|t| t.image = Some(String::new())), "image"),
        (template(|t| t.cpus = Some(17)), "cpus"),
        (template(|t| t.memory_mib = Some(1)), "memory_mib"),
        (template(|t| t.command = Some(Vec::new())), "command"),
    ] {
        let refused = open(&config, &api(&keys)).await.err().unwrap();
        assert_eq!(refused.kind, ErrorKind::ConfigInvalid, "{word}");
        assert!(
            refused.what.contains("[e2b") && refused.what.contains(word),
            "{word}: {refused}"
        );
    }
    let nobody = open(&config(), &ApiConfig::default()).await.err().unwrap();
    assert!(nobody.what.contains("tokens"), "{nobody}");
}

/// The API over TCP until it is dropped.
struct Served {
    address: SocketAddr,
    stop: watch::Sender<()>,
    serving: tokio::task::JoinHandle<()>,
    _keys: tempfile::NamedTempFile,
    _data: tempfile::TempDir,
}

/// Over fakes, or with this guest.
async fn serve(guest: Option<Arc<dyn Guest>>) -> Served {
    serve_by(|_| {}, guest).await
}

/// The same with another configuration of the API over TCP.
async fn serve_by(change: impl FnOnce(&mut ApiConfig), guest: Option<Arc<dyn Guest>>) -> Served {
    let (keys, data) = (keys(), tempfile::tempdir().unwrap());
    let mut tcp = api(&keys);
    change(&mut tcp);
    let e2b = E2b::open(&config(), &tcp, None, &paths(data.path())).await;
    let e2b = Box::new(e2b.unwrap().unwrap());
    let address = e2b.address().unwrap();
    let (fake, daemon) = Fake::daemon(true);
    *fake.guest.lock().unwrap() = guest;
    let (stop, stopped) = watch::channel(());
    let serving = tokio::spawn(e2b.serve(Serving {
        daemon,
        gate: Gate::new(Bounds::default()),
        stopped,
        shutdown_timeout: Duration::from_secs(5),
    }));
    Served {
        address,
        stop,
        serving,
        _keys: keys,
        _data: data,
    }
}

/// What is answered over HTTP/1.1 to a request for the list of sandboxes.
async fn list(mut stream: impl Stream) -> String {
    let request =
        format!("GET /v2/sandboxes HTTP/1.1\r\nhost: x\r\nx-api-key: {ACME}\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    answer
}

/// The status over HTTP/2.
async fn list_over_http2(stream: impl Stream + 'static) -> StatusCode {
    let connected = hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream));
    let (mut sender, http) = connected.await.unwrap();
    tokio::spawn(http);
    let request = axum::http::Request::builder()
        .uri("http://api.sandboxes.example/v2/sandboxes")
        .header("x-api-key", ACME);
    let answer = sender.send_request(request.body(Body::empty()).unwrap());
    answer.await.unwrap().status()
}

#[tokio::test]
async fn api_is_served_until_thawd_stops() {
    let served = serve(None).await;
    let connect = || tokio::net::TcpStream::connect(served.address);
    let answer = list(connect().await.unwrap()).await;
    assert!(
        answer.starts_with("HTTP/1.1 200") && answer.ends_with("[]"),
        "{answer}"
    );
    assert_eq!(list_over_http2(connect().await.unwrap()).await, StatusCode::OK);
    drop(served.stop);
    served.serving.await.unwrap();
    // A process that another test is starting may hold a copy of the listener for a moment.
    while connect().await.is_ok() {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn version_of_http_is_chosen_in_the_handshake() {
    let file = |name: &str| {
        let certificates = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/certificates");
        certificates.join(name)
    };
    let encrypt = |api: &mut ApiConfig| {
        api.certificate = Some(file("server.pem"));
        api.key = Some(file("server.key"));
    };
    let served = serve_by(encrypt, None).await;
    let trust = Trust::read(&file("ca.pem")).unwrap();
    let url = format!("https://{}", served.address);
    let endpoint = Endpoint::parse(&url, Some(&trust)).unwrap();
    let answer = list(endpoint.connect().await.unwrap()).await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let stream = endpoint.connect_for(true).await.unwrap();
    assert_eq!(list_over_http2(stream).await, StatusCode::OK);
}

async fn use_the_control_plane(sdk: Sdk) {
    let served = serve(None).await;
    run(&served, sdk, "control_plane").await;
}

async fn build_templates(sdk: Sdk) {
    let guest = Arc::new(crate::e2b::envd::local_guest::LocalGuest::default());
    let served = serve(Some(guest)).await;
    run(&served, sdk, "templates").await;
}

/// Runs a program of `tests/e2b` against fakes.
async fn run(served: &Served, sdk: Sdk, program: &str) {
    let url = format!("http://{}", served.address);
    sdk.run(&format!("tests/e2b/{program}"), &url, &[("E2B_API_KEY", ACME)])
        .await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs E2B's Python SDK"]
async fn python_sdk_uses_every_call_of_the_control_plane() {
    use_the_control_plane(Sdk::Python).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs E2B's JavaScript SDK"]
async fn javascript_sdk_uses_every_call_of_the_control_plane() {
    use_the_control_plane(Sdk::JavaScript).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs E2B's Python SDK"]
async fn python_sdk_builds_templates() {
    build_templates(Sdk::Python).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs E2B's JavaScript SDK"]
async fn javascript_sdk_builds_templates() {
    build_templates(Sdk::JavaScript).await;
}
