//! Serves the API over TCP, to callers with a certificate or a token.
//!
//! Invariants: a request with neither is refused, except for the static files of the [`status_page`]; a connection has [`HEAD_LIMIT`] for
//! its handshake, and there are at most [`MOST`] connections; an incomplete configuration is an error.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Request, State};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use thaw_sandbox::config::api::ApiConfig;
use thaw_sandbox::error::{Error, ErrorKind};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;

use super::client_roles::ClientCertificate;
use super::connection::{self, HEAD_LIMIT, HTTP2, Versions};
use super::credentials::{Credentials, Presented};
use super::daemon::Daemon;
use super::http2;
use super::lease::Lease;
use super::listener::{Listener, Most};
use super::peer::Peer;
use super::problem::{Refusal, write_problems};
use super::status_page;

/// Most connections at once.
const MOST: Most = Most {
    in_all: 4096,
    of_one: 1024,
};

/// What HTTP/2 begins with (RFC 9113, section 3.4).
const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// A listening TCP socket, and the credentials of its callers.
pub struct Tcp {
    listener: Listener,
    credentials: Arc<Credentials>,
}

impl Tcp {
    /// Listens at the configured address; `None` if there is none. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// `config-invalid`: the configuration is incomplete, or a file it names cannot be used.
    pub async fn open(config: &ApiConfig) -> Result<Option<Tcp>, Error> {
        let Some(address) = config.listen else {
            return match *config == ApiConfig::default() {
                true => Ok(None),
                false => Err(invalid("there is no listen, the address to serve at")),
            };
        };
        let secured = is_encrypted("[api]", config, address)?;
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
        let credentials = Arc::new(Credentials::read(config)?);
        let listener = Listener::open(address).await;
        let listener = listener.map_err(|e| Error::system(format!("cannot listen at {address}"), &e))?;
        Ok(Some(Tcp {
            listener,
            credentials,
        }))
    }

    /// The credentials, to be reloaded.
    pub fn credentials(&self) -> Arc<Credentials> {
        self.credentials.clone()
    }

    /// Where it listens.
    pub fn address(&self) -> std::io::Result<SocketAddr> {
        self.listener.address()
    }

    /// Serves routes until `stopped`, then waits for the remaining requests.
    pub async fn serve(
        self,
        daemon: &Daemon,
        routes: Router,
        stopped: watch::Receiver<()>,
        shutdown_timeout: Duration,
    ) {
        let Tcp {
            listener,
            credentials,
        } = self;
        let guarded = routes
            .layer(from_fn_with_state(credentials.clone(), authenticate))
            .layer(from_fn(write_problems))
            .merge(status_page::routes());
        let stop = stopped.clone();
        let serve = move |stream, address| {
            let (tls, routes) = (credentials.tls(Versions::Http1), guarded.clone());
            serve_tcp(stream, address, (tls, Versions::Http1), routes, stopped.clone())
        };
        listener.serve(daemon, MOST, stop, shutdown_timeout, serve).await;
    }
}

fn invalid(why: &str) -> Error {
    invalid_in("[api]", why)
}

fn invalid_in(section: &str, why: &str) -> Error {
    Error::new(ErrorKind::ConfigInvalid, format!("{section}: {why}"))
}

/// Whether connections to an address that `section` names are encrypted, with the certificate of `[api]`.
///
/// # Errors
/// `config-invalid`: half of what TLS needs, or neither TLS nor a loopback address.
pub(crate) fn is_encrypted(section: &str, config: &ApiConfig, address: SocketAddr) -> Result<bool, Error> {
    let secured = config.certificate.is_some();
    if secured != config.key.is_some() {
        return Err(invalid("certificate and key go together"));
    }
    match secured || address.ip().is_loopback() {
        true => Ok(secured),
        false => Err(invalid_in(
            section,
            "without certificate and key it listens on a loopback address alone",
        )),
    }
}

/// Serves one connection, encrypted if there are TLS settings, which offer these versions of HTTP.
pub(crate) async fn serve_tcp(
    stream: TcpStream,
    address: IpAddr,
    (tls, versions): (Option<TlsAcceptor>, Versions),
    routes: Router,
    mut stopped: watch::Receiver<()>,
) {
    let Some(tls) = tls else {
        return match versions {
            Versions::Http1 => connection::serve(stream, None::<Peer>, routes, stopped).await,
            Versions::Http1And2 => serve_either(stream, routes, stopped).await,
        };
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
    let is_http2 = stream.get_ref().1.alpn_protocol() == Some(HTTP2);
    match is_http2 {
        true => http2::serve(stream, certificate, routes, stopped).await,
        false => connection::serve(stream, certificate, routes, stopped).await,
    }
}

/// Serves one connection without TLS, by the version of HTTP that its client begins with.
pub(crate) async fn serve_either(stream: TcpStream, routes: Router, mut stopped: watch::Receiver<()>) {
    let first = tokio::time::timeout(HEAD_LIMIT, begins_with_http2(&stream));
    let is_http2 = tokio::select! {
        is_http2 = first => is_http2,
        _ = stopped.changed() => return,
    };
    match is_http2 {
        Ok(Ok(true)) => http2::serve(stream, None::<Peer>, routes, stopped).await,
        Ok(Ok(false)) => connection::serve(stream, None::<Peer>, routes, stopped).await,
        Ok(Err(e)) => tracing::debug!("a connection broke: {e}"),
        Err(_) => tracing::debug!("a connection sent nothing in time"),
    }
}

/// Whether a client begins with HTTP/2. Takes nothing from the connection.
async fn begins_with_http2(stream: &TcpStream) -> std::io::Result<bool> {
    let mut first = [0; PREFACE.len()];
    let count = stream.peek(&mut first).await?;
    // Clients send it at once; its first word is no method of HTTP/1.
    Ok(count >= "PRI".len() && PREFACE.starts_with(&first[..count]))
}

/// Authenticates the caller by its connection's certificate, or else by the request's token.
async fn authenticate(
    State(credentials): State<Arc<Credentials>>,
    mut request: Request,
    next: Next,
) -> Response {
    let certificate = request.extensions().get::<Arc<ClientCertificate>>().cloned();
    let presented = Presented::take(certificate, request.headers_mut());
    match identify(credentials, presented, &mut request) {
        Ok(()) => next.run(request).await,
        Err(refusal) => refusal.into_response(),
    }
}

/// Puts the caller among a request's extensions, by the credentials in force now. Streams that the request opens last no longer than the
/// [`Lease`] that is put there too.
pub(crate) fn identify(
    credentials: Arc<Credentials>,
    presented: Presented,
    request: &mut Request,
) -> Result<(), Refusal> {
    let peer = credentials.admit(&presented)?.peer;
    let lease = Lease::new(credentials, presented, peer.clone());
    request.extensions_mut().insert(peer);
    request.extensions_mut().insert(Arc::new(lease));
    Ok(())
}

#[cfg(test)]
#[path = "tcp_test.rs"]
mod tests;
