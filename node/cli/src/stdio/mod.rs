//! One process's standard streams, terminal and signals, as `docker run` has them.
//!
//! The process's exit is reported only after all its output was passed on, so none is lost. Output that the caller no longer reads is
//! discarded, so that the process does not block.

use std::io::Read;

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

/// How this process attaches to another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AttachOptions {
    pub stdin: Stdin,
    /// Whether the process has a terminal.
    pub tty: bool,
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
/// [`ErrorKind::GuestEnded`] if the guest ends first.
pub async fn attach(
    agent: &AgentClient,
    process: &ProcessId,
    how: AttachOptions,
    signals: Signals,
) -> Result<i32, Error> {
    let _raw = match how.stdin == Stdin::Pass && how.tty && terminal::stdin_is_terminal() {
        true => {
            Some(terminal::RawTerminal::enter().map_err(|e| Error::system("cannot set the terminal", &e))?)
        }
        false => None,
    };
    let mut outputs = vec![tokio::spawn(pump_out(
        agent.clone(),
        process.clone(),
        Output::Stdout,
    ))];
    if !how.tty {
        // With a terminal both are one stream.
        outputs.push(tokio::spawn(pump_out(
            agent.clone(),
            process.clone(),
            Output::Stderr,
        )));
    }
    let others = [
        tokio::spawn(pump_in(agent.clone(), process.clone(), how.stdin)),
        tokio::spawn(signals.forward(agent.clone(), process.clone())),
        tokio::spawn(follow_size(agent.clone(), process.clone(), how.tty)),
    ];
    let _others = others.map(AbortOnDrop);
    let status = agent.wait(process).await;
    for output in outputs {
        drain(output).await;
    }
    status.map_err(|e| Error::new(ErrorKind::GuestEnded, format!("lost the guest: {e}")))
}

struct AbortOnDrop(JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn drain(mut pump: JoinHandle<()>) {
    if tokio::time::timeout(OUTPUT_LINGERS, &mut pump).await.is_err() {
        pump.abort();
    }
}

async fn pump_out(agent: AgentClient, process: ProcessId, output: Output) {
    let mut stdout = tokio::io::stdout();
    let mut stderr = tokio::io::stderr();
    let mut broken = false;
    while let Some(data) = agent.read(&process, output).await {
        if broken {
            continue;
        }
        let written = match output {
            Output::Stdout => write_flush(&mut stdout, &data).await,
            Output::Stderr => write_flush(&mut stderr, &data).await,
        };
        broken = written.is_err();
    }
}

async fn write_flush(to: &mut (impl tokio::io::AsyncWrite + Unpin), data: &[u8]) -> std::io::Result<()> {
    to.write_all(data).await?;
    to.flush().await
}

async fn pump_in(agent: AgentClient, process: ProcessId, stdin: Stdin) {
    if stdin == Stdin::Leave {
        return;
    }
    if stdin == Stdin::Pass {
        let mut input = read_stdin();
        while let Some(data) = input.recv().await {
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

/// Reads stdin on a thread of its own: such a read cannot be cancelled, and the runtime would wait for it at shutdown.
fn read_stdin() -> mpsc::Receiver<Vec<u8>> {
    let (sender, receiver) = mpsc::channel(2);
    let reading = std::thread::Builder::new().name("stdin".into()).spawn(move || {
        let mut buffer = vec![0u8; 32 * 1024];
        let mut stdin = std::io::stdin().lock();
        loop {
            match stdin.read(&mut buffer) {
                Ok(0) => return,
                Ok(n) => {
                    if sender.blocking_send(buffer[..n].to_vec()).is_err() {
                        return;
                    }
                }
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
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
async fn follow_size(agent: AgentClient, process: ProcessId, tty: bool) {
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

    async fn forward(mut self, agent: AgentClient, process: ProcessId) {
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
