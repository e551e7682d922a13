//! Metrics and health over TCP, for callers without access to the API: `[metrics] listen`.
//!
//! Invariants: nothing else is served here, whatever is asked, and nobody is asked who he is; what is served names no sandbox and no
//! tenant. A connection is answered one request at a time, there are at most [`MOST`], and metrics are collected for [`AT_ONCE`] of them.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::middleware::from_fn;
use axum::response::Response;
use axum::routing::get;
use axum::{Extension, Router};
use thaw_sandbox::config::api::MetricsConfig;
use thaw_sandbox::exit::Failure;
use tokio::sync::{Semaphore, watch};

use super::daemon::Daemon;
use super::limits::Gate;
use super::listener::{Listener, Most};
use super::peer::Peer;
use super::problem::{ApiCode, Refusal};
use super::server::serve_one;
use super::{health, metrics, problem, rest};

/// Most connections at once.
const MOST: Most = Most {
    in_all: 64,
    of_one: 16,
};
/// So many callers have metrics collected at once, and the others wait: it takes a thread, and locks that the API takes too.
const AT_ONCE: usize = 2;

/// A TCP socket that listens for who reads metrics.
pub struct Scrape {
    listener: Listener,
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
        let listener = Listener::open(address).await;
        let listener =
            listener.map_err(|e| Failure::system(format!("[metrics]: cannot listen at {address}"), &e))?;
        Ok(Some(Scrape { listener }))
    }

    /// Where it listens.
    pub fn address(&self) -> std::io::Result<SocketAddr> {
        self.listener.address()
    }

    /// Serves until `stopped`, and then as long as who is being served may take. `gate` is the API's, whose load is shown.
    pub async fn serve(
        self,
        daemon: Arc<Daemon>,
        gate: Arc<Gate>,
        stopped: watch::Receiver<()>,
        lingers: Duration,
    ) {
        let routes = routes(daemon.clone(), gate, Arc::new(Semaphore::new(AT_ONCE)));
        let stop = stopped.clone();
        let serve = move |stream, _| serve_one(stream, None::<Peer>, routes.clone(), stopped.clone());
        self.listener.serve(&daemon, MOST, stop, lingers, serve).await;
    }
}

/// Of the API's handlers these two, which need no caller.
fn routes(daemon: Arc<Daemon>, gate: Arc<Gate>, turns: Arc<Semaphore>) -> Router {
    Router::new()
        .route("/metrics", get(in_turn))
        .route("/v1/health", get(health::health))
        .fallback(problem::no_such_route)
        .method_not_allowed_fallback(problem::wrong_method)
        .layer(Extension(gate))
        .layer(Extension(turns))
        .layer(from_fn(problem::say))
        .layer(from_fn(rest::take))
        .with_state(daemon)
}

/// Metrics, when it is this request's turn. The turn ends with the work, also where its caller does not wait for that.
async fn in_turn(
    State(daemon): State<Arc<Daemon>>,
    Extension(gate): Extension<Arc<Gate>>,
    Extension(turns): Extension<Arc<Semaphore>>,
) -> Result<Response, Refusal> {
    let turn = turns.acquire_owned().await;
    let turn = turn.map_err(|e| Refusal::new(ApiCode::Broken, e))?;
    metrics::told(daemon, gate, turn).await
}

#[cfg(test)]
#[path = "scrape_test.rs"]
mod tests;
