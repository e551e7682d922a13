//! A reverse proxy to the ports of sandboxes, and to other nodes: HTTP/1.1 with upgrades such as WebSockets, whatever version a client speaks, and
//! HTTP/2 for gRPC. Bodies and trailers are streamed both ways.
//!
//! Invariants: a request goes only to the address that the host gave the sandbox, while the sandbox has it, or over a connection to the node;
//! there are never more connections in use than [`Bounds`] says; a guest that does not accept, answer or read does not hold a connection
//! longer than the limits here. thawd's own headers do not reach the guest. A request is sent twice only if nothing of it was sent at first, or if
//! it has no body, its method is idempotent and it went over a connection that was [idle](super::idle_connections).

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, HttpBody};
use axum::extract::Request;
use axum::http::header::{CONNECTION, UPGRADE};
use axum::http::{HeaderValue, Method, StatusCode};
use axum::response::Response;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, copy_bidirectional};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::timeout;

use super::head::{OF_THAWD, Upgrade, for_http1, for_http2, is_grpc, remove_connection_fields};
use super::idle_connections::{Connection, Destination, IdleConnections, Limits};
use super::places::{Bounds, Party, Place, Places};
use super::quick_ack::QuickAck;
use super::sender::Sender;
use crate::api::held_body::holding;
use crate::api::period::During;
use crate::api::problem::Refusal;

/// Most connections to sandboxes.
const TO_SANDBOXES: Bounds = Bounds {
    in_all: 2048,
    of_tenant: 1024,
    of_one: 512,
};
/// Most connections to other nodes: as many as callers may have to this one.
const TO_NODES: Bounds = Bounds {
    in_all: 4096,
    of_tenant: 4096,
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
    places: Places,
    idle: IdleConnections,
}

impl Default for Proxy {
    fn default() -> Proxy {
        Proxy::new(TO_SANDBOXES, IDLE_TO_SANDBOXES)
    }
}

/// A request that is ready for a connection, and has a place for one.
pub struct Outgoing {
    request: Request,
    /// It goes over HTTP/2.
    is_http2: bool,
    upgrade: Option<Upgrade>,
    place: Arc<Place>,
    closing: watch::Receiver<bool>,
}

impl Outgoing {
    /// Whether it needs a connection of HTTP/2.
    pub fn is_http2(&self) -> bool {
        self.is_http2
    }
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
            places: Places::new(bounds),
            idle: IdleConnections::new(idle),
        }
    }

    /// A proxy to other nodes.
    pub fn to_nodes() -> Proxy {
        Proxy::new(TO_NODES, IDLE_TO_NODES)
    }

    /// Sends a request to a port of a sandbox, which has this address for this period, and returns the answer. An upgraded connection ends when
    /// `closing` becomes true.
    pub async fn send(
        &self,
        sandbox: Party<'_>,
        (port, during): ((Ipv4Addr, u16), During),
        mut request: Request,
        closing: watch::Receiver<bool>,
    ) -> Result<Response, Failed> {
        let headers = request.headers_mut();
        OF_THAWD.iter().for_each(|name| drop(headers.remove(*name)));
        let to = Destination {
            during,
            port: Some(port),
            tenant: sandbox.tenant.clone(),
        };
        let outgoing = self.outgoing(sandbox, request, closing)?;
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
        self.send_over(to, QuickAck::new(stream), outgoing).await
    }

    /// Prepares a request with all its headers, which counts as a connection to this sandbox or node. An upgraded connection ends when `closing`
    /// becomes true.
    pub fn outgoing(
        &self,
        to: Party<'_>,
        mut request: Request,
        closing: watch::Receiver<bool>,
    ) -> Result<Outgoing, Failed> {
        let place = self.places.take(to).map_err(Failed::Refused)?;
        let is_http2 = is_grpc(&request);
        let upgrade = match is_http2 {
            true => for_http2(&mut request).map(|()| None),
            false => for_http1(&mut request),
        };
        Ok(Outgoing {
            request,
            is_http2,
            upgrade: upgrade.map_err(|e| broken(&e))?,
            place,
            closing,
        })
    }

    /// Sends a request over an idle connection, if there is one and the request asks for no upgrade.
    pub async fn reuse(&self, to: &Destination, outgoing: Outgoing) -> Result<Sent, Failed> {
        if !stays(&outgoing) {
            return Ok(Sent::NotYet(outgoing));
        }
        let Some(connection) = self.idle.take(to, outgoing.is_http2) else {
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
        let opened = Sender::open(stream, outgoing.is_http2).await;
        let (sender, http) = opened.map_err(|e| broken(&e))?;
        let connection = self.idle.open(to, sender, http);
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
            is_http2,
            upgrade,
            place,
            closing,
        } = outgoing;
        let answer = match timeout(ANSWER_LIMIT, connection.sender.try_send(request)).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(mut failed)) => {
                let unsent = failed.take_message();
                let why = failed.into_error();
                // What cannot be parsed is an answer too.
                let request = unsent.or(again.filter(|_| !why.is_parse()));
                let request = request.ok_or_else(|| broken(&why))?;
                return Ok(Sent::NotYet(Outgoing {
                    request,
                    is_http2,
                    upgrade,
                    place,
                    closing,
                }));
            }
            Err(_) => return Err(broken(&"the answer did not begin in time")),
        };
        let answer = match stays && answer.status() != StatusCode::SWITCHING_PROTOCOLS {
            true => self.idle.keep(connection, place.clone(), answer),
            false => answer.map(Body::new),
        };
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

/// The guest's answer for the client.
fn pass_on(
    mut answer: Response,
    upgrade: Option<Upgrade>,
    place: Arc<Place>,
    closing: watch::Receiver<bool>,
) -> Response {
    let guest = hyper::upgrade::on(&mut answer);
    let is_switched = answer.status() == StatusCode::SWITCHING_PROTOCOLS;
    let held = place.clone();
    // The answer counts as a connection as long as its body is read.
    let mut answer = answer.map(|body| holding(body, held));
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

#[cfg(test)]
#[path = "grpc_test.rs"]
mod grpc_test;
