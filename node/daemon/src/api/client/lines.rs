//! Lines of an answer, as they arrive.

use http_body_util::BodyExt;
use hyper::body::Incoming;
use thaw_sandbox::error::{Error, ErrorKind};

use super::{Connection, MAX_ANSWER};

/// An answer of lines that is being received.
#[derive(Debug)]
pub(super) struct Lines {
    body: Incoming,
    /// Received bytes that are not passed on yet: at most one line and one frame of the body.
    received: Vec<u8>,
    connection: Connection,
}

impl Lines {
    pub fn new(body: Incoming, connection: Connection) -> Lines {
        Lines {
            body,
            received: Vec::new(),
            connection,
        }
    }

    /// The next line; `None` at the end.
    ///
    /// # Errors
    /// [`ErrorKind::DaemonUnreachable`] if the owner breaks off.
    pub async fn next(&mut self) -> Option<Result<Vec<u8>, Error>> {
        loop {
            if let Some(end) = self.received.iter().position(|b| *b == b'\n') {
                return Some(Ok(self.received.drain(..=end).collect()));
            }
            if self.received.len() > MAX_ANSWER {
                return Some(Err(broken("it sent a line that is too long")));
            }
            match self.connection.receive(self.body.frame()).await {
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

pub(super) fn broken(why: &str) -> Error {
    Error::new(
        ErrorKind::DaemonUnreachable,
        format!("the answer broke off: {why}"),
    )
}
