//! The kept output of a container, as it arrives from its owner.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use thaw_protocol::api::{Encoding, LogEvent, LogStream};
use thaw_sandbox::agent_client::Output;
use thaw_sandbox::error::{Error, ErrorKind};

use super::{Connection, MAX_ANSWER};

/// Output that is being received.
#[derive(Debug)]
pub struct Logs {
    body: Incoming,
    /// Received bytes that are not decoded yet: at most one line and one frame of the body.
    received: Vec<u8>,
    _connection: Connection,
}

impl Logs {
    pub(super) fn new(body: Incoming, connection: Connection) -> Logs {
        Logs {
            body,
            received: Vec::new(),
            _connection: connection,
        }
    }

    /// The next piece; `None` at the end.
    ///
    /// # Errors
    /// [`ErrorKind::DaemonUnreachable`] if the owner breaks off, or sends something else.
    pub async fn next(&mut self) -> Option<Result<(Output, Vec<u8>), Error>> {
        loop {
            if let Some(end) = self.received.iter().position(|b| *b == b'\n') {
                let line: Vec<u8> = self.received.drain(..=end).collect();
                return Some(decoded(&line).ok_or_else(|| broken("it sent a line that is no LogEvent")));
            }
            if self.received.len() > MAX_ANSWER {
                return Some(Err(broken("it sent a line that is too long")));
            }
            match self.body.frame().await {
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        self.received.extend_from_slice(&data);
                    }
                }
                Some(Err(e)) => return Some(Err(broken(&e.to_string()))),
                None => return None,
            }
        }
    }
}

fn broken(why: &str) -> Error {
    Error::new(
        ErrorKind::DaemonUnreachable,
        format!("the output broke off: {why}"),
    )
}

fn decoded(line: &[u8]) -> Option<(Output, Vec<u8>)> {
    let event: LogEvent = serde_json::from_slice(line).ok()?;
    let data = match event.piece.encoding {
        Encoding::Utf8 => event.piece.data.into_bytes(),
        Encoding::Base64 => STANDARD.decode(event.piece.data).ok()?,
    };
    let output = match event.stream {
        LogStream::Stdout => Output::Stdout,
        LogStream::Stderr => Output::Stderr,
    };
    Some((output, data))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_pieces_of_a_stream() {
        let line = br#"{"stream":"stderr","piece":{"data":"/wA=","encoding":"base64"}}"#;
        assert_eq!(decoded(line), Some((Output::Stderr, vec![0xff, 0])));
        let line = br#"{"stream":"stdout","piece":{"data":"a\n","encoding":"utf-8"}}"#;
        assert_eq!(decoded(line), Some((Output::Stdout, b"a\n".to_vec())));
        for wrong in [
            &b"{}"[..],
            b"",
            br#"{"stream":"stdout","piece":{"data":"?","encoding":"base64"}}"#,
        ] {
            assert_eq!(decoded(wrong), None);
        }
    }
}
