//! Connects to the guest's agent, and converts its errors.

use std::path::Path;
use std::time::Duration;

pub use thaw_agent_client::{AgentClient, Output, ProcessId};

use thaw_protocol::handshake::AGENT_PORT;
use ttrpc::Code;

use crate::error::{Error, ErrorKind};
use crate::handshake;

/// Limit for output that arrives after its process has ended: another process may hold the streams open.
pub const OUTPUT_LINGERS: Duration = Duration::from_secs(2);

/// Connects through the sandbox's vsock socket.
pub async fn connect(vsock: &Path, limit: Duration) -> Result<AgentClient, Error> {
    let failed = |e: &dyn std::fmt::Display| {
        Error::new(
            ErrorKind::AgentFailed,
            format!("cannot reach the guest's agent: {e}"),
        )
    };
    // The connection of the handshake, which blocks: the socket's path may be longer than an address.
    let path = vsock.to_owned();
    let stream = tokio::task::spawn_blocking(move || handshake::connect(&path, AGENT_PORT, limit))
        .await
        .map_err(|e| failed(&e))?
        .map_err(|e| failed(&e))?;
    stream.set_nonblocking(true).map_err(|e| failed(&e))?;
    let stream = tokio::net::UnixStream::from_std(stream).map_err(|e| failed(&e))?;
    Ok(AgentClient::over(stream))
}

/// Converts the agent's error of creating or starting a process. The status's code tells errors of the command from
/// those of the agent.
pub fn start_failure(error: ttrpc::Error) -> Error {
    let ttrpc::Error::RpcStatus(status) = &error else {
        return Error::new(
            ErrorKind::AgentFailed,
            format!("the guest's agent does not answer: {error}"),
        );
    };
    let message = status.message().to_owned();
    match status.code() {
        Code::NOT_FOUND => Error::new(ErrorKind::NotFound, message),
        Code::PERMISSION_DENIED => Error::new(ErrorKind::NotExecutable, message),
        Code::INVALID_ARGUMENT => Error::new(ErrorKind::AgentFailed, message)
            .remedy("correct it: a user or group is a number, or a name that the image has"),
        _ => Error::new(ErrorKind::AgentFailed, message),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_agents_codes_become_dockers() {
        let failure = |code: Code| {
            start_failure(ttrpc::Error::RpcStatus(ttrpc::get_status(
                code,
                "exec: \"x\": not found",
            )))
            .kind
        };
        assert_eq!(failure(Code::NOT_FOUND), ErrorKind::NotFound);
        assert_eq!(failure(Code::PERMISSION_DENIED), ErrorKind::NotExecutable);
        assert_eq!(failure(Code::INTERNAL), ErrorKind::AgentFailed);
        let unknown = ttrpc::get_status(
            Code::INVALID_ARGUMENT,
            "user \"x\": no matching entry in /etc/passwd",
        );
        let said = start_failure(ttrpc::Error::RpcStatus(unknown)).to_string();
        assert!(
            said.contains("user \"x\"") && said.contains("a name that the image has"),
            "{said}"
        );
        assert_eq!(
            start_failure(ttrpc::Error::LocalClosed).kind,
            ErrorKind::AgentFailed
        );
    }
}
