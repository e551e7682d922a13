//! The PID namespace that a pod's containers can share: created when the first container asks for it, and kept
//! as long as the sandbox.
//!
//! Its first process takes the place of the pause program of other runtimes: it reaps orphans and does nothing
//! else. It is a fork of the agent that every process of the namespace can see, so it keeps none of the agent's
//! file systems, descriptors and privileges.

use std::fs;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, Signal, kill_process};
use rustix::thread::UnshareFlags;
use thaw_sys::lock::Lock;

use super::capabilities::{self, Capabilities};
use super::fork::{self, fork};
use super::rootfs;
use crate::error::{Error, Result, WithContext};
use crate::reaper::{Child, Reaper};

/// Name of its first process.
const NAME: &std::ffi::CStr = c"pause";
/// User and group of its first process.
const NOBODY: u32 = 65534;
/// A directory of the guest image on which it mounts its empty root, in its own mount namespace.
const ROOT: &str = "/run";

/// The first process of the namespace, once a container has asked for one.
#[derive(Debug, Default)]
pub struct PodPids(Mutex<Option<Child>>);

impl PodPids {
    /// Returns the path of the namespace's file. Blocks.
    pub fn path(&self, reaper: &Arc<Reaper>) -> Result<PathBuf> {
        let mut init = self.0.locked();
        // When the first process ends, the kernel ends all others in the namespace. The next container gets a
        // new namespace.
        let living = init.take().filter(|init| init.exit_code().is_none());
        let living = match living {
            Some(living) => living,
            None => start(reaper)?,
        };
        let path = format!("/proc/{}/ns/pid", living.pid);
        *init = Some(living);
        Ok(path.into())
    }

    /// Ends the namespace and every process in it.
    pub async fn end(&self) {
        let init = self.0.locked().take();
        let Some(init) = init else {
            return;
        };
        // Until its end is known, the PID belongs to no other process.
        if let (Some(pid), true) = (Pid::from_raw(init.pid), init.exit_code().is_none()) {
            let _ = kill_process(pid, Signal::KILL);
        }
        init.wait().await;
    }
}

fn start(reaper: &Arc<Reaper>) -> Result<Child> {
    let (mut failure, report) = pipe_with(PipeFlags::CLOEXEC)
        .map(|(read, write)| (fs::File::from(read), fs::File::from(write)))
        .with_context(|| "make a pipe".into())?;
    let hold = reaper.hold();
    // unshare(2) puts the thread's next children into the namespace, so this takes a thread that forks nothing
    // else.
    let forked = std::thread::scope(|scope| {
        let fork = || {
            thaw_sys::jail::unshare(UnshareFlags::NEWPID)
                .with_context(|| "make the pod's PID namespace".into())?;
            fork(|| run_init(&report)).with_context(|| "fork into the pod's PID namespace".into())
        };
        scope.spawn(fork).join()
    });
    let pid = forked.map_err(|_| Error::State("the pod's first process was not created".into()))??;
    let init = reaper.expect(&hold, pid);
    drop((hold, report));
    let mut why = String::new();
    // No report means success.
    failure
        .read_to_string(&mut why)
        .with_context(|| "read the report of the pod's first process".into())?;
    match why.is_empty() {
        true => Ok(init),
        false => Err(Error::State(format!(
            "the pod's PID namespace has no first process: {why}"
        ))),
    }
}

/// Runs in the new process, and never returns.
fn run_init(report: &fs::File) {
    fork::reset_signals();
    fork::close_all_but(vec![report.as_raw_fd()]);
    if let Err(e) = drop_inherited() {
        // On failure the agent is gone, and with it the guest.
        let _ = write!(&mut &*report, "{e}");
        fork::exit(1);
    }
    fork::close_all_but(Vec::new());
    // Signals without a handler do not reach the first process of a namespace.
    fork::reap_forever()
}

/// Gives up everything inherited from the agent.
fn drop_inherited() -> Result<()> {
    let what = || "leave the guest's file system".into();
    rustix::process::setsid().with_context(|| "begin a session".into())?;
    let null = fs::File::options().read(true).write(true).open("/dev/null");
    let null = null.with_context(|| "open /dev/null".into())?;
    for number in 0..3 {
        fork::become_stdio(null.as_fd(), number)
            .with_context(|| format!("connect standard stream {number}"))?;
    }
    // The whole pod ends with this process, so the OOM killer should choose another. Not permitted everywhere.
    let _ = fs::write("/proc/self/oom_score_adj", "-1000");
    thaw_sys::jail::unshare(UnshareFlags::NEWNS).with_context(|| "make a mount namespace".into())?;
    mount_change(
        "/",
        MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC,
    )
    .with_context(what)?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC | MountFlags::RDONLY;
    mount("none", ROOT, "tmpfs", flags, c"size=4k,mode=0555").with_context(what)?;
    rootfs::enter(Path::new(ROOT))?;
    rustix::thread::set_name(NAME).with_context(|| "take a name".into())?;
    capabilities::cut_bounding(&Capabilities::default())?;
    fork::change_user(NOBODY, NOBODY, &[]).with_context(|| "become nobody".into())?;
    rustix::thread::set_no_new_privs(true).with_context(|| "set no_new_privs".into())
}
