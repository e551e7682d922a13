//! Containers: the OCI runtime of this guest.
//!
//! [`Container::create`] mounts and sets up everything except executing the program, which [`Container::start`]
//! does. [`Container::remove`] cleans up after its processes have ended. The cgroup determines which processes
//! belong to a container.

mod added_mounts;
pub mod archive;
pub mod capabilities;
pub mod cgroup;
pub mod change;
pub mod files;
pub mod fork;
pub mod init;
pub mod inspect;
pub mod journal;
pub mod kept;
pub mod launch;
pub mod pod_pids;
pub mod process;
pub mod rlimits;
pub mod rootfs;
pub mod seccomp;
pub mod sessions;
pub mod spec;
pub mod syscalls;
pub mod user;
pub mod watch;

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::fs::{Mode, OFlags, open};
use rustix::pipe::{PipeFlags, pipe_with};
use thaw_protocol::agent::agent::{CreateContainerRequest, ExecProcessRequest};
use thaw_protocol::agent::oci;
use thaw_protocol::agent::readiness::ExpectReadyRequest;
use thaw_sys::lock::Lock;

use crate::error::{Error, Result, WithContext};
use crate::huge_pages::{self, Reservation};
use crate::oom::{ChangeWatch, OomEvents};
use crate::readiness::Probe;
use crate::reaper::{ExitCode, Reaper};
use crate::storage::{Storage, Storages};
use crate::warning;
use cgroup::Cgroup;
use launch::{Place, Status};
use process::Process;
use spec::{ProcessSpec, Spec};

/// Most ended execs that are kept per container after their exit code was reported, for late readers of their
/// output.
const MAX_ENDED: usize = 64;

/// A container of this guest.
#[derive(Debug)]
pub struct Container {
    pub id: String,
    pub spec: Spec,
    pub cgroup: Cgroup,
    pub init: Arc<Process>,
    init_id: String,
    /// Set until it is started.
    pending: Mutex<Option<Pending>>,
    /// Set until a caller waits for it.
    probe: Mutex<Option<Probe>>,
    execs: Mutex<Execs>,
    /// Storages that are released with it.
    mounts: Mutex<Vec<PathBuf>>,
    huge_pages: Mutex<Vec<Reservation>>,
    oom_kills: AtomicU64,
    /// The task that watches `memory.events`.
    pub(crate) memory_watch: Mutex<Option<tokio::task::AbortHandle>>,
}

#[derive(Debug)]
struct Pending {
    go: OwnedFd,
    status: Status,
}

#[derive(Debug, Default)]
struct Execs {
    by_id: BTreeMap<String, Option<Arc<Process>>>,
    /// Ended and reported, oldest first.
    reported: Vec<String>,
}

impl Container {
    /// Creates a container without executing its program. Blocks. Must be called within the runtime.
    pub fn create(
        request: &CreateContainerRequest,
        storages: &[Storage],
        all: &Storages,
        reaper: &Arc<Reaper>,
    ) -> Result<Self> {
        let oci = request
            .OCI
            .as_ref()
            .ok_or_else(|| Error::Invalid("the request has no OCI specification".into()))?;
        if request.stdin_port != 0 || request.stdout_port != 0 || request.stderr_port != 0 {
            return Err(Error::Unsupported(
                "streams over vsock ports of their own are not supported: use ReadStdout".into(),
            ));
        }
        let spec = Spec::new(&request.container_id, oci, request.string_user.as_ref())?;
        let resources = oci.Linux.as_ref().and_then(|linux| linux.Resources.as_ref());
        let huge_pages = huge_pages::of_limits(resources.map_or(&[], |r| &r.HugepageLimits))?;
        let mounts = all.acquire_all(storages)?;
        let made = Self::set_up(&spec, reaper);
        match made {
            Ok((cgroup, init, pending)) => Ok(Container {
                id: request.container_id.clone(),
                init_id: request.exec_id.clone(),
                spec,
                cgroup,
                init: Arc::new(init),
                pending: Mutex::new(Some(pending)),
                probe: Mutex::default(),
                execs: Mutex::default(),
                mounts: Mutex::new(mounts),
                huge_pages: Mutex::new(huge_pages),
                oom_kills: AtomicU64::new(0),
                memory_watch: Mutex::default(),
            }),
            Err(e) => {
                all.release_all(&mounts);
                Err(e)
            }
        }
    }

    fn set_up(spec: &Spec, reaper: &Arc<Reaper>) -> Result<(Cgroup, Process, Pending)> {
        let cgroup = Cgroup::create(&spec.cgroup)?;
        let launched = cgroup.apply(&spec.resources).and_then(|()| {
            let (wait, go) = pipe_with(PipeFlags::CLOEXEC).with_context(|| "make a pipe".into())?;
            let first = spec.delegates.then(|| cgroup.open_first()).transpose()?;
            let place = Place::New {
                spec,
                go: wait,
                first,
            };
            let (init, status) = Process::launch(
                reaper,
                &spec.process,
                spec.seccomp.as_ref(),
                cgroup.open_procs()?,
                place,
            )?;
            if spec.delegates {
                cgroup.enable_below()?;
            }
            Ok((init, Pending { go, status }))
        });
        match launched {
            Ok((init, pending)) => Ok((cgroup, init, pending)),
            Err(e) => {
                if let Err(left) = cgroup.kill_and_wait().and_then(|()| cgroup.remove()) {
                    warning!("cleaning up after a container that was not created: {left}");
                }
                Err(e)
            }
        }
    }

    /// Executes its program. Blocks until that has succeeded or failed.
    pub fn start(&self) -> Result<()> {
        let Some(Pending { go, status }) = self.pending.locked().take() else {
            return Err(Error::State(format!("container {} was already started", self.id)));
        };
        rustix::io::write(&go, b"s").with_context(|| "start the container's process".into())?;
        status.wait()
    }

    /// Watches the port that the container listens on, from before its start, or from now on if it has started. Must be called within the
    /// runtime.
    pub fn expect_ready(&self, request: &ExpectReadyRequest) -> Result<()> {
        // Locked so that it is not started meanwhile.
        let pending = self.pending.locked();
        let probe = Probe::new(request, self.cgroup.path(), pending.is_none())?;
        *self.probe.locked() = Some(probe);
        Ok(())
    }

    /// Returns the probe that [`Container::expect_ready`] made, once the container is started.
    pub fn take_probe(&self) -> Result<Probe> {
        if self.pending.locked().is_some() {
            return Err(Error::State(format!("container {} was not started yet", self.id)));
        }
        self.probe.locked().take().ok_or_else(|| {
            Error::State(format!(
                "container {} was started without a readiness check, or another caller waits for it already",
                self.id
            ))
        })
    }

    /// Runs another process in it. Blocks until its program is executed or that has failed. Must be called
    /// within the runtime.
    pub fn exec(&self, request: &ExecProcessRequest, reaper: &Arc<Reaper>) -> Result<()> {
        let id = &request.exec_id;
        if id.is_empty() || *id == self.init_id || *id == self.id {
            return Err(Error::Invalid(format!(
                "exec id {id:?} is empty or that of the container's first process"
            )));
        }
        if request.stdin_port != 0 || request.stdout_port != 0 || request.stderr_port != 0 {
            return Err(Error::Unsupported(
                "streams over vsock ports of their own are not supported: use ReadStdout".into(),
            ));
        }
        let process = request
            .process
            .as_ref()
            .ok_or_else(|| Error::Invalid("the request has no process".into()))?;
        let spec = ProcessSpec::new(process, request.string_user.as_ref())?;
        self.check_runs()?;
        if self.execs.locked().by_id.contains_key(id) {
            return Err(Error::State(format!(
                "container {} has an exec {id:?} already",
                self.id
            )));
        }
        // The id is reserved while the process is created, so that another exec with the same id is refused.
        self.execs.locked().by_id.insert(id.clone(), None);
        let launched = self.launch_beside(&spec, reaper);
        let mut execs = self.execs.locked();
        match launched {
            Ok(process) => {
                execs.by_id.insert(id.clone(), Some(Arc::new(process)));
                Ok(())
            }
            Err(e) => {
                execs.by_id.remove(id);
                Err(e)
            }
        }
    }

    /// Runs a process of a hook in it, which has no exec id. Blocks until its program is executed or that has failed. Must be called
    /// within the runtime.
    pub fn launch_hook(&self, process: &oci::Process, reaper: &Arc<Reaper>) -> Result<Process> {
        let spec = ProcessSpec::new(process, None)?;
        self.check_runs()?;
        self.launch_beside(&spec, reaper)
    }

    /// Fails if its first process was not started or has ended.
    pub fn check_runs(&self) -> Result<()> {
        match self.pending.locked().is_some() || self.init.exit_code().is_some() {
            true => Err(Error::State(format!("container {} is not running", self.id))),
            false => Ok(()),
        }
    }

    fn launch_beside(&self, spec: &ProcessSpec, reaper: &Arc<Reaper>) -> Result<Process> {
        let place = Place::Beside(self.init.pidfd()?);
        let cgroup = match self.spec.delegates {
            true => self.cgroup.open_procs_of(self.init.child.pid)?,
            false => self.cgroup.open_procs()?,
        };
        let (process, status) = Process::launch(reaper, spec, self.spec.seccomp.as_ref(), cgroup, place)?;
        status.wait()?;
        Ok(process)
    }

    /// Its root directory as its first process sees it, with all mounts.
    pub fn root(&self) -> Result<OwnedFd> {
        let not_running = || Error::State(format!("container {} is not running", self.id));
        if self.pending.locked().is_some() {
            return Err(not_running());
        }
        let path = format!("/proc/{}/root", self.init.child.pid);
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = open(&path, flags, Mode::empty());
        // Checked afterwards: until its end is known, the PID belongs to no other process.
        if self.init.exit_code().is_some() {
            return Err(not_running());
        }
        root.with_context(|| format!("open {path}"))
    }

    /// Returns a process by its exec id. The container's own id, its first exec id, and an empty id mean the
    /// first process.
    pub fn process(&self, exec_id: &str) -> Result<Arc<Process>> {
        if exec_id.is_empty() || exec_id == self.id || exec_id == self.init_id {
            return Ok(self.init.clone());
        }
        let execs = self.execs.locked();
        execs
            .by_id
            .get(exec_id)
            .cloned()
            .flatten()
            .ok_or_else(|| Error::Invalid(format!("container {} has no exec {exec_id:?}", self.id)))
    }

    /// Notes that an exec's exit code was reported. Only the last few such execs are kept.
    pub fn reported(&self, exec_id: &str) {
        let mut execs = self.execs.locked();
        if execs.by_id.contains_key(exec_id) && !execs.reported.iter().any(|id| id == exec_id) {
            execs.reported.push(exec_id.to_owned());
            if execs.reported.len() > MAX_ENDED {
                let oldest = execs.reported.remove(0);
                if let Some(Some(process)) = execs.by_id.remove(&oldest) {
                    process.stdio.close();
                }
            }
        }
    }

    /// Sends a signal to every process.
    pub fn signal_all(&self, number: u32) -> Result<()> {
        if number == libc::SIGKILL as u32 {
            return self.cgroup.kill();
        }
        let pids = self.cgroup.processes();
        if pids.is_empty() {
            return Err(Error::State(format!("container {} has no process left", self.id)));
        }
        for pid in pids {
            // A process that has ended meanwhile needs no signal.
            if let (Some(pid), true) = (rustix::process::Pid::from_raw(pid), number != 0) {
                let _ = rustix::process::kill_process(pid, process::signal(number)?);
            }
        }
        Ok(())
    }

    /// Pushes an event if the kernel has killed one of its processes for lack of memory since the last call.
    pub fn check_for_oom(&self, events: &OomEvents) {
        let now = self.cgroup.read_key("memory.events", "oom_kill").unwrap_or(0);
        if self.oom_kills.fetch_max(now, Ordering::AcqRel) < now {
            events.push(&self.id);
        }
    }

    /// Freezes or thaws it, and waits for that.
    pub async fn freeze(&self, frozen: bool) -> Result<()> {
        let watch = ChangeWatch::new(self.cgroup.open_events("cgroup.events")?)?;
        self.cgroup.freeze(frozen)?;
        while self.cgroup.events().frozen != frozen {
            if !self.cgroup.events().populated {
                return Err(Error::State(format!("container {} has no process left", self.id)));
            }
            watch.changed().await?;
        }
        Ok(())
    }

    /// Kills all its processes and waits for their end, at most `timeout`.
    pub async fn kill(&self, timeout: Option<Duration>) -> Result<ExitCode> {
        // It can no longer be started.
        self.pending.locked().take();
        let ended = async {
            let watch = ChangeWatch::new(self.cgroup.open_events("cgroup.events")?)?;
            self.cgroup.kill()?;
            while self.cgroup.events().populated {
                watch.changed().await?;
            }
            Ok(self.init.wait().await)
        };
        match timeout {
            None => ended.await,
            Some(timeout) => tokio::time::timeout(timeout, ended).await.unwrap_or_else(|_| {
                Err(Error::State(format!(
                    "container {}: processes {:?} did not end",
                    self.id,
                    self.cgroup.processes()
                )))
            }),
        }
    }

    /// Removes everything that is left of a container without processes. Blocks.
    pub fn remove(&self, all: &Storages) {
        if let Some(watch) = self.memory_watch.locked().take() {
            watch.abort();
        }
        self.init.stdio.close();
        for process in self.execs.locked().by_id.values().flatten() {
            process.stdio.close();
        }
        if let Err(e) = self.cgroup.remove() {
            warning!("container {}: {e}", self.id);
        }
        all.release_all(&std::mem::take(&mut *self.mounts.locked()));
        self.huge_pages.locked().clear();
    }
}
