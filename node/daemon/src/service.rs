//! Notifications to the service manager (sd_notify(3)), if there is one.
//!
//! Invariant: the watchdog is notified by thawd's async runtime, after taking the locks that every request takes. So a thawd whose threads
//! or locks hang sends nothing, and systemd restarts it. Its sandboxes run on meanwhile.

use std::sync::Arc;
use std::time::Duration;

use sd_notify::NotifyState;
use tokio::time::MissedTickBehavior;

use crate::api::daemon::Daemon;

/// Notifies that callers can connect.
pub fn ready(daemon: &Daemon) {
    notify(&[NotifyState::Ready, NotifyState::Status(&status(daemon))]);
}

/// Notifies that thawd shuts down, before it finishes its requests.
pub fn stopping() {
    notify(&[
        NotifyState::Stopping,
        NotifyState::Status("finishing; the sandboxes run on"),
    ]);
}

/// Notifies the watchdog twice in each of its periods, for ever. Does nothing without a watchdog.
pub async fn keep_alive(daemon: Arc<Daemon>) {
    let Some(period) = sd_notify::watchdog_enabled().filter(|period| !period.is_zero()) else {
        return std::future::pending().await;
    };
    notify_while_alive(daemon, period, notify).await;
}

/// The same through `notify`.
pub(crate) async fn notify_while_alive(
    daemon: Arc<Daemon>,
    period: Duration,
    notify: impl Fn(&[NotifyState<'_>]),
) {
    let mut ticks = tokio::time::interval(period / 2);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut sent = String::new();
    loop {
        ticks.tick().await;
        let status = status(&daemon);
        notify(&[NotifyState::Watchdog]);
        if status != sent {
            notify(&[NotifyState::Status(&status)]);
            sent = status;
        }
    }
}

/// Takes the locks that every request takes.
fn status(daemon: &Daemon) -> String {
    let now = daemon.drained();
    let counts = daemon.cache.counts();
    let (sandboxes, making, watchers) = (now.sandboxes, now.making, counts.watchers);
    let draining = if now.draining { "; draining" } else { "" };
    format!("{sandboxes} sandboxes, {making} being made, {watchers} watches{draining}")
}

fn notify(what: &[NotifyState<'_>]) {
    if let Err(e) = sd_notify::notify(what) {
        tracing::warn!("cannot tell the service manager: {e}");
    }
}
