//! Callers of a thawd over loopback TCP: an administrator of each of some tenants, by a token.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;

use serde_json::Value;

use crate::place::Place;

const ADDRESS: &str = "127.0.0.1:";

/// The token of a tenant.
pub fn token(tenant: &str) -> String {
    format!("{tenant}-{}", "0".repeat(32))
}

/// The lines of `thawd.toml` by which the next thawd serves these tenants, to stand below `[api]`. Writes their tokens.
pub fn serve(place: &Place, tenants: &[&str]) -> String {
    let file = place.path("tokens");
    let line = |tenant: &&str| format!("{tenant} {} role=admin tenant={tenant}\n", token(tenant));
    fs::write(&file, tenants.iter().map(line).collect::<String>()).unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
    format!("listen = \"{ADDRESS}0\"\ntokens = {file:?}\n")
}

/// Asks the thawd that was started last on behalf of a tenant, by this method and path, with a body: the status and the answer.
pub fn ask(place: &Place, tenant: &str, request: &str, body: &Value) -> Option<(String, String)> {
    let (body, token) = (body.to_string(), token(tenant));
    let stream = TcpStream::connect(address(place)?).ok()?;
    let head = format!(
        "{request} HTTP/1.1\r\nhost: thawd\r\nconnection: close\r\ncontent-type: application/json\r\n\
         authorization: Bearer {token}\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    exchange(stream, &head, &body)
}

/// Sends a request with `connection: close`: the status line and the body of the answer. None if the connection breaks.
pub fn exchange(mut stream: TcpStream, head: &str, body: &str) -> Option<(String, String)> {
    stream.write_all(head.as_bytes()).ok()?;
    stream.write_all(body.as_bytes()).ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    let (head, body) = text.split_once("\r\n\r\n")?;
    Some((head.lines().next()?.to_owned(), body.to_owned()))
}

/// Where it listens, as it logged.
pub fn address(place: &Place) -> Option<String> {
    let log = fs::read_to_string(place.path("thawd.log")).ok()?;
    let (_, port) = log.rsplit_once(ADDRESS)?;
    let port: String = port.chars().take_while(char::is_ascii_digit).collect();
    Some(format!("{ADDRESS}{port}"))
}
