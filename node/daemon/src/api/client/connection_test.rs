use std::os::unix::net::UnixListener;
use std::sync::atomic::{AtomicUsize, Ordering};

use http_body_util::BodyExt;
use hyper::service::service_fn;

use super::*;

/// A server that answers each request with its path, and counts its connections. `per_connection` is how many requests it answers before it
/// closes one.
struct Server {
    directory: tempfile::TempDir,
    connections: Arc<AtomicUsize>,
}

impl Server {
    fn start(per_connection: usize) -> Server {
        let directory = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(directory.path().join("socket")).unwrap();
        listener.set_nonblocking(true).unwrap();
        let listener = tokio::net::UnixListener::from_std(listener).unwrap();
        let connections = Arc::new(AtomicUsize::new(0));
        let count = connections.clone();
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                count.fetch_add(1, Ordering::Relaxed);
                tokio::spawn(serve(stream, per_connection));
            }
        });
        Server {
            directory,
            connections,
        }
    }

    async fn ask(&self, connections: &Connections, path: &str) -> String {
        let request = Request::get(path).header("host", "thawd").body(Full::default());
        let socket = self.directory.path().join("socket");
        let (response, mut connection) = connections.send(&socket, request.unwrap()).await.unwrap();
        let body = connection.receive(response.into_body().collect()).await.unwrap();
        connections.keep(connection);
        String::from_utf8(body.to_bytes().into()).unwrap()
    }

    fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }
}

async fn serve(stream: UnixStream, requests: usize) {
    let answered = AtomicUsize::new(0);
    let (done, mut last) = tokio::sync::mpsc::channel(1);
    let service = service_fn(|request: Request<Incoming>| {
        if answered.fetch_add(1, Ordering::Relaxed) + 1 == requests {
            done.try_send(()).unwrap();
        }
        let path = request.uri().path().to_owned();
        async move { Ok::<_, hyper::Error>(Response::new(Full::new(Bytes::from(path)))) }
    });
    let mut connection =
        pin!(hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service));
    tokio::select! {
        ended = connection.as_mut() => ended.unwrap(),
        _ = last.recv() => {
            // Closed without a word in the answer's head: the client cannot know.
            tokio::time::timeout(Duration::from_millis(50), connection).await.unwrap_or(Ok(())).unwrap();
        }
    }
}

#[tokio::test]
async fn requests_of_a_client_use_one_connection_after_each_other() {
    let (server, connections) = (Server::start(usize::MAX), Connections::default());
    for path in ["/a", "/b", "/c"] {
        assert_eq!(server.ask(&connections.clone(), path).await, path);
    }
    assert_eq!(server.connections(), 1);
}

#[tokio::test]
async fn requests_at_once_have_a_connection_each() {
    let (server, connections) = (Server::start(usize::MAX), Connections::default());
    for _ in 0..2 {
        tokio::join!(server.ask(&connections, "/a"), server.ask(&connections, "/b"));
    }
    assert_eq!(server.connections(), 2);
}

#[tokio::test]
async fn a_connection_that_was_closed_meanwhile_is_replaced() {
    let (server, connections) = (Server::start(1), Connections::default());
    for (count, path) in (1..).zip(["/a", "/b", "/c"]) {
        assert_eq!(server.ask(&connections, path).await, path);
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert_eq!(server.connections(), count);
    }
}

#[tokio::test]
async fn nobody_at_the_socket_is_an_error() {
    let directory = tempfile::tempdir().unwrap();
    let request = Request::get("/").body(Full::default()).unwrap();
    let sent = Connections::default()
        .send(&directory.path().join("none"), request)
        .await;
    assert!(sent.is_err());
}
