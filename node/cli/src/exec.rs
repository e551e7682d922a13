//! `thaw exec`: runs another process in a running sandbox's container, over the sandbox's vsock socket.

use clap::Args;
use thaw_sandbox::READY_LIMIT;
use thaw_sandbox::agent_client;
use thaw_sandbox::container::{self, Options, Running};
use thaw_sandbox::error::Error;
use thaw_sandbox::paths::Paths;
use thaw_sandbox::state::{RunDirectory, vsock_socket};

use super::ProcessArguments;
use super::run::{check_tty, environment};
use crate::stdio::{AttachOptions, Signals, Stdin, attach, terminal};

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  thaw exec cache redis-cli ping")]
pub struct ExecArguments {
    #[command(flatten)]
    pub process: ProcessArguments,
    /// The sandbox: id, name, or the beginning of an id
    pub sandbox: String,
    /// What to run
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "COMMAND"
    )]
    pub command: Vec<String>,
}

pub(super) async fn exec(arguments: &ExecArguments) -> Result<u8, Error> {
    check_tty(&arguments.process)?;
    let run = RunDirectory::open(&Paths::from_env().run)?;
    let record = run.find(&arguments.sandbox)?;
    let directory = run.directory(&record.id);
    let running = Running::read(&directory)?;
    let options = Options {
        command: arguments.command.clone(),
        env: environment(&arguments.process)?,
        workdir: arguments.process.workdir.clone(),
        user: arguments.process.user.clone(),
        tty: arguments.process.tty,
        size: terminal::size(),
        ..Default::default()
    };
    let agent = agent_client::connect(&vsock_socket(&directory), READY_LIMIT).await?;
    let signals = Signals::new()?;
    let process = container::exec(&agent, &running, &options).await?;
    let how = AttachOptions {
        stdin: match arguments.process.interactive {
            true => Stdin::Pass,
            false => Stdin::Close,
        },
        tty: arguments.process.tty,
        output: true,
    };
    let status = attach(&agent, &process, how, signals).await?;
    Ok(status as u8)
}
