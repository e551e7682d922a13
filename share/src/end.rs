//! Why serving ended.

use std::io;

use thaw_protocol::share::HeaderError;

/// Why serving ended.
#[derive(Debug, thiserror::Error)]
pub enum End {
    /// The normal end.
    #[error("the VMM has ended")]
    Closed,
    #[error("the VMM sent {0}")]
    Header(#[from] HeaderError),
    #[error("the relay: {0}")]
    Io(io::Error),
}

impl From<io::Error> for End {
    fn from(error: io::Error) -> End {
        match error.kind() {
            io::ErrorKind::UnexpectedEof | io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => {
                End::Closed
            }
            _ => End::Io(error),
        }
    }
}
