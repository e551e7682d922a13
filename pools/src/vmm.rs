//! A `thaw-vmm` process.
//!
//! It gets nothing on stdin, a log on stdout and stderr, its listening control socket as [`CONTROL_FD`], and after that the descriptors of
//! the namespaces that it shares with other VMMs, if this process could make some. Its environment is empty but for `THAW_LOG`, whether its
//! jail must be whole, and which descriptors are namespaces. It leads its own session, so the terminal's Ctrl-C does not reach it. If the
//! host grants it, it is the first process of a PID namespace; its recorded pid is the one we see. Unless it is
//! [released](VmmProcess::release), it is killed when its owner drops it. [`crate::share`] starts its process the same way, without
//! namespaces.

use std::ffi::{CString, OsStr};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::{Pid, Resource, Rlimit, Signal, WaitId, WaitIdOptions, WaitOptions};
use thaw_protocol::api::DISK_MIB;
use thaw_protocol::control::{CONTROL_FD, JAIL_VARIABLE, JAIL_WHOLE, NAMESPACES_VARIABLE};
use thaw_protocol::disk_layer;
use thaw_sys::namespaces::Namespaces;

use crate::Error;
use crate::priority;
use crate::process::{self, ProcessRecord};
use crate::shared_namespaces;
use crate::spawn::{self, Program};

/// Environment variable that names the binary.
pub const VMM_VARIABLE: &str = "THAW_VMM";

/// Least OOM score of a process that serves a guest: the kernel kills it before thawd, whose unit sets a lower score that the process
/// would inherit.
const OOM_SCORE: i32 = 200;
/// Bytes of the largest file that such a process may write: the layer of the largest disk, which is larger than any guest's memory.
pub const LARGEST_FILE: u64 = disk_layer::file_bytes((*DISK_MIB.end() as u64) << 20);

/// The path of the binary: `$THAW_VMM`, or else in the directory of the running program.
pub fn find() -> Result<PathBuf, Error> {
    find_program(VMM_VARIABLE, "thaw-vmm", |looked| Error::VmmMissing { looked })
}

/// The path of one of our programs: the value of `variable`, or else in the directory of the running program.
pub(crate) fn find_program(
    variable: &str,
    name: &str,
    missing: impl FnOnce(PathBuf) -> Error,
) -> Result<PathBuf, Error> {
    let looked = match std::env::var_os(variable) {
        Some(path) => PathBuf::from(path),
        None => {
            let own = std::env::current_exe().map_err(Error::system("find this program"))?;
            own.with_file_name(name)
        }
    };
    // Absolute, because the child executes it in another directory. Links are followed then.
    match std::path::absolute(&looked) {
        Ok(path) if path.is_file() => Ok(path),
        _ => Err(missing(looked)),
    }
}

/// Creates a socket of `kind` that listens at `path`, whose directory must exist. A path longer than `sun_path` is reached through
/// `/proc`.
pub fn listen(path: &Path, kind: SocketType) -> Result<OwnedFd, Error> {
    let fail = |e: rustix::io::Errno| Error::io("listen at", path)(e.into());
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).map_err(fail)?;
    let (address, _directory) = address(path).map_err(fail)?;
    rustix::net::bind(&socket, &address).map_err(fail)?;
    rustix::net::listen(&socket, 128).map_err(fail)?;
    Ok(socket)
}

/// Connects to a socket of `kind` at `path`.
pub fn connect(path: &Path, kind: SocketType) -> Result<OwnedFd, Error> {
    let fail = |e: rustix::io::Errno| Error::io("connect to", path)(e.into());
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).map_err(fail)?;
    let (address, _directory) = address(path).map_err(fail)?;
    rustix::io::retry_on_intr(|| rustix::net::connect(&socket, &address)).map_err(fail)?;
    Ok(socket)
}

/// Whether a VMM may be listening at a control socket; `false` only if certainly none is. Does not wait for the VMM.
pub fn may_listen(path: &Path) -> bool {
    use rustix::io::Errno;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let connected = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .and_then(|socket| Ok((address(path)?, socket)))
        .and_then(|((address, _directory), socket)| rustix::net::connect(&socket, &address));
    // A socket without a listener, a file that is no socket, and no file.
    !matches!(
        connected,
        Err(Errno::CONNREFUSED | Errno::NOENT | Errno::NOTDIR | Errno::PROTOTYPE)
    )
}

/// Whether a live process serves the stream socket at `path`. A forked child of a dead server, which may hold the socket until it executes
/// another program, does not count.
pub fn is_served(path: &Path) -> bool {
    let Ok(socket) = connect(path, SocketType::STREAM) else {
        return false;
    };
    match process::listens(&socket) {
        Some(pid) => ProcessRecord::of(pid).is_some(),
        None => true,
    }
}

/// The address of a path, and the directory that it may go through, which must stay open while the address is used.
fn address(path: &Path) -> Result<(SocketAddrUnix, Option<OwnedFd>), rustix::io::Errno> {
    if let Ok(address) = SocketAddrUnix::new(path) {
        return Ok((address, None));
    }
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(rustix::io::Errno::INVAL);
    };
    use rustix::fs::{Mode, OFlags};
    let directory = rustix::fs::open(
        parent,
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    let mut short = format!("/proc/self/fd/{}/", directory.as_raw_fd()).into_bytes();
    short.extend_from_slice(name.as_bytes());
    Ok((
        SocketAddrUnix::new(Path::new(OsStr::from_bytes(&short)))?,
        Some(directory),
    ))
}

/// A running VMM, or another process that is started the same way.
#[derive(Debug)]
pub struct VmmProcess {
    /// The child to reap; `None` if another process is its parent, or it was reaped.
    child: Option<Pid>,
    pidfd: OwnedFd,
    record: ProcessRecord,
    kill_on_drop: bool,
}

/// What a VMM does if the host lacks a part of its jail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Jail {
    /// It ends, with [`JAIL_LACKS_CODE`](thaw_protocol::control::JAIL_LACKS_CODE).
    Whole,
    /// It continues with the parts that the host supports, and logs the missing ones.
    AsHostAllows,
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// It exited with this status.
    Code(i32),
    /// This signal ended it.
    Signal(i32),
}

/// Keeps places for the descriptors of this many VMMs that start at the same time, so that their starts cost the same however many descriptors
/// this process will have. To be called while it has few.
///
/// # Errors
/// No descriptor is left.
pub fn reserve_descriptors(starts: usize) -> io::Result<()> {
    spawn::reserve(starts)
}

/// Starts the VMM `program` with `socket` as its descriptor 3 and `log` as its stdout and stderr.
pub fn spawn(program: &Path, socket: &OwnedFd, log: &OwnedFd, jail: Jail) -> Result<VmmProcess, Error> {
    start(program, socket, log, jail, shared_namespaces::get())
}

/// Starts `program` as [`spawn`] does. It inherits `namespaces` as its descriptors from 4 on; without them it makes its own.
pub(crate) fn start(
    program: &Path,
    socket: &OwnedFd,
    log: &OwnedFd,
    jail: Jail,
    namespaces: Option<&Namespaces>,
) -> Result<VmmProcess, Error> {
    let fail = Error::io("start", program);
    let level = std::env::var_os("THAW_LOG").map(|level| [b"THAW_LOG=", level.as_bytes()].concat());
    let jail = match jail {
        Jail::Whole => Some(format!("{JAIL_VARIABLE}={JAIL_WHOLE}").into_bytes()),
        Jail::AsHostAllows => None,
    };
    let places = namespaces.map(|_| format!("{NAMESPACES_VARIABLE}={}", CONTROL_FD + 1).into_bytes());
    let started = || {
        let null = File::open("/dev/null")?;
        let own: [_; CONTROL_FD as usize + 1] = [null.as_fd(), log.as_fd(), log.as_fd(), socket.as_fd()];
        let shared = namespaces.into_iter().flat_map(Namespaces::descriptors);
        spawn::spawn(&Program {
            path: &CString::new(program.as_os_str().as_bytes())?,
            environment: &[level, jail, places]
                .into_iter()
                .flatten()
                .map(CString::new)
                .collect::<Result<Vec<_>, _>>()?,
            descriptors: &own.into_iter().chain(shared).collect::<Vec<_>>(),
            largest_file: LARGEST_FILE,
        })
    };
    let spawn::Started { pid, pidfd } = started().map_err(fail)?;
    let number = pid.as_raw_nonzero().get();
    // Not reaped yet, so the pid still belongs to it.
    let record = ProcessRecord::of(number).unwrap_or(ProcessRecord {
        pid: number,
        start_time: 0,
    });
    if let Err(error) = process::raise_oom_score(number, OOM_SCORE) {
        tracing::debug!(%error, "a process keeps the OOM score of ours");
    }
    Ok(VmmProcess {
        child: Some(pid),
        pidfd,
        record,
        kill_on_drop: true,
    })
}

impl VmmProcess {
    /// Its identity, for a record on disk.
    pub fn record(&self) -> ProcessRecord {
        self.record
    }

    /// Readable once it has ended.
    pub fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// Kills it. No effect once it has ended.
    pub fn kill(&self) {
        let _ = rustix::process::pidfd_send_signal(&self.pidfd, Signal::KILL);
    }

    /// Gives it the usual priority. A thread that makes resources ahead has a lower one, which the processes it starts inherit.
    pub fn raise_priority(&self) {
        priority::raise(self.record.pid);
    }

    /// Limits the size of files that it writes, in bytes, to less than [`LARGEST_FILE`]: a write beyond fails, and the process cannot raise
    /// the limit. No effect once it has ended.
    ///
    /// # Errors
    /// As of prlimit(2): without CAP_SYS_RESOURCE the process must be of our own user.
    pub fn limit_files(&self, bytes: u64) -> io::Result<()> {
        let limit = Rlimit {
            current: Some(bytes),
            maximum: Some(bytes),
        };
        let Some(pid) = Pid::from_raw(self.record.pid).filter(|_| self.record.lives()) else {
            return Ok(());
        };
        match rustix::process::prlimit(Some(pid), Resource::Fsize, limit) {
            Ok(_) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }

    /// Takes over a process that another process started, if it is alive.
    pub fn adopt(record: ProcessRecord) -> Option<VmmProcess> {
        Some(VmmProcess {
            child: None,
            pidfd: record.open()?,
            record,
            kill_on_drop: true,
        })
    }

    /// How it ended, without reaping it or waiting. `None` while it is alive, and for an adopted process if the kernel does not say
    /// ([`process::status_of_ended`]).
    pub fn ended(&self) -> Option<Ended> {
        if self.child.is_none() {
            let status = process::status_of_ended(self.pidfd(), self.record)?;
            return Some(match libc::WIFSIGNALED(status) {
                true => Ended::Signal(libc::WTERMSIG(status)),
                false => Ended::Code(libc::WEXITSTATUS(status)),
            });
        }
        let peek = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
        let status = rustix::process::waitid(WaitId::PidFd(self.pidfd.as_fd()), peek).ok()??;
        match status.terminating_signal() {
            Some(signal) => Some(Ended::Signal(signal)),
            None => status.exit_status().map(Ended::Code),
        }
    }

    /// Waits until it ends and reaps it. The status is `None` if another process reaps it.
    pub fn wait(&mut self) -> io::Result<Option<ExitStatus>> {
        let Some(child) = self.child else {
            crate::process::await_end(&self.pidfd, crate::process::END_LIMIT);
            return Ok(None);
        };
        let reaped =
            rustix::io::retry_on_intr(|| rustix::process::waitpid(Some(child), WaitOptions::empty()))?;
        self.child = None;
        Ok(reaped.map(|(_, status)| ExitStatus::from_raw(status.as_raw())))
    }

    /// Lets it outlive us from now on.
    pub fn release(&mut self) {
        self.kill_on_drop = false;
    }
}

impl Drop for VmmProcess {
    fn drop(&mut self) {
        if self.kill_on_drop {
            self.kill();
            let _ = self.wait();
        }
    }
}

#[cfg(test)]
#[path = "vmm_test.rs"]
mod tests;
