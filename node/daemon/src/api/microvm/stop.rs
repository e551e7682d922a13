//! Stops the process of a sandbox's container, for good or to start its program again.

use std::pin::pin;
use std::time::Duration;

use thaw_protocol::api::StopContainer;
use thaw_sandbox::READY_LIMIT;
use thaw_sandbox::agent_client;
use thaw_sandbox::container::{Running, can_start_again, signals};
use thaw_sandbox::error::{Error, ErrorKind};
use thaw_sys::lock::Lock;

use super::{Microvm, in_time};
use crate::api::problem::{ApiCode, Refusal};

/// How long the end of a process may take to be reported.
const REPORT_LIMIT: Duration = Duration::from_secs(5);

impl Microvm {
    pub(super) async fn send_signal(&self, running: &Running, number: u8) -> Result<(), Error> {
        let agent = agent_client::connect(&self.sandbox.vsock(), READY_LIMIT).await?;
        let process = running.process();
        let sent = in_time(agent.signal(&process, number.into())).await?;
        sent.map_err(|e| {
            let what = format!("cannot send signal {number} to the container's process: {e}");
            Error::new(ErrorKind::AgentFailed, what).remedy("it may have ended: see `thaw ps -a`")
        })
    }

    /// Ends the restart policy, and stops the process.
    pub(super) async fn stop_container(&self, how: StopContainer) -> Result<(), Error> {
        let running = Running::read(&self.sandbox.directory())?;
        let monitored = self.monitor.locked().as_ref().map(|monitor| {
            monitor.end_policy();
            (monitor.exit.clone(), monitor.life.clone())
        });
        let Some((mut exit, life)) = monitored else {
            return self.stop_attached(&running, how).await;
        };
        let is_restarting = life.borrow().restarting.is_some();
        let ended = async { drop(exit.wait_for(Option::is_some).await) };
        match is_restarting {
            true => ends_in_time(ended, READY_LIMIT).await,
            false => self.end_process(&running, how, ended).await,
        }
    }

    /// Stops the process of a container that a `thaw run` is attached to.
    async fn stop_attached(&self, running: &Running, how: StopContainer) -> Result<(), Error> {
        let agent = agent_client::connect(&self.sandbox.vsock(), READY_LIMIT).await?;
        let process = running.process();
        // Without an answer, its owner has ended the machine.
        let ended = async { drop(agent.wait(&process).await) };
        self.end_process(running, how, ended).await
    }

    /// Stops the process, and waits until the program was started again.
    pub(super) async fn restart_container(&self, how: StopContainer) -> Result<(), Refusal> {
        let id = &self.sandbox.record().id;
        let refuse = |why: &str| {
            let what = format!("the container of sandbox {id} cannot be restarted: {why}");
            Refusal::new(ApiCode::ProcessRefused, what)
        };
        let running = Running::read(&self.sandbox.directory())?;
        if !can_start_again(&self.sandbox.directory()) {
            return Err(refuse("it was thawed from a snapshot; run its image again"));
        }
        let monitored = self.monitor.locked().as_ref().map(|monitor| {
            let before = *monitor.life.borrow();
            monitor.request_restart();
            (monitor.exit.clone(), monitor.life.clone(), before)
        });
        let attached = "its `thaw run` is attached to it and ends with it; run it with -d";
        let (mut exit, mut life, before) = monitored.ok_or_else(|| refuse(attached))?;
        if before.restarting.is_none() {
            let (mut over, mut seen) = (exit.clone(), life.clone());
            let ended = async {
                tokio::select! {
                    _ = seen.wait_for(|life| life.restarting.is_some() || life.starts > before.starts) => {}
                    _ = over.wait_for(Option::is_some) => {}
                }
            };
            self.end_process(&running, how, ended).await?;
        }
        let started = async {
            tokio::select! {
                _ = life.wait_for(|life| life.starts > before.starts) => true,
                _ = exit.wait_for(Option::is_some) => false,
            }
        };
        match tokio::time::timeout(READY_LIMIT, started).await {
            Ok(true) => Ok(()),
            Ok(false) => Err(refuse("its program could not be started again; see thawd's log")),
            Err(_) => Err(late("been started again", READY_LIMIT).into()),
        }
    }

    /// Sends the stop signal and, after the timeout, SIGKILL, until `ended` completes.
    async fn end_process(
        &self,
        running: &Running,
        how: StopContainer,
        ended: impl Future<Output = ()>,
    ) -> Result<(), Error> {
        let life = running.life();
        let mut ended = pin!(ended);
        let signal = how.signal.unwrap_or(life.stop_signal);
        if let Err(e) = self.send_signal(running, signal).await {
            // It may have ended just now.
            return ends_in_time(ended, REPORT_LIMIT).await.map_err(|_| e);
        }
        let Some(limit) = life.stop_timeout(how.timeout_s) else {
            ended.await;
            return Ok(());
        };
        if tokio::time::timeout(limit, &mut ended).await.is_ok() {
            return Ok(());
        }
        if let Err(e) = self.send_signal(running, signals::KILL).await {
            tracing::debug!("{e}");
        }
        ends_in_time(ended, READY_LIMIT).await
    }
}

async fn ends_in_time(ended: impl Future<Output = ()>, limit: Duration) -> Result<(), Error> {
    let ended = tokio::time::timeout(limit, ended).await;
    ended.map_err(|_| late("ended", limit))
}

fn late(what: &str, limit: Duration) -> Error {
    let what = format!(
        "the container's process has not {what} within {} s",
        limit.as_secs()
    );
    Error::new(ErrorKind::AgentFailed, what).remedy("`thaw rm` ends its machine")
}
