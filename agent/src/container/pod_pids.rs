//! The PID namespace a pod's containers share, where they are to: made when the first of them asks for it, and there as long as
//! the sandbox.
//!
//! Its first process is ours, as the pause program is elsewhere: orphans come to it and are reaped, and it does nothing else. It
//! is a fork of the agent that whoever shares the namespace can see, so it keeps nothing of the agent's: no file system, no
//! descriptor, no privilege.

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
use crate::error::{Error, For, Result};
use crate::reaper::{Child, Reaper};

/// What it is called.
const NAME: &std::ffi::CStr = c"pause";
/// Whose it is: nobody's.
const NOBODY: u32 = 65534;
/// A directory of the guest image it may mount its empty root on, in a mount namespace of its own.
const ROOT: &str = "/run";

/// The namespace, once somebody asked for it.
#[derive(Debug, Default)]
pub struct PodPids(Mutex<Option<Child>>);

impl PodPids {
    /// The namespace, by its file. Blocks.
    pub fn path(&self, reaper: &Arc<Reaper>) -> Result<PathBuf> {
        let mut init = self.0.locked();
        // With it everything in the namespace has ended: whoever comes then gets another.
        let living = init.take().filter(|init| init.exit_code().is_none());
        let living = match living {
            Some(living) => living,
            None => begin(reaper)?,
        };
        let path = format!("/proc/{}/ns/pid", living.pid);
        *init = Some(living);
        Ok(path.into())
    }

    /// Ends it, and everything that is in it still.
    pub async fn end(&self) {
        let init = self.0.locked().take();
        let Some(init) = init else {
            return;
        };
        // Until its end is known the PID is its own.
        if let (Some(pid), true) = (Pid::from_raw(init.pid), init.exit_code().is_none()) {
            let _ = kill_process(pid, Signal::KILL);
        }
        init.wait().await;
    }
}

fn begin(reaper: &Arc<Reaper>) -> Result<Child> {
    let (mut failure, told) = pipe_with(PipeFlags::CLOEXEC)
        .map(|(read, write)| (fs::File::from(read), fs::File::from(write)))
        .for_(|| "make a pipe".into())?;
    let hold = reaper.hold();
    // A namespace of PIDs is that of a thread's next children: of one that does nothing else.
    let forked = std::thread::scope(|scope| {
        let fork = || {
            thaw_sys::jail::unshare(UnshareFlags::NEWPID).for_(|| "make the pod's PID namespace".into())?;
            fork(|| stand(&told)).for_(|| "fork into the pod's PID namespace".into())
        };
        scope.spawn(fork).join()
    });
    let pid = forked.map_err(|_| Error::State("the pod's first process was not made".into()))??;
    let init = reaper.expect(&hold, pid);
    drop((hold, told));
    let mut why = String::new();
    // Silence is success.
    failure
        .read_to_string(&mut why)
        .for_(|| "hear of the pod's first process".into())?;
    match why.is_empty() {
        true => Ok(init),
        false => Err(Error::State(format!(
            "the pod's PID namespace has no first process: {why}"
        ))),
    }
}

/// In the new process, which never returns.
fn stand(told: &fs::File) {
    fork::reset_signals();
    fork::close_all_but(vec![told.as_raw_fd()]);
    if let Err(e) = strip() {
        // Nobody to tell: the agent is gone, and so is the guest.
        let _ = write!(&mut &*told, "{e}");
        fork::exit(1);
    }
    fork::close_all_but(Vec::new());
    // Signals without a handler do not reach the first process of a namespace.
    fork::reap_forever()
}

/// Gives up all it has of the agent's.
fn strip() -> Result<()> {
    let what = || "leave the guest's file system".into();
    rustix::process::setsid().for_(|| "begin a session".into())?;
    let null = fs::File::options().read(true).write(true).open("/dev/null");
    let null = null.for_(|| "open /dev/null".into())?;
    for number in 0..3 {
        fork::become_stdio(null.as_fd(), number).for_(|| format!("connect standard stream {number}"))?;
    }
    // With it goes all of the pod: another shall be found to kill for want of memory. Not allowed to everybody.
    let _ = fs::write("/proc/self/oom_score_adj", "-1000");
    thaw_sys::jail::unshare(UnshareFlags::NEWNS).for_(|| "make a mount namespace".into())?;
    mount_change(
        "/",
        MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC,
    )
    .for_(what)?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC | MountFlags::RDONLY;
    mount("none", ROOT, "tmpfs", flags, c"size=4k,mode=0555").for_(what)?;
    rootfs::enter(Path::new(ROOT))?;
    rustix::thread::set_name(NAME).for_(|| "take a name".into())?;
    capabilities::cut_bounding(&Capabilities::default())?;
    fork::change_user(NOBODY, NOBODY, &[]).for_(|| "become nobody".into())?;
    rustix::thread::set_no_new_privs(true).for_(|| "set no_new_privs".into())
}
