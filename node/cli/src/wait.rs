//! `thaw wait`: waits for containers to end, and tells how they ended. A kept record tells of a container that has ended.

use clap::Args;
use futures_util::future::join_all;
use thaw_sandbox::READY_LIMIT;
use thaw_sandbox::agent_client::{self, AgentClient};
use thaw_sandbox::blocking::blocking;
use thaw_sandbox::container::Running;
use thaw_sandbox::error::{Error, ErrorKind};
use thaw_sandbox::paths::Paths;
use thaw_sandbox::state::{PausedSandboxes, RunDirectory, vsock_socket};

use super::logs::LISTED;
use super::print;

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  test $(thaw wait $(thaw run -d oci:./job)) = 0")]
pub struct WaitArguments {
    /// The sandboxes: ids, names, or beginnings of ids
    #[arg(required = true, value_name = "SANDBOX")]
    pub sandboxes: Vec<String>,
}

pub(super) async fn wait(arguments: &WaitArguments) -> Result<u8, Error> {
    let run = RunDirectory::open(&Paths::from_env().run)?;
    // All at once: one that ends first may leave nothing.
    let waits = arguments.sandboxes.iter().map(|wanted| wait_for(&run, wanted));
    let mut failed = None;
    for status in join_all(waits).await {
        match status {
            Ok(status) => print(&status.to_string()),
            Err(e) => drop(failed.get_or_insert(e)),
        }
    }
    failed.map_or(Ok(0), Err)
}

async fn wait_for(run: &RunDirectory, wanted: &str) -> Result<i32, Error> {
    let id = match run.find(wanted) {
        Ok(record) => record.id,
        Err(not_found) => return recorded(run, wanted, not_found.remedy(LISTED)),
    };
    let directory = run.directory(&id);
    let status = async {
        let running = Running::read(&directory)?;
        let agent = agent_client::connect(&vsock_socket(&directory), READY_LIMIT).await?;
        exit_status(&agent, &running).await
    };
    match status.await {
        Ok(status) => Ok(status),
        Err(lost) => settled(run, id, lost).await,
    }
}

/// Waits for the end of a container's process.
///
/// # Errors
/// [`ErrorKind::GuestEnded`] if the guest ends first.
pub(super) async fn exit_status(agent: &AgentClient, running: &Running) -> Result<i32, Error> {
    let status = agent.wait(&running.process()).await;
    status.map_err(|e| Error::new(ErrorKind::GuestEnded, format!("lost the guest: {e}")))
}

/// The error for a sandbox whose memory is released: it has no guest. `None` for others. Blocks.
pub(super) fn memory_released(wanted: &str) -> Option<Error> {
    let paused = PausedSandboxes::under(&Paths::from_env().data).find(wanted)?;
    let what = format!(
        "sandbox {} is paused, and its memory is released",
        paused.record().id
    );
    Some(Error::new(ErrorKind::MemoryReleased, what))
}

/// The exit status of a container whose guest was lost, or `lost` if its owner did not record one.
pub(super) async fn settled(run: &RunDirectory, id: String, lost: Error) -> Result<i32, Error> {
    let run = run.clone();
    blocking(move || {
        if lost.kind == ErrorKind::GuestEnded {
            // Its owner records the end before it removes the sandbox.
            run.wait_for_owner(&id)?;
        }
        recorded(&run, &id, lost)
    })
    .await
}

/// The exit status in the record of an ended sandbox, or `failure` if there is no record and its memory is not released.
fn recorded(run: &RunDirectory, wanted: &str, failure: Error) -> Result<i32, Error> {
    let Some(ended) = run.find_ended(wanted)? else {
        return Err(memory_released(wanted).unwrap_or(failure));
    };
    ended.exit_code.ok_or_else(|| {
        let why = ended.reason.unwrap_or_default();
        Error::new(
            ErrorKind::GuestEnded,
            format!("sandbox {} has failed: {why}", ended.id),
        )
    })
}
