//! Small requests through the gateway to a port of a sandbox, alone and beside many connections.
//!
//! A tiny guest has no server. So the host, a network namespace of the benchmark's own, is given the sandbox's address too, and a server
//! of the benchmark answers there in the guest's place: what is timed is the gateway, and no guest.
//!
//! Invariant: every one of the many connections is answered after the requests that were timed beside it, so it was open meanwhile.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use rustix::process::{Resource, getrlimit, setrlimit};
use serde_json::{Value, json};
use thaw_protocol::api::FreezeSandbox;
use thaw_tiny_node::Place;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::http::{Connection, SMALL, serve};
use super::{Addresses, DOMAIN, KEY};
use crate::Report;
use crate::clock::{monotonic_ns, progress, us_since};
use crate::create::Node;
use crate::network::place::ip;
use crate::snapshot::server::failed;

/// The series of requests without other connections.
const ALONE: &str = "gateway: small request";
/// The same beside [`OTHERS`] connections.
const BESIDE: &str = "gateway: small request beside 1000 connections";
/// The connections. Those that are not [`SLOW`] were answered once and are idle.
const OTHERS: usize = 1000;
/// Of these so many send the head of a request slowly, and as many the body.
const SLOW: usize = 50;
/// Bytes that a slow caller has to send: more than it comes to.
const SLOW_BYTES: usize = 1024;
/// How long it waits before each.
const SLOWNESS: Duration = Duration::from_millis(500);
/// Descriptors that this process needs at most.
const DESCRIPTORS: u64 = 4096;
/// The port.
const PORT: u16 = 8000;
/// How long the sandbox may live, seconds.
const TIMEOUT_S: u32 = 3600;

/// Times so many requests in each round, alone and beside the connections in turn. One round more, which warms up, is not counted. The calling
/// thread must be in a network namespace of its own.
///
/// # Errors
/// A request was not answered as it must be, whoever sent it.
pub async fn run(place: Place, rounds: usize, requests: usize, report: &mut Report) -> Result<Place, String> {
    raise_descriptors()?;
    let addresses = Addresses::free()?;
    place.configure(&addresses.configuration(&place)?);
    let node = Node::configured(place)?;
    let gateway = Gateway::open(&node, addresses.e2b).await?;
    for round in 0..=rounds {
        let mut discarded = Report::new("warm-up");
        let report = if round == 0 { &mut discarded } else { &mut *report };
        node.settle().await?;
        gateway.requests(ALONE, requests, report).await?;
        let crowd = Crowd::gather(&gateway).await?;
        node.settle().await?;
        gateway.requests(BESIDE, requests, report).await?;
        crowd.dissolve(&gateway).await?;
        progress(
            "bench-service",
            format!("gateway, round {round} of {rounds} is done"),
        );
    }
    report.ratio_of(
        "p99_gateway_under_1000_connections_over_idle",
        (BESIDE, 99.0),
        (ALONE, 99.0),
    )?;
    report.note(format!(
        "The gateway's requests are of one caller, over loopback without TLS, on a connection that stays open; a server of the benchmark answers \
         in the place of the guest, which has none. Of {OTHERS} other connections {} are idle after one request, {SLOW} send the head of a \
         request and {SLOW} its body, a byte every {} ms. All of them are answered after the requests that are timed.",
        OTHERS - 2 * SLOW,
        SLOWNESS.as_millis()
    ));
    node.client.delete(&gateway.id).await.map_err(failed)?;
    Ok(node.stop())
}

/// Lets this process have both ends of all connections open.
fn raise_descriptors() -> Result<(), String> {
    let mut limit = getrlimit(Resource::Nofile);
    if limit.current.is_none_or(|current| current >= DESCRIPTORS) {
        return Ok(());
    }
    limit.current = Some(DESCRIPTORS);
    setrlimit(Resource::Nofile, limit)
        .map_err(|e| format!("{DESCRIPTORS} open descriptors (raise the hard limit, ulimit -Hn): {e}"))
}

/// The gateway's port for one sandbox.
struct Gateway {
    to: SocketAddr,
    /// The sandbox.
    id: String,
    /// The host name of its port.
    host: String,
    /// A small request.
    small: Vec<u8>,
}

impl Gateway {
    /// Makes a sandbox by E2B's API, and answers at its address.
    async fn open(node: &Node, to: SocketAddr) -> Result<Gateway, String> {
        let id = sandbox(node, to).await?;
        let shown = node.client.get(&id).await.map_err(failed)?;
        let address = shown.network.map(|network| network.address);
        let address: Option<IpAddr> = address.and_then(|address| address.parse().ok());
        let address = address.ok_or_else(|| format!("sandbox {id} has no address"))?;
        ip(&["address", "add", &format!("{address}/32"), "dev", "lo"])?;
        let listener = TcpListener::bind((address, PORT)).await;
        let listener = listener.map_err(|e| format!("a server at {address}: {e}"))?;
        tokio::spawn(serve(listener));
        let host = format!("{PORT}-{id}.{DOMAIN}");
        Ok(Gateway {
            to,
            small: format!("GET / HTTP/1.1\r\nhost: {host}\r\n\r\n").into_bytes(),
            id,
            host,
        })
    }

    /// A connection on which a request was answered.
    async fn connect(&self) -> Result<Connection, String> {
        let connection = Connection::open(self.to).await;
        let mut connection = connection.map_err(|e| format!("a connection to the gateway: {e}"))?;
        self.ask(&mut connection).await?;
        Ok(connection)
    }

    async fn ask(&self, connection: &mut Connection) -> Result<(), String> {
        good(connection.ask(&self.small).await)
    }

    /// Times so many requests on a new connection.
    async fn requests(&self, series: &str, count: usize, report: &mut Report) -> Result<(), String> {
        let mut connection = self.connect().await?;
        for _ in 0..count {
            let began = monotonic_ns();
            let answer = connection.ask(&self.small).await;
            let us = us_since(began);
            good(answer)?;
            report.sample(series, "µs", us);
        }
        Ok(())
    }
}

/// Makes a sandbox of a stored snapshot by E2B's API: of the image its container would be started, which a tiny guest has not.
async fn sandbox(node: &Node, to: SocketAddr) -> Result<String, String> {
    let client = &node.client;
    let original = client.create(&node.request()).await.map_err(failed)?.sandbox.id;
    let frozen = client.freeze(&original, &FreezeSandbox::default()).await;
    let snapshot = frozen.map_err(failed)?.snapshot;
    let snapshot = snapshot.ok_or("the node did not store the snapshot")?;
    client.delete(&original).await.map_err(failed)?;
    let body = json!({"templateID": snapshot, "timeout": TIMEOUT_S}).to_string();
    let request = format!(
        "POST /v2/sandboxes HTTP/1.1\r\nhost: {to}\r\nx-api-key: {KEY}\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    );
    let asked = async { Connection::open(to).await?.ask(request.as_bytes()).await };
    let (status, answer) = asked
        .await
        .map_err(|e: io::Error| format!("POST /v2/sandboxes: {e}"))?;
    let made: Value = serde_json::from_slice(&answer).unwrap_or_default();
    match made["sandboxID"].as_str() {
        Some(id) if status == 201 => Ok(id.to_owned()),
        _ => Err(format!("POST /v2/sandboxes: {status} {made}")),
    }
}

/// Whether an answer is that of the server in the guest's place.
fn good(answer: io::Result<(u16, Vec<u8>)>) -> Result<(), String> {
    match answer {
        Ok((200, body)) if body == SMALL => Ok(()),
        Ok((status, body)) => Err(format!(
            "a request through the gateway: {status} {}",
            String::from_utf8_lossy(&body)
        )),
        Err(e) => Err(format!("a request through the gateway: {e}")),
    }
}

/// The other connections.
struct Crowd {
    idle: Vec<Connection>,
    slow: JoinSet<Result<(), String>>,
    /// Becomes true when slow callers are to send the rest.
    hurry: watch::Sender<bool>,
}

impl Crowd {
    /// Opens all.
    async fn gather(gateway: &Gateway) -> Result<Crowd, String> {
        let (hurry, waits) = watch::channel(false);
        let mut crowd = Crowd {
            idle: Vec::with_capacity(OTHERS),
            slow: JoinSet::new(),
            hurry,
        };
        let rest = "a".repeat(SLOW_BYTES);
        let host = &gateway.host;
        let head = (
            format!("GET / HTTP/1.1\r\nhost: {host}\r\nx-slow: "),
            format!("{rest}\r\n\r\n"),
        );
        let body = (
            format!("POST / HTTP/1.1\r\nhost: {host}\r\ncontent-length: {SLOW_BYTES}\r\n\r\n"),
            rest,
        );
        for (begin, rest) in [head, body] {
            for _ in 0..SLOW {
                let connection = Connection::open(gateway.to).await;
                let mut connection = connection.map_err(|e| format!("a slow caller: {e}"))?;
                let begun = connection.send(begin.as_bytes()).await;
                begun.map_err(|e| format!("a slow caller: {e}"))?;
                crowd
                    .slow
                    .spawn(send_slowly(connection, rest.clone().into_bytes(), waits.clone()));
            }
        }
        while crowd.idle.len() + crowd.slow.len() < OTHERS {
            crowd.idle.push(gateway.connect().await?);
        }
        Ok(crowd)
    }

    /// Has all of them answered, and closes them.
    async fn dissolve(mut self, gateway: &Gateway) -> Result<(), String> {
        self.hurry.send_replace(true);
        while let Some(answered) = self.slow.join_next().await {
            let answered = answered.map_err(|e| e.to_string())?;
            answered.map_err(|e| format!("a slow caller: {e}"))?;
        }
        for mut connection in self.idle {
            let answered = gateway.ask(&mut connection).await;
            answered.map_err(|e| format!("an idle connection: {e}"))?;
        }
        Ok(())
    }
}

/// Sends the rest of a request byte by byte, and what is left at once when `hurry` becomes true. Then it must be answered.
async fn send_slowly(
    mut connection: Connection,
    rest: Vec<u8>,
    mut hurry: watch::Receiver<bool>,
) -> Result<(), String> {
    let mut rest = rest.iter();
    let text = |e: io::Error| e.to_string();
    while timeout(SLOWNESS, hurry.changed()).await.is_err() {
        let next = rest.next().ok_or("it had sent all before it was to")?;
        connection.send(&[*next]).await.map_err(text)?;
    }
    connection.send(rest.as_slice()).await.map_err(text)?;
    good(connection.answer().await)
}
