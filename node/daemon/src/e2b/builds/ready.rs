//! The last part of a build: its start command, and the wait until its ready command succeeds.

use std::sync::Arc;
use std::time::Duration;

use thaw_sandbox::agent_client::Output;
use tokio::time::{Instant, sleep, timeout_at};

use super::super::context::Context;
use super::guest::{Guest, StepError, Surroundings};
use super::log::{BuildLog, Level, Lines};
use crate::api::kept::{Processes, Said};

/// How long the ready command may fail.
pub const READY_LIMIT: Duration = Duration::from_secs(5 * 60);
/// The time between two runs of the ready command.
const PAUSE: Duration = Duration::from_millis(500);
/// The ready command of a start command without one, as at E2B.
const DEFAULT_READY: &str = "sleep 20";

/// The commands of a template, each of which may be missing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Commands {
    /// Runs on in every sandbox of the template.
    pub start: Option<String>,
    /// Succeeds once the sandbox may be frozen.
    pub ready: Option<String>,
}

impl Commands {
    /// Runs them.
    ///
    /// # Errors
    /// The start command fails, or the ready command does not succeed in time.
    pub async fn run(&self, guest: &Guest, context: &Context, log: &BuildLog) -> Result<(), StepError> {
        let ready = match (&self.start, &self.ready) {
            (_, Some(ready)) => ready.as_str(),
            (Some(_), None) => DEFAULT_READY,
            (None, None) => return Ok(()),
        };
        let failing = async {
            match &self.start {
                Some(start) => started(guest, start, context, log).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            done = until_ready(guest, ready, context, log) => done,
            why = failing => Err(why),
        }
    }
}

/// Starts the start command and logs what it writes. Returns only if it fails.
async fn started(guest: &Guest, start: &str, context: &Context, log: &BuildLog) -> StepError {
    log.add(Level::Info, format!("start command: {start}"));
    let begun = guest.start(start, Surroundings::of(context, None)).await;
    let (processes, id) = match begun {
        Ok(begun) => begun,
        Err(refusal) => return refusal.into(),
    };
    match follow(&processes, &id, log).await {
        // It may have left a server behind.
        Ok(0) => std::future::pending().await,
        Ok(code) => StepError::Failed(match log.last_line() {
            Some(line) => format!("the start command ended with exit code {code}: {line}"),
            None => format!("the start command ended with exit code {code}"),
        }),
        Err(why) => why,
    }
}

/// Logs what a kept process writes, until it ends.
async fn follow(processes: &Arc<dyn Processes>, id: &str, log: &BuildLog) -> Result<i32, StepError> {
    let (mut lines, mut at) = (Lines::into_log(log), 0);
    loop {
        match processes.output(id, at).await? {
            Said::Wrote {
                offset,
                is_stderr,
                data,
            } => {
                at = offset + data.len() as u64;
                let output = if is_stderr { Output::Stderr } else { Output::Stdout };
                lines.push(output, &data);
            }
            Said::Ended(code) => return Ok(code),
        }
    }
}

/// Runs the ready command until it succeeds.
async fn until_ready(guest: &Guest, ready: &str, context: &Context, log: &BuildLog) -> Result<(), StepError> {
    log.add(Level::Info, format!("ready command: {ready}"));
    let (deadline, mut last) = (Instant::now() + READY_LIMIT, None);
    let runs = async {
        loop {
            let ended = guest.run(ready, Surroundings::of(context, None), None).await?;
            if ended.code == 0 {
                return Ok::<_, StepError>(());
            }
            last = Some(ended.code);
            sleep(PAUSE).await;
        }
    };
    match timeout_at(deadline, runs).await {
        Ok(done) => done,
        Err(_) => Err(StepError::Failed(format!(
            "the ready command has not succeeded within {} seconds: {}",
            READY_LIMIT.as_secs(),
            match last {
                Some(code) => format!("its last exit code was {code}"),
                None => "it did not end".to_owned(),
            }
        ))),
    }
}
