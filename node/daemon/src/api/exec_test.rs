use std::path::Path;

use axum::http::{Request, StatusCode};
use proptest::prelude::*;
use thaw_protocol::api::TerminalSize;
use thaw_sandbox::state::Behalf;
use tokio::net::UnixStream;
use tokio::sync::oneshot;
use tokio_tungstenite::tungstenite::Message as Sent;
use tokio_tungstenite::{WebSocketStream, client_async};

use super::*;
use crate::api::fake::{Fake, request};
use crate::api::peer::Access;
use crate::api::server::{OverTcp, serve};
use crate::api::test_client::{JSON, ask, read, refused, routes, send, whole};

/// A daemon of fakes that serves, with one sandbox.
struct Served {
    fake: Arc<Fake>,
    daemon: Arc<Daemon>,
    id: String,
    root: tempfile::TempDir,
    stop: oneshot::Sender<()>,
    served: tokio::task::JoinHandle<Result<(), thaw_sandbox::error::Error>>,
}

impl Served {
    async fn start() -> Served {
        let root = tempfile::tempdir().unwrap();
        let (fake, daemon) = Fake::daemon(true);
        let id = daemon
            .create(request("x"), Behalf::default())
            .await
            .unwrap()
            .sandbox
            .id;
        let (stop, stopped) = oneshot::channel::<()>();
        let (at, serving) = (socket(root.path()), daemon.clone());
        let end = async { drop(stopped.await) };
        let served = tokio::spawn(async move {
            serve(serving, &at, Access::default(), OverTcp::default(), || {}, end).await
        });
        while UnixStream::connect(socket(root.path())).await.is_err() {
            tokio::task::yield_now().await;
        }
        Served {
            fake,
            daemon,
            id,
            root,
            stop,
            served,
        }
    }

    async fn open(&self, first: &str) -> WebSocketStream<UnixStream> {
        let stream = UnixStream::connect(socket(self.root.path())).await.unwrap();
        let url = format!("ws://thawd/v1/sandboxes/{}/exec", self.id);
        let (mut socket, response) = client_async(url, stream).await.unwrap();
        assert_eq!(response.status(), StatusCode::SWITCHING_PROTOCOLS);
        socket.send(Sent::text(first)).await.unwrap();
        socket
    }

    async fn heard(&self, count: usize) -> Vec<String> {
        let mut heard = self.fake.counts.heard.subscribe();
        heard.wait_for(|h| h.len() >= count).await.unwrap().clone()
    }
}

fn socket(root: &Path) -> std::path::PathBuf {
    root.join("s")
}

/// The next message that is not a ping.
async fn next(socket: &mut WebSocketStream<UnixStream>) -> Option<Sent> {
    loop {
        match socket.next().await?.unwrap() {
            Sent::Ping(_) => {}
            other => return Some(other),
        }
    }
}

async fn event(socket: &mut WebSocketStream<UnixStream>) -> ExecEvent {
    match next(socket).await {
        Some(Sent::Text(text)) => serde_json::from_str(&text).unwrap(),
        other => panic!("no event: {other:?}"),
    }
}

fn say(input: &ExecInput) -> Sent {
    Sent::text(serde_json::to_string(input).unwrap())
}

#[tokio::test]
async fn a_terminal_over_a_websocket() {
    let served = Served::start().await;
    let mut socket = served.open(r#"{"command":["cat"],"tty":true}"#).await;
    socket.send(Sent::binary("hello")).await.unwrap();
    let answer = next(&mut socket).await.unwrap();
    assert_eq!(answer.into_data(), [&[STDOUT_CHANNEL][..], b"hello"].concat());
    let size = TerminalSize { rows: 3, columns: 4 };
    socket.send(say(&ExecInput::Resize(size))).await.unwrap();
    assert_eq!(served.heard(1).await, ["size 3 4"]);
    socket.send(say(&ExecInput::Eof)).await.unwrap();
    assert_eq!(event(&mut socket).await, ExecEvent::Exit(Exit { exit_code: 0 }));
    assert!(matches!(next(&mut socket).await, Some(Sent::Close(_))));
    let mut socket = served.open(r#"{"command":["stubborn"]}"#).await;
    socket.send(say(&ExecInput::Signal(9))).await.unwrap();
    assert_eq!(event(&mut socket).await, ExecEvent::Exit(Exit { exit_code: 137 }));
}

#[tokio::test]
async fn who_hangs_up_takes_its_process_along() {
    let served = Served::start().await;
    for (number, program) in ["cat", "yes"].into_iter().enumerate() {
        let socket = served.open(&format!(r#"{{"command":["{program}"]}}"#)).await;
        drop(socket);
        assert_eq!(
            served.heard(number + 1).await.last().unwrap(),
            "signal 1",
            "{program}"
        );
    }
    assert_eq!(served.heard(2).await.len(), 2);
}

/// The runtime's clock advances only when the test advances it, or when all tasks wait.
#[tokio::test]
async fn silent_session_ends_after_90_s_with_its_process() {
    let served = Served::start().await;
    let mut socket = served.open(r#"{"command":["cat"]}"#).await;
    socket.send(Sent::binary("x")).await.unwrap();
    next(&mut socket).await.unwrap();
    tokio::time::pause();
    let began = tokio::time::Instant::now();
    // thawd's pings are not even read.
    assert_eq!(served.heard(1).await, ["signal 1"]);
    let silent = began.elapsed();
    assert!(
        silent >= Duration::from_secs(89) && silent <= Duration::from_secs(91),
        "{silent:?}"
    );
    drop(socket);
}

#[tokio::test]
async fn a_caller_that_answers_pings_keeps_its_process() {
    let served = Served::start().await;
    let mut socket = served.open(r#"{"command":["cat"]}"#).await;
    socket.send(Sent::binary("x")).await.unwrap();
    next(&mut socket).await.unwrap();
    tokio::time::pause();
    // While a thread is awaited, only `advance` moves the clock.
    let (done, until) = std::sync::mpsc::channel::<()>();
    let held = tokio::task::spawn_blocking(move || until.recv());
    // The client answers each ping within a third of the allowed silence; all pings together take three times as long.
    for asked in 0..9 {
        tokio::time::advance(ASKED).await;
        let ping = socket.next().await.unwrap().unwrap();
        assert!(matches!(ping, Sent::Ping(_)), "{asked}: {ping:?}");
        socket.flush().await.unwrap();
        // Until thawd has read the answer.
        for _ in 0..1000 {
            tokio::task::yield_now().await;
        }
    }
    assert!(served.fake.counts.heard.borrow().is_empty());
    socket.send(Sent::binary("y")).await.unwrap();
    let answer = next(&mut socket).await.unwrap();
    assert_eq!(answer.into_data(), [&[STDOUT_CHANNEL][..], b"y"].concat());
    drop(done);
    let _ = held.await.unwrap();
}

#[tokio::test]
async fn what_is_said_wrong_is_told_and_ends_it() {
    let served = Served::start().await;
    for (first, code) in [
        ("{", "malformed-request"),
        (r#"{"command":[]}"#, "invalid-body"),
        (r#"{"command":["cat"],"stdin":"x"}"#, "invalid-body"),
        (r#"{"command":["cat"],"stream":true}"#, "invalid-body"),
        (r#"{"command":["cat"],"more":1}"#, "invalid-body"),
        (r#"{"command":["missing"]}"#, "not-found"),
    ] {
        let mut socket = served.open(first).await;
        let ExecEvent::Error(problem) = event(&mut socket).await else {
            panic!("{first}")
        };
        assert_eq!(problem.code, code, "{first}");
        assert_eq!(problem.instance, format!("/v1/sandboxes/{}/exec", served.id));
    }
    for wrong in [
        r#"{"type":"RESIZE","object":{"rows":0,"columns":1}}"#,
        r#"{"type":"SIGNAL","object":65}"#,
        r#"{"type":"RUN"}"#,
        "[",
    ] {
        let heard = served.fake.counts.heard.borrow().len();
        let mut socket = served.open(r#"{"command":["cat"]}"#).await;
        socket.send(Sent::text(wrong)).await.unwrap();
        assert!(matches!(event(&mut socket).await, ExecEvent::Error(_)), "{wrong}");
        assert_eq!(served.heard(heard + 1).await.last().unwrap(), "signal 1");
    }
    // Larger than the maximum size of a message.
    let mut socket = served.open(r#"{"command":["stubborn"]}"#).await;
    let heard = served.fake.counts.heard.borrow().len();
    let _ = socket.send(Sent::binary(vec![0; MAX_MESSAGE + 1])).await;
    assert_eq!(served.heard(heard + 1).await.last().unwrap(), "signal 1");
}

#[tokio::test]
async fn when_serving_ends_processes_are_told_and_ended() {
    let served = Served::start().await;
    let mut socket = served.open(r#"{"command":["cat"]}"#).await;
    socket.send(Sent::binary("x")).await.unwrap();
    next(&mut socket).await.unwrap();
    drop(served.stop);
    let ExecEvent::Error(problem) = event(&mut socket).await else {
        panic!("no problem")
    };
    assert_eq!((problem.code.as_str(), problem.status), ("thawd-ending", 503));
    drop(socket);
    served.served.await.unwrap().unwrap();
    assert_eq!(*served.fake.counts.heard.borrow(), ["signal 1"]);
    drop(served.daemon);
    assert_eq!(served.fake.living(), 1, "its sandbox goes on");
}

/// Routes with one sandbox, and the path to run processes in it.
async fn with_sandbox() -> (Arc<Fake>, axum::Router, String) {
    let (fake, routes) = routes();
    let body = r#"{"image":"x","cpus":1,"memory_mib":128,"name":"web"}"#;
    let made = send(&routes, ask("POST", "/v1/sandboxes", JSON, body)).await;
    assert_eq!(made.status(), StatusCode::CREATED);
    (fake, routes, "/v1/sandboxes/web/exec".into())
}

async fn ran(routes: &axum::Router, path: &str, body: &str) -> ExecResult {
    let response = send(routes, ask("POST", path, JSON, body.to_owned())).await;
    assert_eq!(response.status(), StatusCode::OK, "{body}");
    serde_json::from_slice(&whole(response).await).unwrap()
}

#[tokio::test]
async fn a_process_is_run_to_its_end() {
    let (_fake, routes, path) = with_sandbox().await;
    let done = |exit_code, stdout: &str, stderr: &str, encoding| ExecResult {
        exit_code,
        stdout: stdout.into(),
        stderr: stderr.into(),
        encoding,
        truncated: false,
    };
    let echo = r#"{"command":["cat"],"stdin":"hé"}"#;
    assert_eq!(ran(&routes, &path, echo).await, done(0, "hé", "", Encoding::Utf8));
    let echo = r#"{"command":["cat"],"stdin":"/w==","encoding":"base64"}"#;
    assert_eq!(
        ran(&routes, &path, echo).await,
        done(0, "/w==", "", Encoding::Base64)
    );
    let bytes = ran(&routes, &path, r#"{"command":["bytes"]}"#).await;
    assert_eq!(bytes, done(3, "/wA=", "ZXJy", Encoding::Base64));
    let much = ran(&routes, &path, r#"{"command":["much"]}"#).await;
    assert!(much.truncated && much.encoding == Encoding::Utf8);
    assert_eq!(much.stdout.len(), MOST_OUTPUT);
    assert!(much.stdout.chars().all(|c| c == 'é'));
}

#[tokio::test]
async fn a_process_is_streamed_and_ends_with_who_listens() {
    let (fake, routes, path) = with_sandbox().await;
    let stream = |program: &str| format!(r#"{{"command":["{program}"],"stream":true}}"#);
    let response = send(&routes, ask("POST", &path, JSON, stream("bytes"))).await;
    assert_eq!(response.headers()["content-type"], LINES);
    let text = whole(response).await;
    let mut events: Vec<ExecEvent> = text
        .split(|b| *b == b'\n')
        .filter(|l| !l.is_empty())
        .map(|l| serde_json::from_slice(l).unwrap())
        .collect();
    assert_eq!(events.pop(), Some(ExecEvent::Exit(Exit { exit_code: 3 })));
    assert_eq!(events.len(), 2);
    assert!(events.contains(&ExecEvent::Stderr(piece(b"err".to_vec()))));
    assert!(events.contains(&ExecEvent::Stdout(piece(vec![0xff, 0]))));
    let mut heard = fake.counts.heard.subscribe();
    drop(send(&routes, ask("POST", &path, JSON, stream("yes"))).await);
    let heard = heard.wait_for(|heard| !heard.is_empty()).await.unwrap();
    assert_eq!(*heard, ["signal 1"]);
}

#[tokio::test]
async fn invalid_processes_are_refused() {
    let (fake, routes, path) = with_sandbox().await;
    for body in [
        "[]",
        "{}",
        r#"{"command":"cat"}"#,
        r#"{"command":[]}"#,
        r#"{"command":[""]}"#,
        r#"{"command":["a\u0000"]}"#,
        r#"{"command":["cat"],"more":1}"#,
        r#"{"command":["cat"],"env":["A"]}"#,
        r#"{"command":["cat"],"env":["=A"]}"#,
        r#"{"command":["cat"],"workdir":"x"}"#,
        r#"{"command":["cat"],"user":""}"#,
        r#"{"command":["cat"],"size":{"rows":0,"columns":1}}"#,
        r#"{"command":["cat"],"size":{"rows":70000,"columns":1}}"#,
        r#"{"command":["cat"],"stdin":"?","encoding":"base64"}"#,
        r#"{"command":["cat"],"encoding":"latin-1"}"#,
    ] {
        let request = ask("POST", &path, JSON, body);
        refused(&routes, request, 422, "invalid-body", body).await;
    }
    assert!(fake.counts.heard.borrow().is_empty());
}

#[tokio::test]
async fn processes_that_cannot_run_are_refused() {
    let (fake, routes, path) = with_sandbox().await;
    let stuffed = format!(r#"{{"command":["cat"],"stdin":"{}"}}"#, "x".repeat(1 << 20));
    let nowhere = "/v1/sandboxes/nobody/exec";
    let good = r#"{"command":["cat"]}"#;
    for (path, kind, body, status, code) in [
        (nowhere, JSON, good, 404, "sandbox-not-found"),
        (&path, "text/plain", good, 415, "wrong-media-type"),
        (&path, JSON, "", 400, "malformed-request"),
        (&path, JSON, &stuffed, 413, "body-too-large"),
        (&path, JSON, r#"{"command":["missing"]}"#, 422, "not-found"),
    ] {
        let shown = body.chars().take(60).collect::<String>();
        let request = ask("POST", path, kind, body.to_owned());
        refused(&routes, request, status, code, &shown).await;
    }
    let without_upgrade = ask("GET", &path, JSON, "");
    refused(&routes, without_upgrade, 426, "upgrade-required", "GET").await;
    refused(&routes, ask("PUT", &path, JSON, ""), 405, "wrong-method", "PUT").await;
    send(&routes, ask("POST", "/v1/sandboxes/web/pause", JSON, "")).await;
    let request = ask("POST", &path, JSON, good);
    refused(&routes, request, 409, "sandbox-not-running", "paused").await;
    let shown: thaw_protocol::api::Sandbox = read(&routes, "/v1/sandboxes/web").await;
    assert_eq!(shown.state, "paused");
    assert!(fake.counts.heard.borrow().is_empty());
}

#[test]
fn pages_of_other_sites_are_turned_away() {
    let headers = |origin: &str, host: &str| {
        let request = Request::builder().header("origin", origin).header("host", host);
        request.body(()).unwrap().headers().clone()
    };
    assert!(same_site(&HeaderMap::new()).is_ok());
    assert!(same_site(&headers("https://node:8443", "node:8443")).is_ok());
    for origin in ["https://evil", "null", "", "https://node", "node:8443"] {
        assert!(same_site(&headers(origin, "node:8443")).is_err(), "{origin}");
    }
}

proptest! {
    #[test]
    fn an_answer_holds_the_beginning_of_what_was_written(
        pieces in prop::collection::vec((any::<u8>(), 0..100_000_usize), 0..6),
    ) {
        let pieces: Vec<_> = pieces.iter().map(|(byte, length)| vec![*byte; *length]).collect();
        let mut kept = Kept::default();
        pieces.iter().for_each(|piece| kept.keep(piece));
        let all = pieces.concat();
        prop_assert!(kept.bytes.len() <= MOST_OUTPUT);
        prop_assert!(all.starts_with(&kept.bytes));
        prop_assert_eq!(kept.more, all.len() > MOST_OUTPUT);
        prop_assert!(kept.more || kept.bytes == all);
    }

    #[test]
    fn a_piece_is_what_was_written(data in prop::collection::vec(any::<u8>(), 0..64)) {
        let piece = piece(data.clone());
        let read = match piece.encoding {
            Encoding::Utf8 => piece.data.into_bytes(),
            Encoding::Base64 => STANDARD.decode(piece.data).unwrap(),
        };
        prop_assert_eq!(read, data);
    }
}
