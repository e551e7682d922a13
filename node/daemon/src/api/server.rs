//! Serving the API on a unix socket, and over TCP where that is configured ([`super::tcp`], and metrics alone [`super::scrape`]).
//!
//! Invariants: a connection holds a bounded buffer, and only while its peer keeps sending heads and reading answers in time;
//! there are never more than [`MOST_CONNECTIONS`], nor more than [`MOST_OF_ONE`] of one peer; who may not be served is told so
//! and nothing more. When serving ends, watches and
//! processes end first, what is being answered has [`LINGERS`] to end, and the rest is cut.

use std::collections::HashMap;
use std::hash::Hash;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::response::IntoResponse;
use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::Service;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustix::net::SocketType;
use thaw_failpoint::{Failpoint, reach};
use thaw_pools::vmm;
use thaw_sandbox::exit::{ExitCode, Failure};
use thaw_sandbox::sandbox::{Node, Sandbox};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::daemon::Daemon;
use super::limits::{Bounds, Gate};
use super::patience::{Patient, STALL};
use super::peer::{Access, Peer, user_of};
use super::problem::{ApiCode, RETRY_AFTER_S, Refusal, say};
use super::router::router;
use super::scrape::Scrape;
use super::tcp::Tcp;

/// Most connections at once.
const MOST_CONNECTIONS: usize = 8192;
/// Most of one peer.
const MOST_OF_ONE: usize = 6144;
/// How long a request's head may take to come, and a connection may be idle.
pub const HEAD_LIMIT: Duration = Duration::from_secs(30);
/// Largest head, bytes; what is buffered of a body at once.
const MAX_HEAD: usize = 64 << 10;
/// Most header fields.
const MAX_FIELDS: usize = 64;
/// How long the last callers are waited for.
pub const LINGERS: Duration = Duration::from_secs(30);
/// The same, of an owner of one sandbox: its machine has ended, so nobody is served for long.
const OWNER_LINGERS: Duration = Duration::from_secs(2);
/// After an accept that failed, for want of descriptors most likely.
pub const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

/// Where thawd serves over TCP.
#[derive(Default)]
pub struct OverTcp {
    /// The API.
    pub api: Option<Tcp>,
    /// Metrics and health alone.
    pub scrape: Option<Scrape>,
}

/// Serves until `end`; `listens` is called when callers can connect. One socket a dead thawd left is replaced, a living one's
/// is not.
pub async fn serve(
    daemon: Arc<Daemon>,
    socket: &Path,
    access: Access,
    tcp: OverTcp,
    listens: impl FnOnce(),
    end: impl Future<Output = ()>,
) -> Result<(), Failure> {
    if vmm::is_served(socket) {
        let what = format!("another thawd serves {}", socket.display());
        return Err(Failure::new(ExitCode::Runtime, what).remedy("stop it first, or set THAW_RUN"));
    }
    if std::fs::remove_file(socket).is_ok() {
        reach(Failpoint::ServeOldRemoved);
    }
    let listener = listen(socket, access)?;
    reach(Failpoint::ServeListening);
    listens();
    serve_all(&daemon, listener, access, tcp, end, LINGERS).await;
    let _ = std::fs::remove_file(socket);
    reach(Failpoint::ServeEnded);
    daemon.release().await;
    reach(Failpoint::ServeReleased);
    Ok(())
}

fn listen(socket: &Path, access: Access) -> Result<UnixListener, Failure> {
    let fail = |e: std::io::Error| Failure::system(format!("cannot listen at {}", socket.display()), &e);
    let listener = std::os::unix::net::UnixListener::from(vmm::listen(socket, SocketType::STREAM)?);
    reach(Failpoint::ServeBound);
    // Before anybody is accepted: who was quicker is asked who it is.
    let permitted = match access.group {
        Some(group) => chown(socket, None, Some(group)),
        None => Ok(()),
    };
    permitted
        .and_then(|()| std::fs::set_permissions(socket, PermissionsExt::from_mode(access.mode())))
        .and_then(|()| listener.set_nonblocking(true))
        .and_then(|()| UnixListener::from_std(listener))
        .map_err(fail)
}

/// Connections, by what tells one peer's from another's.
pub struct Connections<K> {
    serving: JoinSet<K>,
    by_peer: HashMap<K, usize>,
    most: usize,
    most_of_one: usize,
}

impl<K: Clone + Eq + Hash + Send + 'static> Connections<K> {
    /// At most so many at once, and of one peer.
    pub fn new(most: usize, most_of_one: usize) -> Connections<K> {
        Connections {
            serving: JoinSet::new(),
            by_peer: HashMap::new(),
            most,
            most_of_one,
        }
    }

    /// Whether this peer may have one more.
    pub fn has_room(&self, peer: &K) -> bool {
        let mine = self.by_peer.get(peer).copied().unwrap_or(0);
        self.serving.len() < self.most && mine < self.most_of_one
    }

    /// Serves one more.
    pub fn add(&mut self, peer: K, connection: impl Future<Output = ()> + Send + 'static) {
        *self.by_peer.entry(peer.clone()).or_default() += 1;
        self.serving.spawn(async move {
            connection.await;
            peer
        });
    }

    /// Forgets those that ended.
    pub fn reap(&mut self) {
        while let Some(ended) = self.serving.try_join_next() {
            // One that panicked is counted for ever: it does not happen, and errs on the side of less.
            let Ok(peer) = ended else { continue };
            if let Some(count) = self.by_peer.get_mut(&peer) {
                *count -= 1;
                if *count == 0 {
                    self.by_peer.remove(&peer);
                }
            }
        }
    }
}

/// Waits for the last connections, but not for ever.
pub async fn linger<K: 'static>(mut connections: Connections<K>, lingers: Duration) {
    let all_ended = async { while connections.serving.join_next().await.is_some() {} };
    if tokio::time::timeout(lingers, all_ended).await.is_err() {
        tracing::warn!("connections were cut");
    }
    connections.serving.shutdown().await;
}

/// Serves routes on a unix socket until `stopped`, and then as long as who is being served may take.
async fn accept(
    daemon: &Daemon,
    routes: Router,
    listener: UnixListener,
    access: Access,
    stopped: watch::Receiver<()>,
    lingers: Duration,
) {
    let mut connections = Connections::new(MOST_CONNECTIONS, MOST_OF_ONE);
    let mut stop = stopped.clone();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = stop.changed() => break,
        };
        connections.reap();
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(e) => {
                tracing::warn!("cannot accept a connection: {e}");
                tokio::time::sleep(ACCEPT_AGAIN).await;
                continue;
            }
        };
        let Ok(uid) = user_of(&stream) else { continue };
        if !access.allows(uid) {
            let what = format!("user {uid} is neither root nor the user thawd runs as");
            connections.add(uid, turn_away(stream, ApiCode::NotAllowed, what));
        } else if !connections.has_room(&uid) {
            // Said without a task: whoever does not read it misses it.
            let text = format!(
                "HTTP/1.1 429 Too Many Requests\r\nretry-after: {RETRY_AFTER_S}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
            );
            let _ = stream.try_write(text.as_bytes());
            daemon.metrics.connection_refused();
        } else {
            let (connected, routes) = (daemon.metrics.connected(), routes.clone());
            let serving = serve_one(stream, Some(Peer::user(uid)), routes, stopped.clone());
            connections.add(uid, async move {
                serving.await;
                drop(connected);
            });
        }
    }
    drop(listener);
    linger(connections, lingers).await;
}

/// Serves wherever it is to be, until `end`.
async fn serve_all(
    daemon: &Arc<Daemon>,
    listener: UnixListener,
    access: Access,
    tcp: OverTcp,
    end: impl Future<Output = ()>,
    lingers: Duration,
) {
    // One gate: who asks both ways has no more for it.
    let gate = Gate::new(Bounds::default());
    let routes = router(daemon.clone(), gate.clone());
    let (stop, stopped) = watch::channel(());
    let ending = async move {
        end.await;
        daemon.end();
        drop(stop);
    };
    let over_tcp = async {
        if let Some(tcp) = tcp.api {
            tcp.serve(daemon, routes.clone(), stopped.clone(), lingers).await;
        }
    };
    let scraped = async {
        if let Some(scrape) = tcp.scrape {
            scrape.serve(daemon.clone(), gate, stopped.clone(), lingers).await;
        }
    };
    let on_socket = accept(daemon, routes.clone(), listener, access, stopped.clone(), lingers);
    tokio::join!(ending, over_tcp, scraped, on_socket);
}

fn http() -> http1::Builder {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(HEAD_LIMIT)
        .max_buf_size(MAX_HEAD)
        .max_headers(MAX_FIELDS);
    http
}

/// Serves one connection to its end, or to the end of the request it is at when `stopped`. What is `known` of its peer each request
/// has among its extensions; where that is not who asks, each must say it.
pub async fn serve_one<K: Clone + Send + Sync + 'static>(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    known: Option<K>,
    routes: Router,
    mut stopped: watch::Receiver<()>,
) {
    let service = TowerToHyperService::new(routes);
    let service = hyper::service::service_fn(move |mut request: Request<Incoming>| {
        if let Some(known) = known.clone() {
            request.extensions_mut().insert(known);
        }
        service.call(request)
    });
    let io = TokioIo::new(Patient::new(stream, STALL));
    let connection = http().serve_connection(io, service).with_upgrades();
    let mut connection = std::pin::pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        _ = stopped.changed() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(e) = ended {
        tracing::debug!("a connection broke: {e}");
    }
}

/// Answers one request with a refusal.
async fn turn_away(stream: UnixStream, code: ApiCode, what: String) {
    let refuse = move || {
        let what = what.clone();
        async move { Refusal::new(code, what).into_response() }
    };
    let routes: Router = Router::new()
        .fallback(refuse)
        .layer(axum::middleware::from_fn(say));
    let service = TowerToHyperService::new(routes);
    let service =
        hyper::service::service_fn(move |request: Request<Incoming>| service.call(request.map(Body::new)));
    let io = TokioIo::new(Patient::new(stream, STALL));
    let served = http().keep_alive(false).serve_connection(io, service).await;
    if let Err(e) = served {
        tracing::debug!("a connection broke: {e}");
    }
}

/// The API of one sandbox, for as long as its owner holds it.
#[derive(Debug)]
pub struct OwnerService {
    end: tokio::sync::oneshot::Sender<()>,
    served: tokio::task::JoinHandle<()>,
}

impl OwnerService {
    /// Serves `sandbox` at `owner.sock` in its directory, which is for this user alone. Within a tokio runtime.
    pub fn start(node: Node, sandbox: Arc<Sandbox>) -> Result<OwnerService, Failure> {
        let access = Access::default();
        let listener = listen(&thaw_sandbox::state::owner_socket(&sandbox.directory()), access)?;
        let daemon = Daemon::of_one(node, sandbox);
        let (end, ended) = tokio::sync::oneshot::channel::<()>();
        let served = tokio::spawn(async move {
            let end = async { drop(ended.await) };
            serve_all(&daemon, listener, access, OverTcp::default(), end, OWNER_LINGERS).await;
        });
        Ok(OwnerService { end, served })
    }

    /// Waits until nobody is being served any more.
    pub async fn stop(self) {
        let _ = self.end.send(());
        if let Err(e) = self.served.await {
            tracing::warn!("the sandbox's API ended: {e}");
        }
    }
}

#[cfg(test)]
#[path = "server_test.rs"]
mod tests;
