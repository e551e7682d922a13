//! Serving the API over TCP: to who shows a certificate or brings a token.
//!
//! Invariants: nobody is served whom neither names; a connection has [`HEAD_LIMIT`] for its handshake, and there are at
//! most [`MOST`]; what is configured is either all of what it needs, or an error.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Request, State};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use thaw_sandbox::config::api::ApiConfig;
use thaw_sandbox::exit::{ExitCode, Failure};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;

use super::client_roles::ClientCertificate;
use super::credentials::Credentials;
use super::daemon::Daemon;
use super::lease::{Lease, Shown};
use super::listener::{Listener, Most};
use super::peer::Peer;
use super::problem::say;
use super::server::{HEAD_LIMIT, serve_one};

/// Most connections at once.
const MOST: Most = Most {
    in_all: 4096,
    of_one: 1024,
};

/// A TCP socket that listens, and who may ask there.
pub struct Tcp {
    listener: Listener,
    credentials: Arc<Credentials>,
}

impl Tcp {
    /// As the configuration says; none where it says nothing. Within a tokio runtime.
    ///
    /// # Errors
    /// `config-invalid`: something is missing, or cannot be used.
    pub async fn open(config: &ApiConfig) -> Result<Option<Tcp>, Failure> {
        let Some(address) = config.listen else {
            return match *config == ApiConfig::default() {
                true => Ok(None),
                false => Err(invalid("there is no listen, the address to serve at")),
            };
        };
        let secured = config.certificate.is_some();
        if secured != config.key.is_some() {
            return Err(invalid("certificate and key go together"));
        }
        if config.tokens.is_none() && config.client_ca.is_none() {
            return Err(invalid("with listen goes tokens or client_ca: who may ask"));
        }
        if !secured && config.client_ca.is_some() {
            return Err(invalid("with client_ca go certificate and key"));
        }
        if config.client_roles.is_some() && config.client_ca.is_none() {
            return Err(invalid(
                "with client_roles goes client_ca: whose certificates have them",
            ));
        }
        if !secured && !address.ip().is_loopback() {
            return Err(invalid(
                "without certificate and key it listens on a loopback address alone",
            ));
        }
        let credentials = Arc::new(Credentials::read(config)?);
        let listener = Listener::open(address).await;
        let listener = listener.map_err(|e| Failure::system(format!("cannot listen at {address}"), &e))?;
        Ok(Some(Tcp {
            listener,
            credentials,
        }))
    }

    /// Who may ask there, to be read again.
    pub fn credentials(&self) -> Arc<Credentials> {
        self.credentials.clone()
    }

    /// Where it listens.
    pub fn address(&self) -> std::io::Result<SocketAddr> {
        self.listener.address()
    }

    /// Serves routes until `stopped`, and then as long as who is being served may take.
    pub async fn serve(
        self,
        daemon: &Daemon,
        routes: Router,
        stopped: watch::Receiver<()>,
        lingers: Duration,
    ) {
        let Tcp {
            listener,
            credentials,
        } = self;
        let guarded = routes
            .layer(from_fn_with_state(credentials.clone(), authenticate))
            .layer(from_fn(say));
        let stop = stopped.clone();
        let serve = move |stream, address| {
            let (tls, routes) = (credentials.tls(), guarded.clone());
            serve_tcp(stream, address, tls, routes, stopped.clone())
        };
        listener.serve(daemon, MOST, stop, lingers, serve).await;
    }
}

fn invalid(why: &str) -> Failure {
    Failure::new(ExitCode::ConfigInvalid, format!("[api]: {why}"))
}

async fn serve_tcp(
    stream: TcpStream,
    address: IpAddr,
    tls: Option<TlsAcceptor>,
    routes: Router,
    mut stopped: watch::Receiver<()>,
) {
    let Some(tls) = tls else {
        return serve_one(stream, None::<Peer>, routes, stopped).await;
    };
    let handshake = tokio::time::timeout(HEAD_LIMIT, tls.accept(stream));
    let stream = tokio::select! {
        stream = handshake => stream,
        _ = stopped.changed() => return,
    };
    let stream = match stream {
        Ok(Ok(stream)) => stream,
        Ok(Err(e)) => return tracing::debug!(%address, "a handshake failed: {e}"),
        Err(_) => return tracing::debug!(%address, "a handshake did not end in time"),
    };
    let shown = stream.get_ref().1.peer_certificates();
    let shown = shown.and_then(|chain| chain.first());
    let certificate = shown.map(|shown| Arc::new(ClientCertificate::read(shown)));
    serve_one(stream, certificate, routes, stopped).await;
}

/// Who asks, by the certificate its connection showed, or else by the token this request brings; what it may do, by what is in force
/// when it asks. What the request opens lasts no longer than the [`Lease`] it has among its extensions.
async fn authenticate(
    State(credentials): State<Arc<Credentials>>,
    mut request: Request,
    next: Next,
) -> Response {
    let certificate = request.extensions().get::<Arc<ClientCertificate>>().cloned();
    let shown = Shown::take(certificate, request.headers_mut());
    let peer = match credentials.admit(&shown) {
        Ok(admission) => admission.peer,
        Err(refusal) => return refusal.into_response(),
    };
    let lease = Lease::new(credentials, shown, peer.clone());
    request.extensions_mut().insert(peer);
    request.extensions_mut().insert(Arc::new(lease));
    next.run(request).await
}

#[cfg(test)]
#[path = "tcp_test.rs"]
mod tests;
