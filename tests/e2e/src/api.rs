//! Requests to a node's API, as bytes on its socket.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use serde_json::Value;

use crate::home::Home;

/// Asks thawd: the answer's head, and its body.
pub fn ask(home: &Home, method: &str, path: &str, body: &str) -> (String, Value) {
    let mut stream = UnixStream::connect(home.run().join("thawd.sock")).unwrap();
    let length = body.len();
    let request = format!(
        "{method} {path} HTTP/1.1\r\nHost: thawd\r\nConnection: close\r\nContent-Type: application/json\r\n\
         Content-Length: {length}\r\n\r\n{body}"
    );
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (
        head.to_lowercase(),
        serde_json::from_str(body).unwrap_or_default(),
    )
}
