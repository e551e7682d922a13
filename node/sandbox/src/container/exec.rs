//! Runs another process in a running container, for `thaw exec` and for thawd's API.

use thaw_protocol::agent::MessageField;
use thaw_protocol::agent::agent::ExecProcessRequest;

use super::{Options, Running, exec_process};
use crate::agent_client::{AgentClient, ProcessId, start_failure};
use crate::error::Error;
use crate::id::new_id;

/// Starts a process. Returns when its program is executed.
///
/// # Errors
/// [`ErrorKind::NotFound`](crate::error::ErrorKind::NotFound) and [`ErrorKind::NotExecutable`](crate::error::ErrorKind::NotExecutable) if
/// the command is at fault.
pub async fn exec(agent: &AgentClient, running: &Running, options: &Options) -> Result<ProcessId, Error> {
    let process = ProcessId {
        container: running.container_id.clone(),
        exec: new_id().map_err(|e| Error::system("cannot read random bytes", &e))?,
    };
    let request = ExecProcessRequest {
        container_id: process.container.clone(),
        exec_id: process.exec.clone(),
        process: MessageField::some(exec_process(running, options)),
        ..Default::default()
    };
    agent.exec(&request).await.map_err(start_failure)?;
    Ok(process)
}
