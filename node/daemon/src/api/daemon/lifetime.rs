//! What ends a sandbox: its machine, its container, its timeout, or the process it was created for.

use std::future::pending;
use std::sync::Weak;
use std::time::Duration;

use futures_util::future::BoxFuture;
use thaw_pools::process::ProcessRecord;
use thaw_protocol::api::{ContainerHealth, OnExit, OnTimeout};
use thaw_sandbox::readiness;
use thaw_sandbox::state::{Ending, TimeLimit};
use tokio::sync::watch::Receiver;

use super::describe::{RESTARTING, checked, exited, ran_out_of_memory, restarts, set, started};
use super::timeout::Due;
use super::{Daemon, Described};
use crate::api::container_monitor::ContainerLife;
use crate::api::machine::{Condition, Machine};
use crate::api::scope::Wanted;

/// What ended a sandbox.
enum End {
    /// One of its rules, by name: the sandbox must be deleted.
    Rule(&'static str),
    /// Its container's process, with this status: only its record and its output stay.
    Exit(i32),
    /// Its machine ended by itself: the sandbox has failed.
    Machine,
}

/// Watches a sandbox until it ends. Updates the cache when its machine or its container ends, or its volumes are lost. Lists the sandbox as
/// failed if its machine ended without a request. Deletes it if its timeout is over, if the process it was created for has ended, or if its
/// container's process has ended and it is to be deleted then. Lists it as ended if only its record is to stay then.
pub(super) fn watch(daemon: Weak<Daemon>, machine: &dyn Machine) -> impl Future<Output = ()> + Send + use<> {
    let record = machine.record();
    let shown = Shown {
        daemon: daemon.clone(),
        id: record.id.clone(),
    };
    let machine_ends = machine_ends(shown.clone(), machine.end());
    let client_ends = client_ends(machine.ending());
    let times_out = times_out(shown.clone(), machine.time_limit());
    let container_ends = container_ends(shown.clone(), machine.exit(), machine.life(), machine.ending());
    let lives = container_lives(shown.clone(), machine.life());
    let health = container_health(shown.clone(), machine.health());
    let volumes_lost = volumes_lost(shown, machine.volumes_lost());
    let id = record.id.clone();
    async move {
        let end = tokio::select! {
            // The end of the machine comes first, because it can cause the others.
            biased;
            end = machine_ends => end,
            end = client_ends => end,
            end = times_out => end,
            end = container_ends => end,
            () = lives => return,
            () = health => return,
            () = volumes_lost => return,
        };
        let Some(daemon) = daemon.upgrade() else { return };
        // On a task of its own, because this task ends with the sandbox.
        tokio::spawn(async move {
            let _finishing = daemon.finishing.read().await;
            match end {
                End::Machine => daemon.fail(&id).await,
                End::Exit(status) => daemon.keep_exited(&id, status).await,
                End::Rule(why) => {
                    if daemon.delete_unless_failed(&Wanted::on_node(&id)).await.is_ok() {
                        tracing::info!(sandbox = id, "ended: {why}");
                    }
                }
            }
        });
    }
}

/// Waits until the timeout of a sandbox whose memory is released deletes it.
pub(super) async fn watch_paused(daemon: Weak<Daemon>, id: String, limit: Receiver<TimeLimit>) {
    let shown = Shown {
        daemon,
        id: id.clone(),
    };
    // It deletes the sandbox only, which is paused already.
    times_out(shown.clone(), limit).await;
    let Some(daemon) = shown.daemon.upgrade() else {
        return;
    };
    // On a task of its own, because this task ends with the sandbox.
    tokio::spawn(async move {
        let _finishing = daemon.finishing.read().await;
        if daemon.delete(&Wanted::on_node(&id)).await.is_ok() {
            tracing::info!(sandbox = id, "deleted: its time is over");
        }
    });
}

/// Updates the cached description of a sandbox.
#[derive(Clone)]
struct Shown {
    daemon: Weak<Daemon>,
    id: String,
}

impl Shown {
    fn update(&self, change: impl FnOnce(&mut Described)) {
        if let Some(daemon) = self.daemon.upgrade() {
            daemon.cache.update(&self.id, change);
        }
    }

    /// Pauses it, because it is due. On a task of its own, because the caller's task ends with the sandbox.
    fn pause(&self, due: Due) {
        let Some(daemon) = self.daemon.upgrade() else {
            return;
        };
        let id = self.id.clone();
        tokio::spawn(async move {
            let _finishing = daemon.finishing.read().await;
            daemon.pause_in_time(&id, due).await;
        });
    }

    /// Whether the last end of its container's process is shown already, and was to be followed by a start.
    fn is_restarting(&self) -> bool {
        let daemon = self.daemon.upgrade();
        let shown = daemon.and_then(|daemon| daemon.cache.get(&self.id));
        shown.is_some_and(|shown| shown.state == RESTARTING)
    }
}

/// Waits until the process that the sandbox was made for has ended, if the sandbox still ends with that.
async fn client_ends(mut ending: Receiver<Ending>) -> End {
    loop {
        let client = ending.borrow_and_update().client;
        let is_changed = tokio::select! {
            // The change comes first, because the process may end as soon as it has asked for it.
            biased;
            changed = ending.changed() => changed.is_ok(),
            () = process_ends(client) => return End::Rule("the process it was made for has ended"),
        };
        if !is_changed {
            return pending().await;
        }
    }
}

async fn process_ends(process: Option<ProcessRecord>) {
    let Some(process) = process else {
        return pending().await;
    };
    if let Some(pidfd) = process.open()
        && let Ok(pidfd) = readiness::register(pidfd, tokio::io::Interest::READABLE)
    {
        let _ = pidfd.readable().await;
    }
}

/// Waits until the sandbox must be deleted because its time is over or it is idle. Pauses it each time that it is to be paused.
async fn times_out(shown: Shown, mut limit: Receiver<TimeLimit>) -> End {
    loop {
        let now = *limit.borrow_and_update();
        let is_changed = tokio::select! {
            changed = limit.changed() => changed.is_ok(),
            () = passes(now) => match now.on_timeout {
                OnTimeout::Delete => return End::Rule("its time is over"),
                OnTimeout::Pause => {
                    shown.pause(Due::TimeIsOver);
                    limit.changed().await.is_ok()
                }
            },
            requests = is_idle(&shown, now) => match now.on_timeout {
                OnTimeout::Delete => return End::Rule("it was idle"),
                OnTimeout::Pause => {
                    shown.pause(Due::Idle { requests });
                    true
                }
            },
        };
        if !is_changed {
            return pending().await;
        }
    }
}

/// Waits until the sandbox has been idle for too long. Returns how many requests for it there had been.
async fn is_idle(shown: &Shown, limit: TimeLimit) -> u64 {
    match limit.idle_s {
        Some(seconds) => {
            let limit = Duration::from_secs(seconds.into());
            Daemon::until_idle(&shown.daemon, &shown.id, limit).await
        }
        None => pending().await,
    }
}

/// Waits until the time is over.
async fn passes(limit: TimeLimit) {
    let Some(timeout) = limit.timeout else {
        return pending().await;
    };
    // The clock of the timeout advances while the host sleeps; the timer's clock may not.
    while !timeout.left().is_zero() {
        tokio::time::sleep(timeout.left()).await;
    }
}

async fn container_ends(
    shown: Shown,
    exit: BoxFuture<'static, i32>,
    life: Option<Receiver<ContainerLife>>,
    mut ending: Receiver<Ending>,
) -> End {
    let status = exit.await;
    if life.is_some_and(|life| life.borrow().out_of_memory) && !shown.is_restarting() {
        shown.update(ran_out_of_memory);
    }
    shown.update(|described| exited(described, status));
    loop {
        let on_exit = ending.borrow_and_update().on_exit;
        match on_exit {
            OnExit::Delete => return End::Rule("its container's process has ended"),
            OnExit::End => return End::Exit(status),
            OnExit::Keep => {}
        }
        if ending.changed().await.is_err() {
            return pending().await;
        }
    }
}

/// Shows the restarts of its container.
async fn container_lives(shown: Shown, life: Option<Receiver<ContainerLife>>) {
    let Some(mut life) = life else {
        return pending().await;
    };
    let mut before: Option<ContainerLife> = None;
    loop {
        let now = *life.borrow_and_update();
        let is_new = |status: &i32| before.is_none_or(|before| before.restarting != Some(*status));
        // An end between two looks was followed by a start.
        let unseen = before.is_some_and(|b| now.starts > b.starts && b.restarting.is_none());
        let ended = now.restarting.filter(is_new).or(now.last_exit.filter(|_| unseen));
        if let Some(status) = ended {
            if now.out_of_memory {
                shown.update(ran_out_of_memory);
            }
            shown.update(|described| restarts(described, status));
        }
        if now.restarting.is_none() && now.starts > before.map_or(0, |before| before.starts) {
            shown.update(|described| started(described, now.restarts));
        }
        before = Some(now);
        if life.changed().await.is_err() {
            return pending().await;
        }
    }
}

/// Shows whether its container is healthy.
async fn container_health(shown: Shown, health: Option<Receiver<Option<ContainerHealth>>>) {
    let Some(mut health) = health else {
        return pending().await;
    };
    loop {
        let now = health.borrow_and_update().clone();
        shown.update(|described| checked(described, now.as_ref()));
        if health.changed().await.is_err() {
            return pending().await;
        }
    }
}

async fn machine_ends(shown: Shown, end: BoxFuture<'static, String>) -> End {
    let reason = end.await;
    shown.update(|described| set(described, Condition::Ended(reason)));
    let is_owner_elsewhere = shown
        .daemon
        .upgrade()
        .is_some_and(|daemon| daemon.factory.is_none());
    match is_owner_elsewhere {
        false => End::Machine,
        // The owner sees the end too, and removes the sandbox.
        true => pending().await,
    }
}

async fn volumes_lost(shown: Shown, lost: BoxFuture<'static, String>) {
    let why = lost.await;
    shown.update(|described| described.volumes_error = Some(why));
    pending().await
}
