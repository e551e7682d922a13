//! The streams of a process, copied between the guest's agent and containerd's fifos, files or logging program.
//!
//! Invariants:
//! - Bytes are copied unchanged.
//! - While a piece is written, one more is read from the agent. A slow reader therefore blocks the process,
//!   and at most two pieces are held here.
//! - An output fifo is closed at the end of the stream and not before, even while no client has it open.
//! - stdin ends once it was closed by a call *and* no client has it open.
//! - Input that the process no longer takes is read and dropped until the process is removed, because
//!   containerd's CRI drops the output of a process whose input it cannot write.

mod fifo;
mod logger;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;

use crate::agent::{Agent, Output, ProcessId};
use crate::error::{Error, Result, WithContext};
use crate::warning;

/// Bytes of input copied at once.
const PIECE: usize = 32 * 1024;

/// containerd's names for a process's streams. An empty name means that there is no such stream.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stdio {
    pub stdin: String,
    pub stdout: String,
    pub stderr: String,
    pub terminal: bool,
}

/// The container whose streams they are, for a logging program.
#[derive(Clone, Debug)]
pub struct StreamOwner {
    pub namespace: String,
    pub container: String,
}

type Sink = Box<dyn AsyncWrite + Send + Unpin>;

/// The destination of an output.
enum Target {
    /// Output is read and dropped.
    Nowhere,
    /// Opened once a reader has opened it.
    Fifo(String),
    Ready(Sink),
}

/// Destinations of both outputs, before the process exists.
pub struct Targets {
    stdout: Target,
    stderr: Target,
}

impl std::fmt::Debug for Targets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Targets")
    }
}

impl Targets {
    /// Opens the destinations, and starts the logging program if one is named.
    pub async fn open(stdio: &Stdio, owner: &StreamOwner) -> Result<Targets> {
        if let Some(uri) = stdio.stdout.strip_prefix("binary://") {
            let logger = logger::start(uri, owner).await?;
            return Ok(Targets {
                stdout: Target::Ready(Box::new(logger.stdout)),
                stderr: match stdio.terminal {
                    true => Target::Nowhere,
                    false => Target::Ready(Box::new(logger.stderr)),
                },
            });
        }
        let stderr = match stdio.terminal {
            true => Target::Nowhere,
            false => target(&stdio.stderr).await?,
        };
        Ok(Targets {
            stdout: target(&stdio.stdout).await?,
            stderr,
        })
    }
}

async fn target(name: &str) -> Result<Target> {
    let (scheme, path) = name.split_once("://").unwrap_or(("", name));
    let is_fifo = |path: &str| {
        use std::os::unix::fs::FileTypeExt;
        std::fs::metadata(path).is_ok_and(|m| m.file_type().is_fifo())
    };
    match scheme {
        _ if path.is_empty() => Ok(Target::Nowhere),
        "" | "fifo" if is_fifo(path) => Ok(Target::Fifo(path.to_owned())),
        "" | "file" => {
            // The query of a URI is not part of the file's path.
            let path = path.split('?').next().unwrap_or(path);
            if let Some(directory) = Path::new(path).parent() {
                std::fs::create_dir_all(directory)
                    .with_context(|| format!("create {}", directory.display()))?;
            }
            let opened = tokio::fs::File::options()
                .append(true)
                .create(true)
                .open(path)
                .await;
            Ok(Target::Ready(Box::new(
                opened.with_context(|| format!("open {path}"))?,
            )))
        }
        "fifo" => Err(Error::Invalid(format!("{path} is not a fifo"))),
        other => Err(Error::Unsupported(format!(
            "output to {other}:// is not supported: name a fifo, file:///PATH or binary:///PROGRAM"
        ))),
    }
}

/// Streams that are being copied. When dropped, input stops; output continues to its end, or until
/// [`Streams::stop`].
#[derive(Debug)]
pub struct Streams {
    outputs: Vec<JoinHandle<()>>,
    open: watch::Receiver<usize>,
    stdin: JoinHandle<()>,
    close: Arc<Notify>,
    ended: watch::Sender<bool>,
}

impl Drop for Streams {
    fn drop(&mut self) {
        self.stdin.abort();
    }
}

impl Streams {
    /// Starts to copy the streams of a created process.
    pub fn start(agent: &Agent, process: &ProcessId, stdio: &Stdio, targets: Targets) -> Streams {
        let (count, open) = watch::channel(2);
        let carry = |output, target| {
            let (agent, process, count) = (agent.clone(), process.clone(), count.clone());
            tokio::spawn(async move {
                carry_output(&agent, &process, output, target).await;
                count.send_modify(|open| *open -= 1);
            })
        };
        let outputs = vec![
            carry(Output::Stdout, targets.stdout),
            carry(Output::Stderr, targets.stderr),
        ];
        let close = Arc::new(Notify::new());
        let (ended, mut has_ended) = watch::channel(false);
        let stdin = {
            let (agent, process, path) = (agent.clone(), process.clone(), stdio.stdin.clone());
            let (close, terminal) = (close.clone(), stdio.terminal);
            tokio::spawn(async move {
                if !path.is_empty()
                    && carry_input(&agent, &process, &path, &close, &mut has_ended)
                        .await
                        .is_err()
                {
                    return;
                }
                // Only the user of a terminal ends its input (Ctrl-D).
                if !terminal {
                    let _ = agent.close_stdin(&process).await;
                }
            })
        };
        Streams {
            outputs,
            open,
            stdin,
            close,
            ended,
        }
    }

    /// Records that the client closed stdin. It ends once no client has it open.
    pub fn close_stdin(&self) {
        self.close.notify_one();
    }

    /// Stops input, because the process has ended.
    pub fn end_input(&self) {
        self.ended.send_replace(true);
    }

    /// Waits until all output has been written, independently of `self`.
    pub fn drained(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut open = self.open.clone();
        async move {
            // A dropped sender means that both ended.
            let _ = open.wait_for(|open| *open == 0).await;
        }
    }

    /// Stops copying.
    pub fn stop(&mut self) {
        self.stdin.abort();
        self.outputs.drain(..).for_each(|output| output.abort());
    }
}

async fn carry_output(agent: &Agent, process: &ProcessId, output: Output, target: Target) {
    let sink: Option<Sink> = match target {
        Target::Nowhere => None,
        Target::Ready(sink) => Some(sink),
        Target::Fifo(path) => match fifo::writer(Path::new(&path)).await {
            Ok(fifo) => Some(Box::new(fifo)),
            Err(e) => {
                warning!(
                    "{output:?} of {} is dropped: cannot open {path}: {e}",
                    process.exec
                );
                None
            }
        },
    };
    let mut sink = sink;
    let mut next = agent.read(process, output).await;
    while let Some(data) = next {
        // Meanwhile the guest prepares the next piece, and no more.
        let ((), read) = tokio::join!(
            write_piece(&mut sink, &data, process, output),
            agent.read(process, output)
        );
        next = read;
    }
    if let Some(open) = &mut sink {
        let _ = open.flush().await;
    }
}

async fn write_piece(sink: &mut Option<Sink>, data: &[u8], process: &ProcessId, output: Output) {
    if let Some(open) = sink
        && let Err(e) = open.write_all(data).await
    {
        warning!("{output:?} of {} is dropped: {e}", process.exec);
        *sink = None;
    }
}

/// Copies input until its end. An error comes from the fifo.
async fn carry_input(
    agent: &Agent,
    process: &ProcessId,
    path: &str,
    close: &Notify,
    has_ended: &mut watch::Receiver<bool>,
) -> Result<()> {
    let opened = fifo::reader(Path::new(path), true).with_context(|| format!("open {path}"));
    let mut fifo: Box<dyn AsyncRead + Send + Unpin> = match opened {
        Ok(fifo) => Box::new(fifo),
        Err(e) => {
            warning!("no input for {}: {e}", process.exec);
            return Ok(());
        }
    };
    let mut piece = vec![0; PIECE];
    let (mut closed, mut takes) = (false, true);
    loop {
        let read = tokio::select! {
            read = fifo.read(&mut piece) => read,
            () = close.notified(), if !closed => {
                closed = true;
                // Buffered data stays while the fifo is open. Close the writing end here, which kept the
                // input from ending.
                fifo = Box::new(fifo::reader(Path::new(path), false).with_context(|| format!("open {path}"))?);
                continue;
            }
        };
        match read {
            Ok(0) => return Ok(()),
            Ok(length) if takes => tokio::select! {
                written = agent.write_stdin(process, &piece[..length]) => takes = written.is_ok(),
                _ = has_ended.wait_for(|ended| *ended) => takes = false,
            },
            Ok(_dropped) => {}
            Err(e) => {
                warning!("input of {} ends: {e}", process.exec);
                return Ok(());
            }
        }
    }
}

/// Limit for clients to read a process's remaining output after its removal.
pub const DRAIN_LIMIT: Duration = Duration::from_secs(10);
