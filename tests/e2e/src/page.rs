//! Pages of HTTP servers in sandboxes.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use crate::PATIENCE;

/// How long a server may take to send each part of its answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);

/// Asks for `/` once, of a server that accepts within `limit`. Returns the answer with its head: empty if the server closed the connection.
pub fn get(from: SocketAddr, limit: Duration) -> io::Result<String> {
    get_path(from, "/", limit)
}

fn get_path(from: SocketAddr, path: &str, limit: Duration) -> io::Result<String> {
    let mut stream = TcpStream::connect_timeout(&from, limit)?;
    stream.set_read_timeout(Some(ANSWER_LIMIT))?;
    stream.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes())?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    Ok(text)
}

/// The same of a server that may be about to start.
pub fn fetch(from: impl Into<SocketAddr>) -> String {
    fetch_path(from, "/")
}

/// Fetches another page.
pub fn fetch_path(from: impl Into<SocketAddr>, path: &str) -> String {
    let (from, since) = (from.into(), Instant::now());
    loop {
        match get_path(from, path, Duration::from_secs(10)) {
            Ok(text) if !text.is_empty() => return text,
            last => assert!(since.elapsed() < PATIENCE, "{from}: {last:?}"),
        }
        std::thread::sleep(Duration::from_millis(200));
    }
}
