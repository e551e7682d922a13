//! The services for containerd. The task service forwards each call to the pod, and so does the [`sandbox`] service.
//!
//! Invariant: a call that changes something completes, even if its client disconnects.

mod sandbox;

use std::future::Future;
use std::path::PathBuf;
use std::process;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use async_trait::async_trait;
use thaw_protocol::shim::task::*;
use thaw_protocol::shim::task_ttrpc::Task;
use thaw_protocol::shim::task_types::{ProcessInfo, Status};
use thaw_protocol::shim::{Empty, MessageField};
use tokio::sync::watch;
use ttrpc::r#async::TtrpcContext;

use crate::error::{Error, Result};
use crate::pod::Pod;
use crate::process::{Exit, Phase};
use crate::stdio::Stdio;

/// The services for containerd. A shutdown sets `stop`.
#[derive(Clone, Debug)]
pub struct Service {
    pub pod: Arc<Pod>,
    pub stop: watch::Sender<bool>,
    /// Path of the socket it is reached at.
    pub socket: Option<PathBuf>,
}

type Answer<T> = ttrpc::Result<T>;

fn empty(done: Result<()>) -> Answer<Empty> {
    done.map(|()| Empty::new()).map_err(Into::into)
}

/// Completes the work in a task of its own. ttrpc drops the future of a call whose client has disconnected or
/// timed out, which would leave it half done.
pub async fn run_to_completion<T: Send + 'static>(
    work: impl Future<Output = Result<T>> + Send + 'static,
) -> Result<T> {
    tokio::spawn(work)
        .await
        .unwrap_or_else(|e| Err(Error::State(format!("the call did not complete: {e}"))))
}

impl Service {
    /// Ends the shim, and removes its socket at once so that another shim can be started for the same pod.
    pub fn stop(&self) {
        let stopped_before = self.stop.send_replace(true);
        // Only once: afterwards there may be the socket of another shim.
        if !stopped_before && let Some(socket) = &self.socket {
            let _ = std::fs::remove_file(socket);
        }
    }

    /// Ends the microVM and the shim, unless there are tasks.
    fn stop_without_tasks(&self) {
        if !self.pod.has_tasks() && !self.pod.is_sandbox() {
            self.pod.end_machine();
            self.stop();
        }
    }

    fn state(&self, r: &StateRequest) -> Result<StateResponse> {
        let container = self.pod.container(&r.id)?;
        let process = container.process(&r.exec_id)?;
        let exit = match process.phase() {
            Phase::Ended(exit) => Some(exit),
            Phase::Created | Phase::Starting | Phase::Running => None,
        };
        let status = match process.phase() {
            Phase::Running if container.paused.load(Ordering::Acquire) => Status::PAUSED.into(),
            _ => process.status(),
        };
        Ok(StateResponse {
            id: r.id.clone(),
            bundle: container.bundle.display().to_string(),
            pid: self.pod.pid(),
            status,
            stdin: process.stdio.stdin.clone(),
            stdout: process.stdio.stdout.clone(),
            stderr: process.stdio.stderr.clone(),
            terminal: process.stdio.terminal,
            exit_status: exit.as_ref().map_or(0, |exit| exit.status),
            exited_at: MessageField::from_option(exit.map(|exit| exit.at)),
            exec_id: r.exec_id.clone(),
            ..Default::default()
        })
    }

    fn pids(&self, id: &str) -> Result<PidsResponse> {
        let container = self.pod.container(id)?;
        let running = container.init.phase() == Phase::Running;
        let info = running.then(|| ProcessInfo {
            pid: self.pod.pid(),
            ..Default::default()
        });
        Ok(PidsResponse {
            processes: info.into_iter().collect(),
            ..Default::default()
        })
    }
}

#[async_trait]
impl Task for Service {
    async fn state(&self, _: &TtrpcContext, r: StateRequest) -> Answer<StateResponse> {
        Ok(self.state(&r)?)
    }

    async fn create(&self, _: &TtrpcContext, r: CreateTaskRequest) -> Answer<CreateTaskResponse> {
        let pod = self.pod.clone();
        let pid = run_to_completion(async move { pod.create(r).await }).await?;
        Ok(CreateTaskResponse {
            pid,
            ..Default::default()
        })
    }

    async fn start(&self, _: &TtrpcContext, r: StartRequest) -> Answer<StartResponse> {
        let pod = self.pod.clone();
        let pid = run_to_completion(async move { pod.start(&r.id, &r.exec_id).await }).await?;
        Ok(StartResponse {
            pid,
            ..Default::default()
        })
    }

    async fn delete(&self, _: &TtrpcContext, r: DeleteRequest) -> Answer<DeleteResponse> {
        let (pod, id) = (self.pod.clone(), r.id.clone());
        let exit = run_to_completion(async move { pod.delete(&r.id, &r.exec_id).await }).await?;
        // Not reached if the client has disconnected or timed out, because ttrpc then drops this future.
        self.pod.forget(&id);
        Ok(DeleteResponse {
            pid: self.pod.pid(),
            exit_status: exit.status,
            exited_at: MessageField::some(exit.at),
            ..Default::default()
        })
    }

    async fn pids(&self, _: &TtrpcContext, r: PidsRequest) -> Answer<PidsResponse> {
        Ok(self.pids(&r.id)?)
    }

    async fn pause(&self, _: &TtrpcContext, r: PauseRequest) -> Answer<Empty> {
        let pod = self.pod.clone();
        empty(run_to_completion(async move { pod.pause(&r.id, true).await }).await)
    }

    async fn resume(&self, _: &TtrpcContext, r: ResumeRequest) -> Answer<Empty> {
        let pod = self.pod.clone();
        empty(run_to_completion(async move { pod.pause(&r.id, false).await }).await)
    }

    async fn checkpoint(&self, _: &TtrpcContext, r: CheckpointTaskRequest) -> Answer<Empty> {
        let pod = self.pod.clone();
        let checkpointed = async move { pod.checkpoint(&r.id, &r.path, r.options.as_ref()).await };
        empty(run_to_completion(checkpointed).await)
    }

    async fn kill(&self, _: &TtrpcContext, r: KillRequest) -> Answer<Empty> {
        let pod = self.pod.clone();
        empty(run_to_completion(async move { pod.kill(&r.id, &r.exec_id, r.signal, r.all).await }).await)
    }

    async fn exec(&self, _: &TtrpcContext, r: ExecProcessRequest) -> Answer<Empty> {
        let stdio = Stdio {
            stdin: r.stdin,
            stdout: r.stdout,
            stderr: r.stderr,
            terminal: r.terminal,
        };
        empty(self.pod.exec(&r.id, &r.exec_id, stdio, &r.spec.value))
    }

    async fn resize_pty(&self, _: &TtrpcContext, r: ResizePtyRequest) -> Answer<Empty> {
        empty(self.pod.resize(&r.id, &r.exec_id, r.height, r.width).await)
    }

    async fn close_io(&self, _: &TtrpcContext, r: CloseIORequest) -> Answer<Empty> {
        empty(match r.stdin {
            true => self.pod.close_stdin(&r.id, &r.exec_id),
            false => Ok(()),
        })
    }

    async fn update(&self, _: &TtrpcContext, r: UpdateTaskRequest) -> Answer<Empty> {
        empty(self.pod.update(&r.id, &r.resources.value).await)
    }

    async fn wait(&self, _: &TtrpcContext, r: WaitRequest) -> Answer<WaitResponse> {
        let Exit { status, at } = self.pod.wait(&r.id, &r.exec_id).await?;
        Ok(WaitResponse {
            exit_status: status,
            exited_at: MessageField::some(at),
            ..Default::default()
        })
    }

    async fn stats(&self, _: &TtrpcContext, r: StatsRequest) -> Answer<StatsResponse> {
        let stats = self.pod.stats(&r.id).await?;
        Ok(StatsResponse {
            stats: MessageField::some(stats),
            ..Default::default()
        })
    }

    async fn connect(&self, _: &TtrpcContext, r: ConnectRequest) -> Answer<ConnectResponse> {
        // Also answers for a sandbox: a restarted containerd calls this to find out whether the shim still
        // runs.
        if self.pod.sandbox(&r.id).is_err() {
            self.pod.container(&r.id)?;
        }
        Ok(ConnectResponse {
            shim_pid: process::id(),
            task_pid: self.pod.pid(),
            version: env!("CARGO_PKG_VERSION").into(),
            ..Default::default()
        })
    }

    /// Ends the shim unless it has tasks; containerd calls this after each task of a pod. A task in creation
    /// does not count, because its client no longer waits for it. A task in deletion counts until its client
    /// can be answered; the shim ends then, as containerd may not call this again.
    async fn shutdown(&self, _: &TtrpcContext, r: ShutdownRequest) -> Answer<Empty> {
        if r.now {
            self.pod.end_machine();
            self.stop();
        } else if self.pod.is_deleting() {
            let service = self.clone();
            tokio::spawn(async move {
                service.pod.deleted().await;
                service.stop_without_tasks();
            });
        } else {
            self.stop_without_tasks();
        }
        Ok(Empty::new())
    }
}
