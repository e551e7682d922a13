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
    tell(&[NotifyState::Ready, NotifyState::Status(&status(daemon))]);
}

/// Notifies that thawd shuts down, before it finishes its requests.
pub fn stopping() {
    tell(&[
        NotifyState::Stopping,
        NotifyState::Status("finishing; the sandboxes run on"),
    ]);
}

/// Tells the watchdog that thawd lives, twice in each of its periods. Does not end; nothing to do where there is none.
pub async fn keep_alive(daemon: Arc<Daemon>) {
    let Some(period) = sd_notify::watchdog_enabled().filter(|period| !period.is_zero()) else {
        return std::future::pending().await;
    };
    tell_while_alive(daemon, period, tell).await;
}

/// The same, to whoever `tell` tells.
pub(crate) async fn tell_while_alive(
    daemon: Arc<Daemon>,
    period: Duration,
    tell: impl Fn(&[NotifyState<'_>]),
) {
    let mut ticks = tokio::time::interval(period / 2);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut told = String::new();
    loop {
        ticks.tick().await;
        let status = status(&daemon);
        tell(&[NotifyState::Watchdog]);
        if status != told {
            tell(&[NotifyState::Status(&status)]);
            told = status;
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

fn tell(what: &[NotifyState<'_>]) {
    if let Err(e) = sd_notify::notify(what) {
        tracing::warn!("cannot tell the service manager: {e}");
    }
}
