//! Decides when a container's program is started again, and waits until then.
//!
//! Invariants: the delay is a timer, and a user's wish ends it at once; the note of a begun restart is written before the old container
//! is touched and taken back when the program runs, so a thawd that is killed in between leaves the restart to the next one.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use thaw_protocol::api::HealthStatus;
use thaw_sandbox::container::{Life, LifeNote, RestartDelay, can_start_again};
use thaw_sys::lock::Lock;
use tokio::sync::watch;

/// What users want of a container.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Wishes {
    /// It is not to be started again.
    pub stopped: bool,
    /// How often a user has asked to start its program again.
    pub restarts: u64,
}

/// What is shown of a container's life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ContainerLife {
    /// How often its policy has started its program again.
    pub restarts: u32,
    /// How often its program was started since this owner monitors it.
    pub starts: u64,
    /// Its process has ended, with this status, and its program is started again.
    pub restarting: Option<i32>,
    /// The status with which its process ended before the last of these starts.
    pub last_exit: Option<i32>,
    /// Whether memory ran out in the container before the last end of its process.
    pub out_of_memory: bool,
}

impl ContainerLife {
    pub(super) fn of(note: &LifeNote, is_new: bool) -> ContainerLife {
        ContainerLife {
            restarts: note.restarts,
            starts: is_new.into(),
            restarting: note.restarting,
            last_exit: None,
            out_of_memory: false,
        }
    }
}

/// The note of a container's life, in memory and in its sandbox's directory.
#[derive(Debug)]
pub(super) struct NotedLife {
    directory: PathBuf,
    note: Mutex<LifeNote>,
}

impl NotedLife {
    pub fn open(directory: PathBuf) -> NotedLife {
        NotedLife {
            note: Mutex::new(LifeNote::read(&directory)),
            directory,
        }
    }

    pub fn note(&self) -> LifeNote {
        *self.note.locked()
    }

    pub fn change(&self, change: impl FnOnce(&mut LifeNote)) {
        let mut note = self.note.locked();
        change(&mut note);
        // Under the lock, so that the file has the last change.
        note.write(&self.directory);
    }
}

/// The restarts of one container.
#[derive(Debug)]
pub(super) struct Restarting {
    noted: Arc<NotedLife>,
    wishes: watch::Receiver<Wishes>,
    /// How many of the users' wishes were fulfilled.
    fulfilled: u64,
    delay: RestartDelay,
    shown: watch::Sender<ContainerLife>,
}

impl Restarting {
    pub fn new(
        noted: Arc<NotedLife>,
        wishes: watch::Receiver<Wishes>,
        shown: watch::Sender<ContainerLife>,
    ) -> Restarting {
        Restarting {
            noted,
            wishes,
            fulfilled: 0,
            delay: RestartDelay::default(),
            shown,
        }
    }

    pub fn directory(&self) -> &Path {
        &self.noted.directory
    }

    /// The exit status before a restart that an earlier owner began.
    pub fn begun(&self) -> Option<i32> {
        self.noted.note().restarting
    }

    /// Shows whether memory ran out before the end of its process. Comes before that end is shown.
    pub fn ended(&self, out_of_memory: bool) {
        self.show(|shown| shown.out_of_memory = out_of_memory);
    }

    /// Waits until the program of a process that ended so, after this time, is to be started again. Returns false if it is not.
    pub async fn wait(&mut self, life: &Life, status: i32, ran: Duration) -> bool {
        let policy_ends = |wishes: &Wishes, note: &LifeNote| wishes.stopped || note.stopped;
        let (wishes, note) = (*self.wishes.borrow_and_update(), self.noted.note());
        let mut is_asked = wishes.restarts > self.fulfilled;
        let by_policy = !policy_ends(&wishes, &note) && life.restarts(status, note.restarts);
        if !(is_asked || by_policy) || !can_start_again(self.directory()) {
            self.over();
            return false;
        }
        self.noted.change(|note| note.restarting = Some(status));
        self.show(|shown| shown.restarting = Some(status));
        if !is_asked {
            let (delay, fulfilled) = (self.delay.after(ran), self.fulfilled);
            let wished = self.wishes.wait_for(|w| w.stopped || w.restarts > fulfilled);
            let wished = tokio::time::timeout(delay, wished).await;
            // Without a sender the monitor has ended, and this future with it.
            match wished
                .ok()
                .and_then(Result::ok)
                .map(|wishes| wishes.restarts > fulfilled)
            {
                Some(false) => {
                    self.over();
                    return false;
                }
                wished => is_asked = wished.is_some(),
            }
        }
        self.fulfilled = self.wishes.borrow().restarts;
        self.noted.change(|note| match is_asked {
            true => {
                (note.restarts, note.stopped) = (0, false);
            }
            false => note.restarts = note.restarts.saturating_add(1),
        });
        true
    }

    /// The program runs again.
    pub fn started(&self) {
        self.noted.change(|note| note.restarting = None);
        let restarts = self.noted.note().restarts;
        self.show(|shown| {
            *shown = ContainerLife {
                restarts,
                starts: shown.starts + 1,
                restarting: None,
                last_exit: shown.restarting,
                out_of_memory: shown.out_of_memory,
            };
        });
    }

    /// Notes whether the container is healthy.
    pub fn note_health(&self, status: Option<HealthStatus>) {
        if self.noted.note().health != status {
            self.noted.change(|note| note.health = status);
        }
    }

    fn over(&self) {
        if self.noted.note().restarting.is_some() {
            self.noted.change(|note| note.restarting = None);
        }
    }

    fn show(&self, change: impl FnOnce(&mut ContainerLife)) {
        self.shown.send_modify(change);
    }
}

#[cfg(test)]
#[path = "restarting_test.rs"]
mod tests;
