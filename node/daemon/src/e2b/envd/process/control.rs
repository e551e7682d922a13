//! The list of processes, their input, signals, and the sizes of their terminals.

use thaw_protocol::connect::Code;
use thaw_protocol::e2b::process::process_input::Input;
use thaw_protocol::e2b::process::stream_input_request::Event;
use thaw_protocol::e2b::process::{
    CloseStdinRequest, CloseStdinResponse, ListRequest, ListResponse, ProcessConfig, ProcessInfo,
    ProcessInput, SendInputRequest, SendInputResponse, SendSignalRequest, SendSignalResponse, Signal,
    StreamInputRequest, StreamInputResponse, UpdateRequest, UpdateResponse,
};

use super::super::call::Call;
use super::super::connect::incoming::Messages;
use super::super::failure::Failure;
use super::super::relay::{Relay, has_ended};
use super::select::{Selected, running_pid, select};
use super::start::terminal_size;
use crate::api::problem::{ApiCode, Refusal};

/// Largest piece of input that is sent to the agent, bytes.
const INPUT_PIECE: usize = 64 << 10;

/// Lists the processes that run.
pub async fn list(call: Call, _: ListRequest) -> Result<ListResponse, Failure> {
    let relays = call.sandbox.relays.all();
    let running = call.processes().await?.list().await?;
    let running = running.into_iter().filter_map(|info| {
        let pid = running_pid(&info)?;
        let relay = relays.iter().find(|relay| relay.id == info.exec_id);
        Some(match relay {
            Some(relay) => described(relay, pid),
            None => of_command(info.command, pid),
        })
    });
    Ok(ListResponse {
        processes: running.collect(),
    })
}

fn described(relay: &Relay, pid: u32) -> ProcessInfo {
    ProcessInfo {
        config: Some(relay.about.config.clone()),
        pid,
        tag: relay.about.tag.clone(),
    }
}

/// A process of which the guest knows the command only.
fn of_command(command: Vec<String>, pid: u32) -> ProcessInfo {
    let mut words = command.into_iter();
    let config = ProcessConfig {
        cmd: words.next().unwrap_or_default(),
        args: words.collect(),
        ..ProcessConfig::default()
    };
    ProcessInfo {
        config: Some(config),
        pid,
        tag: None,
    }
}

/// Changes the size of a terminal.
pub async fn update(call: Call, request: UpdateRequest) -> Result<UpdateResponse, Failure> {
    let selected = select(&call, request.process).await?;
    let pty = request.pty.unwrap_or_default();
    let Some(size) = terminal_size(&pty)? else {
        return Ok(UpdateResponse {});
    };
    if selected
        .relay
        .as_ref()
        .is_some_and(|relay| !relay.about.has_terminal)
    {
        return Err(Failure::invalid("the process has no terminal"));
    }
    let resized = selected.processes.resize(&selected.id, size.rows, size.columns);
    resized.await?;
    Ok(UpdateResponse {})
}

/// Writes to the input of a process.
pub async fn send_input(call: Call, request: SendInputRequest) -> Result<SendInputResponse, Failure> {
    let selected = select(&call, request.process).await?;
    write(&selected, request.input).await?;
    Ok(SendInputResponse {})
}

/// Writes a stream of messages to the input of a process, in order.
pub async fn stream_input(
    call: Call,
    mut messages: Messages<StreamInputRequest>,
) -> Result<StreamInputResponse, Failure> {
    let mut selected = None;
    while let Some(message) = messages.next().await? {
        match message.event {
            Some(Event::Start(start)) if selected.is_none() => {
                selected = Some(select(&call, start.process).await?);
            }
            Some(Event::Data(data)) => {
                let begun = selected.as_ref().ok_or_else(disordered)?;
                write(begun, data.input).await?;
            }
            Some(Event::Keepalive(_)) => {}
            Some(Event::Start(_)) | None => return Err(disordered()),
        }
    }
    selected.map(|_| StreamInputResponse {}).ok_or_else(disordered)
}

fn disordered() -> Failure {
    Failure::invalid("a stream of input is one start, and then data and keepalives")
}

async fn write(selected: &Selected, input: Option<ProcessInput>) -> Result<(), Failure> {
    let input = input.and_then(|input| input.input);
    let (data, is_terminal) = match input.ok_or_else(|| Failure::invalid("input is stdin or pty"))? {
        Input::Stdin(data) => (data, false),
        Input::Pty(data) => (data, true),
    };
    // Of a process that thawd does not relay it is not known.
    if let Some(relay) = &selected.relay
        && relay.about.has_terminal != is_terminal
    {
        return Err(Failure::invalid(match is_terminal {
            true => "the process has no terminal: send stdin",
            false => "the process has a terminal: send pty",
        }));
    }
    for piece in data.chunks(INPUT_PIECE) {
        selected.processes.write(&selected.id, piece).await?;
    }
    Ok(())
}

/// Closes the input of a process. A terminal has no end of input: its user types ^D.
pub async fn close_stdin(call: Call, request: CloseStdinRequest) -> Result<CloseStdinResponse, Failure> {
    let selected = select(&call, request.process).await?;
    if selected
        .relay
        .as_ref()
        .is_some_and(|relay| relay.about.has_terminal)
    {
        let what = "a terminal has no end of input: send the byte 4 (^D)";
        return Err(Failure::new(Code::FailedPrecondition, what));
    }
    selected.processes.close_stdin(&selected.id).await?;
    Ok(CloseStdinResponse {})
}

/// Sends a signal to a process.
pub async fn send_signal(call: Call, request: SendSignalRequest) -> Result<SendSignalResponse, Failure> {
    let number = match Signal::try_from(request.signal) {
        Ok(Signal::Sigterm) => libc::SIGTERM,
        Ok(Signal::Sigkill) => libc::SIGKILL,
        Ok(Signal::Unspecified) | Err(_) => {
            return Err(Failure::invalid("signal is SIGNAL_SIGTERM or SIGNAL_SIGKILL"));
        }
    };
    let selected = select(&call, request.process).await?;
    match selected.processes.signal(&selected.id, number as u8).await {
        // It ended meanwhile, which callers know by this code.
        Err(Refusal::Api(ApiCode::ProcessRefused, _)) => Err(has_ended(selected.pid)),
        sent => Ok(sent.map(|()| SendSignalResponse {})?),
    }
}
