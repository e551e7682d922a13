//! Metrics and health over TCP, without authentication: `[metrics] listen`.
//!
//! Invariants: nothing but metrics and health is served here; they name no sandbox and no tenant. There are at most [`MOST`]
//! connections, each is answered one request at a time, and at most [`AT_ONCE`] requests collect metrics at the same time.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::middleware::from_fn;
use axum::response::Response;
use axum::routing::get;
use axum::{Extension, Router};
use thaw_sandbox::config::api::MetricsConfig;
use thaw_sandbox::error::Error;
use tokio::sync::{Semaphore, watch};

use super::daemon::Daemon;
use super::listener::{Listener, Most};
use super::peer::Peer;
use super::problem::{ApiCode, Refusal};
use super::request_gate::Gate;
use super::{connection, health, metrics, problem, unread_body};

/// Most connections at once.
const MOST: Most = Most {
    in_all: 64,
    of_one: 16,
};
/// Maximum number of requests that collect metrics at once; others wait. Each takes a thread, and locks that the API needs too.
const AT_ONCE: usize = 2;

/// A listening TCP socket for metrics.
pub struct Scrape {
    listener: Listener,
}

impl Scrape {
    /// Listens at the configured address; `None` if there is none. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// thawd cannot listen at this address.
    pub async fn open(config: &MetricsConfig) -> Result<Option<Scrape>, Error> {
        let Some(address) = config.listen else {
            return Ok(None);
        };
        let listener = Listener::open(address).await;
        let listener =
            listener.map_err(|e| Error::system(format!("[metrics]: cannot listen at {address}"), &e))?;
        Ok(Some(Scrape { listener }))
    }

    /// Where it listens.
    pub fn address(&self) -> std::io::Result<SocketAddr> {
        self.listener.address()
    }

    /// Serves until `stopped`, then waits for the remaining requests. `gate` is the API's: its load is one of the metrics.
    pub async fn serve(
        self,
        daemon: Arc<Daemon>,
        gate: Arc<Gate>,
        stopped: watch::Receiver<()>,
        shutdown_timeout: Duration,
    ) {
        let routes = routes(daemon.clone(), gate, Arc::new(Semaphore::new(AT_ONCE)));
        let stop = stopped.clone();
        let serve = move |stream, _| connection::serve(stream, None::<Peer>, routes.clone(), stopped.clone());
        self.listener
            .serve(&daemon, MOST, stop, shutdown_timeout, serve)
            .await;
    }
}

/// The two handlers of the API that need no authentication.
fn routes(daemon: Arc<Daemon>, gate: Arc<Gate>, turns: Arc<Semaphore>) -> Router {
    Router::new()
        .route("/metrics", get(in_turn))
        .route("/v1/health", get(health::health))
        .fallback(problem::no_such_route)
        .method_not_allowed_fallback(problem::wrong_method)
        .layer(Extension(gate))
        .layer(Extension(turns))
        .layer(from_fn(problem::write_problems))
        .layer(from_fn(unread_body::read_rest))
        .with_state(daemon)
}

/// Waits for this request's turn, then collects metrics. The turn lasts until the work is done, even if the caller hangs up.
async fn in_turn(
    State(daemon): State<Arc<Daemon>>,
    Extension(gate): Extension<Arc<Gate>>,
    Extension(turns): Extension<Arc<Semaphore>>,
) -> Result<Response, Refusal> {
    let turn = turns.acquire_owned().await;
    let turn = turn.map_err(|e| Refusal::new(ApiCode::Broken, e))?;
    metrics::collect(daemon, gate, turn).await
}

#[cfg(test)]
#[path = "scrape_test.rs"]
mod tests;
