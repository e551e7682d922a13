//! Starting a process, and reading one that runs.

use thaw_protocol::api::{ExecProcess, TerminalSize};
use thaw_protocol::e2b::process::{
    ConnectRequest, ConnectResponse, ProcessConfig, Pty, StartRequest, StartResponse,
};
use thaw_sandbox::container::Options;

use super::super::call::Call;
use super::super::connect::outgoing::Outgoing;
use super::super::failure::Failure;
use super::super::paths;
use super::super::relay::{About, Reader, Started};
use super::events;
use super::select::{running_pid, select};
use crate::api::check;
use crate::api::problem::{ApiCode, Refusal};

/// Most bytes of a tag.
const MAX_TAG: usize = 256;
/// Most bytes of a command with its arguments and environment: Linux refuses longer ones.
const MAX_COMMAND: usize = 1 << 20;
/// The PID in the answer if a process ended before its PID was known. Linux gives none so high (PID_MAX_LIMIT).
const ENDED_PID: u32 = 4 << 20;

/// Starts a process and sends its events.
pub async fn start(call: Call, request: StartRequest) -> Result<Outgoing<StartResponse>, Failure> {
    let about = About {
        config: request.process.unwrap_or_default(),
        tag: request.tag,
        has_terminal: request.pty.is_some(),
    };
    if about.tag.as_ref().is_some_and(|tag| tag.len() > MAX_TAG) {
        return Err(Failure::invalid(format!("tag has at most {MAX_TAG} bytes")));
    }
    let mut options = options(&call, &about.config, request.pty)?;
    options.workdir = workdir(&call, about.config.cwd.as_deref()).await?;
    call.sandbox.relays.check_room()?;
    let (pid, reader, has_terminal) = run(&call, options, about, request.stdin.unwrap_or(true)).await?;
    Ok(events::stream(pid, reader, has_terminal, call.patience()))
}

/// Starts a process whose output is relayed. A caller that leaves meanwhile leaves a process that is relayed too.
async fn run(
    call: &Call,
    options: Options,
    about: About,
    has_stdin: bool,
) -> Result<(u32, Reader, bool), Failure> {
    let (machine, relays) = (call.machine()?, call.sandbox.relays.clone());
    let (daemon, deadline) = (call.daemon.clone(), call.deadline);
    let has_terminal = about.has_terminal;
    let started = tokio::spawn(async move {
        let processes = machine.processes().await?;
        let process = machine.exec(options).await?;
        drop(machine);
        let id = process.id();
        if !has_stdin && !has_terminal {
            process.close_stdin().await;
        }
        let list = match processes.list().await {
            Ok(list) => list,
            Err(refusal) => {
                process.signal(libc::SIGKILL as u8).await;
                return Err(refusal.into());
            }
        };
        let info = list.iter().find(|info| info.exec_id == id);
        let pid = info.and_then(running_pid).unwrap_or(ENDED_PID);
        let started = Started {
            process,
            processes,
            pid,
            about,
            deadline,
            closing: daemon.closing(),
        };
        let (reader, work) = relays.begin(started);
        // While it runs, thawd's end waits for it.
        tokio::spawn(async move {
            let work = async {
                work.await;
                Ok::<_, Refusal>(())
            };
            let _ = daemon.finish(work).await;
        });
        Ok::<_, Failure>((pid, reader))
    });
    let (pid, reader) = started
        .await
        .map_err(|e| Failure::from(Refusal::new(ApiCode::Broken, e)))??;
    Ok((pid, reader, has_terminal))
}

/// What to run.
fn options(call: &Call, config: &ProcessConfig, pty: Option<Pty>) -> Result<Options, Failure> {
    let command: Vec<String> = [&config.cmd].into_iter().chain(&config.args).cloned().collect();
    let mut variables = call.environment()?;
    variables.extend(config.envs.clone());
    let env: Vec<String> = variables
        .iter()
        .map(|(name, value)| format!("{name}={value}"))
        .collect();
    if command
        .iter()
        .chain(&env)
        .map(|text| text.len() + 1)
        .sum::<usize>()
        > MAX_COMMAND
    {
        return Err(Failure::invalid(format!(
            "a command has at most {MAX_COMMAND} bytes with its arguments and environment"
        )));
    }
    let size = pty.as_ref().map(terminal_size).transpose()?.flatten();
    let process = ExecProcess {
        command,
        env,
        user: call.user.clone(),
        tty: pty.is_some(),
        size,
        ..ExecProcess::default()
    };
    Ok(check::exec(&process)?.0)
}

/// The working directory, as an absolute path: the caller's, or else the template's. `None`: the container's.
async fn workdir(call: &Call, cwd: Option<&str>) -> Result<Option<String>, Failure> {
    match cwd {
        None | Some("") => Ok(call.sandbox.context.workdir.clone()),
        Some(cwd) => {
            let path = paths::absolute(&call.files().await?, call.user.as_deref(), cwd).await?;
            Ok(Some(path))
        }
    }
}

/// A terminal's size; `None` if the caller names none.
pub fn terminal_size(pty: &Pty) -> Result<Option<TerminalSize>, Failure> {
    let Some(size) = &pty.size else { return Ok(None) };
    let within = |number: u32| u16::try_from(number).ok().filter(|number| *number > 0);
    match (within(size.rows), within(size.cols)) {
        (Some(rows), Some(columns)) => Ok(Some(TerminalSize { rows, columns })),
        _ => Err(Failure::invalid(format!(
            "a terminal has 1 to {} rows and columns, not {} and {}",
            u16::MAX,
            size.rows,
            size.cols
        ))),
    }
}

/// Sends the events of a process that runs.
pub async fn connect(call: Call, request: ConnectRequest) -> Result<Outgoing<ConnectResponse>, Failure> {
    let selected = select(&call, request.process).await?;
    let (reader, has_terminal) = match &selected.relay {
        Some(relay) => {
            let reader = relay.read(selected.processes.clone()).await?;
            (reader, relay.about.has_terminal)
        }
        None => {
            // Only its output is known, not whether it has a terminal. It is kept already, if not by this call.
            let kept = selected.processes.keep(&selected.id).await;
            if let Err(refusal) = kept {
                tracing::debug!("a process is read as it is: {refusal}");
            }
            (Reader::of_guest(selected.processes.clone(), selected.id), false)
        }
    };
    Ok(events::stream(
        selected.pid,
        reader,
        has_terminal,
        call.patience(),
    ))
}
