//! Requests to a thawd that may be dead before it answers, as bytes.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use serde_json::Value;

use crate::daemon::log;
use crate::place::Place;

/// Asks by this method and path, with a body and perhaps an idempotency key, and does not wait. None where nobody listens.
pub fn ask(place: &Place, request: &str, key: Option<&str>, body: &Value) -> Option<UnixStream> {
    let body = body.to_string();
    let key = key.map_or_else(String::new, |key| format!("idempotency-key: {key}\r\n"));
    let mut stream = UnixStream::connect(place.socket()).ok()?;
    let head = format!(
        "{request} HTTP/1.1\r\nhost: thawd\r\nconnection: close\r\ncontent-type: application/json\r\n{key}\
         content-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).ok()?;
    stream.write_all(body.as_bytes()).ok()?;
    Some(stream)
}

/// Its status line and its body; none where it was cut off before either.
pub fn answer(mut stream: UnixStream) -> Option<(String, String)> {
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    let (head, body) = text.split_once("\r\n\r\n")?;
    Some((head.lines().next()?.to_owned(), body.to_owned()))
}

/// The body of its answer, which must be that of a success.
pub fn done(place: &Place, request: &str, body: &Value) -> Value {
    match ask(place, request, None, body).and_then(answer) {
        Some((status, body)) if status.contains(" 20") => serde_json::from_str(&body).unwrap_or_default(),
        other => panic!("{request}: {other:?}; {}", log(place)),
    }
}

/// The value of a metric, whose name comes with its labels.
pub fn metric(place: &Place, name: &str) -> Option<f64> {
    let (_, body) = answer(ask(place, "GET /metrics", None, &Value::Null)?)?;
    let value = body
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    value?.parse().ok()
}
