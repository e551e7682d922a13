//! Idle connections to ports of sandboxes, or to other nodes, that earlier requests left for later ones.
//!
//! Invariants:
//! - A connection serves one request at a time, also one of HTTP/2. It becomes idle only when the answer to the request before was read to the
//!   end, and over HTTP/1.1 when that request was sent too, which hyper tells. So no byte of one answer is taken for a part of the next, and
//!   a connection whose protocol has changed never becomes idle. Streams of HTTP/2 are told apart by their numbers.
//! - A connection is used only for the destination to which it was opened. That includes a [period](crate::api::period): for which a sandbox
//!   runs without interruption, or a node is a member. Whoever uses a connection has the period of now, so none is used that was opened before a
//!   pause, a resume, or the end of another sandbox with the same address. An idle connection is closed when its period is over.
//! - There are never more idle connections than [`Limits`] allows, nor for longer. If there are as many, the tenant with the most loses one, so
//!   that none has few because another has many.

use std::cmp::Reverse;
use std::collections::{HashMap, VecDeque};
use std::net::Ipv4Addr;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::response::Response;
use hyper::body::{Frame, Incoming, SizeHint};
use thaw_sandbox::tenant::Tenant;
use thaw_sys::lock::Lock;
use tokio::time::{Instant, sleep_until};

use super::sender::{Http, Sender};
use crate::api::period::During;

/// Most idle connections.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub in_all: usize,
    /// To one destination.
    pub of_one: usize,
    /// How long one may be idle.
    pub time: Duration,
}

/// Where a connection leads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Destination {
    /// It leads there for this period.
    pub during: During,
    /// The address and the port of a sandbox. `None`: the period is that of a node, which has one address.
    pub port: Option<(Ipv4Addr, u16)>,
    /// Whose the sandbox is.
    pub tenant: Option<Tenant>,
}

/// An open connection, which one request uses. It closes when this is dropped.
#[derive(Debug)]
pub struct Connection {
    pub sender: Sender,
    to: Destination,
    /// No other connection has this number.
    number: u64,
}

#[derive(Debug)]
struct Idle {
    connection: Connection,
    until: Instant,
}

#[derive(Debug, Default)]
struct State {
    /// The longest idle first.
    idle: VecDeque<Idle>,
    /// How many connections were opened.
    opened: u64,
    /// A task closes those that are idle for too long.
    is_watched: bool,
}

/// See the module.
#[derive(Clone, Debug)]
pub struct IdleConnections {
    state: Arc<Mutex<State>>,
    limits: Limits,
}

impl IdleConnections {
    /// None yet.
    pub fn new(limits: Limits) -> IdleConnections {
        IdleConnections {
            state: Arc::default(),
            limits,
        }
    }

    /// A new connection: `http` is its future, which runs on a task of its own.
    pub fn open(&self, to: Destination, sender: Sender, http: Http) -> Connection {
        let number = {
            let mut state = self.state.locked();
            state.opened += 1;
            state.opened
        };
        tokio::spawn(run(self.clone(), number, to.during.clone(), http));
        Connection { sender, to, number }
    }

    /// Takes an idle connection to a destination, of HTTP/2 or of HTTP/1.1. It was open a moment ago.
    pub fn take(&self, to: &Destination, is_http2: bool) -> Option<Connection> {
        let mut state = self.state.locked();
        let is_one = |idle: &Idle| {
            let connection = &idle.connection;
            connection.to == *to && connection.sender.is_http2() == is_http2
        };
        loop {
            // The last one: it is the least likely to be closed by the other end just now.
            let at = state.idle.iter().rposition(is_one)?;
            let Idle { connection, .. } = state.idle.remove(at)?;
            if connection.sender.is_ready() {
                return Some(connection);
            }
        }
    }

    /// Makes a connection idle once it is ready for the request after this answer, and returns the answer. `in_use` is dropped then,
    /// or when the connection ends.
    pub fn keep(
        &self,
        connection: Connection,
        in_use: impl Send + 'static,
        answer: hyper::Response<Incoming>,
    ) -> Response {
        if connection.sender.is_http2() {
            return answer.map(|body| self.keep_after(connection, body));
        }
        self.keep_ready(connection, in_use);
        answer.map(Body::new)
    }

    /// The same for HTTP/2, whose connections are always ready: once this body has been read. Otherwise the connection closes.
    fn keep_after(&self, connection: Connection, body: Incoming) -> Body {
        if body.is_end_stream() {
            self.put(connection);
            return Body::empty();
        }
        let kept = Some((self.clone(), connection));
        Body::new(Kept { body, kept })
    }

    /// The same for HTTP/1.1.
    fn keep_ready(&self, mut connection: Connection, in_use: impl Send + 'static) {
        if connection.sender.is_ready() {
            return self.put(connection);
        }
        let idle = self.clone();
        tokio::spawn(async move {
            let ready = connection.sender.ready().await;
            drop(in_use);
            if ready.is_ok() {
                idle.put(connection);
            }
        });
    }

    fn put(&self, connection: Connection) {
        let mut state = self.state.locked();
        // Under the lock: whoever ends the period, or sees that the connection ends, looks for it here afterwards.
        if connection.to.during.is_over() || connection.sender.is_closed() {
            return;
        }
        let is_same = |idle: &Idle| idle.connection.to == connection.to;
        let oldest = state.idle.iter().position(is_same);
        let count = state.idle.iter().map(is_same).filter(|same| *same).count();
        let surplus = match oldest {
            Some(oldest) if count >= self.limits.of_one => Some(oldest),
            _ if state.idle.len() >= self.limits.in_all => longest_of_most(&state.idle),
            _ => None,
        };
        if let Some(at) = surplus {
            state.idle.remove(at);
        }
        let until = Instant::now() + self.limits.time;
        state.idle.push_back(Idle { connection, until });
        if !std::mem::replace(&mut state.is_watched, true) {
            tokio::spawn(close_old(self.clone()));
        }
    }

    /// Closes a connection if it is idle.
    fn close(&self, number: u64) {
        let mut state = self.state.locked();
        state.idle.retain(|idle| idle.connection.number != number);
    }

    /// Closes connections that were idle for too long. Returns when the next one is due; `None` if there is none.
    fn close_until_now(&self) -> Option<Instant> {
        let mut state = self.state.locked();
        let now = Instant::now();
        while state.idle.front().is_some_and(|first| first.until <= now) {
            state.idle.pop_front();
        }
        let next = state.idle.front().map(|first| first.until);
        state.is_watched = next.is_some();
        next
    }

    #[cfg(test)]
    pub fn count(&self) -> usize {
        self.state.locked().idle.len()
    }
}

/// Finds the connection that was idle for the longest time, of the tenant that has the most idle connections.
fn longest_of_most(idle: &VecDeque<Idle>) -> Option<usize> {
    let mut tenants = HashMap::new();
    for (at, idle) in idle.iter().enumerate() {
        let tenant = idle.connection.to.tenant.as_ref();
        let (count, _) = tenants.entry(tenant).or_insert((0, Reverse(at)));
        *count += 1;
    }
    let most = tenants.into_values().max();
    most.map(|(_, Reverse(first))| first)
}

/// The body of an answer over HTTP/2, and the connection that becomes idle when it has been read.
struct Kept {
    body: Incoming,
    kept: Option<(IdleConnections, Connection)>,
}

impl HttpBody for Kept {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(cx);
        let is_read = match &polled {
            Poll::Ready(None) => true,
            Poll::Ready(Some(Ok(frame))) => frame.is_trailers() || self.body.is_end_stream(),
            Poll::Ready(Some(Err(_))) | Poll::Pending => false,
        };
        if is_read && let Some((idle, connection)) = self.kept.take() {
            idle.put(connection);
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Closes idle connections in time, as long as there are some.
async fn close_old(idle: IdleConnections) {
    while let Some(next) = idle.close_until_now() {
        sleep_until(next).await;
    }
}

/// Runs a connection until it ends: at the latest when its [`Connection`] is dropped and the answer is passed on. One that is in use when
/// its period ends is not ended here, because a request survives a pause that keeps the memory.
async fn run(idle: IdleConnections, number: u64, mut during: During, mut http: Http) {
    let ended = tokio::select! {
        ended = &mut http => ended,
        () = during.over() => {
            idle.close(number);
            http.await
        }
    };
    idle.close(number);
    if let Err(e) = ended {
        tracing::debug!("a connection to a sandbox or a node broke: {e}");
    }
}
