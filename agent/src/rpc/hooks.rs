//! The service `thaw.Hooks`: runs hooks of a container.

use std::sync::Arc;

use async_trait::async_trait;
use thaw_protocol::agent::hooks::run_hook_response::Outcome as Told;
use thaw_protocol::agent::hooks::{HttpHook, RunHookRequest, RunHookResponse};
use thaw_protocol::agent::hooks_ttrpc::Hooks;
use thaw_protocol::agent::oci;
use tokio::time::{Instant, timeout_at};
use ttrpc::r#async::TtrpcContext;

use super::{Answer, Api, blocking, status};
use crate::error::{Error, Result};
use crate::hook::{self, Ended, Limit, Outcome};
use crate::readiness::http::Request;
use crate::readiness::network::Network;
use crate::sandbox::Sandbox;

/// Longest timeout.
const MAX_TIMEOUT_MS: u32 = 600_000;

#[async_trait]
impl Hooks for Api {
    async fn run(&self, _: &TtrpcContext, r: RunHookRequest) -> Answer<RunHookResponse> {
        let sandbox = self.sandbox.clone();
        // In a task of its own, so that it ends in time also if its caller is gone.
        let ended = tokio::spawn(async move { run(&sandbox, r).await }).await;
        let ended = ended.unwrap_or_else(|e| Err(Error::State(format!("the agent's task failed: {e}"))));
        ended.map(response).map_err(status)
    }
}

async fn run(sandbox: &Arc<Sandbox>, mut r: RunHookRequest) -> Result<Ended> {
    if !(1..=MAX_TIMEOUT_MS).contains(&r.timeout_ms) {
        return Err(Error::Invalid(format!(
            "a timeout is 1 to {MAX_TIMEOUT_MS} ms, not {}",
            r.timeout_ms
        )));
    }
    let limit = Limit::of_ms(r.timeout_ms);
    match (r.process.take(), r.http.take()) {
        (Some(process), None) => command(sandbox, &r.container_id, process, limit).await,
        (None, Some(http)) => request(sandbox, &r.container_id, &http, limit).await,
        _ => Err(Error::Invalid("a hook is either a process or a request".into())),
    }
}

async fn command(sandbox: &Arc<Sandbox>, id: &str, process: oci::Process, limit: Limit) -> Result<Ended> {
    if process.Terminal {
        return Err(Error::Unsupported("a hook has no terminal".into()));
    }
    let late = || Error::State(format!("it was not started within {} ms", limit.ms));
    let activity = timeout_at(limit.deadline, sandbox.activity()).await;
    let activity = activity.map_err(|_| late())?;
    let container = sandbox.container(id)?;
    let reaper = sandbox.reaper.clone();
    let launching = blocking(move || {
        let _motion = activity;
        let process = container.launch_hook(&process, &reaper)?;
        if Instant::now() >= limit.deadline {
            // The answer was given without it.
            process.kill_group(&reaper)?;
        }
        Ok(process)
    });
    let launched = timeout_at(limit.deadline, launching).await;
    let process = launched.map_err(|_| late())??;
    Ok(hook::finish(process, &sandbox.reaper, limit).await)
}

async fn request(sandbox: &Sandbox, id: &str, http: &HttpHook, limit: Limit) -> Result<Ended> {
    let port = u16::try_from(http.port).ok().filter(|port| *port != 0);
    let port = port.ok_or_else(|| Error::Invalid(format!("there is no TCP port {}", http.port)))?;
    let request = Request::new(&http.path, &http.host)?;
    let container = sandbox.container(id)?;
    container.check_runs()?;
    let network = Network::of(&container.init.child)?;
    Ok(hook::send(&network, port, &request, limit).await)
}

fn response(ended: Ended) -> RunHookResponse {
    let (outcome, failure) = match ended.outcome {
        Outcome::Succeeded => (Told::SUCCEEDED, String::new()),
        Outcome::Failed(why) => (Told::FAILED, why),
        Outcome::TimedOut(why) => (Told::TIMED_OUT, why),
    };
    RunHookResponse {
        outcome: outcome.into(),
        failure,
        output: ended.output,
        ..Default::default()
    }
}
