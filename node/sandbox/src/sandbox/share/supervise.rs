//! Restarts a sandbox's thaw-share when it dies, a limited number of times.
//!
//! Invariants: one process runs at a time, and dropping [`Served`] ends it. A process is in the sandbox's record before its VMM
//! gets the connection to it. It is restarted at most [`RESTARTS`] times in [`WINDOW`], with growing delays. After that, and if
//! the VMM is of an earlier release that takes no second relay, shared files answer EIO for good. A pod, whose containers run
//! from shared files, is then ended.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use thaw_pools::cgroup::Hierarchy;
use thaw_pools::process::ProcessRecord;
use thaw_pools::share::{self, Serving};
use thaw_pools::vmm::VmmProcess;
use thaw_protocol::control::{Backend, Command, DeviceId};
use tokio::io::Interest;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::{Shared, run};
use crate::blocking::blocking;
use crate::control_client::ControlClient;
use crate::error::{Error, ErrorKind};
use crate::readiness::register;
use crate::sandbox::backends::Backends;
use crate::sandbox::host_limits;
use crate::state::{Record, SandboxDirectory};
use thaw_sys::lock::Lock;

/// How often thaw-share is restarted within [`WINDOW`].
const RESTARTS: usize = 5;
/// The period of the limit on restarts.
const WINDOW: Duration = Duration::from_secs(600);
/// Delay before the second restart; the first is immediate. Each later one waits four times as long, at most [`LONGEST`].
const FIRST: Duration = Duration::from_millis(250);
/// Longest delay: less than a guest waits.
const LONGEST: Duration = Duration::from_secs(8);

/// The thaw-share of a sandbox, across restarts.
#[derive(Debug)]
pub(in crate::sandbox) struct Served {
    now: Arc<Mutex<Now>>,
    /// The task that waits for its end.
    watch: Option<JoinHandle<()>>,
}

/// Its current process.
#[derive(Debug, Default)]
struct Now {
    /// `None` during a restart, or once there is none for good.
    process: Option<VmmProcess>,
    /// The mount namespace of a pod's thaw-share.
    mounts: Option<Arc<OwnedFd>>,
    /// Why there is none for good.
    lost: Option<String>,
    /// Whether the sandbox is ending: no process is started then.
    is_over: bool,
}

/// The sandbox of a thaw-share, for restarts.
#[derive(Debug)]
pub(in crate::sandbox) struct Supervised {
    pub(in crate::sandbox) id: String,
    pub(in crate::sandbox) is_a_pod: bool,
    pub(in crate::sandbox) shared: Shared,
    /// `None` if it could not be opened: then thaw-share is not restarted.
    pub(in crate::sandbox) directory: Option<SandboxDirectory>,
    pub(in crate::sandbox) control: Arc<ControlClient>,
    pub(in crate::sandbox) lost: watch::Sender<Option<String>>,
    pub(in crate::sandbox) changing: Arc<tokio::sync::Mutex<()>>,
    /// Whether all its processes must be in its cgroup.
    pub(in crate::sandbox) limits_required: bool,
}

impl Supervised {
    /// Keeps the mounts of this process, for the next one.
    fn keep_mounts(&mut self, process: &VmmProcess, now: &mut Now) {
        if !self.is_a_pod {
            return;
        }
        match share::mounts(process) {
            Ok(mounts) => {
                let mounts = Arc::new(mounts);
                now.mounts = Some(mounts.clone());
                self.shared = Shared::Added(Some(mounts));
            }
            Err(e) => tracing::warn!(
                "sandbox {}: its thaw-share cannot be started again if it dies: {e}",
                self.id
            ),
        }
    }
}

impl Served {
    /// Takes over a running thaw-share and supervises it.
    pub(in crate::sandbox) fn new(process: VmmProcess, mut of: Supervised) -> Served {
        let mut now = Now::default();
        of.keep_mounts(&process, &mut now);
        now.process = Some(process);
        Served::supervised(now, of)
    }

    /// For a thaw-share that died before the adoption: starts another.
    pub(in crate::sandbox) fn ended(of: Supervised) -> Served {
        Served::supervised(Now::default(), of)
    }

    fn supervised(now: Now, of: Supervised) -> Served {
        let now = Arc::new(Mutex::new(now));
        let watch = tokio::spawn(supervise(of, now.clone()));
        Served {
            now,
            watch: Some(watch),
        }
    }

    /// The process to name in the sandbox's record.
    pub(in crate::sandbox) fn record(&self) -> Option<ProcessRecord> {
        self.now.locked().process.as_ref().map(VmmProcess::record)
    }

    /// Where to add shares: its mount namespace, which also works during a restart, or a pidfd.
    pub(in crate::sandbox) fn place(&self) -> Result<OwnedFd, Error> {
        let now = self.now.locked();
        if let Some(why) = &now.lost {
            return Err(Error::new(ErrorKind::ShareFailed, why.clone()));
        }
        let place = match (&now.mounts, &now.process) {
            (Some(mounts), _) => mounts.try_clone(),
            (None, Some(process)) => process.pidfd().try_clone_to_owned(),
            (None, None) => Err(Errno::SRCH.into()),
        };
        place.map_err(|e| Error::system("cannot reach thaw-share", &e))
    }

    /// Stops supervision: its end is expected from now on.
    pub(in crate::sandbox) fn expect_end(&mut self) {
        self.now.locked().is_over = true;
        if let Some(watch) = self.watch.take() {
            watch.abort();
        }
    }

    /// Releases it without ending it.
    pub(in crate::sandbox) fn release(mut self) {
        self.expect_end();
        if let Some(process) = &mut self.now.locked().process {
            process.release();
        }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.expect_end();
        // Killed and reaped here, not when the watching task is dropped.
        drop(self.now.locked().process.take());
    }
}

/// Why thaw-share is not restarted.
enum Lost {
    /// Its machine has ended, which is expected.
    WithMachine,
    ForGood(String),
}

/// Waits for its end and restarts it. Ends with the sandbox.
async fn supervise(of: Supervised, now: Arc<Mutex<Now>>) {
    let mut started = Started::default();
    loop {
        let pidfd = now
            .locked()
            .process
            .as_ref()
            .map(|p| p.pidfd().try_clone_to_owned());
        if let Some(pidfd) = pidfd {
            let watched = pidfd.and_then(|pidfd| register(pidfd, Interest::READABLE));
            let Ok(pidfd) = watched.inspect_err(|e| {
                tracing::warn!("sandbox {}: nobody sees its thaw-share end: {e}", of.id);
            }) else {
                return;
            };
            // Readable once the process has ended. It also ends with its VMM.
            let _ = pidfd.readable().await;
        }
        match replace(&of, &now, &mut started).await {
            Ok(()) => tracing::warn!(
                "sandbox {}: another thaw-share serves its files; what was open for writing answers EIO",
                of.id
            ),
            Err(Lost::WithMachine) => return,
            Err(Lost::ForGood(why)) => return lose(&of, &now, why).await,
        }
    }
}

/// Starts another process, in as many attempts as are allowed.
async fn replace(of: &Supervised, now: &Mutex<Now>, started: &mut Started) -> Result<(), Lost> {
    // Reaps the old process, so that its memory is free before another starts.
    let ended = now.locked().process.take();
    let how = match ended.map(|mut process| process.wait()) {
        Some(Ok(Some(status))) => format!("thaw-share has ended ({status})"),
        _ => "thaw-share has ended".to_owned(),
    };
    loop {
        if of.control.call(Command::Status, &[]).await.is_err() {
            return Err(Lost::WithMachine);
        }
        let Some(pause) = started.another(Instant::now()) else {
            let minutes = WINDOW.as_secs() / 60;
            return Err(Lost::ForGood(format!(
                "it was started {RESTARTS} times in {minutes} minutes"
            )));
        };
        tracing::error!(
            "sandbox {}: {how}: another is started{}",
            of.id,
            match pause.is_zero() {
                true => String::new(),
                false => format!(" in {} ms", pause.as_millis()),
            }
        );
        tokio::time::sleep(pause).await;
        match once(of, now).await {
            Ok(()) => return Ok(()),
            Err((e, Again::Yes)) => tracing::error!("sandbox {}: no other thaw-share: {e}", of.id),
            Err((e, Again::No)) => return Err(Lost::ForGood(e.to_string())),
        }
    }
}

/// Whether another attempt may succeed.
enum Again {
    Yes,
    No,
}

async fn once(of: &Supervised, now: &Mutex<Now>) -> Result<(), (Error, Again)> {
    let Some(directory) = &of.directory else {
        let what = "the sandbox's directory could not be opened";
        return Err((Error::new(ErrorKind::ShareFailed, what), Again::No));
    };
    if matches!(of.shared, Shared::Added(None)) {
        let what = "what was mounted in it is lost";
        return Err((Error::new(ErrorKind::ShareFailed, what), Again::No));
    }
    let (shared, path) = (of.shared.clone(), directory.path().to_owned());
    let Serving { process, relay } = blocking(move || run(&shared, &path))
        .await
        .map_err(|e| (e, Again::Yes))?;
    {
        let _one = of.changing.lock().await;
        let record = process.record();
        let written = directory.record().and_then(|was| {
            let cgroup = was.cgroup.as_deref().map(|name| Hierarchy::detect().adopt(name));
            host_limits::enter(of.limits_required, cgroup.as_ref(), &process)?;
            directory.write(&Record {
                share: Some(record),
                ..was
            })
        });
        written.map_err(|e| (e, Again::Yes))?;
        let mut now = now.locked();
        if now.is_over {
            return Err((Error::new(ErrorKind::ShareFailed, "the sandbox ends"), Again::No));
        }
        now.process = Some(process);
    }
    let mut backends = Backends::default();
    backends.attach(DeviceId::Shared, Backend::Share, &relay);
    // Only the VMM may hold the relay: if the VMM refuses it, the process ends.
    let given = backends.send(&of.control).await;
    drop(relay);
    given.map(drop).map_err(|e| (e, Again::No))
}

/// Gives up on thaw-share for good.
async fn lose(of: &Supervised, now: &Mutex<Now>, why: String) {
    {
        let mut now = now.locked();
        if now.is_over {
            return;
        }
        let why = format!("thaw-share has ended for good: {why}");
        now.lost = Some(why.clone());
        of.lost.send_replace(Some(why));
    }
    if of.is_a_pod {
        tracing::error!(
            "sandbox {}: thaw-share has ended for good ({why}): the sandbox is ended with it",
            of.id
        );
        // The task that monitors the sandbox sees its end.
        let _ = of.control.call(Command::Shutdown, &[]).await;
        return;
    }
    tracing::error!(
        "sandbox {}: thaw-share has ended for good ({why}): what it shares with the host answers EIO in the guest \
         from now on; start the sandbox again",
        of.id
    );
}

/// When each restart happened.
#[derive(Debug, Default)]
struct Started(VecDeque<Instant>);

impl Started {
    /// How long to wait before the next restart; `None` if no more are allowed.
    fn another(&mut self, now: Instant) -> Option<Duration> {
        self.0.retain(|at| now.duration_since(*at) < WINDOW);
        let before = self.0.len();
        if before >= RESTARTS {
            return None;
        }
        self.0.push_back(now);
        Some(match before {
            0 => Duration::ZERO,
            more => FIRST
                .saturating_mul(4u32.saturating_pow(more as u32 - 1))
                .min(LONGEST),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn restarts_are_bounded_and_each_waits_longer() {
        let (mut started, begin) = (Started::default(), Instant::now());
        let pauses: Vec<Option<u128>> = (0..7)
            .map(|n| {
                let at = begin + Duration::from_secs(n);
                started.another(at).map(|pause| pause.as_millis())
            })
            .collect();
        let expected = [Some(0), Some(250), Some(1000), Some(4000), Some(8000), None, None];
        assert_eq!(pauses, expected);
        assert!(LONGEST < Duration::from_millis(thaw_protocol::share::PATIENCE_MS));
        // The first two are outside the window.
        let later = begin + WINDOW + Duration::from_millis(1500);
        assert_eq!(started.another(later), Some(Duration::from_millis(4000)));
        assert!(started.0.len() <= RESTARTS);
        assert_eq!(
            started.another(later + 2 * WINDOW),
            Some(Duration::ZERO),
            "one that served long starts anew at once"
        );
    }
}
