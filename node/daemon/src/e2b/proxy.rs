//! A reverse proxy to the ports of sandboxes, and to other nodes: HTTP/1.1 with bodies streamed both ways, and upgrades such as WebSockets.
//!
//! Invariants: a request goes only to the address that the host gave the sandbox, or over the connection to the node; there are never more
//! connections than [`Bounds`] says; a guest that does not accept, answer or read does not hold a connection longer than the limits here.
//! thawd's own headers do not reach the guest.

use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::http::header::{CONNECTION, HOST, TE, TRAILER, TRANSFER_ENCODING, UPGRADE};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, Uri};
use axum::response::Response;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use thaw_protocol::nodes::MARK;
use thaw_sys::lock::Lock;
use tokio::io::{AsyncRead, AsyncWrite, copy_bidirectional};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::timeout;

use crate::api::problem::{ApiCode, Refusal};
use crate::api::write_timeout::{WRITE_TIMEOUT, WriteTimeout};

/// Most connections.
#[derive(Clone, Copy, Debug)]
struct Bounds {
    in_all: usize,
    /// To one sandbox, or to one node.
    of_one: usize,
}

/// Most connections to sandboxes.
const TO_SANDBOXES: Bounds = Bounds {
    in_all: 2048,
    of_one: 512,
};
/// Most connections to other nodes: as many as callers may have to this one.
const TO_NODES: Bounds = Bounds {
    in_all: 4096,
    of_one: 2048,
};
/// How long a guest may take to accept a connection.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// How long it may take to begin its answer. A program may compute that long.
const ANSWER_LIMIT: Duration = Duration::from_secs(10 * 60);
/// Largest head of an answer, bytes.
const MAX_HEAD: usize = 64 << 10;
/// Most header fields of an answer.
const MAX_FIELDS: usize = 128;

/// Fields that concern one connection only (RFC 9110, section 7.6.1), besides those that `Connection` names.
const OF_CONNECTION: [HeaderName; 8] = [
    CONNECTION,
    TE,
    TRAILER,
    TRANSFER_ENCODING,
    UPGRADE,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    HeaderName::from_static("proxy-authorization"),
];
/// Fields that are for thawd.
const OF_THAWD: [&str; 2] = ["e2b-sandbox-id", "e2b-sandbox-port"];

/// Why a request got no answer of the guest.
#[derive(Debug)]
pub enum Failed {
    /// Nothing accepts connections at the port.
    NotOpen,
    /// The connection broke, or the answer came too late.
    Broken(String),
    /// There are too many connections.
    Refused(Refusal),
}

/// The connections of a proxy, counted by sandbox or by node.
#[derive(Clone, Debug)]
pub struct Proxy(Arc<Mutex<HashMap<String, usize>>>, Bounds);

impl Default for Proxy {
    fn default() -> Proxy {
        Proxy(Arc::default(), TO_SANDBOXES)
    }
}

/// One connection.
#[derive(Debug)]
struct Place {
    proxy: Proxy,
    id: String,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut counts = self.proxy.0.locked();
        if let Some(count) = counts.get_mut(&self.id) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.id);
            }
        }
    }
}

impl Proxy {
    /// A proxy to other nodes.
    pub fn to_nodes() -> Proxy {
        Proxy(Arc::default(), TO_NODES)
    }

    fn place(&self, id: &str) -> Result<Arc<Place>, Failed> {
        let mut counts = self.0.locked();
        let of_one = counts.get(id).copied().unwrap_or(0);
        if of_one >= self.1.of_one || counts.values().sum::<usize>() >= self.1.in_all {
            let what = "too many connections to sandboxes";
            return Err(Failed::Refused(Refusal::new(ApiCode::TooMany, what)));
        }
        *counts.entry(id.to_owned()).or_default() += 1;
        Ok(Arc::new(Place {
            proxy: self.clone(),
            id: id.to_owned(),
        }))
    }

    /// Sends a request to a port of the sandbox `id`, which has this address, and returns the answer. An upgraded connection ends when
    /// `closing` becomes true.
    pub async fn send(
        &self,
        id: &str,
        to: (Ipv4Addr, u16),
        mut request: Request,
        closing: watch::Receiver<bool>,
    ) -> Result<Response, Failed> {
        let place = self.place(id)?;
        let headers = request.headers_mut();
        OF_THAWD.iter().for_each(|name| drop(headers.remove(*name)));
        let stream = match timeout(CONNECT_LIMIT, TcpStream::connect(to)).await {
            Ok(Ok(stream)) => stream,
            Ok(Err(_)) | Err(_) => return Err(Failed::NotOpen),
        };
        let set = stream.set_nodelay(true);
        set.map_err(|e| Failed::Broken(e.to_string()))?;
        exchange(place, stream, request, closing).await
    }

    /// Sends a request with all its headers over a connection, which counts as one to `name`, and returns the answer. An upgraded connection
    /// ends when `closing` becomes true.
    pub async fn send_over(
        &self,
        name: &str,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        request: Request,
        closing: watch::Receiver<bool>,
    ) -> Result<Response, Failed> {
        exchange(self.place(name)?, stream, request, closing).await
    }
}

/// Sends a request over a connection, and returns the answer.
async fn exchange(
    place: Arc<Place>,
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    mut request: Request,
    closing: watch::Receiver<bool>,
) -> Result<Response, Failed> {
    let upgrade = prepare(&mut request)?;
    let broken = |e: &dyn std::fmt::Display| Failed::Broken(e.to_string());
    let io = TokioIo::new(WriteTimeout::new(stream, WRITE_TIMEOUT));
    let mut http = http1::Builder::new();
    http.max_buf_size(MAX_HEAD).max_headers(MAX_FIELDS);
    let (mut sender, connection) = http.handshake(io).await.map_err(|e| broken(&e))?;
    let held = place.clone();
    tokio::spawn(async move {
        // It ends when the answer has been passed on or the client has left.
        if let Err(e) = connection.with_upgrades().await {
            tracing::debug!("a connection to a sandbox broke: {e}");
        }
        drop(held);
    });
    let answer = match timeout(ANSWER_LIMIT, sender.send_request(request)).await {
        Ok(answer) => answer.map_err(|e| broken(&e))?,
        Err(_) => return Err(broken(&"the answer did not begin in time")),
    };
    Ok(pass_on(answer, upgrade, place, closing))
}

/// An upgrade that the client asks for.
struct Upgrade {
    protocol: HeaderValue,
    client: OnUpgrade,
}

/// Prepares a request for the connection. Returns the upgrade that it asks for.
fn prepare(request: &mut Request) -> Result<Option<Upgrade>, Failed> {
    let protocol = upgrade_of(request.headers());
    let client = protocol.is_some().then(|| hyper::upgrade::on(&mut *request));
    let authority = request
        .uri()
        .authority()
        .and_then(|a| HeaderValue::try_from(a.as_str()).ok());
    let path = request.uri().path_and_query().map_or("/", |path| path.as_str());
    *request.uri_mut() = Uri::try_from(path).map_err(|e| Failed::Broken(e.to_string()))?;
    let headers = request.headers_mut();
    remove_connection_fields(headers);
    if let Some(authority) = authority {
        headers.insert(HOST, authority);
    }
    let Some((protocol, client)) = protocol.zip(client) else {
        return Ok(None);
    };
    headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(UPGRADE, protocol.clone());
    Ok(Some(Upgrade { protocol, client }))
}

/// The protocol that a head asks to change to.
fn upgrade_of(headers: &HeaderMap) -> Option<HeaderValue> {
    let asks = connection_words(headers).any(|word| word.eq_ignore_ascii_case("upgrade"));
    headers.get(UPGRADE).filter(|_| asks).cloned()
}

fn connection_words(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    let fields = headers.get_all(CONNECTION).iter();
    fields
        .filter_map(|field| field.to_str().ok())
        .flat_map(|field| field.split(','))
        .map(str::trim)
}

fn remove_connection_fields(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = connection_words(headers)
        .filter_map(|word| word.parse().ok())
        .collect();
    for name in named.iter().chain(&OF_CONNECTION) {
        // A body's length is told by the connection's own framing, whatever `Connection` says of it, and no caller removes a node's mark.
        if *name != axum::http::header::CONTENT_LENGTH && *name != MARK {
            headers.remove(name);
        }
    }
}

/// The guest's answer for the client.
fn pass_on(
    mut answer: hyper::Response<Incoming>,
    upgrade: Option<Upgrade>,
    place: Arc<Place>,
    closing: watch::Receiver<bool>,
) -> Response {
    let guest = hyper::upgrade::on(&mut answer);
    let is_switched = answer.status() == StatusCode::SWITCHING_PROTOCOLS;
    let held = place.clone();
    // The answer counts as a connection as long as its body is read.
    let mut answer = answer.map(|body| {
        Body::new(body.map_err(move |e| {
            let _held = &held;
            e
        }))
    });
    remove_connection_fields(answer.headers_mut());
    if !is_switched {
        return answer;
    }
    let Some(Upgrade { protocol, client }) = upgrade else {
        // The guest changed the protocol although the client did not ask for it.
        *answer.status_mut() = StatusCode::BAD_GATEWAY;
        return answer;
    };
    answer
        .headers_mut()
        .insert(CONNECTION, HeaderValue::from_static("upgrade"));
    answer.headers_mut().insert(UPGRADE, protocol);
    tokio::spawn(join(client, guest, place, closing));
    answer
}

/// Copies both ways until one end closes, or thawd shuts down.
async fn join(client: OnUpgrade, guest: OnUpgrade, place: Arc<Place>, mut closing: watch::Receiver<bool>) {
    let copied = async {
        let (client, guest) = tokio::try_join!(client, guest)?;
        let (mut client, mut guest) = (TokioIo::new(client), TokioIo::new(guest));
        copy_bidirectional(&mut client, &mut guest).await?;
        Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
    };
    tokio::select! {
        copied = copied => if let Err(e) = copied {
            tracing::debug!("an upgraded connection to a sandbox broke: {e}");
        },
        _ = closing.wait_for(|closing| *closing) => {}
    }
    drop(place);
}

#[cfg(test)]
#[path = "proxy_test.rs"]
mod tests;
