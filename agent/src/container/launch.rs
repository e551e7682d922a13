//! Launches a program from its specification.
//!
//! There are two forks. The first child enters the namespaces and forks the second, because a PID namespace
//! applies only to children. The first child reports the PID of the second and exits, so that the second
//! becomes a child of the agent, which is PID 1. The second child sets everything up, reports that it is ready,
//! and executes the program: for a container's first process when it is told to, otherwise at once.
//!
//! Reports are sent over a SEQPACKET socket that closes when the program is executed. That it closes without a
//! report means success.

use std::ffi::CString;
use std::fs;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use rustix::thread::{ThreadNameSpaceType, UnshareFlags};
use serde::{Deserialize, Serialize};
use thaw_protocol::packet::{self, PacketError};

use super::fork::{self, fork};
use super::spec::{ProcessSpec, Spec};
use super::{capabilities, init, rlimits, rootfs, seccomp, user};
use crate::error::{Error, Result, WithContext};

/// A report of a child.
#[derive(Debug, Serialize, Deserialize)]
enum Report {
    /// The PID of the second child. Sent by the first.
    Pid(i32),
    /// Setup is complete. The terminal's master comes with it.
    Ready,
    Failed(Failure),
}

/// An error in serialised form.
#[derive(Debug, Serialize, Deserialize)]
enum Failure {
    System(String, i32),
    Invalid(String),
    Unsupported(String),
    CommandNotFound(String),
    CommandNotExecutable(String),
}

impl From<Error> for Failure {
    fn from(e: Error) -> Self {
        match e {
            Error::System { what, source } => {
                Failure::System(what, source.raw_os_error().unwrap_or(libc::EIO))
            }
            Error::Unsupported(t) => Failure::Unsupported(t),
            Error::CommandNotFound(t) => Failure::CommandNotFound(t),
            Error::CommandNotExecutable(t) => Failure::CommandNotExecutable(t),
            other => Failure::Invalid(other.to_string()),
        }
    }
}

impl From<Failure> for Error {
    fn from(f: Failure) -> Self {
        match f {
            Failure::System(what, errno) => Error::System {
                what,
                source: std::io::Error::from_raw_os_error(errno),
            },
            Failure::Invalid(t) => Error::Invalid(t),
            Failure::Unsupported(t) => Error::Unsupported(t),
            Failure::CommandNotFound(t) => Error::CommandNotFound(t),
            Failure::CommandNotExecutable(t) => Error::CommandNotExecutable(t),
        }
    }
}

/// What to launch.
pub struct Launch<'a> {
    pub process: &'a ProcessSpec,
    pub seccomp: Option<&'a seccomp::Filter>,
    /// `cgroup.procs` of the container, open for writing.
    pub cgroup: OwnedFd,
    /// Standard streams of the process, or `None` for a terminal.
    pub stdio: Option<[OwnedFd; 3]>,
    pub place: Place<'a>,
}

/// Where a process is started.
pub enum Place<'a> {
    /// As the first process of a container. It waits for a byte from `go`. `first` is `cgroup.procs` of the cgroup below the container's in
    /// which it begins, if that is another.
    New {
        spec: &'a Spec,
        go: OwnedFd,
        first: Option<OwnedFd>,
    },
    /// Beside the process of this pidfd.
    Beside(OwnedFd),
}

/// A process that is set up.
#[derive(Debug)]
pub struct Launched {
    /// The terminal's master, if it has one.
    pub console: Option<OwnedFd>,
    pub status: Status,
}

/// The socket over which the process reports until it executes its program.
#[derive(Debug)]
pub struct Status(OwnedFd);

impl Status {
    /// Waits until the program is executed, or returns why it was not.
    pub fn wait(self) -> Result<()> {
        match packet::receive::<Report>(&self.0) {
            Err(PacketError::Closed) => Ok(()),
            Ok((Report::Failed(failure), _)) => Err(failure.into()),
            other => Err(Error::State(format!(
                "the starting process pid_reported {other:?}"
            ))),
        }
    }
}

/// Launches. `on_pid` receives the PID as soon as it exists, before the process can end by itself.
pub fn launch(launch: Launch<'_>, on_pid: impl FnOnce(i32)) -> Result<Launched> {
    let (ours, theirs) = socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .with_context(|| "make a socket pair".into())?;
    fork(|| first_child(&launch, &theirs)).with_context(|| "fork".into())?;
    drop((theirs, launch));
    let mut on_pid = Some(on_pid);
    loop {
        match packet::receive::<Report>(&ours) {
            Ok((Report::Pid(pid), _)) => {
                if let Some(on_pid) = on_pid.take() {
                    on_pid(pid);
                }
            }
            Ok((Report::Ready, fds)) => {
                return Ok(Launched {
                    console: fds.into_iter().next(),
                    status: Status(ours),
                });
            }
            Ok((Report::Failed(failure), _)) => return Err(failure.into()),
            Err(PacketError::Closed) => {
                return Err(Error::State("the process was killed while it was set up".into()));
            }
            Err(e) => return Err(Error::State(format!("the process's report is unreadable: {e}"))),
        }
    }
}

fn report(socket: &OwnedFd, report: &Report, fds: &[BorrowedFd<'_>]) {
    // On failure the agent is gone, and with it the guest.
    let _ = packet::send(socket, report, fds);
}

fn first_child(launch: &Launch<'_>, socket: &OwnedFd) {
    fork::reset_signals();
    let mut keep = vec![socket.as_raw_fd(), launch.cgroup.as_raw_fd()];
    keep.extend(launch.stdio.iter().flatten().map(AsRawFd::as_raw_fd));
    match &launch.place {
        Place::New { go, first, .. } => keep.extend([go].into_iter().chain(first).map(AsRawFd::as_raw_fd)),
        Place::Beside(pidfd) => keep.push(pidfd.as_raw_fd()),
    }
    keep.extend(crate::log::descriptor());
    fork::close_all_but(keep);
    match fork_second(launch, socket) {
        Ok((pid, _pid_pending)) => {
            report(socket, &Report::Pid(pid), &[]);
            fork::exit(0)
        }
        Err(e) => {
            report(socket, &Report::Failed(e.into()), &[]);
            fork::exit(1)
        }
    }
}

/// Forks the second child. Returns its PID and a descriptor that this child keeps until it has reported the
/// PID.
fn fork_second(launch: &Launch<'_>, socket: &OwnedFd) -> Result<(i32, Option<OwnedFd>)> {
    let (pid_reported, pid_pending) = pipe_with(PipeFlags::CLOEXEC).with_context(|| "make a pipe".into())?;
    enter_namespaces(launch)?;
    let mut pid_pending = Some(pid_pending);
    let child = || {
        pid_pending = None;
        second_child(launch, socket, &pid_reported);
    };
    let pid = fork(child).with_context(|| "fork into the namespaces".into())?;
    Ok((pid, pid_pending))
}

fn enter_namespaces(launch: &Launch<'_>) -> Result<()> {
    if launch.process.oom_score_adj != 0 {
        let value = launch.process.oom_score_adj.to_string();
        fs::write("/proc/self/oom_score_adj", &value)
            .with_context(|| format!("set oom_score_adj to {value}"))?;
    }
    rustix::io::write(&launch.cgroup, b"0").with_context(|| "join the container's cgroup".into())?;
    match &launch.place {
        Place::New { spec, first, .. } => {
            for path in &spec.join {
                let what = || format!("join namespace {}", path.display());
                let ns = fs::File::open(path).with_context(what)?;
                rustix::thread::move_into_link_name_space(ns.as_fd(), None).with_context(what)?;
            }
            thaw_sys::jail::unshare(spec.unshare)
                .with_context(|| format!("make namespaces {:?}", spec.unshare))?;
            // The cgroup at the time of the unshare is the root of the namespace.
            match first {
                Some(first) => rustix::io::write(first, b"0")
                    .map(drop)
                    .with_context(|| "join the container's first cgroup".into()),
                None => Ok(()),
            }
        }
        Place::Beside(pidfd) => {
            let all = ThreadNameSpaceType::CONTROL_GROUP
                | ThreadNameSpaceType::INTER_PROCESS_COMMUNICATION
                | ThreadNameSpaceType::HOST_NAME_AND_NIS_DOMAIN_NAME
                | ThreadNameSpaceType::NETWORK
                | ThreadNameSpaceType::PROCESS_ID
                | ThreadNameSpaceType::MOUNT;
            rustix::thread::move_into_thread_name_spaces(pidfd.as_fd(), all)
                .with_context(|| "join the container's namespaces".into())
        }
    }
}

/// `pid_reported` reaches its end once the first child has reported the PID or is gone.
fn second_child(launch: &Launch<'_>, socket: &OwnedFd, pid_reported: &OwnedFd) {
    let Err(e) = become_program(launch, socket, pid_reported);
    report_failure(socket, e)
}

/// Reports why the program was not executed, and ends this process as a shell would.
fn report_failure(socket: &OwnedFd, e: Error) -> ! {
    let code = match e {
        Error::CommandNotFound(_) => 127,
        Error::CommandNotExecutable(_) => 126,
        _ => 125,
    };
    report(socket, &Report::Failed(e.into()), &[]);
    fork::exit(code)
}

fn become_program(
    launch: &Launch<'_>,
    socket: &OwnedFd,
    pid_reported: &OwnedFd,
) -> Result<std::convert::Infallible> {
    let process = launch.process;
    rustix::process::setsid().with_context(|| "begin a session".into())?;
    if let Place::New { spec, .. } = &launch.place {
        if spec.unshare.contains(UnshareFlags::NEWUTS) && !spec.hostname.is_empty() {
            rustix::system::sethostname(spec.hostname.as_bytes())
                .with_context(|| "set the container's hostname".into())?;
        }
        if spec.unshare.contains(UnshareFlags::NEWNET) {
            crate::network::loopback_up()?;
        }
        rootfs::prepare(spec)?;
        rootfs::enter(&spec.root)?;
    }
    let console = if launch.stdio.is_none() {
        Some(open_console(process, &launch.place)?)
    } else {
        None
    };
    if let Place::New { spec, .. } = &launch.place {
        rootfs::make_cwd(&process.cwd)?;
        check_exists(process)?;
        rootfs::restrict(spec)?;
    }
    let user = user::look_up(&process.user)?;
    connect_stdio(launch, console.as_ref().map(|(_, slave)| slave), user.uid)?;

    let master = console.as_ref().map(|(master, _)| master.as_fd());
    // The agent identifies the process by its PID, so that must be reported first, whichever child runs first.
    let _end = rustix::io::retry_on_intr(|| rustix::io::read(pid_reported, &mut [0u8]));
    report(socket, &Report::Ready, master.as_slice());
    drop(console);
    if let Place::New { go, .. } = &launch.place {
        let mut byte = [0u8];
        let read = rustix::io::retry_on_intr(|| rustix::io::read(go, &mut byte))
            .with_context(|| "wait for the start".into())?;
        if read == 0 {
            // The container is removed without being started.
            fork::exit(0);
        }
    }

    rlimits::apply(&process.limits)?;
    rustix::process::umask(process.umask);
    // Without no_new_privs, setting a filter needs a capability that is dropped below.
    if let (Some(filter), false) = (launch.seccomp, process.no_new_privileges) {
        seccomp::apply(filter)?;
    }
    capabilities::cut_bounding(&process.capabilities)?;
    rustix::thread::set_keep_capabilities(true).with_context(|| "keep capabilities".into())?;
    fork::change_user(user.uid, user.gid, &user.groups)
        .with_context(|| format!("become user {}:{}", user.uid, user.gid))?;
    rustix::thread::set_keep_capabilities(false).with_context(|| "keep capabilities".into())?;
    capabilities::apply(&process.capabilities)?;
    rustix::process::chdir(&process.cwd)
        .with_context(|| format!("change to working directory {}", process.cwd.display()))?;
    if process.no_new_privileges {
        rustix::thread::set_no_new_privs(true).with_context(|| "set no_new_privs".into())?;
        if let Some(filter) = launch.seccomp {
            seccomp::apply(filter)?;
        }
    }
    fork::close_on_exec();
    if let Place::New { spec, .. } = &launch.place
        && spec.init
    {
        init::supervise(process.terminal, || {
            report_failure(socket, execute(process, &user.home))
        });
    }
    Err(execute(process, &user.home))
}

/// Opens a terminal of the container's own devpts: master and slave.
fn open_console(process: &ProcessSpec, place: &Place<'_>) -> Result<(OwnedFd, OwnedFd)> {
    let what = || "open a terminal in the container (is a devpts mounted at /dev/pts?)".into();
    let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
    let master = rustix::fs::open("/dev/pts/ptmx", flags, Mode::empty()).with_context(what)?;
    unlockpt(&master).with_context(what)?;
    let slave = ioctl_tiocgptpeer(
        &master,
        OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC,
    )
    .with_context(what)?;
    if let Some((rows, columns)) = process.console.filter(|(r, c)| *r != 0 || *c != 0) {
        let size = Winsize {
            ws_row: rows,
            ws_col: columns,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        tcsetwinsize(&master, size).with_context(|| "set the terminal's size".into())?;
    }
    if matches!(place, Place::New { .. }) {
        rootfs::console(&slave)?;
    }
    Ok((master, slave))
}

fn connect_stdio(launch: &Launch<'_>, slave: Option<&OwnedFd>, uid: u32) -> Result<()> {
    if let Some(slave) = slave {
        rustix::process::ioctl_tiocsctty(slave)
            .with_context(|| "make the terminal the controlling one".into())?;
    }
    for number in 0..3 {
        let fd = match (&launch.stdio, slave) {
            (Some(fds), _) => &fds[number],
            (None, Some(slave)) => slave,
            (None, None) => return Err(Error::State("neither streams nor a terminal".into())),
        };
        // A user other than root must be able to open /dev/stdout again.
        let owner = Some(rustix::fs::Uid::from_raw(uid));
        rustix::fs::fchown(fd, owner, None)
            .with_context(|| format!("give standard stream {number} to the user"))?;
        fork::become_stdio(fd.as_fd(), number as i32)
            .with_context(|| format!("connect standard stream {number}"))?;
    }
    Ok(())
}

const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The last value of an environment variable of the process.
fn variable<'a>(process: &'a ProcessSpec, name: &str) -> Option<&'a str> {
    let pairs = process.env.iter().rev().filter_map(|e| e.split_once('='));
    pairs.filter(|(n, _)| *n == name).map(|(_, value)| value).next()
}

/// The paths at which the program is looked for, in order.
fn candidates(process: &ProcessSpec) -> Vec<PathBuf> {
    let command = &process.args[0];
    if command.contains('/') {
        return vec![command.into()];
    }
    let path = variable(process, "PATH").unwrap_or(DEFAULT_PATH);
    let directories = path.split(':').map(|dir| if dir.is_empty() { "." } else { dir });
    directories.map(|dir| Path::new(dir).join(command)).collect()
}

fn not_found(command: &str) -> Error {
    Error::CommandNotFound(match command.contains('/') {
        true => format!("exec {command:?}: no such file or directory"),
        false => format!("exec {command:?}: executable file not found in $PATH"),
    })
}

/// Fails if the program does not exist, so that creating the container reports it rather than starting it.
/// Executing it reports every other problem.
fn check_exists(process: &ProcessSpec) -> Result<()> {
    let is_missing = |candidate: &PathBuf| {
        let found = rustix::fs::stat(process.cwd.join(candidate));
        matches!(found, Err(rustix::io::Errno::NOENT | rustix::io::Errno::NOTDIR))
    };
    match candidates(process).iter().all(is_missing) {
        true => Err(not_found(&process.args[0])),
        false => Ok(()),
    }
}

/// Executes the program. Returns only on failure.
fn execute(process: &ProcessSpec, home: &str) -> Error {
    let mut env = process.env.clone();
    if variable(process, "HOME").is_none_or(str::is_empty) {
        env.retain(|e| !e.starts_with("HOME="));
        env.push(format!("HOME={home}"));
    }
    let command = &process.args[0];
    // The specification was checked for NULs.
    let strings = |list: &[String]| -> Vec<CString> {
        list.iter()
            .filter_map(|s| CString::new(s.as_bytes()).ok())
            .collect()
    };
    let (args, env) = (strings(&process.args), strings(&env));
    let mut seen: Option<std::io::Error> = None;
    for candidate in candidates(process) {
        let Ok(path) = CString::new(candidate.as_os_str().as_bytes()) else {
            continue;
        };
        let e = fork::exec(&path, &args, &env);
        match e.raw_os_error() {
            Some(libc::ENOENT | libc::ENOTDIR) => {}
            _ => seen = Some(seen.unwrap_or(e)),
        }
    }
    match seen {
        Some(e) => Error::CommandNotExecutable(format!("exec {command:?}: {e}")),
        None => not_found(command),
    }
}
