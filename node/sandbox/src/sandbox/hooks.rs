//! Runs the hooks of a sandbox's container: before it is frozen, and after it is thawed.
//!
//! The guest's agent runs them, and ends them at their time limit. Invariant: whatever the guest does, a call here ends [`LATE`] after
//! that limit or with the machine, and keeps a bounded part of what the guest says.

use std::path::Path;
use std::time::{Duration, Instant};

use thaw_protocol::agent::MessageField;
use thaw_protocol::agent::hooks::run_hook_response::Outcome as Told;
use thaw_protocol::agent::hooks::{HttpHook, RunHookRequest, RunHookResponse};
use thaw_protocol::api::{Hook, HookResult, OnHookFailure};

use super::create::Making;
use super::machine::ended;
use super::{Node, Sandbox};
use crate::agent_client::{self, start_failure};
use crate::container::{Options, RUNNING_FILE, Running, exec_process};
use crate::error::{Error, ErrorKind};
use crate::failure::last_lines;

/// How long the agent may take to be reached, and to answer beyond a hook's time limit.
const LATE: Duration = Duration::from_secs(10);
/// Most bytes of output and of a reason that are kept.
const MOST_OUTPUT: usize = 4096;
const MOST_REASON: usize = 512;
/// Lines of the output that an error shows.
const SHOWN_LINES: usize = 20;

impl Sandbox {
    /// Runs the hook before a freeze, if its container has one. The sandbox runs meanwhile.
    ///
    /// # Errors
    /// [`ErrorKind::HookFailed`]: it must not be frozen. [`ErrorKind::HookMissing`]: `require` is set, and its container has no hook after
    /// a thaw.
    pub(super) async fn before_freeze(&self, node: &Node, require: bool) -> Result<(), Error> {
        let directory = self.directory();
        let is_there = node.has_agents() && directory.join(RUNNING_FILE).exists();
        let running = is_there.then(|| Running::read(&directory)).transpose()?;
        let id = &self.record().id;
        if require {
            check_required(running.as_ref(), &format!("sandbox {id} cannot be frozen"))?;
        }
        let hook = running
            .as_ref()
            .and_then(|running| Some((running, running.hooks.before_freeze.as_ref()?)));
        let Some((running, hook)) = hook else {
            return Ok(());
        };
        let result = run(&self.vsock(), running, hook, self.wait_end()).await;
        match result.failure {
            None => Ok(()),
            Some(why) => {
                let what = format!("sandbox {id} cannot be frozen: its before_freeze hook failed: {why}");
                Err(failed(what, &result.output))
            }
        }
    }
}

impl Making<'_> {
    /// Runs the hook after a thaw, if the container has one, and notes its result in the record, which is not written yet.
    ///
    /// # Errors
    /// [`ErrorKind::HookFailed`]: the sandbox must end, because `require` is set or the hook says so.
    pub(super) async fn after_thaw(
        &mut self,
        container: Option<&Running>,
        require: bool,
    ) -> Result<(), Error> {
        let hook = container.and_then(|running| Some((running, running.hooks.after_thaw.as_ref()?)));
        let (Some((running, hook)), true) = (hook, self.node.has_agents()) else {
            return Ok(());
        };
        let end = ended(self.resources.control()?.life());
        let vsock = self.resources.directory.vsock_socket();
        let result = {
            let _stage = self.trace.stage("after_thaw");
            run(&vsock, running, hook, end).await
        };
        let id = &self.record.id;
        if let Some(why) = &result.failure {
            let what = format!("the after_thaw hook of sandbox {id} failed: {why}");
            if require || hook.on_failure == OnHookFailure::End {
                return Err(failed(what, &result.output));
            }
            tracing::warn!("{what}");
            for line in last_lines(result.output.as_bytes(), SHOWN_LINES) {
                tracing::warn!("  | {line}");
            }
        }
        self.record.after_thaw = Some(result);
        Ok(())
    }
}

/// Fails if a container has no hook after a thaw. `what` begins the error.
///
/// # Errors
/// [`ErrorKind::HookMissing`].
pub(super) fn check_required(container: Option<&Running>, what: &str) -> Result<(), Error> {
    match container.is_some_and(|running| running.hooks.after_thaw.is_some()) {
        true => Ok(()),
        false => {
            let what = format!("{what}: it has no after_thaw hook, and one is required");
            Err(Error::new(ErrorKind::HookMissing, what))
        }
    }
}

fn failed(what: String, output: &str) -> Error {
    Error {
        context: last_lines(output.as_bytes(), SHOWN_LINES),
        ..Error::new(ErrorKind::HookFailed, what)
    }
}

/// Runs a hook in the guest behind this vsock socket. `end` completes when the machine has ended, with the reason.
async fn run(vsock: &Path, running: &Running, hook: &Hook, end: impl Future<Output = String>) -> HookResult {
    let (request, since) = (request(running, hook), Instant::now());
    let limit = Duration::from_millis(hook.timeout_ms.into()) + LATE;
    let asked = async {
        let agent = agent_client::connect(vsock, LATE).await?;
        agent.run_hook(&request).await.map_err(start_failure)
    };
    let answer = tokio::select! {
        answer = tokio::time::timeout(limit, asked) => match answer {
            Ok(answer) => answer.map_err(|e| e.what),
            Err(_) => Err("the guest's agent does not answer".to_owned()),
        },
        why = end => Err(why),
    };
    let (failure, output) = match answer {
        Ok(answer) => told(&answer),
        Err(why) => (Some(why), String::new()),
    };
    HookResult {
        failure: failure.map(|why| why.chars().take(MOST_REASON).collect()),
        took_ms: u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX),
        output,
    }
}

fn request(running: &Running, hook: &Hook) -> RunHookRequest {
    let process = hook.command.as_ref().map(|command| {
        let options = Options {
            command: command.clone(),
            user: hook.user.clone(),
            ..Options::default()
        };
        exec_process(running, &options)
    });
    let http = hook.http.as_ref().map(|http| HttpHook {
        port: http.port.into(),
        path: http.path.clone(),
        host: http.host.clone().unwrap_or_default(),
        ..Default::default()
    });
    RunHookRequest {
        container_id: running.container_id.clone(),
        process: MessageField::from_option(process),
        http: MessageField::from_option(http),
        timeout_ms: hook.timeout_ms,
        ..Default::default()
    }
}

/// Why a hook failed, if it did, and then its output.
fn told(answer: &RunHookResponse) -> (Option<String>, String) {
    let output = &answer.output[answer.output.len().saturating_sub(MOST_OUTPUT)..];
    let output = || String::from_utf8_lossy(output).into_owned();
    match answer.outcome.enum_value() {
        Ok(Told::SUCCEEDED) => (None, String::new()),
        Ok(Told::FAILED | Told::TIMED_OUT) => (Some(answer.failure.clone()), output()),
        other => {
            let why = format!("the guest's agent says of its end: {other:?}");
            (Some(why), output())
        }
    }
}

#[cfg(test)]
#[path = "hooks_test.rs"]
mod tests;
