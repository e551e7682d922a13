//! Records what the first sandbox thawed from a snapshot touches, so that later thaws map it before the guest runs.
//!
//! Invariant: no caller waits for a recording, and no thaw fails because of one. If a recording fails, the next thaw records.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use thaw_protocol::control::Command;

use super::pagemap::pagemap;
use super::{Node, Sandbox};
use crate::blocking::blocking;
use crate::error::Error;
use crate::snapshot::Registered;

/// What an application touches within this time after its thaw counts as its start.
const START: Duration = Duration::from_secs(1);

/// Records the working set of a snapshot in the background, unless it has one. Must be called within a tokio runtime.
pub(super) fn record(node: &Node, registered: &Arc<Registered>, sandbox: &Sandbox) {
    let Ok(control) = sandbox.resources.control().cloned() else {
        return;
    };
    if !registered.take_recording() {
        return;
    }
    let (node, registered, vmm) = (node.clone(), registered.clone(), sandbox.record().vmm);
    tokio::spawn(async move {
        tokio::time::sleep(START).await;
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
