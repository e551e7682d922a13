//! A `thaw-vmm` process.
//!
//! It gets exactly four descriptors: nothing on stdin, a log on stdout and stderr, and its listening control socket as [`CONTROL_FD`]. Its
//! environment is empty but for `THAW_LOG` and whether its jail must be whole. It leads its own session, so the terminal's Ctrl-C does not
//! reach it. If the host grants it, it is the first process of a PID namespace; its recorded pid is the one we see. Unless it is
//! [released](VmmProcess::release), it is killed when its owner drops it. [`crate::share`] starts its process the same way.

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
use thaw_protocol::control::{CONTROL_FD, JAIL_VARIABLE, JAIL_WHOLE};
use thaw_protocol::disk_layer;

use crate::Error;
use crate::priority;
use crate::process::{self, ProcessRecord};
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

/// Starts `program` with `socket` as its descriptor 3 and `log` as its stdout and stderr.
pub fn spawn(program: &Path, socket: &OwnedFd, log: &OwnedFd, jail: Jail) -> Result<VmmProcess, Error> {
    let fail = Error::io("start", program);
    let level = std::env::var_os("THAW_LOG").map(|level| [b"THAW_LOG=", level.as_bytes()].concat());
    let jail = match jail {
        Jail::Whole => Some(format!("{JAIL_VARIABLE}={JAIL_WHOLE}").into_bytes()),
        Jail::AsHostAllows => None,
    };
    let started = || {
        let null = File::open("/dev/null")?;
        let descriptors: [_; CONTROL_FD as usize + 1] =
            [null.as_fd(), log.as_fd(), log.as_fd(), socket.as_fd()];
        spawn::spawn(&Program {
            path: &CString::new(program.as_os_str().as_bytes())?,
            environment: &level
                .into_iter()
                .chain(jail)
                .map(CString::new)
                .collect::<Result<Vec<_>, _>>()?,
            descriptors: &descriptors,
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
mod tests {
    use super::*;
    use std::fs;
    use std::io::{Read, Seek};
    use std::os::unix::process::CommandExt;

    fn log() -> OwnedFd {
        rustix::fs::memfd_create("log", rustix::fs::MemfdFlags::CLOEXEC).unwrap()
    }

    fn script(directory: &Path, text: &str) -> PathBuf {
        use std::os::unix::fs::PermissionsExt;
        let path = directory.join("fake-vmm");
        fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    #[test]
    fn vmm_inherits_its_socket_and_no_other_descriptor() {
        let directory = tempfile::tempdir().unwrap();
        let program = script(directory.path(), "ls -l /proc/self/fd; env; echo pid $$");
        let listener = listen(&directory.path().join("s"), SocketType::SEQPACKET).unwrap();
        // A descriptor that a careless spawn would inherit.
        let stray = rustix::fs::memfd_create("stray", rustix::fs::MemfdFlags::empty()).unwrap();
        let log = log();
        let mut vmm = spawn(&program, &listener, &log, Jail::Whole).unwrap();
        assert!(vmm.wait().unwrap().unwrap().success());
        drop(stray);
        let mut text = String::new();
        let mut file = fs::File::from(log);
        file.rewind().unwrap();
        file.read_to_string(&mut text).unwrap();
        assert!(text.contains(" 3 -> socket:"), "{text}");
        assert!(text.contains(" 0 -> /dev/null"), "{text}");
        assert!(!text.contains("stray"), "{text}");
        assert!(!text.contains("HOME="), "{text}");
        assert!(text.contains("THAW_JAIL=whole"), "{text}");
        assert!(text.contains("pid 1\n"), "not in a PID namespace: {text}");
    }

    #[test]
    fn vmm_dies_with_its_owner_unless_released() {
        let directory = tempfile::tempdir().unwrap();
        let program = script(directory.path(), "exec sleep 60");
        let listener = listen(&directory.path().join("s"), SocketType::SEQPACKET).unwrap();
        let vmm = spawn(&program, &listener, &log(), Jail::AsHostAllows).unwrap();
        let record = vmm.record();
        assert!(record.lives());
        let score = fs::read_to_string(format!("/proc/{}/oom_score_adj", record.pid)).unwrap();
        assert!(score.trim().parse::<i32>().unwrap() >= OOM_SCORE, "{score}");
        let files = || {
            let limits = fs::read_to_string(format!("/proc/{}/limits", record.pid)).unwrap();
            let files = limits
                .lines()
                .find_map(|l| l.strip_prefix("Max file size"))
                .unwrap();
            let mut words = files
                .split_whitespace()
                .map(|word| word.parse::<u64>().unwrap_or(0));
            (words.next().unwrap(), words.next().unwrap())
        };
        assert_eq!(files(), (LARGEST_FILE, LARGEST_FILE));
        vmm.limit_files(5 << 20).unwrap();
        assert_eq!(files(), (5 << 20, 5 << 20));
        drop(vmm);
        assert!(!record.lives());

        let mut vmm = spawn(&program, &listener, &log(), Jail::AsHostAllows).unwrap();
        vmm.release();
        let record = vmm.record();
        drop(vmm);
        assert!(record.lives());

        let adopted = VmmProcess::adopt(record).unwrap();
        drop(adopted);
        assert!(!record.lives());
        assert!(VmmProcess::adopt(record).is_none());
    }

    #[test]
    fn ended_is_reported_before_it_is_reaped() {
        let directory = tempfile::tempdir().unwrap();
        let listener = listen(&directory.path().join("s"), SocketType::SEQPACKET).unwrap();
        let ended = |vmm: &VmmProcess| {
            process::await_end(&vmm.pidfd, process::END_LIMIT);
            (vmm.ended(), vmm.ended())
        };
        let program = script(directory.path(), "exit 7");
        let mut vmm = spawn(&program, &listener, &log(), Jail::AsHostAllows).unwrap();
        assert_eq!(ended(&vmm), (Some(Ended::Code(7)), Some(Ended::Code(7))));
        assert_eq!(
            vmm.wait().unwrap().unwrap().code(),
            Some(7),
            "it is still to be reaped"
        );
        assert_eq!(vmm.ended(), keeps_status().then_some(Ended::Code(7)));

        let program = script(directory.path(), "exec sleep 60");
        let vmm = spawn(&program, &listener, &log(), Jail::AsHostAllows).unwrap();
        assert_eq!(vmm.ended(), None, "it lives");
        vmm.kill();
        assert_eq!(ended(&vmm).0, Some(Ended::Signal(9)));
    }

    /// Whether a pidfd of this kernel keeps the status of a process that was reaped.
    fn keeps_status() -> bool {
        let release = rustix::system::uname().release().to_string_lossy().into_owned();
        let mut numbers = release.split(['.', '-']).map(|n| n.parse::<u32>().unwrap_or(0));
        (numbers.next(), numbers.next()) >= (Some(6), Some(15))
    }

    #[test]
    fn adopted_process_reports_how_it_ended() {
        let directory = tempfile::tempdir().unwrap();
        let listener = listen(&directory.path().join("s"), SocketType::SEQPACKET).unwrap();
        for (text, kills, end) in [
            ("exec sleep 60", true, Ended::Signal(9)),
            ("read line < fifo; exit 7", false, Ended::Code(7)),
        ] {
            let fifo = directory.path().join("fifo");
            let _ = fs::remove_file(&fifo);
            rustix::fs::mknodat(
                rustix::fs::CWD,
                &fifo,
                rustix::fs::FileType::Fifo,
                rustix::fs::Mode::from_raw_mode(0o600),
                0,
            )
            .unwrap();
            let program = script(directory.path(), &text.replace("fifo", fifo.to_str().unwrap()));
            let mut vmm = spawn(&program, &listener, &log(), Jail::AsHostAllows).unwrap();
            let mut adopted = VmmProcess::adopt(vmm.record()).unwrap();
            adopted.release();
            assert_eq!(adopted.ended(), None, "it lives");
            match kills {
                true => adopted.kill(),
                false => fs::write(&fifo, "x\n").unwrap(),
            }
            process::await_end(&adopted.pidfd, process::END_LIMIT);
            assert_eq!(adopted.ended(), Some(end), "before its parent reaps it");
            vmm.wait().unwrap();
            assert_eq!(adopted.ended(), keeps_status().then_some(end), "after that");
        }
    }

    #[test]
    fn sockets_work_at_paths_longer_than_an_address() {
        let directory = tempfile::tempdir().unwrap();
        let deep = directory.path().join("d".repeat(120));
        fs::create_dir(&deep).unwrap();
        let path = deep.join("control.sock");
        let listener = listen(&path, SocketType::SEQPACKET).unwrap();
        let ours = connect(&path, SocketType::SEQPACKET).unwrap();
        let theirs = rustix::net::accept(&listener).unwrap();
        thaw_protocol::packet::send(&ours, &5u32, &[]).unwrap();
        assert_eq!(thaw_protocol::packet::receive::<u32>(&theirs).unwrap().0, 5);
    }

    #[test]
    fn socket_is_served_while_its_listener_lives() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        assert!(!is_served(&path));
        let listener = listen(&path, SocketType::STREAM).unwrap();
        assert!(is_served(&path));
        drop(listener);
        assert!(!is_served(&path));
        // A process that listens and is killed while its child has the socket.
        let script = "import os, socket, sys, time\ns = socket.socket(socket.AF_UNIX)\ns.bind(sys.argv[1])\ns.listen()\n\
                      if os.fork() == 0:\n    print('ready', flush=True)\ntime.sleep(60)";
        let mut server = std::process::Command::new("python3")
            .args(["-c", script])
            .arg(directory.path().join("t"))
            .stdout(std::process::Stdio::piped())
            .process_group(0)
            .spawn()
            .unwrap();
        server.stdout.take().unwrap().read_exact(&mut [0; 6]).unwrap();
        let path = directory.path().join("t");
        assert!(is_served(&path));
        server.kill().unwrap();
        server.wait().unwrap();
        assert!(connect(&path, SocketType::STREAM).is_ok() && !is_served(&path));
        rustix::process::kill_process_group(Pid::from_child(&server), Signal::KILL).unwrap();
    }

    #[test]
    fn missing_vmm_binary_is_named() {
        let missing = Error::VmmMissing {
            looked: "/nowhere/thaw-vmm".into(),
        };
        assert!(missing.to_string().contains("/nowhere/thaw-vmm"));
        let directory = tempfile::tempdir().unwrap();
        let listener = listen(&directory.path().join("s"), SocketType::SEQPACKET).unwrap();
        let error = spawn(Path::new("/nowhere/thaw-vmm"), &listener, &log(), Jail::Whole).unwrap_err();
        assert!(error.to_string().contains("/nowhere/thaw-vmm"), "{error}");
    }
}
