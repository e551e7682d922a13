//! thawd's own attendance of a container's process, where nobody else's is it: what it writes goes into the journal in its
//! sandbox's directory, and its end is told.
//!
//! Invariant: nothing is asked of the agent before what it gave last is in the journal, so a thawd that is killed loses
//! nothing: the next gets it again.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use thaw_sandbox::agent_client::{AgentClient, Output};
use thaw_sandbox::container::Running;
use thaw_sandbox::exit::Failure;
use thaw_sandbox::journal::Journal;
use thaw_sandbox::sandbox::{READY_LIMIT, Sandbox};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::process::{GuestProcess, Process};

/// After a guest's agent was lost or could not be reached: it may be paused.
const AGAIN: Duration = Duration::from_secs(1);

/// Attends until it is dropped, or the process has ended.
#[derive(Debug)]
pub struct Attendance {
    pub journal: Arc<Journal>,
    /// What the process ended with.
    pub exit: watch::Receiver<Option<i32>>,
    attending: JoinHandle<()>,
}

impl Drop for Attendance {
    fn drop(&mut self) {
        self.attending.abort();
        self.journal.close();
    }
}

impl Attendance {
    /// Of the process of a sandbox's container; by a connection there is, or else one that is made.
    pub fn start(
        sandbox: &Sandbox,
        running: Running,
        agent: Option<AgentClient>,
    ) -> Result<Attendance, Failure> {
        let (directory, vsock, end) = (sandbox.directory(), sandbox.vsock(), sandbox.wait_end());
        let journal = Journal::open(&directory)
            .map_err(|e| Failure::system(format!("cannot keep output in {}", directory.display()), &e))?;
        let journal = Arc::new(journal);
        let (tell, exit) = watch::channel(None);
        let kept = journal.clone();
        let attending = tokio::spawn(async move {
            tokio::select! {
                status = attend(&vsock, &running, agent, &kept) => drop(tell.send_replace(Some(status))),
                _ = end => {}
            }
            kept.close();
        });
        Ok(Attendance {
            journal,
            exit,
            attending,
        })
    }

    /// Of the container a sandbox came with, by a connection that is still to be made.
    pub fn again(sandbox: &Sandbox) -> Result<Attendance, Failure> {
        Attendance::start(sandbox, Running::read(&sandbox.directory())?, None)
    }
}

async fn attend(
    vsock: &Path,
    running: &Running,
    mut agent: Option<AgentClient>,
    journal: &Arc<Journal>,
) -> i32 {
    loop {
        let connected = match agent.take() {
            Some(agent) => Ok(agent),
            None => AgentClient::connect(vsock, READY_LIMIT).await,
        };
        let ended = match connected {
            Ok(agent) => {
                let id = running.process();
                keep(&GuestProcess { agent, id }, running.tty, journal).await
            }
            Err(e) => Err(e),
        };
        match ended {
            Ok(status) => return status,
            Err(e) => tracing::debug!("a container's process is not attended: {e}"),
        }
        tokio::time::sleep(AGAIN).await;
    }
}

/// Keeps what a process writes, to its end.
async fn keep(process: &dyn Process, tty: bool, journal: &Arc<Journal>) -> Result<i32, Failure> {
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
        // The process goes on: it must not wait for room on the host.
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
        frames.sort_by_key(|(_, data)| data.len());
        assert_eq!(
            frames,
            [(Output::Stdout, vec![0xff, 0]), (Output::Stderr, b"err".to_vec())]
        );
    }
}
