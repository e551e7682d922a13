//! The agent's error: each has a sentence for people and a kind for programs.

use std::io;

/// The agent's error.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A system call failed.
    #[error("{what}: {source}")]
    System { what: String, source: io::Error },
    /// The request is invalid.
    #[error("{0}")]
    Invalid(String),
    /// The request is valid, but not in the present state.
    #[error("{0}")]
    State(String),
    /// The request is valid, but this agent does not support it.
    #[error("{0}")]
    Unsupported(String),
    /// The process's command does not exist in its root file system: exit code 127 in a shell.
    #[error("{0}")]
    CommandNotFound(String),
    /// The command exists but cannot be executed: exit code 126 in a shell.
    #[error("{0}")]
    CommandNotExecutable(String),
    /// The file does not exist.
    #[error("{0}")]
    NoFile(String),
    /// The stream is at its end.
    #[error("eof")]
    EndOfFile,
}

/// The agent's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// The error of the last system call, with the purpose of the call.
    pub fn last(what: impl Into<String>) -> Self {
        Error::System {
            what: what.into(),
            source: io::Error::last_os_error(),
        }
    }

    /// The errno, if a system call failed.
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

/// Adds the purpose of the failed system call to an error.
pub trait WithContext<T> {
    /// Wraps the error with `what`.
    fn with_context(self, what: impl FnOnce() -> String) -> Result<T>;
}

impl<T, E: Into<io::Error>> WithContext<T> for std::result::Result<T, E> {
    fn with_context(self, what: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|e| Error::System {
            what: what(),
            source: e.into(),
        })
    }
}
