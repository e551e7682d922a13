//! Several nodes over fakes in one process, which serve over TCP, for tests.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use serde_json::{Value, json};
use thaw_protocol::api::TenantLimits;
use thaw_sandbox::admission::Admission;
use thaw_sandbox::config::e2b::ClusterConfig;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use super::copying::keep_copied;
use crate::api::tcp::serve_either;
use crate::api::test_client::{send, until, whole};
use crate::e2b::members::Members;
use crate::e2b::members::proof::Step;
use crate::e2b::test_api::{ACME, Answer, Api, echo};
use crate::e2b::whole_id::{Tag, WholeId};

const NAMES: [&str; 3] = ["a", "b", "c"];
/// Of one fake machine, MiB.
const MACHINE: u64 = 128;

/// A node that serves over TCP.
pub struct Node {
    pub name: &'static str,
    pub config: ClusterConfig,
    pub api: Api,
    address: SocketAddr,
    /// Connections.
    accepted: Arc<AtomicUsize>,
    serving: tokio::task::JoinHandle<()>,
    stop: watch::Sender<()>,
}

impl Node {
    /// From now on the node refuses connections, and has none.
    pub async fn stop(&mut self) {
        self.serving.abort();
        let _ = (&mut self.serving).await;
        self.stop.send_replace(());
        self.stop.closed().await;
        // A process that another test is starting may hold a copy of the listener for a moment.
        while TcpStream::connect(self.address).await.is_ok() {
            tokio::task::yield_now().await;
        }
        // Other nodes notice that their idle connections to it are closed.
        tokio::time::sleep(Duration::from_millis(20)).await;
    }

    /// How many connections it has accepted.
    pub fn accepted(&self) -> usize {
        self.accepted.load(Ordering::SeqCst)
    }

    /// Whether an id names this node.
    pub fn has(&self, id: &str) -> bool {
        WholeId::parse(id).unwrap().home == Some(Tag::of(self.name))
    }

    /// Sends a request of the tenant acme.
    pub async fn ask(&self, method: &str, path: &str, body: Value) -> Answer {
        self.api.ask(ACME, method, path, body).await
    }

    /// Creates a sandbox on this node, as for another node, and returns its id.
    pub async fn make_here(&self) -> String {
        self.make_here_as(json!({"templateID": "base"})).await
    }

    async fn make_here_as(&self, what: Value) -> String {
        let body = what.to_string();
        let request = Request::builder().method("POST").uri("/v2/sandboxes");
        let request = request.header("x-api-key", ACME).extension(Step::First);
        let made = send(&self.api.routes, request.body(Body::from(body)).unwrap()).await;
        let made: Value = serde_json::from_slice(&whole(made).await).unwrap();
        made["sandboxID"].as_str().unwrap().to_owned()
    }
}

fn key() -> tempfile::NamedTempFile {
    let key = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(key.path(), "k".repeat(64)).unwrap();
    key
}

fn config(own: &str, key: &tempfile::NamedTempFile, addresses: &[SocketAddr]) -> ClusterConfig {
    let nodes = NAMES.iter().zip(addresses);
    ClusterConfig {
        node: Some(own.into()),
        key: key.path().to_owned(),
        paused_registry: Some("registry.example/paused".into()),
        nodes: nodes
            .map(|(name, at)| ((*name).into(), format!("http://{at}")))
            .collect(),
        ..ClusterConfig::default()
    }
}

async fn listeners(count: usize) -> (Vec<TcpListener>, Vec<SocketAddr>) {
    let mut listeners = Vec::new();
    for _ in 0..count {
        listeners.push(TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap());
    }
    let addresses = listeners.iter().map(|listener| listener.local_addr().unwrap());
    let addresses = addresses.collect();
    (listeners, addresses)
}

/// Nodes that have room for so many machines each.
pub async fn nodes(machines: &[u64]) -> Vec<Node> {
    let (key, (listeners, addresses)) = (key(), listeners(machines.len()).await);
    let started = listeners.into_iter().zip(NAMES).zip(machines).zip(0..);
    let started = started.map(|(((listener, name), machines), number)| {
        let (config, address) = (config(name, &key, &addresses), listener.local_addr().unwrap());
        let members = Members::open(&config).unwrap();
        let capacity = TenantLimits {
            memory_mib: Some(machines * MACHINE),
            ..TenantLimits::default()
        };
        let admission = Admission::with(TenantLimits::default(), capacity);
        let api = Api::of_node(Some(Router::new().fallback(echo)), admission, Some(members));
        // Ids of fakes count from here.
        api.fake.counts.made.store(1000 * number, Ordering::SeqCst);
        let (stop, stopped) = watch::channel(());
        let (routes, accepted) = (api.routes.clone(), Arc::<AtomicUsize>::default());
        let count = accepted.clone();
        let serving = tokio::spawn(async move {
            loop {
                let stream = listener.accept().await.unwrap().0;
                count.fetch_add(1, Ordering::SeqCst);
                tokio::spawn(serve_either(stream, routes.clone(), stopped.clone()));
            }
        });
        Node {
            name,
            config,
            api,
            address,
            accepted,
            serving,
            stop,
        }
    });
    started.collect()
}

/// Makes a sandbox on the node b, pauses it, and copies it to the registry, which all nodes share. Returns its id.
pub async fn paused_on_b(nodes: &[Node]) -> String {
    paused_on_b_as(nodes, json!({"templateID": "base"})).await
}

/// The same with this body of the creation.
pub async fn paused_on_b_as(nodes: &[Node], what: Value) -> String {
    let copies = nodes[0].api.fake.copies.lock().unwrap().clone();
    for node in &nodes[1..] {
        *node.api.fake.copies.lock().unwrap() = copies.clone();
    }
    let id = nodes[1].make_here_as(what).await;
    let pause = format!("/sandboxes/{id}/pause");
    nodes[0].ask("POST", &pause, json!({})).await.ok(204);
    let copying = tokio::spawn(keep_copied(nodes[1].api.service.clone()));
    until(|| copies.has(&format!("registry.example/paused:{id}"))).await;
    copying.abort();
    id
}

/// Removes the node b from the lists of the others.
pub fn forget_b(nodes: &[Node]) {
    for node in nodes.iter().filter(|node| node.name != "b") {
        let members = node.api.service.members.as_ref().unwrap();
        let mut config = node.config.clone();
        config.nodes.remove("b");
        members.reload(&config).unwrap();
    }
}

/// A server that answers each GET with these bytes, and keeps the connection open. Another request breaks the connection.
async fn answering(answer: Vec<u8>) -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let (mut stream, answer) = (listener.accept().await.unwrap().0, answer.clone());
            tokio::spawn(async move {
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    head.push(stream.read_u8().await.unwrap());
                }
                if !head.starts_with(b"GET ") {
                    return;
                }
                // The other end may have seen enough.
                let _ = stream.write_all(&answer).await;
                let _ = stream.read(&mut [0]).await;
            });
        }
    });
    address
}

/// The node `a` beside a node `b` that answers each GET with these bytes, and breaks the connection at other requests.
pub async fn beside(answer: Vec<u8>) -> Api {
    let (key, b) = (key(), answering(answer).await);
    let a = ([127, 0, 0, 1], 1).into();
    let members = Members::open(&config("a", &key, &[a, b])).unwrap();
    Api::of_node(None, Admission::default(), Some(members))
}

/// An answer with this body.
pub fn body(text: &str) -> Vec<u8> {
    let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", text.len());
    [head.as_bytes(), text.as_bytes()].concat()
}
