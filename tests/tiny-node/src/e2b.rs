//! Nodes that answer E2B's API as one over loopback TCP, and requests to them by an administrator.

use std::fs;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicU16, Ordering};

use serde_json::Value;

use crate::callers;
use crate::place::Place;

/// The first of the ports to choose from.
const FIRST_PORT: u16 = 20_000;
/// The administrator's API key.
const KEY: &str = "administrator-0123456789abcdef0123";

/// A node's name, and the port of its API.
pub type Named = (&'static str, u16);

/// Where this process's nodes listen: an address of its own. On 127.0.0.1, a connection of any process could take a port that is chosen here
/// before its node listens.
fn address() -> Ipv4Addr {
    let [_, high, middle, low] = std::process::id().to_be_bytes();
    Ipv4Addr::new(127, 64 | high & 63, middle, low)
}

/// Nodes with these names, each with a port that is free.
pub fn named<const COUNT: usize>(names: [&'static str; COUNT]) -> [Named; COUNT] {
    // Other tests of this process choose other ports.
    static NEXT: AtomicU16 = AtomicU16::new(FIRST_PORT);
    let ports = || std::iter::repeat_with(|| NEXT.fetch_add(1, Ordering::Relaxed));
    let is_free = |port: &u16| TcpListener::bind((address(), *port)).is_ok();
    names.map(|name| (name, ports().find(is_free).unwrap()))
}

/// Makes the next thawd of a place one of these nodes, with copies of paused sandboxes in a registry. It has no pools, and its template `base` is
/// the stored snapshot of that name.
pub fn configure(place: &Place, own: Named, nodes: &[Named], registry: &str) {
    let (tokens, key) = (place.path("tokens"), place.path("cluster-key"));
    write_secret(&tokens, &format!("administrator {KEY} role=admin\n"));
    write_secret(&key, &"k".repeat(64));
    let address = address();
    let url = |(name, port): &Named| format!("{name} = \"http://{address}:{port}\"\n");
    let (name, port) = own;
    let urls: String = nodes.iter().map(url).collect();
    let none = "{ low = 0, high = 0 }";
    place.configure(&format!(
        "[pools]\ndisks = {none}\nnetworks = {none}\ncgroups = {none}\n[pools.shells]\nshapes = 0\n[pools.parked]\ntemplates = 0\n\
         [api]\ntokens = {tokens:?}\n[e2b]\nlisten = \"{address}:{port}\"\n[e2b.templates.base]\nsnapshot = \"base\"\n\
         [e2b.cluster]\nnode = \"{name}\"\nkey = {key:?}\npaused_registry = \"{registry}/paused\"\n[e2b.cluster.nodes]\n{urls}"
    ));
}

fn write_secret(file: &Path, text: &str) {
    fs::write(file, text).unwrap();
    fs::set_permissions(file, fs::Permissions::from_mode(0o600)).unwrap();
}

/// thawd's id of the sandbox with this id of E2B's API.
pub fn short(id: &str) -> &str {
    &id[..12]
}

/// Whether a place has the sandbox with this id paused, and a registry has the copy.
pub fn is_copied(place: &Place, id: &str) -> bool {
    let note = place.path("data/paused").join(short(id)).join("copy.json");
    let note: Value = serde_json::from_slice(&fs::read(note).unwrap_or_default()).unwrap_or_default();
    note["is_complete"] == true
}

/// Sends a node a request (method and path), with more lines of the head, and a body. Returns the status and the answer; `None` if nobody
/// listens or the connection breaks.
pub fn ask(node: Named, request: &str, head: &str, body: &Value) -> Option<(u16, Value)> {
    let body = body.to_string();
    let (address, (_, port)) = (address(), node);
    let stream = TcpStream::connect((address, port)).ok()?;
    let head = format!(
        "{request} HTTP/1.1\r\nhost: {address}:{port}\r\nconnection: close\r\ncontent-type: application/json\r\nx-api-key: {KEY}\r\n{head}\
         content-length: {}\r\n\r\n",
        body.len()
    );
    let (line, body) = callers::exchange(stream, &head, &body)?;
    let status = line.split(' ').nth(1)?.parse().ok()?;
    Some((status, serde_json::from_str(&body).unwrap_or_default()))
}
