//! A reverse proxy to the ports of sandboxes, and to other nodes: HTTP/1.1 with bodies streamed both ways, and upgrades such as WebSockets.
//!
//! Invariants: a request goes only to the address that the host gave the sandbox, while the sandbox has it, or over a connection to the node;
//! there are never more connections in use than [`Bounds`] says; a guest that does not accept, answer or read does not hold a connection
//! longer than the limits here. thawd's own headers do not reach the guest. A request is sent twice only if nothing of it was sent at first, or if
//! it has no body, its method is idempotent and it went over a connection that was [idle](super::idle_connections).

use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::{Body, HttpBody};
use axum::extract::Request;
use axum::http::header::{CONNECTION, HOST, TE, TRAILER, TRANSFER_ENCODING, UPGRADE};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri};
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

use super::idle_connections::{Connection, Destination, IdleConnections, Limits};
use super::quick_ack::QuickAck;
use crate::api::period::During;
use crate::api::problem::{ApiCode, Refusal};
use crate::api::write_timeout::{WRITE_TIMEOUT, WriteTimeout};

/// Most connections in use.
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
/// Idle connections to sandboxes. Servers close theirs after two seconds or more; one that serves a connection at a time serves no other
/// meanwhile.
const IDLE_TO_SANDBOXES: Limits = Limits {
    in_all: 256,
    of_one: 8,
    time: Duration::from_secs(1),
};
/// Idle connections to other nodes, which close theirs after 30 seconds.
const IDLE_TO_NODES: Limits = Limits {
    in_all: 256,
    of_one: 16,
    time: Duration::from_secs(10),
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

/// The connections of a proxy.
#[derive(Clone, Debug)]
pub struct Proxy {
    in_use: Arc<Mutex<InUse>>,
    bounds: Bounds,
    idle: IdleConnections,
}

/// How many connections are in use.
#[derive(Debug, Default)]
struct InUse {
    in_all: usize,
    /// By sandbox or by node.
    of: HashMap<String, usize>,
}

impl Default for Proxy {
    fn default() -> Proxy {
        Proxy::new(TO_SANDBOXES, IDLE_TO_SANDBOXES)
    }
}

/// One connection in use.
#[derive(Debug)]
struct Place {
    in_use: Arc<Mutex<InUse>>,
    id: String,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut in_use = self.in_use.locked();
        in_use.in_all -= 1;
        if let Some(count) = in_use.of.get_mut(&self.id) {
            *count -= 1;
            if *count == 0 {
                in_use.of.remove(&self.id);
            }
        }
    }
}

/// A request that is ready for a connection, and has a place for one.
pub struct Outgoing {
    request: Request,
    upgrade: Option<Upgrade>,
    place: Arc<Place>,
    closing: watch::Receiver<bool>,
}

/// What became of a request.
pub enum Sent {
    Answered(Response),
    /// It needs a new connection: there was no idle one, or that one broke, and the request may be sent again.
    NotYet(Outgoing),
}

impl Proxy {
    fn new(bounds: Bounds, idle: Limits) -> Proxy {
        Proxy {
            in_use: Arc::default(),
            bounds,
            idle: IdleConnections::new(idle),
        }
    }

    /// A proxy to other nodes.
    pub fn to_nodes() -> Proxy {
        Proxy::new(TO_NODES, IDLE_TO_NODES)
    }

    fn place(&self, id: &str) -> Result<Arc<Place>, Failed> {
        let mut in_use = self.in_use.locked();
        let of_one = in_use.of.get(id).copied().unwrap_or(0);
        if of_one >= self.bounds.of_one || in_use.in_all >= self.bounds.in_all {
            let what = "too many connections to sandboxes";
            return Err(Failed::Refused(Refusal::new(ApiCode::TooMany, what)));
        }
        in_use.in_all += 1;
        *in_use.of.entry(id.to_owned()).or_default() += 1;
        Ok(Arc::new(Place {
            in_use: self.in_use.clone(),
            id: id.to_owned(),
        }))
    }

    /// Sends a request to a port of the sandbox `id`, which has this address for this period, and returns the answer. An upgraded connection
    /// ends when `closing` becomes true.
    pub async fn send(
        &self,
        id: &str,
        (port, during): ((Ipv4Addr, u16), During),
        mut request: Request,
        closing: watch::Receiver<bool>,
    ) -> Result<Response, Failed> {
        let headers = request.headers_mut();
        OF_THAWD.iter().for_each(|name| drop(headers.remove(*name)));
        let to = Destination {
            during,
            port: Some(port),
        };
        let outgoing = self.outgoing(id, request, closing)?;
        let outgoing = match self.reuse(&to, outgoing).await? {
            Sent::Answered(answer) => return Ok(answer),
            Sent::NotYet(outgoing) => outgoing,
        };
        let stream = match timeout(CONNECT_LIMIT, TcpStream::connect(port)).await {
            Ok(Ok(stream)) => stream,
            Ok(Err(_)) | Err(_) => return Err(Failed::NotOpen),
        };
        stream.set_nodelay(true).map_err(|e| broken(&e))?;
        // After it was opened: the sandbox may have ended before, and another with its address have accepted it.
        if to.during.is_over() {
            return Err(broken(&"the sandbox was paused or has ended"));
        }
        self.send_over(to, QuickAck(stream), outgoing).await
    }

    /// Prepares a request with all its headers, which counts as a connection to `name`. An upgraded connection ends when `closing` becomes
    /// true.
    pub fn outgoing(
        &self,
        name: &str,
        mut request: Request,
        closing: watch::Receiver<bool>,
    ) -> Result<Outgoing, Failed> {
        let place = self.place(name)?;
        let upgrade = prepare(&mut request)?;
        Ok(Outgoing {
            request,
            upgrade,
            place,
            closing,
        })
    }

    /// Sends a request over an idle connection, if there is one and the request asks for no upgrade.
    pub async fn reuse(&self, to: &Destination, outgoing: Outgoing) -> Result<Sent, Failed> {
        if !stays(&outgoing) {
            return Ok(Sent::NotYet(outgoing));
        }
        let Some(connection) = self.idle.take(to) else {
            return Ok(Sent::NotYet(outgoing));
        };
        let again = repeatable(&outgoing.request);
        self.exchange(connection, outgoing, again).await
    }

    /// Sends a request over a new connection, and returns the answer.
    pub async fn send_over(
        &self,
        to: Destination,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        outgoing: Outgoing,
    ) -> Result<Response, Failed> {
        let io = TokioIo::new(WriteTimeout::new(stream, WRITE_TIMEOUT));
        let mut http = http1::Builder::new();
        http.max_buf_size(MAX_HEAD).max_headers(MAX_FIELDS);
        let (sender, http) = http.handshake(io).await.map_err(|e| broken(&e))?;
        let connection = self.idle.open(to, sender, http.with_upgrades());
        match self.exchange(connection, outgoing, None).await? {
            Sent::Answered(answer) => Ok(answer),
            Sent::NotYet(_) => Err(broken(&"it was closed before the request was sent")),
        }
    }

    /// Sends a request over a connection. If that breaks before an answer begins, `again` is to be sent, or the request itself if nothing of
    /// it was sent.
    async fn exchange(
        &self,
        mut connection: Connection,
        outgoing: Outgoing,
        again: Option<Request>,
    ) -> Result<Sent, Failed> {
        let stays = stays(&outgoing);
        let Outgoing {
            request,
            upgrade,
            place,
            closing,
        } = outgoing;
        let answer = match timeout(ANSWER_LIMIT, connection.sender.try_send_request(request)).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(mut failed)) => {
                let unsent = failed.take_message();
                let why = failed.into_error();
                // What cannot be parsed is an answer too.
                let request = unsent.or(again.filter(|_| !why.is_parse()));
                let request = request.ok_or_else(|| broken(&why))?;
                return Ok(Sent::NotYet(Outgoing {
                    request,
                    upgrade,
                    place,
                    closing,
                }));
            }
            Err(_) => return Err(broken(&"the answer did not begin in time")),
        };
        if stays && answer.status() != StatusCode::SWITCHING_PROTOCOLS {
            self.idle.keep(connection, place.clone());
        }
        Ok(Sent::Answered(pass_on(answer, upgrade, place, closing)))
    }
}

fn broken(why: &dyn std::fmt::Display) -> Failed {
    Failed::Broken(why.to_string())
}

/// Whether a connection speaks HTTP after this request too.
fn stays(outgoing: &Outgoing) -> bool {
    outgoing.upgrade.is_none() && outgoing.request.method() != Method::CONNECT
}

/// The same request, if it may be sent twice: it has no body, and its method is idempotent (RFC 9110, section 9.2.2).
fn repeatable(request: &Request) -> Option<Request> {
    let may_repeat = request.method().is_idempotent() && request.body().is_end_stream();
    may_repeat.then(|| {
        let mut same = Request::new(Body::empty());
        *same.method_mut() = request.method().clone();
        *same.uri_mut() = request.uri().clone();
        *same.version_mut() = request.version();
        *same.headers_mut() = request.headers().clone();
        same
    })
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
    *request.uri_mut() = Uri::try_from(path).map_err(|e| broken(&e))?;
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

#[cfg(test)]
#[path = "reuse_test.rs"]
mod reuse_test;
