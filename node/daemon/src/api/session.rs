//! The session of a caller with a process that it runs.
//!
//! Invariants: at most [`PIECES`] pieces are buffered each way, so a slow side slows the other; when the caller drops the session, or thawd
//! shuts down, the process gets SIGHUP, then SIGKILL; the session's task runs until the process has ended.

use std::sync::Arc;
use std::time::Duration;

use thaw_sandbox::agent_client::{OUTPUT_LINGERS, Output};
use thaw_sandbox::error::Error;
use tokio::sync::{mpsc, watch};

use super::process::Process;

/// Pieces buffered each way. A piece is at most what the agent returns at once.
const PIECES: usize = 4;
/// How long a process may take to end after SIGHUP, and after SIGKILL.
const GRACE: Duration = Duration::from_secs(5);
/// How long the whole hang-up may take: a paused guest does not answer.
const PARTING: Duration = Duration::from_secs(15);

/// An event of a process.
#[derive(Debug)]
pub enum Said {
    Wrote(Output, Vec<u8>),
    /// The last event.
    Ended(Result<i32, Error>),
}

/// A process and its caller. Dropping this hangs up the process.
#[derive(Debug)]
pub struct Session {
    process: Arc<dyn Process>,
    said: mpsc::Receiver<Said>,
    input: Option<mpsc::Sender<Vec<u8>>>,
}

impl Session {
    /// Starts the session of a process that was just started. `held` is dropped at its end.
    pub fn start(
        process: Arc<dyn Process>,
        tty: bool,
        closing: watch::Receiver<bool>,
        held: impl Send + 'static,
    ) -> Session {
        let (says, said) = mpsc::channel(PIECES);
        let (input, fed) = mpsc::channel(PIECES);
        let running = process.clone();
        tokio::spawn(async move {
            let _held = held;
            run(running.as_ref(), tty, fed, &says, closing).await;
        });
        Session {
            process,
            said,
            input: Some(input),
        }
    }

    /// The next event. `None` when thawd shuts down.
    pub async fn next(&mut self) -> Option<Said> {
        self.said.recv().await
    }

    /// The process itself.
    pub fn process(&self) -> Arc<dyn Process> {
        self.process.clone()
    }

    /// Its input, which is closed when this is dropped. Returned once only.
    pub fn input(&mut self) -> Option<mpsc::Sender<Vec<u8>>> {
        self.input.take()
    }
}

async fn run(
    process: &dyn Process,
    tty: bool,
    fed: mpsc::Receiver<Vec<u8>>,
    says: &mpsc::Sender<Said>,
    mut closing: watch::Receiver<bool>,
) {
    let (over, ended) = watch::channel(false);
    let end = async {
        let status = process.wait().await;
        over.send_replace(true);
        status
    };
    let outputs = async {
        let stderr = async {
            // With a terminal both are one stream.
            if !tty {
                pump(process, Output::Stderr, says, ended.clone()).await;
            }
        };
        tokio::join!(pump(process, Output::Stdout, says, ended.clone()), stderr);
    };
    let work = async {
        let (status, ()) = tokio::join!(end, outputs);
        // A caller that has dropped the session does not receive it.
        let _ = says.send(Said::Ended(status)).await;
    };
    let feeding = async {
        feed(process, fed).await;
        std::future::pending::<()>().await;
    };
    tokio::select! {
        // Dropping the session also closes the input; the end of input alone does not hang up.
        biased;
        () = says.closed() => {}
        _ = closing.wait_for(|closing| *closing) => {}
        () = work => return,
        () = feeding => {}
    }
    if tokio::time::timeout(PARTING, hang_up(process)).await.is_err() {
        tracing::warn!("a process whose caller has gone could not be ended: its guest does not answer");
    }
}

/// Passes on the output of the process until its stream ends, or for at most [`OUTPUT_LINGERS`] after the process's end: another
/// process may hold the stream open. `ended` becomes true at that end.
pub async fn pump(
    process: &dyn Process,
    output: Output,
    says: &mpsc::Sender<Said>,
    mut ended: watch::Receiver<bool>,
) {
    let mut left = OUTPUT_LINGERS;
    loop {
        let (begun, was_over) = (tokio::time::Instant::now(), *ended.borrow());
        let over = async {
            // The sender lives as long as this function runs.
            let _ = ended.wait_for(|ended| *ended).await;
            tokio::time::sleep(left).await;
        };
        let data = tokio::select! {
            data = process.read(output) => data,
            () = over => None,
        };
        let Some(data) = data else { return };
        if was_over {
            left = left.saturating_sub(begun.elapsed());
        }
        if says.send(Said::Wrote(output, data)).await.is_err() {
            return;
        }
    }
}

async fn feed(process: &dyn Process, mut fed: mpsc::Receiver<Vec<u8>>) {
    while let Some(data) = fed.recv().await {
        if let Err(e) = process.write(data).await {
            tracing::debug!("stdin ended: {e}");
            return;
        }
    }
    process.close_stdin().await;
}

/// Sends SIGHUP, as a closed terminal does, then SIGKILL if the process does not end.
async fn hang_up(process: &dyn Process) {
    let drain = async |output| while process.read(output).await.is_some() {};
    let draining = async {
        // Output must be read, or the process could block.
        tokio::join!(drain(Output::Stdout), drain(Output::Stderr));
        std::future::pending::<()>().await;
    };
    let ending = async {
        process.signal(libc::SIGHUP as u8).await;
        if tokio::time::timeout(GRACE, process.wait()).await.is_err() {
            process.signal(libc::SIGKILL as u8).await;
            let _ = process.wait().await;
        }
    };
    tokio::select! {
        () = ending => {}
        () = draining => {}
    }
}

#[cfg(test)]
#[path = "session_test.rs"]
mod tests;
