//! Tests of open streams over TCP, and when they end.

use std::sync::OnceLock;
use std::time::{Instant, UNIX_EPOCH};

use futures_util::{SinkExt, StreamExt};
use hyper::body::Incoming;
use tokio_tungstenite::tungstenite::Message as Sent;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::{WebSocketStream, client_async};

use super::*;

/// How soon after its cause a stream must end. The end comes by a message, not by a timer.
const SOON: Duration = Duration::from_secs(10);
/// How long to check that a stream stays open.
const FOR_A_WHILE: Duration = Duration::from_millis(200);

/// The line of the caller under test. A second caller's line never changes.
const LINE: &str = "role=operate tenant=acme";
const STAYS: &str = "stays-acme-44444444444444444444444";

fn lines(first: &str) -> String {
    format!("{first}\nstays {STAYS} {LINE}\n")
}

fn token_file(first: &str) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), lines(first)).unwrap();
    file
}

/// A streamed answer, and its connection.
struct Followed {
    body: Incoming,
    _sender: SendRequest<Full<Bytes>>,
}

impl Followed {
    async fn over(
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        path: &str,
        token: Option<&str>,
    ) -> Followed {
        let mut kept = Kept::over(stream).await;
        let request = hyper::Request::builder().uri(path).header("host", "x");
        let request = match token {
            Some(token) => request.header("authorization", format!("Bearer {token}")),
            None => request,
        };
        let request = request.body(Full::default()).unwrap();
        let response = kept.0.send_request(request).await.unwrap();
        assert_eq!(response.status(), 200, "{path}");
        Followed {
            body: response.into_body(),
            _sender: kept.0,
        }
    }

    /// Whether the stream stays open for a while.
    async fn goes_on(&mut self) -> bool {
        let until = Instant::now() + FOR_A_WHILE;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match tokio::time::timeout(left, self.body.frame()).await {
                Err(_) => return true,
                Ok(Some(Ok(_))) => {}
                Ok(Some(Err(_)) | None) => return false,
            }
        }
    }

    /// Whether the stream breaks off soon, without the end of a complete answer.
    async fn breaks_off(self) -> bool {
        let whole = tokio::time::timeout(SOON, self.body.collect()).await;
        whole.expect("it goes on").is_err()
    }
}

/// The open streams of a caller for one sandbox.
struct Open {
    watch: Followed,
    log: Followed,
    session: WebSocketStream<TcpStream>,
}

impl Open {
    async fn by(served: &Served, token: &str) -> Open {
        let connect = async || TcpStream::connect(served.address).await.unwrap();
        let follow = async |path: &str| Followed::over(connect().await, path, Some(token)).await;
        let url = format!("ws://{}/v1/sandboxes/web/exec", served.address);
        let mut request = url.into_client_request().unwrap();
        let bearer = format!("Bearer {token}").parse().unwrap();
        request.headers_mut().insert("authorization", bearer);
        let (mut session, _) = client_async(request, connect().await).await.unwrap();
        session.send(Sent::text(r#"{"command":["cat"]}"#)).await.unwrap();
        let mut open = Open {
            watch: follow("/v1/sandboxes?watch=1").await,
            log: follow("/v1/sandboxes/web/logs?follow=1").await,
            session,
        };
        assert!(open.echoes().await);
        open
    }

    /// Whether the process still answers.
    async fn echoes(&mut self) -> bool {
        self.session.send(Sent::binary("x")).await.unwrap();
        loop {
            match tokio::time::timeout(SOON, self.session.next()).await.unwrap() {
                Some(Ok(Sent::Binary(_))) => return true,
                Some(Ok(Sent::Ping(_))) => {}
                _ => return false,
            }
        }
    }

    async fn goes_on(&mut self) {
        assert!(self.watch.goes_on().await, "the watch");
        assert!(self.log.goes_on().await, "the log");
        assert!(self.echoes().await, "the session");
    }

    async fn breaks_off(mut self, why: &str) {
        assert!(self.watch.breaks_off().await, "{why}: the watch");
        assert!(self.log.breaks_off().await, "{why}: the log");
        let closed = async {
            loop {
                match self.session.next().await {
                    Some(Ok(Sent::Close(frame))) => return frame.unwrap(),
                    Some(Ok(Sent::Ping(_))) => {}
                    other => panic!("{why}: {other:?}"),
                }
            }
        };
        let frame = tokio::time::timeout(SOON, closed).await.unwrap();
        assert_eq!(frame.code, CloseCode::Policy, "{why}");
        assert!(frame.reason.contains("token"), "{why}: {}", frame.reason);
    }
}

const CONTAINER: &str =
    r#"{"image":"x","cpus":1,"memory_mib":128,"name":"web","container":{"command":["a"]}}"#;

/// Creates a sandbox of the tenant acme for the callers.
async fn make(served: &Served) {
    let mut kept = Kept::plain(served).await;
    let made = kept.ask("POST", "/v1/sandboxes", Some(STAYS), CONTAINER).await;
    assert_eq!(made.0, 201, "{}", made.1);
}

#[tokio::test]
async fn token_that_is_removed_or_changed_ends_what_it_opened() {
    let line = format!("one {OPERATE} {LINE}");
    let file = token_file(&line);
    let served = serve(&config(false, false, Some(&file))).await;
    make(&served).await;
    let mut other = Open::by(&served, STAYS).await;
    for changed in [
        String::new(),
        format!("one {OPERATE} role=operate tenant=other"),
        format!("one {OPERATE} role=read tenant=acme"),
        format!("one {OPERATE} role=admin tenant=acme"),
        format!("one {OTHER} {LINE}"),
        format!("{line} expires=2020-01-01"),
    ] {
        std::fs::write(file.path(), lines(&line)).unwrap();
        served.credentials.reload().unwrap();
        let mut open = Open::by(&served, OPERATE).await;
        // Reloads the unchanged file.
        served.credentials.reload().unwrap();
        open.goes_on().await;
        std::fs::write(file.path(), lines(&changed)).unwrap();
        served.credentials.reload().unwrap();
        open.breaks_off(&changed).await;
        other.goes_on().await;
    }
}

#[tokio::test]
async fn token_that_expires_ends_what_it_opened() {
    let file = token_file(&format!("one {OPERATE} {LINE} expires=2027-01-01"));
    let config = config(false, false, Some(&file));
    // A second before that day, by a clock that stands until everything is open.
    let (day, left) = (
        UNIX_EPOCH + Duration::from_secs(1_798_761_600),
        Duration::from_secs(1),
    );
    let began = Arc::<OnceLock<Instant>>::default();
    let runs = began.clone();
    let clock = Box::new(move || day - left + runs.get().map_or(Duration::ZERO, Instant::elapsed));
    let served = serve_at(Tcp {
        listener: Listener::open(config.listen.unwrap()).await.unwrap(),
        credentials: Arc::new(Credentials::read_by(&config, clock).unwrap()),
    });
    make(&served).await;
    let mut other = Open::by(&served, STAYS).await;
    let open = Open::by(&served, OPERATE).await;
    let began = began.get_or_init(Instant::now);
    open.breaks_off("it expired").await;
    assert!(began.elapsed() >= left);
    other.goes_on().await;
}

#[tokio::test]
async fn upload_under_way_ends_when_its_token_is_removed() {
    let file = token_file(&format!("one {OPERATE} {LINE}"));
    let served = serve(&config(false, false, Some(&file))).await;
    make(&served).await;
    let mut stream = TcpStream::connect(served.address).await.unwrap();
    let head = format!(
        "PUT /v1/sandboxes/web/files?path=/x HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\nexpect: 100-continue\r\n{}\r\n",
        bearer(OPERATE)
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    // The request was admitted, and thawd waits for the file.
    let mut goes_on = [0; 12];
    stream.read_exact(&mut goes_on).await.unwrap();
    assert_eq!(&goes_on, b"HTTP/1.1 100");
    std::fs::write(file.path(), lines("")).unwrap();
    served.credentials.reload().unwrap();
    let mut answer = Vec::new();
    let read = tokio::time::timeout(SOON, stream.read_to_end(&mut answer)).await;
    read.expect("the connection stays").unwrap();
    let answer = String::from_utf8_lossy(&answer);
    assert!(answer.contains("HTTP/1.1 401"), "{answer}");
}

#[tokio::test]
async fn certificate_that_loses_its_role_ends_what_it_opened() {
    let roles = client_roles(&format!("{BUILDER}dns:client role=read tenant=acme"));
    let served = serve(&ApiConfig {
        client_roles: Some(roles.path().to_owned()),
        ..config(true, true, None)
    })
    .await;
    let watch = async |name: &str| {
        let stream = tls(&served, Some(name)).await.unwrap();
        Followed::over(stream, "/v1/sandboxes?watch=1", None).await
    };
    let (client, mut builder) = (watch("client").await, watch("workload").await);
    std::fs::write(roles.path(), BUILDER).unwrap();
    served.credentials.reload().unwrap();
    assert!(client.breaks_off().await);
    assert!(builder.goes_on().await);
}
