//! Why a share could not be attached or detached.

use std::io;

use thaw_protocol::share::SLOTS;

/// Why a share could not be attached or detached.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    #[error("{what} cannot be shared: {source}")]
    Source { what: String, source: io::Error },
    #[error("{what} cannot be shared: it is {kind}, and only directories and regular files can be")]
    Kind { what: String, kind: &'static str },
    #[error("{0:?} cannot be the name of a share, or is another's")]
    Name(String),
    #[error("there is no room for another share: a microVM has {SLOTS}")]
    Full,
    #[error("thaw-share has ended, and with it all that this microVM shares")]
    Ended,
    #[error("cannot attach a share: {step}: {source}")]
    Step { step: &'static str, source: io::Error },
}
