//! Metrics and health over TCP, for who has no part in the API: `[metrics] listen`.
//!
//! Invariants: nothing else is served here, whatever is asked, and nobody is asked who he is; what is served names no sandbox and no
//! tenant. A connection is answered one request at a time, and there are at most [`MOST_CONNECTIONS`], [`MOST_OF_ONE`] of one address.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::middleware::from_fn;
use axum::routing::get;
use axum::{Extension, Router};
use tokio::net::TcpListener;
use tokio::sync::watch;

use super::daemon::Daemon;
use super::limits::Gate;
use super::peer::Peer;
use super::server::{ACCEPT_AGAIN, Connections, linger, serve_one};
use super::tcp::patient;
use super::{health, metrics, problem, rest};
use crate::config::api::MetricsConfig;
use crate::exit::Failure;

/// Most connections at once.
const MOST_CONNECTIONS: usize = 64;
/// Most of one address.
const MOST_OF_ONE: usize = 16;

/// A TCP socket that listens for who reads metrics.
pub struct Scrape {
    listener: TcpListener,
}

impl Scrape {
    /// As the configuration says; none where it says nothing. Within a tokio runtime.
    ///
    /// # Errors
    /// Nobody can listen there.
    pub async fn open(config: &MetricsConfig) -> Result<Option<Scrape>, Failure> {
        let Some(address) = config.listen else {
            return Ok(None);
        };
        let listener = TcpListener::bind(address).await;
        let listener =
            listener.map_err(|e| Failure::system(format!("[metrics]: cannot listen at {address}"), &e))?;
        Ok(Some(Scrape { listener }))
    }

    /// Where it listens.
    pub fn address(&self) -> std::io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves until `stopped`, and then as long as who is being served may take. `gate` is the API's, whose load is shown.
    pub async fn serve(
        self,
        daemon: Arc<Daemon>,
        gate: Arc<Gate>,
        stopped: watch::Receiver<()>,
        lingers: Duration,
    ) {
        let routes = routes(daemon, gate);
        let mut connections = Connections::new(MOST_CONNECTIONS, MOST_OF_ONE);
        let mut stop = stopped.clone();
        loop {
            let accepted = tokio::select! {
                accepted = self.listener.accept() => accepted,
                _ = stop.changed() => break,
            };
            connections.reap();
            match accepted {
                Ok((stream, from)) => {
                    let origin = from.ip().to_canonical();
                    // Who has no room is cut off.
                    if connections.has_room(&origin) && patient(&stream).is_ok() {
                        let serving = serve_one(stream, None::<Peer>, routes.clone(), stopped.clone());
                        connections.add(origin, serving);
                    }
                }
                Err(e) => {
                    tracing::warn!("cannot accept a connection: {e}");
                    tokio::time::sleep(ACCEPT_AGAIN).await;
                }
            }
        }
        drop(self.listener);
        linger(connections, lingers).await;
    }
}

/// Of the API's handlers these two, which need no caller.
fn routes(daemon: Arc<Daemon>, gate: Arc<Gate>) -> Router {
    Router::new()
        .route("/metrics", get(metrics::metrics))
        .route("/v1/health", get(health::health))
        .fallback(problem::no_such_route)
        .method_not_allowed_fallback(problem::wrong_method)
        .layer(Extension(gate))
        .layer(from_fn(problem::say))
        .layer(from_fn(rest::take))
        .with_state(daemon)
}

#[cfg(test)]
#[path = "scrape_test.rs"]
mod tests;
