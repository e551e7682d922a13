//! Monitors the container of a sandbox that the API or `thaw run -d` started: writes its output to the journal in the sandbox's directory,
//! starts its program again as its restart policy says, and reports its exit status.
//!
//! Invariant: output is read from the agent only after the output before it is in the journal. So a thawd that is killed loses nothing:
//! the next one reads it again.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use thaw_protocol::api::ContainerHealth;
use thaw_sandbox::agent_client::{self, AgentClient, Output};
use thaw_sandbox::container::{self, Running};
use thaw_sandbox::error::Error;
use thaw_sandbox::journal::Journal;
use thaw_sandbox::{READY_LIMIT, Sandbox};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::process::{GuestProcess, Process};

mod health;
mod restarting;

pub use restarting::ContainerLife;
use restarting::{NotedLife, Restarting, Wishes};

/// How long to wait before the next attempt to reach the agent: the guest may be paused.
const RETRY: Duration = Duration::from_secs(1);
/// How long the agent may take to report whether memory ran out, which delays the report of a container's end.
const OOM_REPORT_LIMIT: Duration = Duration::from_secs(2);
/// The agent's name for the number of processes in a container's cgroup that the kernel killed because memory ran out.
const OOM_KILLS: &str = "oom_kill";

/// Monitors until it is dropped, or the container's process has ended for good.
#[derive(Debug)]
pub struct ContainerMonitor {
    pub journal: Arc<Journal>,
    /// The exit status of the process that is not started again.
    pub exit: watch::Receiver<Option<i32>>,
    pub life: watch::Receiver<ContainerLife>,
    /// `None` while its health is not checked.
    pub health: watch::Receiver<Option<ContainerHealth>>,
    wishes: watch::Sender<Wishes>,
    noted: Arc<NotedLife>,
    monitoring: JoinHandle<()>,
}

impl Drop for ContainerMonitor {
    fn drop(&mut self) {
        self.monitoring.abort();
        self.journal.close();
    }
}

impl ContainerMonitor {
    /// Monitors the process of a sandbox's container, over `agent` or a new connection.
    pub fn start(
        sandbox: &Sandbox,
        running: Running,
        agent: Option<AgentClient>,
    ) -> Result<ContainerMonitor, Error> {
        let (directory, vsock, end) = (sandbox.directory(), sandbox.vsock(), sandbox.wait_end());
        // An earlier owner monitored it already.
        let is_new = !Journal::exists(&directory);
        let journal = Journal::open(&directory)
            .map_err(|e| Error::system(format!("cannot keep output in {}", directory.display()), &e))?;
        let journal = Arc::new(journal);
        let noted = Arc::new(NotedLife::open(directory));
        let (tell, exit) = watch::channel(None);
        let (shows, life) = watch::channel(ContainerLife::of(&noted.note(), is_new));
        let (checks, health) = watch::channel(running.health.as_ref().map(|_| ContainerHealth::default()));
        let (wishes, wished) = watch::channel(Wishes::default());
        let monitored = Monitored {
            vsock,
            running,
            journal: journal.clone(),
            checks,
            restarting: Restarting::new(noted.clone(), wished, shows),
        };
        let kept = journal.clone();
        let monitoring = tokio::spawn(async move {
            tokio::select! {
                status = monitored.until_over(agent) => drop(tell.send_replace(Some(status))),
                _ = end => {}
            }
            kept.close();
        });
        Ok(ContainerMonitor {
            journal,
            exit,
            life,
            health,
            wishes,
            noted,
            monitoring,
        })
    }

    /// Monitors the container that a thawed or adopted sandbox has, over a new connection.
    pub fn resume(sandbox: &Sandbox) -> Result<ContainerMonitor, Error> {
        ContainerMonitor::start(sandbox, Running::read(&sandbox.directory())?, None)
    }

    /// Ends the container's restart policy: a user stops it.
    pub fn end_policy(&self) {
        self.noted.change(|note| note.stopped = true);
        self.wishes.send_modify(|wishes| wishes.stopped = true);
    }

    /// Has its program started again, when its process has ended or at once if it has.
    pub fn request_restart(&self) {
        self.wishes.send_modify(|wishes| {
            wishes.stopped = false;
            wishes.restarts += 1;
        });
    }
}

/// A container, as the task of its monitor has it.
struct Monitored {
    vsock: PathBuf,
    running: Running,
    journal: Arc<Journal>,
    checks: watch::Sender<Option<ContainerHealth>>,
    restarting: Restarting,
}

impl Monitored {
    /// Monitors the container and starts its program again, as its policy and its users want. Returns the last exit status.
    async fn until_over(mut self, mut agent: Option<AgentClient>) -> i32 {
        // An earlier owner may have ended before it had started the program again.
        let mut ended = self.restarting.begun();
        loop {
            let began = Instant::now();
            let status = match ended.take() {
                Some(status) => status,
                None => tokio::select! {
                    status = self.until_end(agent.take()) => status,
                    () = health::check(&self.vsock, &self.running, &self.checks) => continue,
                    () = self.note_health() => continue,
                },
            };
            if !self
                .restarting
                .wait(&self.running.life(), status, began.elapsed())
                .await
            {
                return status;
            }
            match self.start_again().await {
                Ok(connected) => {
                    self.restarting.started();
                    agent = Some(connected);
                }
                Err(e) => {
                    let sandbox = &self.running.container_id;
                    tracing::warn!(sandbox, "its program could not be started again: {e}");
                    ended = Some(status);
                }
            }
        }
    }

    /// Notes whether it is healthy, for `thaw ps`. Never completes.
    async fn note_health(&self) {
        let mut health = self.checks.subscribe();
        loop {
            let status = health.borrow_and_update().as_ref().map(|health| health.status);
            self.restarting.note_health(status);
            // The sender lives as long as this.
            let _ = health.changed().await;
        }
    }

    async fn start_again(&self) -> Result<AgentClient, Error> {
        let agent = agent_client::connect(&self.vsock, READY_LIMIT).await?;
        container::start_again(&agent, &self.running, self.restarting.directory()).await?;
        Ok(agent)
    }

    /// Keeps the output of its process until that ends, and returns the exit status.
    async fn until_end(&self, mut agent: Option<AgentClient>) -> i32 {
        loop {
            let connected = match agent.take() {
                Some(agent) => Ok(agent),
                None => agent_client::connect(&self.vsock, READY_LIMIT).await,
            };
            let ended = match connected {
                Ok(agent) => {
                    let id = self.running.process();
                    let process = GuestProcess { agent, id };
                    let ended = keep(&process, self.running.tty, &self.journal).await;
                    if ended.is_ok() {
                        let out_of_memory = ran_out_of_memory(&process).await;
                        self.restarting.ended(out_of_memory);
                    }
                    ended
                }
                Err(e) => Err(e),
            };
            match ended {
                Ok(status) => return status,
                Err(e) => tracing::debug!("a container's process is not monitored: {e}"),
            }
            tokio::time::sleep(RETRY).await;
        }
    }
}

/// Whether the kernel killed a process of a container, whose own process has ended, because memory ran out. The count is asked for, because
/// the agent reports each kill as an event to one caller only.
async fn ran_out_of_memory(process: &GuestProcess) -> bool {
    let stats = process.agent.stats(&process.id.container);
    let kills = match tokio::time::timeout(OOM_REPORT_LIMIT, stats).await {
        Ok(Ok(stats)) => stats.cgroup_stats.memory_stats.stats.get(OOM_KILLS).copied(),
        Ok(Err(e)) => {
            tracing::debug!("whether memory ran out in a container is unknown: {e}");
            None
        }
        Err(_) => None,
    };
    kills.is_some_and(|kills| kills > 0)
}

/// Writes the output of a process to the journal until it ends, and returns its exit status.
async fn keep(process: &dyn Process, tty: bool, journal: &Arc<Journal>) -> Result<i32, Error> {
    let stderr = async {
        // With a terminal both are one stream.
        if !tty {
            pump(process, Output::Stderr, journal).await;
        }
    };
    let (status, (), ()) = tokio::join!(process.wait(), pump(process, Output::Stdout, journal), stderr);
    status
}

async fn pump(process: &dyn Process, output: Output, journal: &Arc<Journal>) {
    let mut lost = false;
    while let Some(data) = process.read(output).await {
        let journal = journal.clone();
        let kept = tokio::task::spawn_blocking(move || journal.append(output, &data)).await;
        let failed = match kept {
            Ok(Ok(())) => None,
            Ok(Err(e)) => Some(e),
            Err(e) => Some(std::io::Error::other(e)),
        };
        // The process continues: it must not block while the host's disk is full.
        match failed {
            Some(e) if !lost => {
                tracing::warn!("output of a container is lost: {e}");
                lost = true;
            }
            Some(_) => {}
            None => lost = false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::fake::{Counts, FakeProcess};

    #[tokio::test]
    async fn what_a_process_writes_is_kept_to_its_end() {
        let directory = tempfile::tempdir().unwrap();
        let journal = Arc::new(Journal::open(directory.path()).unwrap());
        let process = FakeProcess::start("bytes", Arc::<Counts>::default());
        assert_eq!(keep(&process, false, &journal).await.unwrap(), 3);
        let mut frames = journal.read(0).unwrap().frames;
        frames.extend(journal.read(journal.read(0).unwrap().next).unwrap().frames);
        frames.sort_by_key(|frame| frame.data.len());
        let kept: Vec<_> = frames.iter().map(|f| (f.output, &f.data[..])).collect();
        assert_eq!(kept, [(Output::Stdout, &[0xff, 0][..]), (Output::Stderr, b"err")]);
    }
}
