//! Connections of the proxy that are used again.

use std::sync::atomic::{AtomicUsize, Ordering};

use axum::body::Bytes;
use axum::http::header::HOST;
use http_body_util::BodyExt;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use super::*;
use crate::api::period::Period;
use crate::api::test_client::until;

const ID: &str = "0123456789ab";
const OK: &str = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";

/// What a guest has seen.
#[derive(Debug, Default)]
struct Seen {
    accepted: AtomicUsize,
    requests: AtomicUsize,
    /// Connections that have ended.
    ended: AtomicUsize,
}

/// A server in a sandbox.
struct Guest {
    port: (Ipv4Addr, u16),
    seen: Arc<Seen>,
}

impl Guest {
    /// It answers the requests on each connection with these texts in turn. Then it closes the connection: at once, or without an answer to
    /// one request more.
    async fn answering(answers: &'static [&'static str], at_once: bool) -> Guest {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let port = (Ipv4Addr::LOCALHOST, listener.local_addr().unwrap().port());
        let seen: Arc<Seen> = Arc::default();
        let count = seen.clone();
        tokio::spawn(async move {
            loop {
                let (mut stream, count) = (listener.accept().await.unwrap().0, count.clone());
                count.accepted.fetch_add(1, Ordering::SeqCst);
                tokio::spawn(async move {
                    serve(&mut stream, answers, at_once, &count.requests).await;
                    drop(stream);
                    count.ended.fetch_add(1, Ordering::SeqCst);
                });
            }
        });
        Guest { port, seen }
    }

    fn accepted(&self) -> usize {
        self.seen.accepted.load(Ordering::SeqCst)
    }

    fn requests(&self) -> usize {
        self.seen.requests.load(Ordering::SeqCst)
    }

    /// Waits until so many connections have ended.
    async fn ended(&self, count: usize) {
        until(|| self.seen.ended.load(Ordering::SeqCst) == count).await;
    }
}

async fn serve(stream: &mut TcpStream, answers: &[&str], at_once: bool, requests: &AtomicUsize) {
    for answer in answers {
        if !has_request(stream).await {
            return;
        }
        requests.fetch_add(1, Ordering::SeqCst);
        stream.write_all(answer.as_bytes()).await.unwrap();
    }
    if !at_once && has_request(stream).await {
        requests.fetch_add(1, Ordering::SeqCst);
    }
}

/// Reads a head; false if there is none.
async fn has_request(stream: &mut TcpStream) -> bool {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        match stream.read_u8().await {
            Ok(byte) => head.push(byte),
            Err(_) => return false,
        }
    }
    true
}

fn request(method: Method, body: &'static str) -> Request {
    let request = axum::http::Request::builder().method(method).uri("/x");
    request.header(HOST, "x").body(Body::from(body)).unwrap()
}

/// Sends a request without reading the answer's body.
async fn head_of(
    proxy: &Proxy,
    guest: &Guest,
    period: &Period,
    request: Request,
) -> Result<Response, Failed> {
    let to = (guest.port, period.refer());
    proxy.send(ID.into(), to, request, watch::channel(false).1).await
}

async fn ask(proxy: &Proxy, guest: &Guest, period: &Period, request: Request) -> Result<Bytes, Failed> {
    let answer = head_of(proxy, guest, period, request).await?;
    Ok(answer.into_body().collect().await.unwrap().to_bytes())
}

async fn get(proxy: &Proxy, guest: &Guest, period: &Period) -> Result<Bytes, Failed> {
    ask(proxy, guest, period, request(Method::GET, "")).await
}

/// Waits until so many connections are idle.
async fn idle(proxy: &Proxy, count: usize) {
    until(|| proxy.idle.count() == count).await;
}

/// A proxy whose idle connections stay.
fn proxy(in_all: usize, of_one: usize) -> Proxy {
    let time = Duration::from_secs(100);
    let limits = Limits { in_all, of_one, time };
    Proxy::new(TO_SANDBOXES, limits)
}

#[tokio::test]
async fn connection_serves_one_request_after_another() {
    let guest = Guest::answering(&[OK; 9], false).await;
    let (proxy, period) = (proxy(4, 4), Period::default());
    for asked in 1..=4 {
        assert_eq!(get(&proxy, &guest, &period).await.unwrap(), "ok");
        idle(&proxy, 1).await;
        assert_eq!((guest.accepted(), guest.requests()), (1, asked));
    }
    assert_eq!(proxy.places.count(), 0, "an idle one has no place");
    let (first, second) = tokio::join!(head_of_get(&proxy, &guest, &period), get(&proxy, &guest, &period));
    assert!(first.is_ok() && second.is_ok());
    assert_eq!(guest.accepted(), 2, "two requests at once");
}

async fn head_of_get(proxy: &Proxy, guest: &Guest, period: &Period) -> Result<Response, Failed> {
    head_of(proxy, guest, period, request(Method::GET, "")).await
}

#[tokio::test]
async fn idle_connection_that_the_guest_closed_is_replaced() {
    let guest = Guest::answering(&[OK], true).await;
    let (proxy, period) = (proxy(4, 4), Period::default());
    for asked in 1..=3 {
        let post = request(Method::POST, "");
        assert_eq!(ask(&proxy, &guest, &period, post).await.unwrap(), "ok");
        guest.ended(asked).await;
        idle(&proxy, 0).await;
        assert_eq!((guest.accepted(), guest.requests()), (asked, asked));
    }
}

#[tokio::test]
async fn request_is_sent_again_only_if_that_is_safe() {
    // Each connection breaks at its second request.
    let guest = Guest::answering(&[OK], false).await;
    let (proxy, period) = (proxy(4, 4), Period::default());
    get(&proxy, &guest, &period).await.unwrap();
    idle(&proxy, 1).await;
    assert_eq!(get(&proxy, &guest, &period).await.unwrap(), "ok");
    assert_eq!((guest.accepted(), guest.requests()), (2, 3));
    for (unsafe_one, sent) in [(request(Method::POST, ""), 4), (request(Method::PUT, "body"), 6)] {
        idle(&proxy, 1).await;
        let broken = ask(&proxy, &guest, &period, unsafe_one).await;
        assert!(matches!(broken, Err(Failed::Broken(_))), "{broken:?}");
        assert_eq!(guest.requests(), sent);
        get(&proxy, &guest, &period).await.unwrap();
    }
}

#[tokio::test]
async fn interruption_closes_idle_connections_of_the_sandbox() {
    let guest = Guest::answering(&[OK; 9], false).await;
    let (proxy, paused, other) = (proxy(4, 4), Period::default(), Period::default());
    get(&proxy, &guest, &paused).await.unwrap();
    idle(&proxy, 1).await;
    // A sandbox with the same address.
    get(&proxy, &guest, &other).await.unwrap();
    idle(&proxy, 2).await;
    assert_eq!(guest.accepted(), 2);
    let before = paused.refer();
    drop(paused);
    idle(&proxy, 1).await;
    guest.ended(1).await;
    let late = request(Method::GET, "");
    let late = proxy.send(ID.into(), (guest.port, before), late, watch::channel(false).1);
    assert!(matches!(late.await, Err(Failed::Broken(_))));
    get(&proxy, &guest, &other).await.unwrap();
    assert_eq!(guest.requests(), 3, "nothing was sent after the interruption");
}

#[tokio::test]
async fn connection_in_use_at_an_interruption_is_not_kept() {
    let guest = Guest::answering(&[OK; 9], false).await;
    let (proxy, period) = (proxy(4, 4), Period::default());
    let (end, ended) = tokio::sync::oneshot::channel::<()>();
    let body = futures_util::stream::once(async move {
        let _ = ended.await;
        Ok::<_, std::convert::Infallible>(Bytes::from_static(b"hi"))
    });
    let mut post = request(Method::POST, "");
    let length = axum::http::header::CONTENT_LENGTH;
    post.headers_mut().insert(length, HeaderValue::from_static("2"));
    *post.body_mut() = Body::from_stream(body);
    assert_eq!(ask(&proxy, &guest, &period, post).await.unwrap(), "ok");
    drop(period);
    // The request is still being sent.
    assert_eq!(proxy.places.count(), 1);
    end.send(()).unwrap();
    guest.ended(1).await;
    assert_eq!(proxy.idle.count(), 0);
}

#[tokio::test]
async fn connection_with_an_unread_answer_is_not_kept() {
    for unread in [
        "HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nok",
        "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok",
        "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok and more",
    ] {
        let answers: &'static [&'static str] = vec![unread].leak();
        let guest = Guest::answering(answers, false).await;
        let (proxy, period) = (proxy(4, 4), Period::default());
        drop(head_of_get(&proxy, &guest, &period).await.unwrap());
        guest.ended(1).await;
        idle(&proxy, 0).await;
        until(|| proxy.places.count() == 0).await;
    }
}

#[tokio::test]
async fn connection_that_could_change_its_protocol_is_not_kept() {
    let guest = Guest::answering(&[OK; 2], false).await;
    let (proxy, period) = (proxy(4, 4), Period::default());
    for asked in 1..=2 {
        let mut upgrade = request(Method::GET, "");
        let headers = upgrade.headers_mut();
        headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
        assert_eq!(ask(&proxy, &guest, &period, upgrade).await.unwrap(), "ok");
        guest.ended(asked).await;
        assert_eq!((guest.accepted(), proxy.idle.count()), (asked, 0));
    }
}

#[tokio::test]
async fn idle_connections_are_bounded() {
    let (proxy, period) = (proxy(2, 1), Period::default());
    let mut guests = Vec::new();
    for _ in 0..3 {
        guests.push(Guest::answering(&[OK; 2], false).await);
    }
    let one = &guests[0];
    let (first, second) = tokio::join!(get(&proxy, one, &period), get(&proxy, one, &period));
    assert!(first.is_ok() && second.is_ok());
    one.ended(1).await;
    idle(&proxy, 1).await;
    for guest in &guests[1..] {
        get(&proxy, guest, &period).await.unwrap();
    }
    // The longest idle is closed.
    one.ended(2).await;
    idle(&proxy, 2).await;
}

#[tokio::test]
async fn tenant_with_the_most_idle_connections_loses_one() {
    let (proxy, period) = (proxy(3, 3), Period::default());
    let mut guests = Vec::new();
    for tenant in ["small", "large", "large", "large"] {
        let guest = Guest::answering(&[OK; 2], false).await;
        let sandbox = Party {
            name: ID,
            tenant: Some(tenant.parse().unwrap()),
        };
        let to = (guest.port, period.refer());
        let sent = proxy.send(sandbox, to, request(Method::GET, ""), watch::channel(false).1);
        sent.await.unwrap().into_body().collect().await.unwrap();
        guests.push(guest);
        idle(&proxy, guests.len().min(3)).await;
    }
    guests[1].ended(1).await;
    let is_left = |guest: &Guest| guest.seen.ended.load(Ordering::SeqCst) == 0;
    assert!(is_left(&guests[0]), "the longest idle one, of another tenant");
}

#[tokio::test]
async fn connection_is_closed_when_it_was_idle_for_long() {
    let guest = Guest::answering(&[OK; 2], false).await;
    let limits = Limits {
        time: Duration::from_millis(20),
        ..IDLE_TO_SANDBOXES
    };
    let (proxy, period) = (Proxy::new(TO_SANDBOXES, limits), Period::default());
    for asked in 1..=2 {
        get(&proxy, &guest, &period).await.unwrap();
        guest.ended(asked).await;
        idle(&proxy, 0).await;
    }
}
