//! One process's standard streams, terminal and signals, as `docker run` has them.
//!
//! The process's exit is reported only after all its output was passed on, so none is lost. If the output can no longer be written, this
//! process ends: a closed pipe ends it as SIGPIPE would ([`CLOSED_PIPE`]), and the process gets that signal.

use std::io::{self, Read};

use futures_util::future::{Either, select};
use thaw_sandbox::agent_client::{AgentClient, OUTPUT_LINGERS, Output, ProcessId};
use thaw_sandbox::error::{Error, ErrorKind};
use tokio::io::AsyncWriteExt;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

pub mod terminal;

/// Signals passed on to the process.
const FORWARDED: [i32; 7] = [
    libc::SIGHUP,
    libc::SIGINT,
    libc::SIGQUIT,
    libc::SIGTERM,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGALRM,
];
/// Number of SIGINT or SIGTERM signals after which the process is killed, whatever it does with them.
const FORCED_AFTER: u32 = 3;

/// The exit status when the reader of this process's output has closed its pipe: 128 + SIGPIPE.
pub const CLOSED_PIPE: u8 = 128 + libc::SIGPIPE as u8;
/// Number of pieces of stdin that are read ahead while a call to the agent is under way.
const PIECES_AHEAD: usize = 4;
/// Most bytes of one piece: as many as a pipe holds.
const INPUT_PIECE: usize = 64 << 10;
/// Most bytes of stdin in one call to the agent.
const MOST_INPUT: usize = 256 << 10;

/// How this process attaches to another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AttachOptions {
    pub stdin: Stdin,
    /// Whether the process has a terminal.
    pub tty: bool,
    /// Whether this process passes the output on. If false, the sandbox's owner keeps it.
    pub output: bool,
}

/// Source of a process's stdin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Stdin {
    /// The stdin of this process.
    Pass,
    /// Nothing: it is closed at once.
    #[default]
    Close,
    /// It stays as it is, for a process that was started earlier.
    Leave,
}

/// Attaches to a process that was just started or thawed until it ends, and returns its status. `signals` are passed on, including those
/// that were caught before the process was started.
///
/// # Errors
/// [`ErrorKind::GuestEnded`] if the guest ends first, and the error of a failed write of output. If that is because the pipe was closed,
/// returns [`CLOSED_PIPE`] instead.
pub async fn attach(
    agent: &AgentClient,
    process: &ProcessId,
    how: AttachOptions,
    signals: Signals,
) -> Result<i32, Error> {
    let _raw = raw_terminal(how.stdin == Stdin::Pass && how.tty)?;
    let input = pump_in(agent.clone(), process.clone(), how.stdin);
    let _others = [
        tokio::spawn(input),
        tokio::spawn(signals.forward(agent.clone(), process.clone())),
        tokio::spawn(follow_size(agent.clone(), process.clone(), how.tty)),
    ]
    .map(AbortOnDrop);
    let stderr = async {
        match how.output && !how.tty {
            true => pump_out(agent, process, Output::Stderr).await,
            // With a terminal both are one stream.
            false => Ok(()),
        }
    };
    let stdout = async {
        match how.output {
            true => pump_out(agent, process, Output::Stdout).await,
            false => Ok(()),
        }
    };
    let outputs = std::pin::pin!(async { tokio::try_join!(stdout, stderr).map(drop) });
    let ended = std::pin::pin!(agent.wait(process));
    let (status, written) = match select(ended, outputs).await {
        Either::Left((status, outputs)) => {
            let written = tokio::time::timeout(OUTPUT_LINGERS, outputs).await;
            (status, written.unwrap_or(Ok(())))
        }
        Either::Right((Ok(()), ended)) => (ended.await, Ok(())),
        Either::Right((Err(e), _)) => {
            if let Err(e) = agent.signal(process, libc::SIGPIPE as u32).await {
                tracing::debug!("cannot pass on the end of the output: {e}");
            }
            return unwritten(&e).map(i32::from);
        }
    };
    match (status, written) {
        (Err(e), _) => Err(Error::new(ErrorKind::GuestEnded, format!("lost the guest: {e}"))),
        (Ok(_), Err(e)) => unwritten(&e).map(i32::from),
        (Ok(status), Ok(())) => Ok(status),
    }
}

/// The terminal on stdin in raw mode, if `wanted` and if there is one.
pub fn raw_terminal(wanted: bool) -> Result<Option<terminal::RawTerminal>, Error> {
    match wanted && terminal::stdin_is_terminal() {
        true => {
            let raw = terminal::RawTerminal::enter();
            raw.map(Some)
                .map_err(|e| Error::system("cannot set the terminal", &e))
        }
        false => Ok(None),
    }
}

/// The exit status of a command whose output could not be written because its reader has closed the pipe.
///
/// # Errors
/// Any other error of a write, such as that of a full disk.
pub fn unwritten(error: &io::Error) -> Result<u8, Error> {
    match error.kind() {
        io::ErrorKind::BrokenPipe => Ok(CLOSED_PIPE),
        _ => Err(Error::system("cannot write the output", error)),
    }
}

/// A task that ends with this value.
pub struct AbortOnDrop(pub JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn pump_out(agent: &AgentClient, process: &ProcessId, output: Output) -> io::Result<()> {
    let mut written = Written::default();
    let mut next = agent.read(process, output).await;
    while let Some(data) = next {
        // The next piece comes meanwhile. A failed write does not wait for it.
        let reading = async { Ok::<_, io::Error>(agent.read(process, output).await) };
        (next, ()) = tokio::try_join!(reading, written.write(output, &data))?;
    }
    Ok(())
}

/// The output streams of this process.
#[derive(Debug)]
pub struct Written {
    stdout: tokio::io::Stdout,
    stderr: tokio::io::Stderr,
}

impl Default for Written {
    fn default() -> Written {
        Written {
            stdout: tokio::io::stdout(),
            stderr: tokio::io::stderr(),
        }
    }
}

impl Written {
    /// Writes a piece of output to the stream of the same name.
    pub async fn write(&mut self, output: Output, data: &[u8]) -> io::Result<()> {
        match output {
            Output::Stdout => write_flush(&mut self.stdout, data).await,
            Output::Stderr => write_flush(&mut self.stderr, data).await,
        }
    }
}

async fn write_flush(to: &mut (impl tokio::io::AsyncWrite + Unpin), data: &[u8]) -> io::Result<()> {
    to.write_all(data).await?;
    to.flush().await
}

async fn pump_in(agent: AgentClient, process: ProcessId, stdin: Stdin) {
    if stdin == Stdin::Leave {
        return;
    }
    if stdin == Stdin::Pass {
        let mut input = read_stdin();
        while let Some(data) = next_input(&mut input).await {
            if let Err(e) = agent.write_stdin(&process, &data).await {
                tracing::debug!("stdin ended: {e}");
                return;
            }
        }
    }
    if let Err(e) = agent.close_stdin(&process).await {
        tracing::debug!("cannot close stdin: {e}");
    }
}

/// The input that has arrived: one call to the agent takes as long for much as for little.
pub(crate) async fn next_input(input: &mut mpsc::Receiver<Vec<u8>>) -> Option<Vec<u8>> {
    let mut data = input.recv().await?;
    while data.len() < MOST_INPUT
        && let Ok(more) = input.try_recv()
    {
        data.extend_from_slice(&more);
    }
    Some(data)
}

/// Reads stdin on a thread of its own: such a read cannot be cancelled, and the runtime would wait for it at shutdown.
pub(crate) fn read_stdin() -> mpsc::Receiver<Vec<u8>> {
    let (sender, receiver) = mpsc::channel(PIECES_AHEAD);
    let reading = std::thread::Builder::new().name("stdin".into()).spawn(move || {
        let mut buffer = vec![0u8; INPUT_PIECE];
        let mut stdin = io::stdin().lock();
        loop {
            match stdin.read(&mut buffer) {
                Ok(0) => return,
                Ok(n) => {
                    if sender.blocking_send(buffer[..n].to_vec()).is_err() {
                        return;
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return,
            }
        }
    });
    if let Err(e) = reading {
        tracing::warn!("cannot read stdin: {e}");
    }
    receiver
}

/// Sets the size of the process's terminal to the size of this one, now and whenever it changes.
pub(crate) async fn follow_size(agent: AgentClient, process: ProcessId, tty: bool) {
    if !tty {
        return;
    }
    let Ok(mut changes) = signal(SignalKind::window_change()) else {
        return;
    };
    loop {
        if let Some((rows, columns)) = terminal::size()
            && let Err(e) = agent.resize(&process, rows.into(), columns.into()).await
        {
            tracing::debug!("cannot resize: {e}");
        }
        if changes.recv().await.is_none() {
            return;
        }
    }
}

/// The signals to pass on, caught from the creation of this value on.
pub struct Signals {
    received: mpsc::Receiver<i32>,
    catchers: Vec<AbortOnDrop>,
}

impl Signals {
    /// Call it within a tokio runtime.
    pub fn new() -> Result<Signals, Error> {
        let (sender, received) = mpsc::channel(16);
        let mut catchers = Vec::new();
        for number in FORWARDED {
            let mut caught = signal(SignalKind::from_raw(number))
                .map_err(|e| Error::system(format!("cannot catch signal {number}"), &e))?;
            let sender = sender.clone();
            catchers.push(AbortOnDrop(tokio::spawn(async move {
                while caught.recv().await.is_some() {
                    if sender.send(number).await.is_err() {
                        return;
                    }
                }
            })));
        }
        Ok(Signals { received, catchers })
    }

    pub(crate) async fn forward(mut self, agent: AgentClient, process: ProcessId) {
        let _catchers = std::mem::take(&mut self.catchers);
        let mut endings = 0;
        while let Some(number) = self.received.recv().await {
            if matches!(number, libc::SIGINT | libc::SIGTERM) {
                endings += 1;
            }
            if endings >= FORCED_AFTER {
                tracing::warn!("{FORCED_AFTER} signals to end: killing the process");
                let _ = agent.signal(&process, libc::SIGKILL as u32).await;
            } else if let Err(e) = agent.signal(&process, number as u32).await {
                tracing::debug!("cannot pass on signal {number}: {e}");
            }
        }
    }
}
