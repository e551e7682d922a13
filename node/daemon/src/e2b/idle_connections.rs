//! Idle connections to ports of sandboxes, or to other nodes, that earlier requests left for later ones.
//!
//! Invariants:
//! - A connection serves one request at a time. It becomes idle only when hyper is ready for another request on it: the request before was
//!   sent, and its answer was read to the end. So no byte of one answer is taken for a part of the next, and a connection whose protocol
//!   has changed never becomes idle.
//! - A connection is used only for the destination to which it was opened. That includes a [period](crate::api::period): for which a sandbox
//!   runs without interruption, or a node is a member. Whoever uses a connection has the period of now, so none is used that was opened before a
//!   pause, a resume, or the end of another sandbox with the same address. An idle connection is closed when its period is over.
//! - There are never more idle connections than [`Limits`] allows, nor for longer.

use std::collections::VecDeque;
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use hyper::client::conn::http1::SendRequest;
use thaw_sys::lock::Lock;
use tokio::time::{Instant, sleep_until};

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
}

/// An open connection, which one request uses. It closes when this is dropped.
#[derive(Debug)]
pub struct Connection {
    pub sender: SendRequest<Body>,
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
    pub fn open(
        &self,
        to: Destination,
        sender: SendRequest<Body>,
        http: impl Future<Output = hyper::Result<()>> + Send + 'static,
    ) -> Connection {
        let number = {
            let mut state = self.state.locked();
            state.opened += 1;
            state.opened
        };
        tokio::spawn(run(self.clone(), number, to.during.clone(), http));
        Connection { sender, to, number }
    }

    /// An idle connection to a destination, which is idle no more. It was open a moment ago.
    pub fn take(&self, to: &Destination) -> Option<Connection> {
        let mut state = self.state.locked();
        loop {
            // The last one: it is the least likely to be closed by the other end just now.
            let at = state.idle.iter().rposition(|idle| idle.connection.to == *to)?;
            let Idle { connection, .. } = state.idle.remove(at)?;
            if connection.sender.is_ready() {
                return Some(connection);
            }
        }
    }

    /// Makes a connection idle once it is ready for another request. `in_use` is dropped then, or when the connection ends.
    pub fn keep(&self, mut connection: Connection, in_use: impl Send + 'static) {
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
            _ if state.idle.len() >= self.limits.in_all => Some(0),
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

    /// Closes those that were idle for too long. Returns when the next will have been; `None` if there is none.
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

/// Closes idle connections in time, as long as there are some.
async fn close_old(idle: IdleConnections) {
    while let Some(next) = idle.close_until_now() {
        sleep_until(next).await;
    }
}

/// Runs a connection until it ends: at the latest when its [`Connection`] is dropped and the answer is passed on. One that is in use when
/// its period ends is not ended here, because a request survives a pause that keeps the memory.
async fn run(
    idle: IdleConnections,
    number: u64,
    mut during: During,
    http: impl Future<Output = hyper::Result<()>>,
) {
    let ended = {
        let mut http = std::pin::pin!(http);
        tokio::select! {
            ended = http.as_mut() => ended,
            () = during.over() => {
                idle.close(number);
                http.await
            }
        }
    };
    idle.close(number);
    if let Err(e) = ended {
        tracing::debug!("a connection to a sandbox or a node broke: {e}");
    }
}
