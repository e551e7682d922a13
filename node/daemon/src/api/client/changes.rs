//! The changes of sandboxes, as they arrive from their owner.

use hyper::body::Incoming;
use thaw_protocol::api::WatchEvent;
use thaw_sandbox::error::Error;

use super::Connection;
use super::lines::{Lines, broken};

/// Changes that are being received.
#[derive(Debug)]
pub struct Changes(Lines);

impl Changes {
    pub(super) fn new(body: Incoming, connection: Connection) -> Changes {
        Changes(Lines::new(body, connection))
    }

    /// The next change; `None` when the owner ends.
    ///
    /// # Errors
    /// [`DaemonUnreachable`](thaw_sandbox::error::ErrorKind::DaemonUnreachable) if the owner breaks off, or sends something else.
    pub async fn next(&mut self) -> Option<Result<WatchEvent, Error>> {
        let line = self.0.next().await?;
        let decoded = |line: Vec<u8>| serde_json::from_slice(&line);
        Some(line.and_then(|line| decoded(line).map_err(|e| broken(&format!("it sent no WatchEvent: {e}")))))
    }
}
