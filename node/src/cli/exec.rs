//! `thaw exec`: another process in a running sandbox's container, over the sandbox's vsock socket.

use thaw_protocol::agent::MessageField;
use thaw_protocol::agent::agent::ExecProcessRequest;

use super::ExecArguments;
use super::run::{check_tty, environment};
use crate::agent_client::{AgentClient, ProcessId};
use crate::container::{Options, RUNNING_FILE, Running, exec_process};
use crate::exit::{ExitCode, Failure};
use crate::paths::Paths;
use crate::sandbox::READY_LIMIT;
use crate::state::{RunDirectory, new_id, vsock_socket};
use crate::stdio::{Attendance, Signals, Stdin, attend, terminal};

pub(super) async fn exec(arguments: &ExecArguments) -> Result<u8, Failure> {
    check_tty(&arguments.process)?;
    let run = RunDirectory::open(&Paths::from_env().run)?;
    let record = run.find(&arguments.sandbox)?;
    let directory = run.directory(&record.id);
    let text = std::fs::read(directory.join(RUNNING_FILE)).map_err(|_| {
        Failure::new(
            ExitCode::SandboxNotFound,
            format!("sandbox {} has no running container yet", record.id),
        )
    })?;
    let running: Running = serde_json::from_slice(&text).map_err(|e| {
        Failure::new(
            ExitCode::Runtime,
            format!("{}: {e}", directory.join(RUNNING_FILE).display()),
        )
    })?;
    let options = Options {
        command: arguments.command.clone(),
        env: environment(&arguments.process)?,
        workdir: arguments.process.workdir.clone(),
        user: arguments.process.user.clone(),
        tty: arguments.process.tty,
        size: terminal::size(),
        ..Default::default()
    };
    let agent = AgentClient::connect(&vsock_socket(&directory), READY_LIMIT).await?;
    let exec_id = new_id().map_err(|e| Failure::system("cannot read random bytes", &e))?;
    let request = ExecProcessRequest {
        container_id: running.container_id.clone(),
        exec_id: exec_id.clone(),
        process: MessageField::some(exec_process(&running, &options)),
        ..Default::default()
    };
    let signals = Signals::new()?;
    agent.exec(&request).await?;
    let process = ProcessId {
        container: running.container_id,
        exec: exec_id,
    };
    let how = Attendance {
        stdin: match arguments.process.interactive {
            true => Stdin::Pass,
            false => Stdin::Close,
        },
        tty: arguments.process.tty,
    };
    let status = attend(&agent, &process, how, signals).await?;
    Ok(status as u8)
}
