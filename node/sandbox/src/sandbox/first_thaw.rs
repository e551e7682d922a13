//! Records what the first sandbox thawed from a snapshot touches, so that later thaws map it before the guest runs.
//!
//! The start lasts until the application answers its readiness probe, because that makes it do what a first request needs.
//!
//! Invariant: no caller waits for a recording, and no thaw fails because of one. If a recording fails, the next thaw records.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use thaw_protocol::api::ReadinessProbe;
use thaw_protocol::control::Command;

use super::held_snapshots::is_thawed_once;
use super::pagemap::pagemap;
use super::{Node, Sandbox};
use crate::agent_client;
use crate::blocking::blocking;
use crate::container::Running;
use crate::container::ready::{self, Unready};
use crate::error::Error;
use crate::snapshot::Registered;

/// What an application touches within this time after its thaw counts as its start, also if it is ready earlier: the guest's kernel accepts
/// connections for a server that has not run yet.
const START: Duration = Duration::from_secs(1);
/// The longest that a start lasts, seconds. What is touched later belongs to requests.
const LONGEST_START_S: u32 = 30;
/// How long the guest's agent may take to be reached.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);

/// Records the working set of a snapshot in the background, unless it has one, once its container has started in this sandbox. Must be
/// called within a tokio runtime.
pub(super) fn record(
    node: &Node,
    registered: &Arc<Registered>,
    sandbox: &Sandbox,
    container: Option<&Running>,
) {
    let Ok(control) = sandbox.resources.control().cloned() else {
        return;
    };
    // A fork's snapshot is removed once its clones are there.
    if !registered.take_recording() || is_thawed_once(node, &registered.directory) {
        return;
    }
    let probed = container.filter(|_| node.has_agents()).and_then(probe_of);
    let ready = until_ready(sandbox.vsock(), probed, sandbox.wait_end());
    let (node, registered, vmm) = (node.clone(), registered.clone(), sandbox.record().vmm);
    tokio::spawn(async move {
        tokio::join!(tokio::time::sleep(START), ready);
        let recorded = async {
            let sets = node.templates.registry().working_sets().clone();
            let failed = |e: std::io::Error| Error::system("cannot write a working set", &e);
            let (from, pagemap) =
                blocking(move || Ok((sets.draft().map_err(failed)?, pagemap(vmm)?))).await?;
            let fds = [from.as_fd(), pagemap.as_fd()];
            control.call(Command::WorkingSet, &fds).await?;
            let (node, registered) = (node.clone(), registered.clone());
            blocking(move || {
                let sets = node.templates.registry().working_sets();
                sets.keep(registered.hash, &from).map_err(failed)?;
                let Some(kept) = sets.find(registered.hash) else {
                    return Ok(());
                };
                let again = registered.with_working_set(kept.into()).map_err(failed)?;
                node.snapshots.replace(&node, &registered, again);
                Ok(())
            })
            .await
        };
        if let Err(e) = recorded.await {
            registered.give_up_recording();
            let snapshot = registered.directory.display();
            tracing::debug!("the next thaw of {snapshot} records what it touches first: {e}");
        }
    });
}

/// A container that can be asked whether it is ready.
#[derive(Debug, PartialEq, Eq)]
struct Probed {
    container: String,
    probe: ReadinessProbe,
}

/// The probe of a container, for at most [`LONGEST_START_S`]. It comes from a snapshot, so it may be invalid, which is no probe.
fn probe_of(running: &Running) -> Option<Probed> {
    let probe = running.readiness.as_ref()?;
    let probe = ReadinessProbe {
        timeout_s: LONGEST_START_S,
        ..probe.clone()
    };
    ready::check(&probe).ok()?;
    Some(Probed {
        container: running.container_id.clone(),
        probe,
    })
}

/// Waits until the container behind this vsock socket is ready. Does not wait without a probe. Waits at most [`LONGEST_START_S`], and no
/// longer than until `end`, which completes with the machine's end.
async fn until_ready(vsock: PathBuf, probed: Option<Probed>, end: impl Future<Output = String>) {
    let Some(probed) = probed else { return };
    let limit = Duration::from_secs(LONGEST_START_S.into());
    let asked = tokio::select! {
        asked = tokio::time::timeout(limit, ask(&vsock, &probed)) => asked,
        _ = end => return,
    };
    let why = match asked {
        Ok(Ok(Ok(()))) => return,
        Ok(Ok(Err(unready))) => unready.failure(&probed.probe),
        // Among others, an agent of an earlier release does not probe what runs already.
        Ok(Err(failure)) => failure,
        Err(_) => Unready::TimedOut("the guest does not answer".into()).failure(&probed.probe),
    };
    tracing::debug!("what a first thaw touches is recorded before it is ready: {why}");
}

/// Asks the agent behind this vsock socket to probe a container that runs.
async fn ask(vsock: &Path, probed: &Probed) -> Result<Result<(), Unready>, Error> {
    let agent = agent_client::connect(vsock, CONNECT_LIMIT).await?;
    ready::expect(&agent, &probed.container, &probed.probe).await?;
    ready::wait(&agent, &probed.container, &probed.probe).await
}

#[cfg(test)]
#[path = "first_thaw_test.rs"]
mod tests;
