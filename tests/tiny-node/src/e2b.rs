//! Nodes that answer E2B's API as one over loopback TCP, and requests to them by an administrator.

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use serde_json::Value;

use crate::callers;
use crate::place::Place;

const ADDRESS: &str = "127.0.0.1";
/// The administrator's API key.
const KEY: &str = "administrator-0123456789abcdef0123";

/// A node's name, and the port of its API.
pub type Named = (&'static str, u16);

/// Nodes with these names, each with a port that is free.
pub fn named<const COUNT: usize>(names: [&'static str; COUNT]) -> [Named; COUNT] {
    // All of them are taken before one is given back.
    let taken = names.map(|name| (name, TcpListener::bind((ADDRESS, 0)).unwrap()));
    taken.map(|(name, listener)| (name, listener.local_addr().unwrap().port()))
}

/// Makes the next thawd of a place one of these nodes, with copies of paused sandboxes in a registry. It has no pools, and its template `base` is
/// the stored snapshot of that name.
pub fn configure(place: &Place, own: Named, nodes: &[Named], registry: &str) {
    let (tokens, key) = (place.path("tokens"), place.path("cluster-key"));
    write_secret(&tokens, &format!("administrator {KEY} role=admin\n"));
    write_secret(&key, &"k".repeat(64));
    let url = |(name, port): &Named| format!("{name} = \"http://{ADDRESS}:{port}\"\n");
    let (name, port) = own;
    let urls: String = nodes.iter().map(url).collect();
    let none = "{ low = 0, high = 0 }";
    place.configure(&format!(
        "[pools]\ndisks = {none}\nnetworks = {none}\ncgroups = {none}\n[pools.shells]\nshapes = 0\n[pools.parked]\ntemplates = 0\n\
         [api]\ntokens = {tokens:?}\n[e2b]\nlisten = \"{ADDRESS}:{port}\"\n[e2b.templates.base]\nsnapshot = \"base\"\n\
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
    let (_, port) = node;
    let stream = TcpStream::connect((ADDRESS, port)).ok()?;
    let head = format!(
        "{request} HTTP/1.1\r\nhost: {ADDRESS}:{port}\r\nconnection: close\r\ncontent-type: application/json\r\nx-api-key: {KEY}\r\n{head}\
         content-length: {}\r\n\r\n",
        body.len()
    );
    let (line, body) = callers::exchange(stream, &head, &body)?;
    let status = line.split(' ').nth(1)?.parse().ok()?;
    Some((status, serde_json::from_str(&body).unwrap_or_default()))
}
