use axum::body::Bytes;
use http_body_util::BodyExt;
use hyper::client::conn::http1::SendRequest;
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use thaw_sandbox::state::Behalf;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::*;
use crate::api::fake::{Fake, request};
use crate::api::request_gate::Bounds;
use crate::api::router::document;
use crate::api::test_client::{JSON, ask as request_of, send};

/// Serves until it is dropped.
struct Served {
    fake: Arc<Fake>,
    daemon: Arc<Daemon>,
    address: SocketAddr,
    _stop: watch::Sender<()>,
}

async fn serve() -> Served {
    let config = MetricsConfig {
        listen: Some(([127, 0, 0, 1], 0).into()),
    };
    let scrape = Scrape::open(&config).await.unwrap().unwrap();
    let address = scrape.address().unwrap();
    let (fake, daemon) = Fake::daemon(true);
    let (stop, stopped) = watch::channel(());
    let gate = Gate::new(Bounds::default());
    tokio::spawn(scrape.serve(daemon.clone(), gate, stopped, Duration::from_secs(1)));
    Served {
        fake,
        daemon,
        address,
        _stop: stop,
    }
}

async fn connect(served: &Served) -> SendRequest<http_body_util::Full<Bytes>> {
    let stream = TcpStream::connect(served.address).await.unwrap();
    let (sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
        .await
        .unwrap();
    tokio::spawn(connection);
    sender
}

async fn ask(served: &Served, method: &str, path: &str, body: &str) -> (StatusCode, String) {
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header("host", "x")
        .header("content-type", "application/json")
        .body(http_body_util::Full::new(Bytes::from(body.to_owned())))
        .unwrap();
    let response = connect(served).await.send_request(request).await.unwrap();
    let status = response.status();
    let body = response.into_body().collect().await.unwrap().to_bytes();
    (status, String::from_utf8(body.to_vec()).unwrap())
}

#[tokio::test]
async fn metrics_and_health_are_served_without_a_caller() {
    let served = serve().await;
    let secret = thaw_protocol::api::CreateSandbox {
        name: Some("a-secret-name".into()),
        ..request("a-secret-image")
    };
    let behalf = Behalf {
        tenant: Some("a-secret-tenant".parse().unwrap()),
        ..Behalf::default()
    };
    served.daemon.create(secret, behalf).await.unwrap();
    let (status, text) = ask(&served, "GET", "/metrics", "").await;
    assert_eq!(status, StatusCode::OK);
    assert!(
        text.contains("thaw_build_info") && text.contains("thaw_api_running"),
        "{text}"
    );
    assert!(text.contains(r#"thaw_sandboxes{state="running"} 1"#), "{text}");
    let (status, health) = ask(&served, "GET", "/v1/health", "").await;
    assert_eq!(status, StatusCode::OK);
    assert!(!format!("{text}{health}").contains("a-secret"), "{text}");
    let (status, nothing) = ask(&served, "HEAD", "/metrics", "").await;
    assert_eq!((status, nothing.as_str()), (StatusCode::OK, ""));
}

#[tokio::test]
async fn no_other_operation_is_served() {
    let served = serve().await;
    let document: serde_json::Value = serde_json::from_str(&document()).unwrap();
    let mut refused = 0;
    for path in document["paths"].as_object().unwrap().keys() {
        for method in [
            "GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE",
        ] {
            let reads = matches!(method, "GET" | "HEAD");
            if reads && matches!(path.as_str(), "/metrics" | "/v1/health") {
                continue;
            }
            let asked = path.replace("{id}", "web").replace(['{', '}'], "");
            let body = r#"{"image":"x","cpus":1,"memory_mib":128}"#;
            let body = if reads { "" } else { body };
            let (status, text) = ask(&served, method, &asked, body).await;
            let expected = match path.as_str() {
                "/metrics" | "/v1/health" => StatusCode::METHOD_NOT_ALLOWED,
                _ => StatusCode::NOT_FOUND,
            };
            assert_eq!(status, expected, "{method} {asked}: {text}");
            refused += 1;
        }
    }
    for path in [
        "/",
        "/openapi.json",
        "/metrics/",
        "/v1/health/..",
        "//metrics",
        "/metrics%2f",
        "/METRICS",
    ] {
        assert_eq!(
            ask(&served, "GET", path, "").await.0,
            StatusCode::NOT_FOUND,
            "{path}"
        );
    }
    assert!(refused > 100, "{refused}");
    assert_eq!(served.fake.made(), 0);
    assert!(!served.daemon.drained().draining);
}

#[tokio::test]
async fn what_is_no_request_is_not_answered_as_one() {
    let served = serve().await;
    let long = format!("GET /metrics HTTP/1.1\r\nx: {}\r\n\r\n", "a".repeat(1 << 20));
    for head in [
        "\0\0\0\0\r\n\r\n",
        "\u{16}\u{3}\u{1}\0\r\n\r\n",
        "GET /metrics\r\n\r\n",
        "CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n",
        "GET http://x/v1/sandboxes HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
        "GET /metrics/../v1/sandboxes HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
        "GET /v1/sandboxes HTTP/1.1\r\nhost: x\r\nauthorization: Bearer x\r\nconnection: close\r\n\r\n",
        &long,
    ] {
        let mut stream = TcpStream::connect(served.address).await.unwrap();
        // thawd may close the connection before everything was sent.
        let _ = stream.write_all(head.as_bytes()).await;
        let _ = stream.shutdown().await;
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer).await;
        let answer = String::from_utf8_lossy(&answer);
        let begins: String = head.chars().take(40).collect();
        assert!(!answer.contains("HTTP/1.1 2"), "{begins:?}: {answer}");
    }
    assert_eq!(ask(&served, "GET", "/metrics", "").await.0, StatusCode::OK);
}

#[tokio::test]
async fn connections_are_bounded() {
    let served = serve().await;
    let mut held = Vec::new();
    for _ in 0..MOST.of_one {
        let mut stream = TcpStream::connect(served.address).await.unwrap();
        stream
            .write_all(b"GET /v1/health HTTP/1.1\r\nhost: x\r\n\r\n")
            .await
            .unwrap();
        assert!(stream.read(&mut [0; 1]).await.unwrap() > 0);
        held.push(stream);
    }
    let mut one_more = TcpStream::connect(served.address).await.unwrap();
    let _ = one_more
        .write_all(b"GET /v1/health HTTP/1.1\r\nhost: x\r\n\r\n")
        .await;
    let cut = one_more.read(&mut [0; 1]).await;
    assert!(!matches!(cut, Ok(n) if n > 0), "{cut:?}");
    held.clear();
    // Closed connections are only forgotten when a new one arrives.
    for attempt in 0.. {
        let mut stream = TcpStream::connect(served.address).await.unwrap();
        let _ = stream
            .write_all(b"GET /v1/health HTTP/1.1\r\nhost: x\r\n\r\n")
            .await;
        if matches!(stream.read(&mut [0; 1]).await, Ok(n) if n > 0) {
            break;
        }
        assert!(attempt < 1000);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let (_, text) = ask(&served, "GET", "/metrics", "").await;
    let refused = "\nthaw_api_connections_refused_total ";
    assert!(text.contains(refused), "{text}");
    assert!(!text.contains(&format!("{refused}0\n")), "{text}");
}

#[tokio::test]
async fn metrics_are_collected_for_two_at_once_and_others_wait() {
    let (_fake, daemon) = Fake::daemon(true);
    let turns = Arc::new(Semaphore::new(AT_ONCE));
    let routes = routes(daemon, Gate::new(Bounds::default()), turns.clone());
    let held = turns.clone().acquire_many_owned(AT_ONCE as u32).await.unwrap();
    let waits = {
        let routes = routes.clone();
        tokio::spawn(async move { send(&routes, request_of("GET", "/metrics", JSON, "")).await })
    };
    // Health is answered meanwhile.
    let health = send(&routes, request_of("GET", "/v1/health", JSON, "")).await;
    assert_eq!(health.status(), StatusCode::OK);
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(!waits.is_finished());
    drop(held);
    assert_eq!(waits.await.unwrap().status(), StatusCode::OK);
    assert_eq!(turns.available_permits(), AT_ONCE);
}

#[tokio::test]
async fn nothing_is_served_where_nothing_is_configured() {
    assert!(Scrape::open(&MetricsConfig::default()).await.unwrap().is_none());
    let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let config = MetricsConfig {
        listen: Some(taken.local_addr().unwrap()),
    };
    let failure = Scrape::open(&config).await.err().unwrap();
    assert!(failure.to_string().contains("[metrics]"), "{failure}");
}
