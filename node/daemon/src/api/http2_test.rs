use std::sync::atomic::{AtomicUsize, Ordering};

use axum::body::{Body, Bytes};
use axum::extract::Request as Asked;
use http_body_util::BodyExt;
use hyper::client::conn::http2 as client;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::sync::{Notify, Semaphore};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::*;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// `GET http://x/`, encoded (RFC 7541).
const GET: &[u8] = &[0x82, 0x86, 0x84, 0x41, 1, b'x'];
/// Kinds and flags of frames (RFC 9113, section 6).
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const CONTINUATION: u8 = 9;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
/// Shorter than any limit that would end a connection anyway.
const SOON: Duration = Duration::from_secs(10);

/// A connection that is served.
struct Served {
    stream: DuplexStream,
    stop: watch::Sender<()>,
    serving: JoinHandle<()>,
}

fn serving(routes: Router) -> Served {
    let (stream, theirs) = tokio::io::duplex(1 << 20);
    let (stop, stopped) = watch::channel(());
    let serving = tokio::spawn(serve(theirs, Some(7_u8), routes, stopped));
    Served {
        stream,
        stop,
        serving,
    }
}

async fn connect(stream: DuplexStream) -> client::SendRequest<Body> {
    let connected = client::handshake(TokioExecutor::new(), TokioIo::new(stream));
    let (sender, http) = connected.await.unwrap();
    tokio::spawn(http);
    sender
}

fn get() -> axum::http::request::Builder {
    Request::builder().uri("http://a.example/x")
}

fn empty(request: axum::http::request::Builder) -> Request<Body> {
    request.body(Body::empty()).unwrap()
}

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    let head = [&length[1..], &[kind, flags][..], &stream.to_be_bytes()[..]].concat();
    [head.as_slice(), payload].concat()
}

fn beginning() -> Vec<u8> {
    [PREFACE, frame(SETTINGS, 0, 0, &[]).as_slice()].concat()
}

#[tokio::test]
async fn head_is_what_it_would_be_over_http1() {
    let routes = Router::new().fallback(|asked: Asked| async move {
        let fields = asked.headers();
        let known = asked.extensions().get::<u8>();
        format!("{:?} {:?} {known:?}", fields[HOST], fields[COOKIE])
    });
    let served = serving(routes);
    let mut sender = connect(served.stream).await;
    let request = get()
        .header(HOST, "b.example")
        .header(COOKIE, "a=1")
        .header(COOKIE, "b=2");
    let answer = sender.send_request(empty(request)).await.unwrap();
    let body = answer.into_body().collect().await.unwrap().to_bytes();
    assert_eq!(body, r#""a.example" "a=1; b=2" Some(7)"#);
    let many = (0..=MAX_FIELDS).fold(get(), |request, n| request.header(format!("x-{n}"), "1"));
    let refused = sender.send_request(empty(many)).await.unwrap();
    assert_eq!(refused.status(), StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE);
}

#[tokio::test(start_paused = true)]
async fn connection_without_requests_ends() {
    let slow = HEAD_LIMIT * 3;
    let routes = Router::new().fallback(move || tokio::time::sleep(slow));
    let served = serving(routes);
    let mut sender = connect(served.stream).await;
    let begun = Instant::now();
    let answer = sender.send_request(empty(get())).await.unwrap();
    assert_eq!(answer.status(), StatusCode::OK);
    assert!(begun.elapsed() >= slow, "a request keeps it open");
    served.serving.await.unwrap();
    assert!(begun.elapsed() >= slow + HEAD_LIMIT);
}

#[tokio::test(start_paused = true)]
async fn silent_client_does_not_hold_a_connection() {
    let mut served = serving(Router::new());
    served.stream.write_all(&beginning()).await.unwrap();
    served.serving.await.unwrap();
}

#[tokio::test]
async fn request_is_answered_after_the_stop() {
    let (begun, end) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (begins, ends) = (begun.clone(), end.clone());
    let routes = Router::new().fallback(move || async move {
        begins.notify_one();
        ends.notified().await;
    });
    let Served {
        stream,
        stop,
        serving,
    } = serving(routes);
    let mut sender = connect(stream).await;
    let asked = sender.send_request(empty(get()));
    let stopped = async {
        begun.notified().await;
        drop(stop);
        tokio::task::yield_now().await;
        end.notify_one();
    };
    let (answer, ()) = tokio::join!(asked, stopped);
    assert_eq!(answer.unwrap().status(), StatusCode::OK);
    serving.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn answer_that_is_not_read_is_given_up() {
    let places = Arc::new(Semaphore::new(1));
    let free = places.clone();
    let routes = Router::new().fallback(move || async move {
        let place = places.try_acquire_owned().unwrap();
        let chunk = Ok::<_, Infallible>(Bytes::from_static(&[0; 1024]));
        holding(Body::from_stream(futures_util::stream::repeat(chunk)), place)
    });
    let served = serving(routes);
    let mut sender = connect(served.stream).await;
    let answer = sender.send_request(empty(get())).await.unwrap();
    assert_eq!(free.available_permits(), 0);
    tokio::time::sleep(UNREAD_LIMIT * 2).await;
    assert_eq!(free.available_permits(), 1);
    drop(answer);
    served.serving.await.unwrap();
}

#[tokio::test]
async fn head_without_end_ends_the_connection() {
    let mut served = serving(Router::new());
    let mut first = beginning();
    first.extend(frame(HEADERS, 0, 1, GET));
    served.stream.write_all(&first).await.unwrap();
    // A field, and not the last.
    let more = frame(CONTINUATION, 0, 1, &[0, 1, b'a', 1, b'b']);
    let endless = async { while served.stream.write_all(&more).await.is_ok() {} };
    timeout(SOON, endless).await.expect("the connection is closed");
    served.serving.await.unwrap();
}

#[tokio::test]
async fn client_that_cancels_without_end_is_cut() {
    let asked = Arc::new(AtomicUsize::new(0));
    let count = asked.clone();
    let routes = Router::new().fallback(move || async move {
        count.fetch_add(1, Ordering::SeqCst);
    });
    let mut all = beginning();
    for stream in (1..2000).step_by(2) {
        all.extend(frame(HEADERS, END_STREAM | END_HEADERS, stream, GET));
        all.extend(frame(RST_STREAM, 0, stream, &[0, 0, 0, 8]));
    }
    let mut served = serving(routes);
    served.stream.write_all(&all).await.unwrap();
    let cut = served.stream.read_to_end(&mut all);
    timeout(SOON, cut)
        .await
        .expect("the connection is closed")
        .unwrap();
    served.serving.await.unwrap();
    assert!(asked.load(Ordering::SeqCst) < 100);
}
