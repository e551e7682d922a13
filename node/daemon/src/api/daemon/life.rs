//! The life of a sandbox's container: signals, stops, restarts and its end.

use std::sync::Arc;

use thaw_protocol::api::{OnExit, SandboxAction, SandboxEvent, StopContainer};
use thaw_sandbox::container::signals;
use thaw_sandbox::error::{Error, ErrorKind};

use super::describe::RESTARTING;
use super::{Daemon, Described, no_such_sandbox};
use crate::api::machine::Machine;
use crate::api::problem::{ApiCode, Refusal};
use crate::api::scope::Wanted;

impl Daemon {
    /// Sends a signal to the process of a sandbox's container. SIGKILL and its stop signal also end its restart policy.
    pub async fn signal(&self, wanted: &Wanted, number: u8) -> Result<(), Refusal> {
        let is_restarting = self
            .cache
            .find(wanted)
            .is_some_and(|shown| shown.state == RESTARTING);
        match is_restarting && number == signals::KILL {
            // There is no process, only the policy.
            true => self.stop(wanted, StopContainer::default()).await,
            false => {
                self.running(wanted)?.signal(number).await?;
                let killed = SandboxEvent {
                    signal: Some(number),
                    ..SandboxEvent::now(SandboxAction::Kill)
                };
                self.happened(wanted, killed);
                Ok(())
            }
        }
    }

    /// Stops the process of a sandbox's container for good, and waits for its end. That goes on if this future is dropped.
    pub async fn stop(&self, wanted: &Wanted, how: StopContainer) -> Result<(), Refusal> {
        let machine = self.living(wanted)?;
        self.go_on(async move { Ok(machine.stop(how).await?) }).await?;
        self.happened(wanted, SandboxEvent::now(SandboxAction::Stop));
        Ok(())
    }

    /// Stops the process of a sandbox's container, and starts its program again. That goes on if this future is dropped.
    pub async fn restart(&self, wanted: &Wanted, how: StopContainer) -> Result<(), Refusal> {
        let machine = self.living(wanted)?;
        self.go_on(async move { machine.restart(how).await }).await?;
        self.happened(wanted, SandboxEvent::now(SandboxAction::Restart));
        Ok(())
    }

    /// Waits until the process of a sandbox's container has ended and is not started again, and returns its exit status.
    ///
    /// # Errors
    /// The machine ends first; nothing monitors the container.
    pub async fn exit_of(&self, wanted: &Wanted) -> Result<i32, Refusal> {
        let id = self.id(wanted)?;
        if let Some(status) = self.cache.get(&id).and_then(|shown| shown.exit_code) {
            return Ok(status);
        }
        // The machine must not be held while its end is awaited.
        let (exit, end) = {
            let machine = self.find(&id)?;
            if machine.life().is_none() {
                return Err(unmonitored(&id));
            }
            (machine.exit(), machine.end())
        };
        let mut closing = self.closing();
        let reason = tokio::select! {
            status = exit => return Ok(status),
            reason = end => reason,
            _ = closing.wait_for(|closing| *closing) => return Err(shuts_down()),
        };
        // At shutdown thawd says so first and then releases machines, which then seem to have ended.
        match *closing.borrow() {
            true => Err(shuts_down()),
            false => Err(Error::new(ErrorKind::GuestEnded, reason).into()),
        }
    }

    /// Changes what happens to a sandbox when its container's process ends. From then on it does not end with the process that it was made for.
    ///
    /// # Errors
    /// [`ApiCode::NoLogs`]: nothing monitors the container. [`ApiCode::OneOnly`]: a `thaw run` owns the sandbox, which ends with that.
    pub async fn set_on_exit(&self, wanted: &Wanted, on_exit: OnExit) -> Result<Arc<Described>, Refusal> {
        self.factory()?;
        let turn = self.turn(wanted).await?;
        if turn.machine.life().is_none() {
            return Err(unmonitored(&turn.id));
        }
        turn.machine.set_on_exit(on_exit).await?;
        let shown = self.cache.get(&turn.id);
        Ok(shown.ok_or_else(|| no_such_sandbox(&wanted.text))?)
    }

    /// A sandbox with the results of its container's health checks.
    ///
    /// # Errors
    /// There is no such sandbox.
    pub fn described(&self, wanted: &Wanted) -> Result<Described, Error> {
        let found = self
            .cache
            .find(wanted)
            .ok_or_else(|| no_such_sandbox(&wanted.text))?;
        let health = self.look_up(&found.id).ok().and_then(|machine| machine.health());
        let mut described = Described::clone(&found);
        if let Some(health) = health.and_then(|health| health.borrow().clone()) {
            described.health = Some(health);
        }
        Ok(described)
    }

    /// Shows an event of a sandbox, if that still exists.
    fn happened(&self, wanted: &Wanted, event: SandboxEvent) {
        if let Some(shown) = self.cache.find(wanted) {
            self.cache
                .update(&shown.id, |described| described.event = Some(event));
        }
    }

    /// The machine of a sandbox whose container runs or is started again.
    fn living(&self, wanted: &Wanted) -> Result<Arc<dyn Machine>, Refusal> {
        self.in_state(wanted, &["running", RESTARTING])
    }

    /// Does work that may take as long as a program takes to end, until thawd shuts down.
    async fn go_on(
        &self,
        work: impl Future<Output = Result<(), Refusal>> + Send + 'static,
    ) -> Result<(), Refusal> {
        let (mut closing, finishing) = (self.closing(), self.finishing.clone().read_owned().await);
        let done = tokio::spawn(async move {
            let _finishing = finishing;
            tokio::select! {
                // A `thaw run` shuts down once its container has ended, which must not hide that.
                biased;
                done = work => done,
                _ = closing.wait_for(|closing| *closing) => Err(shuts_down()),
            }
        });
        done.await.map_err(|e| Refusal::new(ApiCode::Broken, e))?
    }
}

fn unmonitored(id: &str) -> Refusal {
    let why = format!("sandbox {id}: whoever started its container waits for its end");
    Refusal::new(ApiCode::NoLogs, why)
}

fn shuts_down() -> Refusal {
    let what = "it does not wait for the container's end";
    Refusal::new(ApiCode::Ending, what)
}
