//! Whatever may end a sandbox, waited for all at once.

use std::sync::Weak;

use thaw_sandbox::readiness;

use super::Daemon;
use super::describe::{exited, set};
use crate::api::machine::{Condition, Machine};
use crate::api::scope::Wanted;

/// Why a sandbox is attended no longer.
enum Over {
    /// It is to end, and why.
    Asked(&'static str),
    /// It ended unasked.
    Ended,
}

/// Tells the cache of its machine's end, of its container's, and of its volumes'; lists it as failed when its machine ended unasked, and
/// deletes it when its time is over, or the process it was made for has ended.
pub(super) fn attend(daemon: Weak<Daemon>, machine: &dyn Machine) -> impl Future<Output = ()> + Send + use<> {
    let (record, end, exit) = (machine.record(), machine.end(), machine.exit());
    let (id, client, timeout) = (record.id.clone(), record.client, record.terms.timeout);
    let client_ends = async move {
        let Some(client) = client else {
            return std::future::pending().await;
        };
        if let Some(pidfd) = client.open()
            && let Ok(pidfd) = readiness::register(pidfd, tokio::io::Interest::READABLE)
        {
            let _ = pidfd.readable().await;
        }
        "the process it was made for has ended"
    };
    let time_ends = async move {
        let Some(timeout) = timeout else {
            return std::future::pending().await;
        };
        // The clock of the timeout goes on while the host sleeps, that of the timer may not.
        while !timeout.left().is_zero() {
            tokio::time::sleep(timeout.left()).await;
        }
        "its time is over"
    };
    let (marked, marking) = (id.clone(), daemon.clone());
    let delete_on_exit = record.terms.delete_on_exit;
    let note_exit = async move {
        let status = exit.await;
        if let Some(daemon) = marking.upgrade() {
            daemon
                .cache
                .update(&marked, |described| exited(described, status));
        }
        match delete_on_exit {
            true => "its container's process has ended",
            false => std::future::pending().await,
        }
    };
    let (marked, marking) = (id.clone(), daemon.clone());
    let mark = async move {
        let reason = end.await;
        if let Some(daemon) = marking.upgrade() {
            daemon
                .cache
                .update(&marked, |described| set(described, Condition::Ended(reason)));
            if daemon.maker.is_some() {
                return;
            }
        }
        // Its owner sees it end, and removes it.
        std::future::pending().await
    };
    let (marked, marking, lost) = (id.clone(), daemon.clone(), machine.volumes_lost());
    let note_lost = async move {
        let why = lost.await;
        if let Some(daemon) = marking.upgrade() {
            daemon
                .cache
                .update(&marked, |described| described.volumes_error = Some(why));
        }
        std::future::pending().await
    };
    async move {
        let over = tokio::select! {
            // First: whatever else ends a sandbox may end because of this.
            biased;
            () = mark => Over::Ended,
            why = client_ends => Over::Asked(why),
            why = time_ends => Over::Asked(why),
            why = note_exit => Over::Asked(why),
            why = note_lost => Over::Asked(why),
        };
        let Some(daemon) = daemon.upgrade() else { return };
        // On a task of its own: this one ends with the sandbox.
        tokio::spawn(async move {
            let _finishing = daemon.finishing.read().await;
            match over {
                Over::Ended => daemon.fail(&id).await,
                Over::Asked(why) => {
                    if daemon.delete_unless_failed(&Wanted::on_node(&id)).await.is_ok() {
                        tracing::info!(sandbox = id, "ended: {why}");
                    }
                }
            }
        });
    }
}
