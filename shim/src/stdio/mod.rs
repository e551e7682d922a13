//! The streams of a process, between the guest's agent and what containerd named: fifos, files, a logging program.
//!
//! Invariants: a stream is carried byte by byte as it is; the agent is asked for one piece more while one is being taken, so a
//! slow reader holds the process and no more than two pieces are here; a fifo of output is closed when the stream is at its end and
//! not before, also while no client has it open; stdin ends once it was closed by call *and* no client has it open. What a process
//! does not take of its input any more is dropped until it is removed: a client that could not write it would take the process's output
//! for lost (containerd's CRI).

mod fifo;
mod logger;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;

use crate::agent::{Agent, Output, ProcessId};
use crate::error::{Error, For, Result};
use crate::warning;

/// Bytes of input carried at once.
const PIECE: usize = 32 * 1024;

/// What containerd named for a process's streams; an empty one is none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stdio {
    pub stdin: String,
    pub stdout: String,
    pub stderr: String,
    pub terminal: bool,
}

/// Whose streams they are: what a logging program is told.
#[derive(Clone, Debug)]
pub struct Whose {
    pub namespace: String,
    pub container: String,
}

type Sink = Box<dyn AsyncWrite + Send + Unpin>;

/// What takes an output.
enum Target {
    /// Read, and dropped.
    Nowhere,
    /// Opened when somebody reads it.
    Fifo(String),
    Ready(Sink),
}

/// Where both outputs go, before there is a process.
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
    /// Starts what takes the output: a logging program, if that is what is named.
    pub async fn open(stdio: &Stdio, whose: &Whose) -> Result<Targets> {
        if let Some(uri) = stdio.stdout.strip_prefix("binary://") {
            let logger = logger::start(uri, whose).await?;
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
            // What of a URI is no path is none of a file's.
            let path = path.split('?').next().unwrap_or(path);
            if let Some(directory) = Path::new(path).parent() {
                std::fs::create_dir_all(directory).for_(|| format!("create {}", directory.display()))?;
            }
            let opened = tokio::fs::File::options()
                .append(true)
                .create(true)
                .open(path)
                .await;
            Ok(Target::Ready(Box::new(opened.for_(|| format!("open {path}"))?)))
        }
        "fifo" => Err(Error::Invalid(format!("{path} is no fifo"))),
        other => Err(Error::Unsupported(format!(
            "output to {other}:// is not supported: name a fifo, file:///PATH or binary:///PROGRAM"
        ))),
    }
}

/// Streams being carried. Dropped, input is carried no further; output is, to its end, or until [`Streams::let_go`].
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
    /// Carries the streams of a process that is made.
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
                // Of a terminal nobody says the end but who types it.
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

    /// The client has closed stdin: it ends once nobody else has it open.
    pub fn close_stdin(&self) {
        self.close.notify_one();
    }

    /// The process has ended: nobody takes input any more.
    pub fn end_input(&self) {
        self.ended.send_replace(true);
    }

    /// Waits until all output has been taken, wherever the streams are meanwhile.
    pub fn drained(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut open = self.open.clone();
        async move {
            // An end of the sender is that of both.
            let _ = open.wait_for(|open| *open == 0).await;
        }
    }

    /// Carries no more.
    pub fn let_go(&mut self) {
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
        // The guest makes ready the next piece meanwhile, and no more than that.
        let ((), read) = tokio::join!(
            take(&mut sink, &data, process, output),
            agent.read(process, output)
        );
        next = read;
    }
    if let Some(open) = &mut sink {
        let _ = open.flush().await;
    }
}

async fn take(sink: &mut Option<Sink>, data: &[u8], process: &ProcessId, output: Output) {
    if let Some(open) = sink
        && let Err(e) = open.write_all(data).await
    {
        warning!("{output:?} of {} is dropped: {e}", process.exec);
        *sink = None;
    }
}

/// Until the end of input; an error is that of the fifo.
async fn carry_input(
    agent: &Agent,
    process: &ProcessId,
    path: &str,
    close: &Notify,
    has_ended: &mut watch::Receiver<bool>,
) -> Result<()> {
    let opened = fifo::reader(Path::new(path), true).for_(|| format!("open {path}"));
    let mut fifo: Box<dyn AsyncRead + Send + Unpin> = match opened {
        Ok(fifo) => Box::new(fifo),
        Err(e) => {
            warning!("no input of {}: {e}", process.exec);
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
                // What is in it stays while it is open; our own end, which kept it from ending, goes.
                fifo = Box::new(fifo::reader(Path::new(path), false).for_(|| format!("open {path}"))?);
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

/// How long output may take to be taken after its process has been removed.
pub const DRAIN_LIMIT: Duration = Duration::from_secs(10);
