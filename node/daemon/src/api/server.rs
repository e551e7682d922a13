//! Serves the API on a unix socket, and over TCP if that is configured: all of it ([`super::tcp`]), or metrics alone
//! ([`super::scrape`]).
//!
//! Invariants: there are never more than [`MOST_CONNECTIONS`] on the unix socket, nor more than [`MOST_OF_ONE`] of one user; a user
//! without access gets an error and nothing else. At shutdown, watches and processes end first; requests that are being answered have
//! [`SHUTDOWN_TIMEOUT`] to end; then the remaining connections are cut.

use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use futures_util::future::BoxFuture;
use rustix::net::SocketType;
use thaw_failpoint::{Failpoint, reach};
use thaw_pools::vmm;
use thaw_sandbox::agent_client::OUTPUT_LINGERS;
use thaw_sandbox::error::{Error, ErrorKind};
use thaw_sandbox::{Node, Sandbox};
use tokio::net::UnixListener;
use tokio::sync::watch;

use super::connection;
use super::connection_set::{ACCEPT_RETRY, ConnectionSet};
use super::daemon::Daemon;
use super::peer::{Access, Peer, user_of};
use super::problem::{ApiCode, RETRY_AFTER_S};
use super::request_gate::{Bounds, Gate};
use super::router::router;
use super::scope::Wanted;
use super::scrape::Scrape;
use super::status_page;
use super::tcp::Tcp;

/// Most connections at once.
const MOST_CONNECTIONS: usize = 8192;
/// Most connections of one user.
const MOST_OF_ONE: usize = 6144;
/// How long requests that are being answered may take to end at shutdown.
pub const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(30);
/// The same for the owner of one sandbox: its machine has ended, so no request takes long.
const OWNER_SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(2);

/// The TCP sockets of thawd.
#[derive(Default)]
pub struct OverTcp {
    /// The API.
    pub api: Option<Tcp>,
    /// Metrics and health alone.
    pub scrape: Option<Scrape>,
    /// Another API for the same sandboxes.
    pub other: Option<Box<dyn OtherApi>>,
}

/// What every server over TCP needs.
#[derive(Clone)]
pub struct Serving {
    pub daemon: Arc<Daemon>,
    /// The gate of all sockets: a caller that uses several gets no larger share.
    pub gate: Arc<Gate>,
    /// Changes when the server must stop.
    pub stopped: watch::Receiver<()>,
    /// How long requests that are being answered may take then.
    pub shutdown_timeout: Duration,
}

/// A server of another API over TCP.
pub trait OtherApi: Send {
    /// Serves until it must stop, then waits for the remaining requests.
    fn serve(self: Box<Self>, serving: Serving) -> BoxFuture<'static, ()>;
}

/// Serves until `end`; `listens` is called when callers can connect. The socket of a dead thawd is replaced; the socket of a living one is
/// not.
pub async fn serve(
    daemon: Arc<Daemon>,
    socket: &Path,
    access: Access,
    tcp: OverTcp,
    listens: impl FnOnce(),
    end: impl Future<Output = ()>,
) -> Result<(), Error> {
    check_unserved(socket)?;
    if std::fs::remove_file(socket).is_ok() {
        reach(Failpoint::ServeOldRemoved);
    }
    let listener = listen(socket, access)?;
    reach(Failpoint::ServeListening);
    listens();
    serve_all(&daemon, listener, access, tcp, end, SHUTDOWN_TIMEOUT).await;
    let _ = std::fs::remove_file(socket);
    reach(Failpoint::ServeEnded);
    daemon.release().await;
    reach(Failpoint::ServeReleased);
    Ok(())
}

/// Checks that no living thawd serves this socket.
///
/// # Errors
/// One does.
pub fn check_unserved(socket: &Path) -> Result<(), Error> {
    if !vmm::is_served(socket) {
        return Ok(());
    }
    let what = format!("another thawd serves {}", socket.display());
    Err(Error::new(ErrorKind::Runtime, what).remedy("stop it first, or set THAW_RUN"))
}

fn listen(socket: &Path, access: Access) -> Result<UnixListener, Error> {
    let fail = |e: std::io::Error| Error::system(format!("cannot listen at {}", socket.display()), &e);
    let listener = std::os::unix::net::UnixListener::from(vmm::listen(socket, SocketType::STREAM)?);
    reach(Failpoint::ServeBound);
    // Set before the first accept. A caller that connected earlier is authenticated like any other.
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

/// Serves routes on a unix socket until `stopped`, then waits for the remaining requests.
async fn accept(
    daemon: Arc<Daemon>,
    routes: Router,
    listener: UnixListener,
    access: Access,
    stopped: watch::Receiver<()>,
    shutdown_timeout: Duration,
) {
    let mut connections = ConnectionSet::new(MOST_CONNECTIONS, MOST_OF_ONE);
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
                tokio::time::sleep(ACCEPT_RETRY).await;
                continue;
            }
        };
        let Ok(uid) = user_of(&stream) else { continue };
        if !access.allows(uid) {
            let what = format!("user {uid} is neither root nor the user thawd runs as");
            connections.add(uid, connection::refuse(stream, ApiCode::NotAllowed, what));
        } else if !connections.has_room(&uid) {
            // Written without a task: a peer that does not read at once misses it.
            let text = format!(
                "HTTP/1.1 429 Too Many Requests\r\nretry-after: {RETRY_AFTER_S}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
            );
            let _ = stream.try_write(text.as_bytes());
            daemon.metrics.connection_refused();
        } else {
            let (connected, routes) = (daemon.metrics.connected(), routes.clone());
            let serving = connection::serve(stream, Some(Peer::user(uid)), routes, stopped.clone());
            connections.add(uid, async move {
                serving.await;
                drop(connected);
            });
        }
    }
    drop(listener);
    connections.finish(shutdown_timeout).await;
}

/// Serves on the unix socket and over TCP until `end`.
async fn serve_all(
    daemon: &Arc<Daemon>,
    listener: UnixListener,
    access: Access,
    tcp: OverTcp,
    end: impl Future<Output = ()>,
    shutdown_timeout: Duration,
) {
    // One gate: a caller that uses several sockets gets no larger share.
    let gate = Gate::new(Bounds::default());
    let routes = router(daemon.clone(), gate.clone());
    let (stop, stopped) = watch::channel(());
    let ending = async move {
        end.await;
        daemon.end();
        drop(stop);
    };
    let over_tcp = {
        let (daemon, routes, stopped) = (daemon.clone(), routes.clone(), stopped.clone());
        async move {
            if let Some(tcp) = tcp.api {
                tcp.serve(&daemon, routes, stopped, shutdown_timeout).await;
            }
        }
    };
    let serving = Serving {
        daemon: daemon.clone(),
        gate: gate.clone(),
        stopped: stopped.clone(),
        shutdown_timeout,
    };
    let other = async move {
        if let Some(other) = tcp.other {
            other.serve(serving).await;
        }
    };
    let scraped = async {
        if let Some(scrape) = tcp.scrape {
            scrape
                .serve(daemon.clone(), gate, stopped.clone(), shutdown_timeout)
                .await;
        }
    };
    let on_socket = accept(
        daemon.clone(),
        routes.clone().merge(status_page::routes()),
        listener,
        access,
        stopped.clone(),
        shutdown_timeout,
    );
    // On the threads that serve connections: another thread would have to wake one of them for each.
    let (on_socket, over_tcp, other) = (
        tokio::spawn(on_socket),
        tokio::spawn(over_tcp),
        tokio::spawn(other),
    );
    let ((), (), on_socket, over_tcp, other) = tokio::join!(ending, scraped, on_socket, over_tcp, other);
    if let Err(e) = on_socket.and(over_tcp).and(other) {
        tracing::error!("a listener ended: {e}");
    }
}

/// The API of one sandbox, for as long as its owner holds it.
#[derive(Debug)]
pub struct OwnerService {
    end: tokio::sync::oneshot::Sender<()>,
    served: tokio::task::JoinHandle<()>,
    daemon: Arc<Daemon>,
    id: String,
}

impl OwnerService {
    /// Serves `sandbox` at `owner.sock` in its directory, to this user alone. Call it within a tokio runtime.
    pub fn start(node: Node, sandbox: Arc<Sandbox>) -> Result<OwnerService, Error> {
        let access = Access::default();
        let listener = listen(&thaw_sandbox::state::owner_socket(&sandbox.directory()), access)?;
        let id = sandbox.record().id.clone();
        let daemon = Daemon::of_one(node, sandbox);
        let serving = daemon.clone();
        let (end, ended) = tokio::sync::oneshot::channel::<()>();
        let served = tokio::spawn(async move {
            let end = async { drop(ended.await) };
            serve_all(
                &serving,
                listener,
                access,
                OverTcp::default(),
                end,
                OWNER_SHUTDOWN_TIMEOUT,
            )
            .await;
        });
        Ok(OwnerService {
            end,
            served,
            daemon,
            id,
        })
    }

    /// Keeps the output and the exit status of its container, from now on.
    pub fn monitor(&self) -> Result<(), Error> {
        self.daemon.monitor(&Wanted::on_node(&self.id))
    }

    /// Waits until its container has ended and is not started again.
    pub async fn exit(&self) -> Result<i32, Error> {
        let exit = self.daemon.exit_of(&Wanted::on_node(&self.id)).await;
        exit.map_err(|refusal| Error::new(ErrorKind::GuestEnded, refusal.to_string()))
    }

    /// After the end of its container's process: waits until all output is kept.
    pub async fn output_kept(&self) {
        if self.daemon.exited(&self.id, OUTPUT_LINGERS).await.is_none() {
            tracing::warn!("the end of the container's output did not arrive");
        }
    }

    /// Stops serving, and waits until the last request has ended.
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
