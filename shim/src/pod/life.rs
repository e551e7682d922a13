//! Operations on a task between its creation and its deletion.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use thaw_protocol::shim::Any;
use thaw_protocol::shim::task_events::*;
use ttrpc::Code;

use super::{Pod, hook_state};
use crate::checkpoint;
use crate::container::Container;
use crate::error::{Error, Result};
use crate::events::Event;
use crate::hooks;
use crate::process::{Exit, Phase, Process};
use crate::spec::{self, config};
use crate::stats;
use crate::stdio::{Stdio, StreamOwner, Streams, Targets};
use crate::warning;

/// Exit codes of a process that could not be executed.
const NOT_FOUND: u32 = 127;
const NOT_EXECUTABLE: u32 = 126;
const FAILED: u32 = 255;
/// Limit for a killed container to end, shorter than the kubelet's.
pub const KILLED_LIMIT: Duration = Duration::from_secs(90);
/// The signals that end the pause program, and its exit codes (kubernetes, build/pause).
const PAUSE_ENDS_WELL: [u32; 2] = [libc::SIGINT as u32, libc::SIGTERM as u32];
const PAUSE_IS_KILLED: [u32; 4] = [
    libc::SIGKILL as u32,
    libc::SIGQUIT as u32,
    libc::SIGHUP as u32,
    libc::SIGABRT as u32,
];

impl Pod {
    /// Starts the container's init process, or an exec.
    pub async fn start(self: &Arc<Pod>, id: &str, exec_id: &str) -> Result<u32> {
        let container = self.container(id)?;
        match exec_id.is_empty() {
            true => self.start_container(&container).await?,
            false => self.start_exec(&container, exec_id).await?,
        }
        Ok(self.pid())
    }

    async fn start_container(self: &Arc<Pod>, container: &Arc<Container>) -> Result<()> {
        let machine = self.machine()?;
        let init = &container.init;
        init.begin()?;
        let started = match (container.is_in_guest(), container.restored) {
            (false, _) => Ok(()),
            (true, false) => machine.agent.start(container.guest_id()).await,
            (true, true) => machine.agent.pause(container.guest_id(), false).await,
        };
        if let Err(e) = started {
            init.end(Exit::now(failed_with(&e)));
            return Err(e);
        }
        self.events.publish(&Event::Start(TaskStart {
            container_id: container.id.clone(),
            pid: self.pid(),
            ..Default::default()
        }));
        init.started();
        let state = hook_state(container, machine, "running");
        if let Err(e) = hooks::run(&container.hooks.poststart, state).await {
            let kill = libc::SIGKILL as u32;
            match self.kill(&container.id, "", kill, true).await {
                Ok(()) | Err(Error::NotFound(_)) => {}
                Err(of_kill) => warning!("container {}: {of_kill}", container.id),
            }
            return Err(e);
        }
        Ok(())
    }

    async fn start_exec(self: &Arc<Pod>, container: &Arc<Container>, exec_id: &str) -> Result<()> {
        let machine = self.machine()?;
        let exec = container.exec(exec_id)?;
        let process = &exec.process;
        process.begin()?;
        let owner = StreamOwner {
            namespace: self.namespace.clone(),
            container: container.id.clone(),
        };
        let started = async {
            let targets = Targets::open(&process.stdio, &owner).await?;
            machine.agent.exec(&process.id, exec.spec).await?;
            Ok(targets)
        };
        let targets = match started.await {
            Ok(targets) => targets,
            Err(e) => {
                process.end(Exit::now(failed_with(&e)));
                return Err(e);
            }
        };
        *process.streams() = Some(Streams::start(
            &machine.agent,
            &process.id,
            &process.stdio,
            targets,
        ));
        self.events.publish(&Event::ExecStarted(TaskExecStarted {
            container_id: container.id.clone(),
            exec_id: exec_id.into(),
            pid: self.pid(),
            ..Default::default()
        }));
        process.started();
        self.watch_process(machine, container, process);
        Ok(())
    }

    /// Adds an exec to a running container.
    pub fn exec(&self, id: &str, exec_id: &str, stdio: Stdio, spec: &[u8]) -> Result<()> {
        let container = self.container(id)?;
        if !container.is_in_guest() {
            return Err(Error::Unsupported(format!(
                "container {id} stands for the pod and has no processes: run the command in another of its containers"
            )));
        }
        if container.init.phase() != Phase::Running {
            return Err(Error::State(format!("container {id} is not running")));
        }
        let mut read: config::Process =
            serde_json::from_slice(spec).map_err(|e| Error::Invalid(format!("process {exec_id}: {e}")))?;
        read.terminal = stdio.terminal;
        container.add(exec_id, stdio, spec::process(&read))?;
        self.events.publish(&Event::ExecAdded(TaskExecAdded {
            container_id: id.into(),
            exec_id: exec_id.into(),
            ..Default::default()
        }));
        Ok(())
    }

    /// Sends a signal. Fails with [`Error::NotFound`] if the process has ended. If a killed container does
    /// not end, its machine is ended.
    pub async fn kill(self: &Arc<Pod>, id: &str, exec_id: &str, signal: u32, all: bool) -> Result<()> {
        let container = self.container(id)?;
        let process = container.process(exec_id)?;
        let ended = || Error::NotFound(format!("process {} has ended", process.id.exec));
        match process.phase() {
            Phase::Ended(_) => return Err(ended()),
            Phase::Created if !exec_id.is_empty() => {
                return Err(Error::State(format!("process {exec_id} was not started")));
            }
            Phase::Created | Phase::Starting | Phase::Running => {}
        }
        if !container.is_in_guest() {
            self.kill_pause(&container, signal).await;
            return Ok(());
        }
        let machine = self.machine()?;
        let all = all && exec_id.is_empty();
        let kills = signal == libc::SIGKILL as u32 && exec_id.is_empty();
        if kills {
            self.end_machine_unless_killed(&container);
        }
        match machine.agent.signal(&process.id, signal, all).await {
            Err(e) if e.is_ended() => Err(ended()),
            // The kill takes effect when the guest continues, or when its machine ends.
            Err(Error::Silent { .. }) if kills => Ok(()),
            done => done,
        }
    }

    /// Ends the machine unless a killed container ends within [`KILLED_LIMIT`].
    fn end_machine_unless_killed(self: &Arc<Pod>, container: &Arc<Container>) {
        if container.is_killed.swap(true, Ordering::AcqRel) {
            return;
        }
        let (pod, container) = (self.clone(), container.clone());
        tokio::spawn(async move {
            if tokio::time::timeout(KILLED_LIMIT, container.init.exit())
                .await
                .is_err()
            {
                warning!(
                    "ending the pod's microVM: container {} was killed but did not end within {} s",
                    container.id,
                    KILLED_LIMIT.as_secs()
                );
                pod.end_machine();
            }
        });
    }

    /// The pod's own container has no process; it reacts to signals as the pause program does.
    async fn kill_pause(&self, container: &Container, signal: u32) {
        let status = match signal {
            s if PAUSE_ENDS_WELL.contains(&s) => 0,
            s if PAUSE_IS_KILLED.contains(&s) => 128 + s,
            _ => return,
        };
        self.record_exit(&container.id, &container.init, Exit::now(status))
            .await;
    }

    /// Pauses or resumes a container's processes.
    pub async fn pause(&self, id: &str, paused: bool) -> Result<()> {
        let container = self.container(id)?;
        if container.init.phase() != Phase::Running {
            return Err(Error::State(format!("container {id} is not running")));
        }
        if container.is_in_guest() {
            self.machine()?.agent.pause(container.guest_id(), paused).await?;
        }
        container.paused.store(paused, Ordering::Release);
        let container_id = id.to_owned();
        self.events.publish(&match paused {
            true => Event::Paused(TaskPaused {
                container_id,
                ..Default::default()
            }),
            false => Event::Resumed(TaskResumed {
                container_id,
                ..Default::default()
            }),
        });
        Ok(())
    }

    /// Sets a terminal's size.
    pub async fn resize(&self, id: &str, exec_id: &str, rows: u32, columns: u32) -> Result<()> {
        let container = self.container(id)?;
        let process = container.process(exec_id)?;
        // An exec that has not started has no terminal; its specification has the initial size.
        if !container.is_in_guest() || (process.phase() == Phase::Created && !exec_id.is_empty()) {
            return Ok(());
        }
        self.machine()?.agent.resize(&process.id, rows, columns).await
    }

    /// Records that the client has closed its end of stdin.
    pub fn close_stdin(&self, id: &str, exec_id: &str) -> Result<()> {
        if let Some(streams) = &*self.container(id)?.process(exec_id)?.streams() {
            streams.close_stdin();
        }
        Ok(())
    }

    /// Changes a container's resource limits.
    pub async fn update(&self, id: &str, resources: &[u8]) -> Result<()> {
        let container = self.container(id)?;
        let read: config::Resources = serde_json::from_slice(resources)
            .map_err(|e| Error::Invalid(format!("resources of {id}: {e}")))?;
        match container.is_in_guest() {
            true => {
                let agent = &self.machine()?.agent;
                agent.update(container.guest_id(), spec::resources(&read)).await
            }
            false => Ok(()),
        }
    }

    /// Returns a container's resource usage.
    pub async fn stats(&self, id: &str) -> Result<Any> {
        let container = self.container(id)?;
        let used = match container.is_in_guest() {
            true => self.machine()?.agent.stats(container.guest_id()).await?,
            false => Default::default(),
        };
        stats::metrics(&used)
    }

    /// Freezes the pod's microVM into a directory that containerd made, then kills the container if the
    /// options ask for it.
    pub async fn checkpoint(self: &Arc<Pod>, id: &str, path: &str, options: Option<&Any>) -> Result<()> {
        let exits = checkpoint::exits(options)?;
        let container = self.container(id)?;
        let path_of = Path::new(path);
        container.checkpoint().write(path_of)?;
        let snapshot = checkpoint::snapshot(path_of);
        self.thawd.freeze(&self.machine()?.sandbox, &snapshot).await?;
        checkpoint::pack(path_of).await?;
        self.events.publish(&Event::Checkpointed(TaskCheckpointed {
            container_id: id.into(),
            checkpoint: path.into(),
            ..Default::default()
        }));
        match exits {
            true => self.kill(id, "", libc::SIGKILL as u32, true).await,
            false => Ok(()),
        }
    }

    /// Waits for a process to end.
    pub async fn wait(&self, id: &str, exec_id: &str) -> Result<Exit> {
        let process: Arc<Process> = self.container(id)?.process(exec_id)?;
        Ok(process.exit().await)
    }
}

/// The exit code of a process that could not be executed.
fn failed_with(error: &Error) -> u32 {
    match error {
        Error::Agent {
            code: Code::NOT_FOUND,
            ..
        } => NOT_FOUND,
        Error::Agent {
            code: Code::PERMISSION_DENIED,
            ..
        } => NOT_EXECUTABLE,
        _ => FAILED,
    }
}
