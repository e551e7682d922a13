//! What can go wrong in the agent, each with a sentence for people and a kind for programs.

use std::io;

/// The agent's error.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A system call failed.
    #[error("{what}: {source}")]
    System { what: String, source: io::Error },
    /// What was asked makes no sense.
    #[error("{0}")]
    Invalid(String),
    /// It makes sense, but the thing is not in a state for it.
    #[error("{0}")]
    State(String),
    /// It makes sense, but this agent does not do it.
    #[error("{0}")]
    Unsupported(String),
    /// The command of a process does not exist in its root filesystem: exit code 127 to a shell.
    #[error("{0}")]
    CommandNotFound(String),
    /// The command exists and cannot be executed: exit code 126 to a shell.
    #[error("{0}")]
    CommandNotExecutable(String),
    /// There is no file where one was looked for.
    #[error("{0}")]
    NoFile(String),
    /// A stream is at its end.
    #[error("eof")]
    EndOfFile,
}

/// The agent's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// The last system call's error, with what it was for.
    pub fn last(what: impl Into<String>) -> Self {
        Error::System {
            what: what.into(),
            source: io::Error::last_os_error(),
        }
    }

    /// The errno beneath, if a system call failed.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Error::System { source, .. } => source.raw_os_error(),
            _ => None,
        }
    }
}

impl From<Error> for io::Error {
    fn from(e: Error) -> Self {
        match e {
            Error::System { source, .. } => source,
            other => io::Error::other(other.to_string()),
        }
    }
}

/// Says what a failed system call was for.
pub trait For<T> {
    /// Wraps the error with `what`.
    fn for_(self, what: impl FnOnce() -> String) -> Result<T>;
}

impl<T, E: Into<io::Error>> For<T> for std::result::Result<T, E> {
    fn for_(self, what: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|e| Error::System {
            what: what(),
            source: e.into(),
        })
    }
}
