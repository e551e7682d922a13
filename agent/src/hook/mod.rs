//! Hooks: a command or a request that the host runs in a container within a time limit.
//!
//! Invariant: a hook ends at its deadline, whatever it does. At most [`MAX_OUTPUT`] bytes of its output are kept; the rest is read and
//! dropped, so that a command does not block.

mod command;
mod request;

use tokio::time::Instant;

pub use command::finish;
pub use request::send;

/// Most bytes of output that are kept.
pub const MAX_OUTPUT: usize = 4096;

/// How a hook ended.
#[derive(Debug, PartialEq, Eq)]
pub struct Ended {
    pub outcome: Outcome,
    pub output: Vec<u8>,
}

/// Whether a hook succeeded. The others have a sentence for people.
#[derive(Debug, PartialEq, Eq)]
pub enum Outcome {
    Succeeded,
    Failed(String),
    TimedOut(String),
}

/// How long a hook may take.
#[derive(Clone, Copy, Debug)]
pub struct Limit {
    pub ms: u32,
    pub deadline: Instant,
}

impl Limit {
    /// A limit that begins now.
    pub fn of_ms(ms: u32) -> Limit {
        Limit {
            ms,
            deadline: Instant::now() + std::time::Duration::from_millis(ms.into()),
        }
    }
}
