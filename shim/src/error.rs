//! Errors as containerd receives them: a code for programs (containerd's errdefs), and a sentence with the failure, its place and a remedy.

use std::path::{Path, PathBuf};
use std::time::Duration;

use ttrpc::{Code, get_status};

/// The result of whatever may fail here.
pub type Result<T, E = Error> = std::result::Result<T, E>;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{0}: not found")]
    NotFound(String),
    #[error("{0}: already exists")]
    AlreadyExists(String),
    #[error("{0}")]
    Invalid(String),
    /// The state does not permit the request.
    #[error("{0}")]
    State(String),
    /// Impossible in a microVM, or not supported by this shim.
    #[error("{0}")]
    Unsupported(String),
    #[error("no thawd serves pods at {path}: {source}; start it: systemctl start thawd.service")]
    NoThawd { path: PathBuf, source: std::io::Error },
    #[error("thawd: {0}")]
    Thawd(String),
    /// An error of the guest's agent, with its code.
    #[error("{message}")]
    Agent { code: Code, message: String },
    /// The guest did not answer within the limit. It may still do the work.
    #[error("the guest did not {what} within {} s", limit.as_secs())]
    Silent { what: String, limit: Duration },
    /// The microVM or its agent is gone.
    #[error("the pod's microVM is gone: {0}")]
    Gone(String),
    #[error("cannot {what}: {source}")]
    System { what: String, source: std::io::Error },
}

/// Adds context to a system call's error.
pub trait WithContext<T> {
    fn with_context(self, what: impl FnOnce() -> String) -> Result<T>;
}

impl<T, E: Into<std::io::Error>> WithContext<T> for std::result::Result<T, E> {
    fn with_context(self, what: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|e| Error::System {
            what: what(),
            source: e.into(),
        })
    }
}

impl Error {
    /// A host file with invalid contents.
    pub fn malformed(path: &Path, why: impl std::fmt::Display) -> Error {
        Error::Invalid(format!("{}: {why}", path.display()))
    }

    /// Prefixes thawd's error with the part of the container that it is about.
    pub fn about(self, part: String) -> Error {
        match self {
            Error::Thawd(what) => Error::Thawd(format!("{part}: {what}")),
            other => other,
        }
    }

    /// Converts an error of the agent's client. A lost connection means that the machine is gone.
    pub fn from_agent(error: ttrpc::Error) -> Error {
        match error {
            ttrpc::Error::RpcStatus(status) => Error::Agent {
                code: status.code(),
                message: status.message().to_owned(),
            },
            other => Error::Gone(other.to_string()),
        }
    }

    /// Whether the agent reports that the process is gone, or not in a state for the request.
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
