//! A caller's hold on a process it runs.
//!
//! Invariants: between the process and its caller lie at most [`PIECES`] pieces each way, so who is slow slows the other; when
//! the caller lets go, or thawd ends, the process is hung up on and then killed; what was begun is attended to its end.

use std::sync::Arc;
use std::time::Duration;

use thaw_sandbox::agent_client::{OUTPUT_LINGERS, Output};
use thaw_sandbox::error::Error;
use tokio::sync::{mpsc, watch};

use super::process::Process;

/// Pieces on their way, each way: each is at most what the agent gives at once.
const PIECES: usize = 4;
/// How long a process that was hung up on may take to end before it is killed, and then.
const GRACE: Duration = Duration::from_secs(5);
/// How long all of that may take: a paused guest answers nothing.
const PARTING: Duration = Duration::from_secs(15);

/// What happens to a process.
#[derive(Debug)]
pub enum Said {
    Wrote(Output, Vec<u8>),
    /// The last.
    Ended(Result<i32, Error>),
}

/// A process and who attends it. Dropped, the process is hung up on.
#[derive(Debug)]
pub struct Session {
    process: Arc<dyn Process>,
    said: mpsc::Receiver<Said>,
    input: Option<mpsc::Sender<Vec<u8>>>,
}

impl Session {
    /// Attends a process that was just started. `held` is let go of when that is over.
    pub fn start(
        process: Arc<dyn Process>,
        tty: bool,
        closing: watch::Receiver<bool>,
        held: impl Send + 'static,
    ) -> Session {
        let (says, said) = mpsc::channel(PIECES);
        let (input, fed) = mpsc::channel(PIECES);
        let attended = process.clone();
        tokio::spawn(async move {
            let _held = held;
            attend(attended.as_ref(), tty, fed, &says, closing).await;
        });
        Session {
            process,
            said,
            input: Some(input),
        }
    }

    /// What happens next. None when thawd ends.
    pub async fn next(&mut self) -> Option<Said> {
        self.said.recv().await
    }

    /// The process itself.
    pub fn process(&self) -> Arc<dyn Process> {
        self.process.clone()
    }

    /// Where its input goes: dropped, that is at its end. It can be had once.
    pub fn input(&mut self) -> Option<mpsc::Sender<Vec<u8>>> {
        self.input.take()
    }
}

async fn attend(
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
        // Who has let go does not hear it.
        let _ = says.send(Said::Ended(status)).await;
    };
    let feeding = async {
        feed(process, fed).await;
        std::future::pending::<()>().await;
    };
    tokio::select! {
        // Who lets go ends the input too: that alone is no hanging up.
        biased;
        () = says.closed() => {}
        _ = closing.wait_for(|closing| *closing) => {}
        () = work => return,
        () = feeding => {}
    }
    if tokio::time::timeout(PARTING, hang_up(process)).await.is_err() {
        tracing::warn!("a process nobody attends any more could not be ended: its guest does not answer");
    }
}

/// Passes on what the process writes until its stream ends, or until it has been waited for [`OUTPUT_LINGERS`] in all since
/// the process's end: what else holds the stream open is not what was run.
async fn pump(
    process: &dyn Process,
    output: Output,
    says: &mpsc::Sender<Said>,
    mut ended: watch::Receiver<bool>,
) {
    let mut left = OUTPUT_LINGERS;
    loop {
        let (begun, was_over) = (tokio::time::Instant::now(), *ended.borrow());
        let over = async {
            // The sender is held as long as we run.
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

/// Ends a process as a terminal that is closed does, and by force where that does not help.
async fn hang_up(process: &dyn Process) {
    let drain = async |output| while process.read(output).await.is_some() {};
    let draining = async {
        // What nobody reads must not hold it up.
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
