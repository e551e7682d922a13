use std::net::SocketAddr;

use axum::http::Request;
use http_body_util::BodyExt;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket};

use super::*;
use crate::api::connection;
use crate::api::period::Period;

const ID: &str = "0123456789ab";

/// A guest that accepts one connection, and its port.
async fn guest<F: Future<Output = ()> + Send + 'static>(
    serve: impl FnOnce(TcpStream) -> F + Send + 'static,
) -> (Ipv4Addr, u16) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move { serve(listener.accept().await.unwrap().0).await });
    (Ipv4Addr::LOCALHOST, port)
}

/// A guest that answers the first request with this text, and tells its head.
async fn answering(answer: &'static str) -> ((Ipv4Addr, u16), tokio::sync::oneshot::Receiver<String>) {
    let (tell, told) = tokio::sync::oneshot::channel();
    let at = guest(move |mut stream| async move {
        let _ = tell.send(head(&mut stream).await);
        stream.write_all(answer.as_bytes()).await.unwrap();
        // Open until the proxy leaves.
        let _ = stream.read(&mut [0]).await;
    });
    (at.await, told)
}

async fn head(stream: &mut TcpStream) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.unwrap());
    }
    String::from_utf8(head).unwrap()
}

/// A port of a sandbox that is never interrupted.
fn to(at: (Ipv4Addr, u16)) -> ((Ipv4Addr, u16), During) {
    let forever = Box::leak(Box::new(Period::default()));
    (at, forever.refer())
}

fn open() -> (watch::Sender<bool>, watch::Receiver<bool>) {
    watch::channel(false)
}

#[tokio::test]
async fn head_and_body_go_through_without_connection_fields() {
    let (at, told) = answering(
        "HTTP/1.1 201 Created\r\nkeep-alive: timeout=5\r\nconnection: x-hop\r\nx-hop: 1\r\nx-app: 2\r\ncontent-length: 4\r\n\r\nbody",
    )
    .await;
    let request = Request::builder()
        .method("POST")
        .uri("http://3000-0123456789ab.sandboxes.example/a%20b?c=d")
        .header("host", "x")
        .header("connection", "close, x-one, content-length")
        .header("x-one", "1")
        .header("content-length", "2")
        .header("e2b-sandbox-id", ID)
        .header("e2b-traffic-access-token", "of-the-ports")
        .header("te", "trailers")
        .header("authorization", "Bearer of-the-app");
    let (proxy, (_closing, closing)) = (Proxy::default(), open());
    let answer = proxy
        .send(
            ID.into(),
            to(at),
            request.body(Body::from("hi")).unwrap(),
            closing,
        )
        .await
        .unwrap();
    let head = told.await.unwrap();
    assert!(head.starts_with("POST /a%20b?c=d HTTP/1.1\r\n"), "{head}");
    assert!(
        head.contains("host: 3000-0123456789ab.sandboxes.example\r\n"),
        "{head}"
    );
    assert!(head.contains("authorization: Bearer of-the-app\r\n") && head.contains("content-length: 2\r\n"));
    for gone in ["x-one", "e2b-sandbox", "of-the-ports", "te:", "close"] {
        assert!(!head.contains(gone), "{gone} in {head}");
    }
    assert_eq!(answer.status(), StatusCode::CREATED);
    let fields = answer.headers();
    assert!(
        fields.contains_key("x-app") && !fields.contains_key("x-hop") && !fields.contains_key("keep-alive")
    );
    assert_eq!(answer.into_body().collect().await.unwrap().to_bytes(), "body");
    while proxy.places.count() > 0 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn request_of_http2_reaches_the_guest_over_http1() {
    let (at, told) = answering("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await;
    let request = Request::builder()
        .version(axum::http::Version::HTTP_2)
        .method("POST")
        .uri("https://3000-0123456789ab.sandboxes.example/a?b")
        .header("te", "trailers");
    // Its length is not known.
    let body = futures_util::stream::once(async { Ok::<_, std::convert::Infallible>("hi") });
    let request = request.body(Body::from_stream(body)).unwrap();
    let (proxy, (_closing, closing)) = (Proxy::default(), open());
    let answer = proxy.send(ID.into(), to(at), request, closing).await.unwrap();
    assert_eq!(answer.into_body().collect().await.unwrap().to_bytes(), "ok");
    let head = told.await.unwrap();
    assert!(head.starts_with("POST /a?b HTTP/1.1\r\n"), "{head}");
    assert!(
        head.contains("host: 3000-0123456789ab.sandboxes.example\r\n"),
        "{head}"
    );
    assert!(
        head.contains("transfer-encoding: chunked\r\n") && !head.contains("te: "),
        "{head}"
    );
}

#[tokio::test]
async fn upgraded_connection_is_joined_until_thawd_ends() {
    let at = guest(|mut stream| async move {
        let head = head(&mut stream).await;
        assert!(head.contains("upgrade: websocket\r\n") && head.contains("connection: upgrade\r\n"), "{head}");
        let answer = "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\nx-key: 1\r\n\r\nhello";
        stream.write_all(answer.as_bytes()).await.unwrap();
        let mut echoed = [0; 4];
        stream.read_exact(&mut echoed).await.unwrap();
        stream.write_all(&echoed).await.unwrap();
        assert_eq!(stream.read(&mut echoed).await.unwrap_or(0), 0);
    })
    .await;
    let (proxy, (close, closing)) = (Proxy::default(), open());
    let proxied = proxy.clone();
    let routes = axum::Router::new().fallback(move |request: axum::extract::Request| async move {
        proxied.send(ID.into(), to(at), request, closing).await.unwrap()
    });
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address: SocketAddr = listener.local_addr().unwrap();
    let (_stop, stopped) = watch::channel(());
    tokio::spawn(async move {
        let stream = listener.accept().await.unwrap().0;
        connection::serve(stream, None::<u8>, routes, stopped).await;
    });
    let mut client = TcpStream::connect(address).await.unwrap();
    client
        .write_all(
            b"GET /ws HTTP/1.1\r\nhost: x\r\nConnection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n\r\n",
        )
        .await
        .unwrap();
    let answer = head(&mut client).await;
    assert!(
        answer.starts_with("HTTP/1.1 101") && answer.contains("x-key: 1\r\n"),
        "{answer}"
    );
    let mut text = [0; 5];
    client.read_exact(&mut text).await.unwrap();
    assert_eq!(&text, b"hello");
    client.write_all(b"ping").await.unwrap();
    client.read_exact(&mut text[..4]).await.unwrap();
    assert_eq!(&text[..4], b"ping");
    assert_eq!(proxy.places.count(), 1);
    assert_eq!(proxy.idle.count(), 0);
    close.send_replace(true);
    assert_eq!(client.read(&mut text).await.unwrap_or(0), 0);
    while proxy.places.count() > 0 {
        tokio::task::yield_now().await;
    }
    assert_eq!(proxy.idle.count(), 0, "it speaks HTTP no more");
}

#[tokio::test]
async fn guest_that_does_not_answer_is_an_error() {
    let (proxy, (_closing, closing)) = (Proxy::default(), open());
    let ask = async |at| {
        proxy
            .send(ID.into(), to(at), Request::new(Body::empty()), closing.clone())
            .await
    };
    // The port stays bound, so that no other test listens at it.
    let bound = TcpSocket::new_v4().unwrap();
    bound.bind((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
    let port = bound.local_addr().unwrap().port();
    assert!(matches!(
        ask((Ipv4Addr::LOCALHOST, port)).await,
        Err(Failed::NotOpen)
    ));
    let hangs_up = guest(|stream| async move { drop(stream) }).await;
    assert!(matches!(ask(hangs_up).await, Err(Failed::Broken(_))));
    let (long, _) = answering("HTTP/1.1 200 OK\r\nx: ").await;
    let endless = ask(long);
    let too_late = tokio::time::timeout(Duration::from_millis(100), endless).await;
    assert!(
        too_late.is_err(),
        "it waits, and a caller that leaves frees the place"
    );
    while proxy.places.count() > 0 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn answer_that_switches_unasked_is_an_error() {
    let (at, _told) =
        answering("HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n").await;
    let (proxy, (_closing, closing)) = (Proxy::default(), open());
    let sent = proxy
        .send(ID.into(), to(at), Request::new(Body::empty()), closing)
        .await;
    let is_refused = sent.is_err() || sent.is_ok_and(|answer| answer.status() == StatusCode::BAD_GATEWAY);
    assert!(is_refused);
}
