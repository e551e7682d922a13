//! The kept output of a container, as it arrives from its owner.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hyper::body::Incoming;
use thaw_protocol::api::{Encoding, LogEvent, LogStream};
use thaw_sandbox::agent_client::Output;
use thaw_sandbox::error::Error;

use super::Connection;
use super::lines::{Lines, broken};

/// Output that is being received.
#[derive(Debug)]
pub struct Logs(Lines);

impl Logs {
    pub(super) fn new(body: Incoming, connection: Connection) -> Logs {
        Logs(Lines::new(body, connection))
    }

    /// The next piece; `None` at the end.
    ///
    /// # Errors
    /// [`DaemonUnreachable`](thaw_sandbox::error::ErrorKind::DaemonUnreachable) if the owner breaks off, or sends something else.
    pub async fn next(&mut self) -> Option<Result<(Output, Vec<u8>), Error>> {
        let line = self.0.next().await?;
        let piece =
            |line: Vec<u8>| decoded(&line).ok_or_else(|| broken("it sent a line that is no LogEvent"));
        Some(line.and_then(piece))
    }
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
