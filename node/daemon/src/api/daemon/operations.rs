//! Operations on one sandbox.
//!
//! Invariant: operations that change a sandbox take turns. An operation that waits for a file system or a device of the host takes no turn.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use thaw_failpoint::{Failpoint, reach};
use thaw_pools::share::Source;
use thaw_protocol::api::{
    FreezeSandbox, FrozenSandbox, KeptProcess, NetworkPolicy, RateLimits, SandboxAction, SandboxEvent,
};
use thaw_protocol::control::DeviceId;
use thaw_sandbox::blocking::blocking;
use thaw_sandbox::container::Options;
use thaw_sandbox::error::Error;
use thaw_sandbox::journal::Journal;
use thaw_sandbox::state::{HostDisk, Record};

use super::describe::set;
use super::turn::Turn;
use super::{Body, Daemon, Described, lifetime, no_such_sandbox};
use crate::api::machine::Machine;
use crate::api::problem::{ApiCode, Refusal};
use crate::api::request_gate::Permit;
use crate::api::scope::Wanted;
use crate::api::session::Session;

impl Daemon {
    /// Ends a sandbox and removes its resources, even if it runs on this host without an owner. Removes the record of a failed one.
    pub async fn delete(&self, wanted: &Wanted) -> Result<(), Error> {
        let id = match (self.id(wanted), &self.factory) {
            (Ok(id), _) => id,
            // The tenant of a sandbox without an owner may be unknown, so only the node's administrator may end it.
            (Err(_), Some(factory)) if wanted.scope.is_node() && factory.end_unowned(&wanted.text).await => {
                return Ok(());
            }
            (Err(none), _) => return Err(none),
        };
        if self.factory.is_none() {
            // Its owner sees the end, and removes it.
            self.find(&id)?.kill();
            return Ok(());
        }
        let held = {
            let mut table = self.table();
            table.remove(&id).map(|held| {
                self.cache.remove(&id);
                (held.body.clone(), held.turn.clone())
            })
        };
        let Some((body, turn)) = held else {
            return match self.delete_ended(&id).await {
                true => Ok(()),
                false => Err(no_such_sandbox(&wanted.text)),
            };
        };
        reach(Failpoint::DeleteForgotten);
        match body {
            Body::Machine(machine) => {
                machine.destroy().await;
                // A pause that was in progress finds it gone, and removes what it has written.
                drop(turn.lock().await);
                Ok(())
            }
            Body::Paused(paused) => {
                // A resume that is in progress ends; one that is done meanwhile finds it gone, and ends its machine.
                paused.deleted.notify_one();
                let _turn = turn.lock().await;
                self.factory()
                    .map_err(|_| no_such_sandbox(&id))?
                    .forget_paused(&paused.files)
                    .await
            }
        }
    }

    /// Stops the CPUs of a sandbox.
    pub async fn pause(&self, wanted: &Wanted) -> Result<(), Error> {
        let turn = self.turn(wanted).await?;
        let id = turn.id.clone();
        let done = turn.machine.pause().await;
        reach(Failpoint::PauseDone);
        let happened = done.is_ok().then(|| SandboxEvent::now(SandboxAction::Pause));
        self.settle(turn, happened).await;
        // Once it is shown as paused, so that no request that follows is from before.
        self.interrupt(&id);
        done
    }

    /// Lets its CPUs run again. Thaws it if its memory is released.
    pub async fn resume(self: &Arc<Daemon>, wanted: &Wanted) -> Result<(), Refusal> {
        let (id, body, alone) = self.turn_of(wanted).await?;
        let machine = match body {
            Body::Machine(machine) => machine,
            Body::Paused(paused) => return self.thaw_paused(&id, &paused).await,
        };
        let turn = Turn::new(id, machine, alone);
        self.renew_timeout(&turn).await?;
        let done = turn.machine.resume().await;
        reach(Failpoint::ResumeDone);
        let happened = done.is_ok().then(|| SandboxEvent::now(SandboxAction::Unpause));
        self.settle(turn, happened).await;
        Ok(done?)
    }

    /// Writes a snapshot of it.
    pub async fn freeze(&self, wanted: &Wanted, request: FreezeSandbox) -> Result<FrozenSandbox, Error> {
        let turn = self.turn(wanted).await?;
        let done = turn.machine.freeze(request).await;
        self.settle(turn, None).await;
        if let (
            Ok(FrozenSandbox {
                snapshot: Some(_), ..
            }),
            Some(factory),
        ) = (&done, &self.factory)
        {
            let factory = factory.clone();
            // The caller does not wait for it.
            tokio::spawn(async move { factory.retire_snapshots().await });
        }
        done
    }

    /// Makes an image of the store visible to it, and returns the image's directory in the guest's root device.
    pub async fn show_image(&self, wanted: &Wanted, digest: &str) -> Result<String, Error> {
        let turn = self.turn(wanted).await?;
        turn.machine.show(digest).await
    }

    /// Shares files of this host with it under `name`, as its client sees them.
    pub async fn add_share(&self, wanted: &Wanted, name: String, source: Source) -> Result<(), Error> {
        // Without a turn: a file system of the host may be slow, and nothing else of the sandbox must wait for it.
        let machine = self.find(&self.id(wanted)?)?;
        machine.add_share(name, source).await
    }

    /// Removes a share.
    pub async fn remove_share(&self, wanted: &Wanted, name: String) -> Result<(), Error> {
        let machine = self.find(&self.id(wanted)?)?;
        machine.remove_share(name).await
    }

    /// Attaches a block device of this host, and returns its slot in the machine.
    pub async fn add_disk(&self, wanted: &Wanted, disk: HostDisk) -> Result<DeviceId, Error> {
        // Without a turn: opening a device of the host may be slow.
        let machine = self.find(&self.id(wanted)?)?;
        machine.add_disk(disk).await
    }

    /// Detaches the block device of a slot.
    pub async fn remove_disk(&self, wanted: &Wanted, slot: DeviceId) -> Result<(), Error> {
        let machine = self.find(&self.id(wanted)?)?;
        machine.remove_disk(slot).await
    }

    /// Waits until its machine ends, and returns why it ended.
    pub async fn end_of(&self, wanted: &Wanted) -> Result<String, Error> {
        let id = self.id(wanted)?;
        if let Some(reason) = self.cache.get(&id).and_then(|shown| shown.reason.clone()) {
            return Ok(reason);
        }
        // The machine must not be held while its end is awaited.
        let end = self.find(&id)?.end();
        Ok(end.await)
    }

    /// Changes where a sandbox may connect to.
    pub async fn set_network_policy(
        &self,
        wanted: &Wanted,
        policy: NetworkPolicy,
    ) -> Result<Arc<Described>, Error> {
        let turn = self.turn(wanted).await?;
        let network = turn.machine.set_network_policy(policy).await?;
        self.cache
            .update(&turn.id, |described| described.network = Some(network));
        self.cache
            .get(&turn.id)
            .ok_or_else(|| no_such_sandbox(&wanted.text))
    }

    /// Changes the rate limits of a sandbox's disks and network.
    pub async fn set_rate_limits(
        &self,
        wanted: &Wanted,
        change: RateLimits,
    ) -> Result<Arc<Described>, Error> {
        let turn = self.turn(wanted).await?;
        let limits = turn.machine.set_rate_limits(change).await?;
        self.cache
            .update(&turn.id, |described| described.rate_limits = limits);
        self.cache
            .get(&turn.id)
            .ok_or_else(|| no_such_sandbox(&wanted.text))
    }

    /// The machine of a running sandbox.
    ///
    /// # Errors
    /// [`ApiCode::NotRunning`]: the guest is paused or has ended, so it cannot answer.
    pub fn running(&self, wanted: &Wanted) -> Result<Arc<dyn Machine>, Refusal> {
        self.in_state(wanted, &["running"])
    }

    /// The machine of a sandbox in one of these states.
    ///
    /// # Errors
    /// [`ApiCode::NotRunning`]: it is in another.
    pub(super) fn in_state(&self, wanted: &Wanted, states: &[&str]) -> Result<Arc<dyn Machine>, Refusal> {
        let shown = self
            .cache
            .find(wanted)
            .ok_or_else(|| no_such_sandbox(&wanted.text))?;
        match shown.state.as_str() {
            state if states.contains(&state) => Ok(self.find(&shown.id)?),
            state => Err(Refusal::new(
                ApiCode::NotRunning,
                match &shown.failure {
                    Some(failure) => format!("sandbox {} has failed: {}", shown.id, failure.message),
                    None => format!("sandbox {} is {state}", shown.id),
                },
            )),
        }
    }

    /// What a sandbox's container wrote.
    ///
    /// # Errors
    /// [`ApiCode::NoLogs`]: thawd did not keep it, or no longer does.
    pub async fn journal(&self, wanted: &Wanted) -> Result<Arc<Journal>, Refusal> {
        let id = self.id(wanted)?;
        let not_kept = |why: &str| Refusal::new(ApiCode::NoLogs, format!("sandbox {id}: {why}"));
        if self
            .cache
            .get(&id)
            .is_some_and(|shown| shown.ended_at().is_some())
        {
            let kept = self.kept_journal(&id).await?;
            return kept
                .ok_or_else(|| not_kept("its output was not kept, or has been removed to limit its size"));
        }
        let journal = match self.held(&id)?.0 {
            Body::Machine(machine) => machine.journal(),
            Body::Paused(paused) => self.journal_in(paused.files.output()).await?,
        };
        journal.ok_or_else(|| not_kept("whoever started its container reads the output"))
    }

    /// The output of an ended sandbox.
    async fn kept_journal(&self, id: &str) -> Result<Option<Arc<Journal>>, Error> {
        let Some(run) = &self.kept.run else {
            return Ok(None);
        };
        self.journal_in(run.ended_output(id)).await
    }

    /// The output in a file, if that exists. No more comes.
    async fn journal_in(&self, file: PathBuf) -> Result<Option<Arc<Journal>>, Error> {
        let journal = blocking(move || {
            let kept = Journal::kept(&file);
            kept.map_err(|e| Error::system(format!("cannot read {}", file.display()), &e))
        });
        Ok(journal.await?.map(Arc::new))
    }

    /// Keeps the output and the exit status of the container that the caller started, from now on.
    pub fn monitor(self: &Arc<Daemon>, wanted: &Wanted) -> Result<(), Error> {
        let id = self.id(wanted)?;
        let machine = self.find(&id)?;
        machine.monitor()?;
        if let Some(held) = self.table().get_mut(&id) {
            // The container's end is now known.
            held.lifetime.abort();
            let lifetime = lifetime::watch(Arc::downgrade(self), machine.as_ref());
            held.lifetime = tokio::spawn(lifetime).abort_handle();
        }
        Ok(())
    }

    /// The exit status of a monitored container's process, once all its output is kept. Returns `None` if it does not end within `limit`.
    pub(in crate::api) async fn exited(&self, id: &str, limit: Duration) -> Option<i32> {
        let exit = self.find(id).ok()?.exit();
        tokio::time::timeout(limit, exit).await.ok()
    }

    /// Starts a process in a sandbox's container, with a session that holds `permit` until it ends or its caller hangs up. That goes on
    /// if this future is dropped.
    pub async fn exec(
        &self,
        wanted: &Wanted,
        options: Options,
        permit: Arc<Permit>,
    ) -> Result<Session, Refusal> {
        let machine = self.running(wanted)?;
        let connected = self.connect(wanted);
        let held = (self.finishing.clone().read_owned().await, permit, connected);
        let (tty, closing) = (options.tty, self.closing());
        let started = tokio::spawn(async move {
            let process = machine.exec(options).await?;
            Ok::<_, Error>(Session::start(process, tty, closing, held))
        });
        let started = started.await.map_err(|e| Refusal::new(ApiCode::Broken, e))?;
        Ok(started?)
    }

    /// Starts a process that outlives its caller, with this input, or with its input open.
    pub async fn start_kept(
        &self,
        wanted: &Wanted,
        options: Options,
        stdin: Option<Vec<u8>>,
    ) -> Result<KeptProcess, Refusal> {
        let machine = self.running(wanted)?;
        let command = options.command.clone();
        // A caller that goes meanwhile leaves no process that is not kept.
        let started = tokio::spawn(async move {
            let processes = machine.processes().await?;
            let process = machine.exec(options).await?;
            let id = process.id();
            if let Err(refusal) = processes.keep(&id).await {
                process.signal(libc::SIGKILL as u8).await;
                return Err(refusal);
            }
            if let Some(stdin) = stdin {
                processes.write(&id, &stdin).await?;
                processes.close_stdin(&id).await?;
            }
            Ok(id)
        });
        let id = started.await.map_err(|e| Refusal::new(ApiCode::Broken, e))??;
        Ok(KeptProcess {
            id,
            command,
            pid: None,
            keep: true,
            exit_code: None,
        })
    }

    /// Updates the cache with the machine's condition, whether the operation succeeded or not, and with what happened.
    async fn settle(&self, turn: Turn, happened: Option<SandboxEvent>) {
        let condition = turn.machine.condition().await;
        self.cache.update(&turn.id, |described| {
            set(described, condition);
            described.event = happened;
        });
    }

    /// Reads something of the record of the sandbox with this id; `None` if it has ended. `read` must not block.
    pub fn read_record<T>(&self, id: &str, read: impl FnOnce(&Record) -> T) -> Option<T> {
        self.table().get(id).map(|held| read(held.body.record()))
    }

    /// Updates the cache with the machine's condition.
    pub(super) async fn show_condition(&self, turn: &Turn) {
        let condition = turn.machine.condition().await;
        self.cache.update(&turn.id, |described| set(described, condition));
    }

    /// The record of a sandbox that has a machine.
    pub(super) fn record_of(&self, wanted: &Wanted) -> Result<Record, Error> {
        let machine = self.find(&self.id(wanted)?)?;
        Ok(machine.record().clone())
    }
}
