//! `thaw attach`: this process's streams and signals for the process of a detached container. The output comes from the sandbox's owner,
//! which keeps it; input and signals go to the agent.

use clap::{ArgAction, Args};
use thaw_daemon::api::client::Logs;
use thaw_daemon::api::logs::Selection;
use thaw_sandbox::READY_LIMIT;
use thaw_sandbox::agent_client::{self, AgentClient, ProcessId};
use thaw_sandbox::container::Running;
use thaw_sandbox::error::{Error, ErrorKind};
use thaw_sandbox::paths::Paths;
use thaw_sandbox::state::{RunDirectory, vsock_socket};

use super::running::Owner;
use super::wait::{exit_status, memory_released, settled};
use crate::stdio::{
    AbortOnDrop, Signals, Written, follow_size, next_input, raw_terminal, read_stdin, unwritten,
};
use crate::ui::Ui;

const CTRL_P: u8 = 0x10;
const CTRL_Q: u8 = 0x11;

#[derive(Debug, Args)]
#[command(after_help = "\
Shows the output from now on; `thaw logs` shows the earlier output. Exits with the container's exit status.
Only a container that was started with `-d -i` reads stdin; the end of stdin does not close the container's.
If the container has a terminal, ctrl-p ctrl-q detaches: the container goes on.

Example:
  thaw run -d -i --name sums IMAGE bc && thaw attach sums")]
pub struct AttachArguments {
    /// Do not pass stdin to the process
    #[arg(long)]
    pub no_stdin: bool,
    /// Pass signals on to the process
    #[arg(long, value_name = "BOOL", default_value_t = true, default_missing_value = "true", num_args = 0..=1, require_equals = true, action = ArgAction::Set)]
    pub sig_proxy: bool,
    /// The sandbox: id, name, or the beginning of an id
    pub sandbox: String,
}

pub(super) async fn attach(arguments: &AttachArguments, ui: &Ui) -> Result<u8, Error> {
    let run = RunDirectory::open(&Paths::from_env().run)?;
    let owner = Owner::find(&arguments.sandbox).map_err(|e| explained(&run, &arguments.sandbox, e))?;
    let directory = run.directory(&owner.id);
    let running = Running::read(&directory).map_err(|e| memory_released(&owner.id).unwrap_or(e))?;
    let selection = Selection {
        follow: true,
        tail: Some(0),
        ..Selection::default()
    };
    let output = owner.client.logs(&owner.id, &selection).await?;
    let agent = agent_client::connect(&vsock_socket(&directory), READY_LIMIT).await?;
    let process = running.process();
    let _raw = raw_terminal(running.tty && !arguments.no_stdin)?;
    let mut others = vec![AbortOnDrop(tokio::spawn(follow_size(
        agent.clone(),
        process.clone(),
        running.tty,
    )))];
    if arguments.sig_proxy {
        let signals = Signals::new()?.forward(agent.clone(), process.clone());
        others.push(AbortOnDrop(tokio::spawn(signals)));
    }
    let detached = async {
        if !arguments.no_stdin {
            pass_input(&agent, &process, running.tty).await
        } else {
            std::future::pending().await
        }
    };
    let status = tokio::select! {
        written = pass_output(output) => match written? {
            Some(status) => return Ok(status),
            None => exit_status(&agent, &running).await,
        },
        () = detached => {
            ui.note("detached", "detached: the container goes on");
            return Ok(0);
        }
    };
    match status {
        Ok(status) => Ok(status as u8),
        Err(lost) => settled(&run, owner.id, lost).await.map(|status| status as u8),
    }
}

/// The error for a sandbox that is not running; it says so if the sandbox has ended.
fn explained(run: &RunDirectory, wanted: &str, failure: Error) -> Error {
    match run.find_ended(wanted) {
        Ok(Some(ended)) if failure.kind == ErrorKind::SandboxNotFound => {
            let what = format!("sandbox {} has ended", ended.id);
            Error::new(ErrorKind::SandboxNotFound, what).remedy("`thaw logs` shows its output")
        }
        _ => failure,
    }
}

/// Writes the output until it ends. Returns this command's exit status if the output can no longer be written.
async fn pass_output(mut output: Logs) -> Result<Option<u8>, Error> {
    let mut written = Written::default();
    while let Some(piece) = output.next().await {
        let (stream, data) = piece?;
        if let Err(e) = written.write(stream, &data).await {
            return unwritten(&e).map(Some);
        }
    }
    Ok(None)
}

/// Passes stdin on. Completes when the user types the detach keys, and only then.
async fn pass_input(agent: &AgentClient, process: &ProcessId, tty: bool) {
    let (mut input, mut keys) = (read_stdin(), DetachKeys::default());
    while let Some(data) = next_input(&mut input).await {
        let (data, is_detached) = match tty {
            true => keys.filter(&data),
            false => (data, false),
        };
        if let Err(e) = agent.write_stdin(process, &data).await {
            tracing::debug!("stdin ended: {e}");
            break;
        }
        if is_detached {
            return;
        }
    }
    std::future::pending().await
}

/// Finds the detach keys, ctrl-p ctrl-q, in typed input.
#[derive(Debug, Default)]
struct DetachKeys {
    /// ctrl-p was typed, and is passed on only when another key follows it.
    is_held: bool,
}

impl DetachKeys {
    /// The input to pass on, and whether the detach keys follow it.
    fn filter(&mut self, data: &[u8]) -> (Vec<u8>, bool) {
        let mut passed = Vec::with_capacity(data.len() + 1);
        for &byte in data {
            let was_held = std::mem::replace(&mut self.is_held, byte == CTRL_P);
            if was_held && byte == CTRL_Q {
                return (passed, true);
            }
            if was_held {
                passed.push(CTRL_P);
            }
            if byte != CTRL_P {
                passed.push(byte);
            }
        }
        (passed, false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn detach_keys_are_found_however_they_arrive() {
        let all = |pieces: &[&[u8]]| {
            let (mut keys, mut passed) = (DetachKeys::default(), Vec::new());
            for piece in pieces {
                let (data, is_detached) = keys.filter(piece);
                passed.extend(data);
                if is_detached {
                    return (passed, true);
                }
            }
            (passed, false)
        };
        assert_eq!(all(&[b"ab\x10\x11c"]), (b"ab".to_vec(), true));
        assert_eq!(all(&[b"ab\x10", b"\x11"]), (b"ab".to_vec(), true));
        assert_eq!(all(&[b"a\x10b\x11"]), (b"a\x10b\x11".to_vec(), false));
        assert_eq!(
            all(&[b"\x10\x10", b"\x10", b"x"]),
            (b"\x10\x10\x10x".to_vec(), false)
        );
        assert_eq!(all(&[b"\x10\x10\x11"]), (b"\x10".to_vec(), true));
    }
}
