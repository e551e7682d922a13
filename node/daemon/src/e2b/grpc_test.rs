//! Requests of gRPC through the proxy.

use std::convert::Infallible;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::body::Bytes;
use axum::http::header::{CONTENT_TYPE, TE};
use axum::http::{HeaderMap, Version};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::TokioExecutor;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use super::*;
use crate::api::period::Period;
use crate::api::test_client::until;

const ID: &str = "0123456789ab";

/// A server of gRPC in a sandbox, which answers with what it is sent.
struct Guest {
    port: (Ipv4Addr, u16),
    accepted: Arc<AtomicUsize>,
    period: Period,
}

async fn listen() -> (TcpListener, (Ipv4Addr, u16)) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    (listener, (Ipv4Addr::LOCALHOST, port))
}

impl Guest {
    async fn start() -> Guest {
        let ((listener, port), accepted) = (listen().await, Arc::<AtomicUsize>::default());
        let count = accepted.clone();
        tokio::spawn(async move {
            loop {
                let stream = TokioIo::new(listener.accept().await.unwrap().0);
                count.fetch_add(1, Ordering::SeqCst);
                let http = http2::Builder::new(TokioExecutor::new());
                tokio::spawn(http.serve_connection(stream, service_fn(echo)));
            }
        });
        Guest {
            port,
            accepted,
            period: Period::default(),
        }
    }

    async fn send(&self, proxy: &Proxy, body: Body) -> Result<Response, Failed> {
        let to = (self.port, self.period.refer());
        proxy
            .send(ID.into(), to, call(body), watch::channel(false).1)
            .await
    }

    fn accepted(&self) -> usize {
        self.accepted.load(Ordering::SeqCst)
    }
}

async fn echo(request: hyper::Request<Incoming>) -> Result<Response, Infallible> {
    assert_eq!(request.headers()[TE], "trailers");
    assert_eq!(*request.uri(), "http://3000-0123456789ab.sandboxes.example/a.B/C");
    let mut status = HeaderMap::new();
    status.insert("grpc-status", HeaderValue::from_static("0"));
    let ends = async move { Some(Ok(status)) };
    Ok(Response::new(Body::new(request.into_body().with_trailers(ends))))
}

fn call(body: Body) -> Request {
    let request = axum::http::Request::builder()
        .version(Version::HTTP_2)
        .method("POST")
        .uri("https://3000-0123456789ab.sandboxes.example/a.B/C")
        .header(CONTENT_TYPE, "application/grpc");
    request.body(body).unwrap()
}

#[tokio::test]
async fn trailers_go_through_and_the_connection_is_kept() {
    let (guest, proxy) = (Guest::start().await, Proxy::default());
    for _ in 0..2 {
        let answer = guest.send(&proxy, Body::from("ping")).await.unwrap();
        assert_eq!(proxy.idle.count(), 0, "it is in use");
        let whole = answer.into_body().collect().await.unwrap();
        assert_eq!(whole.trailers().unwrap()["grpc-status"], "0");
        assert_eq!(whole.to_bytes(), "ping");
        assert_eq!((guest.accepted(), proxy.idle.count()), (1, 1));
        until(|| proxy.places.count() == 0).await;
    }
}

#[tokio::test]
async fn messages_go_both_ways_at_once() {
    let (guest, proxy) = (Guest::start().await, Proxy::default());
    let (tell, told) = tokio::sync::mpsc::channel::<Bytes>(1);
    let sent = futures_util::stream::unfold(told, |mut told| async move {
        let message = told.recv().await?;
        Some((Ok::<_, Infallible>(message), told))
    });
    tell.send(Bytes::from_static(b"one")).await.unwrap();
    let mut answer = guest.send(&proxy, Body::from_stream(sent)).await.unwrap();
    for message in ["one", "two", "three"] {
        let frame = answer.body_mut().frame().await.unwrap().unwrap();
        assert_eq!(frame.into_data().unwrap(), message);
        let next = if message == "one" { "two" } else { "three" };
        let _ = tell.send(Bytes::from_static(next.as_bytes())).await;
    }
    assert_eq!(proxy.places.count(), 1);
}

#[tokio::test]
async fn connection_whose_answer_is_given_up_is_not_kept() {
    let (guest, proxy) = (Guest::start().await, Proxy::default());
    drop(guest.send(&proxy, Body::from("ping")).await.unwrap());
    assert_eq!(proxy.idle.count(), 0);
    until(|| proxy.places.count() == 0).await;
    guest.send(&proxy, Body::from("ping")).await.unwrap();
    assert_eq!(guest.accepted(), 2);
}

#[tokio::test]
async fn guest_without_http2_is_an_error() {
    let ((listener, port), proxy) = (listen().await, Proxy::default());
    tokio::spawn(async move {
        let mut stream = listener.accept().await.unwrap().0;
        let _ = stream.read(&mut [0; 64]).await;
        let answer = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n";
        stream.write_all(answer).await.unwrap();
    });
    let period = Period::default();
    let to = (port, period.refer());
    let sent = proxy.send(ID.into(), to, call(Body::from("ping")), watch::channel(false).1);
    assert!(matches!(sent.await, Err(Failed::Broken(_))));
}
