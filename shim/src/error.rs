//! What goes wrong, as containerd is told: a code for programs (its errdefs), a sentence that says what, where and what to do.

use std::path::{Path, PathBuf};
use std::time::Duration;

use ttrpc::{Code, get_status};

/// The result of whatever may fail here.
pub type Result<T> = std::result::Result<T, Error>;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{0}: not found")]
    NotFound(String),
    #[error("{0}: already exists")]
    AlreadyExists(String),
    #[error("{0}")]
    Invalid(String),
    /// Not in that state.
    #[error("{0}")]
    State(String),
    /// What no microVM can do, or this shim does not yet.
    #[error("{0}")]
    Unsupported(String),
    #[error("no thawd serves pods at {path}: {source}; start it: systemctl start thawd.service")]
    NoThawd { path: PathBuf, source: std::io::Error },
    #[error("thawd: {0}")]
    Thawd(String),
    /// A refusal of the guest's agent, with its code.
    #[error("{message}")]
    Agent { code: Code, message: String },
    /// The guest has not answered, and may yet.
    #[error("the guest did not {what} within {} s", limit.as_secs())]
    Silent { what: String, limit: Duration },
    /// The microVM is gone, or its agent.
    #[error("the pod's microVM is gone: {0}")]
    Gone(String),
    #[error("cannot {what}: {source}")]
    System { what: String, source: std::io::Error },
}

/// Adds to a failed system call what it was for.
pub trait For<T> {
    fn for_(self, what: impl FnOnce() -> String) -> Result<T>;
}

impl<T, E: Into<std::io::Error>> For<T> for std::result::Result<T, E> {
    fn for_(self, what: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|e| Error::System {
            what: what(),
            source: e.into(),
        })
    }
}

impl Error {
    /// A file of the host that is not what it must be.
    pub fn malformed(path: &Path, why: impl std::fmt::Display) -> Error {
        Error::Invalid(format!("{}: {why}", path.display()))
    }

    /// Says of what of a container thawd speaks.
    pub fn of(self, part: String) -> Error {
        match self {
            Error::Thawd(what) => Error::Thawd(format!("{part}: {what}")),
            other => other,
        }
    }

    /// What the agent answered. A connection that is lost is a machine that is gone.
    pub fn of_agent(error: ttrpc::Error) -> Error {
        match error {
            ttrpc::Error::RpcStatus(status) => Error::Agent {
                code: status.code(),
                message: status.message().to_owned(),
            },
            other => Error::Gone(other.to_string()),
        }
    }

    /// Whether the agent says that what was asked for is not in the state for it, or not there.
    pub fn is_ended(&self) -> bool {
        matches!(
            self,
            Error::Agent {
                code: Code::FAILED_PRECONDITION | Code::NOT_FOUND,
                ..
            } | Error::Gone(_)
        )
    }

    fn code(&self) -> Code {
        match self {
            Error::NotFound(_) => Code::NOT_FOUND,
            Error::AlreadyExists(_) => Code::ALREADY_EXISTS,
            Error::Invalid(_) => Code::INVALID_ARGUMENT,
            Error::State(_) => Code::FAILED_PRECONDITION,
            Error::Unsupported(_) => Code::UNIMPLEMENTED,
            Error::NoThawd { .. } | Error::Gone(_) => Code::UNAVAILABLE,
            Error::Silent { .. } => Code::DEADLINE_EXCEEDED,
            Error::Thawd(_) | Error::System { .. } => Code::UNKNOWN,
            Error::Agent { code, .. } => *code,
        }
    }
}

impl From<Error> for ttrpc::Error {
    fn from(error: Error) -> ttrpc::Error {
        ttrpc::Error::RpcStatus(get_status(error.code(), error.to_string()))
    }
}
