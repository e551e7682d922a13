//! A real, jailed thaw-vmm driven over its control socket.

#![allow(dead_code, clippy::unwrap_used)]

pub mod snapshot;

use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use thaw_protocol::control::*;
use thaw_protocol::packet::{self, PacketError};

/// How long anything may take before a test fails: a hang is a failure, not a wait.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// A thaw-vmm process, killed when dropped.
pub struct Vmm {
    pub child: Child,
    address: SocketAddrUnix,
}

static NEXT: AtomicU32 = AtomicU32::new(0);

impl Vmm {
    /// Starts one that listens on an abstract socket of its own.
    pub fn spawn() -> Vmm {
        Self::spawn_binary(env!("CARGO_BIN_EXE_thaw-vmm").as_ref(), None)
    }

    /// As [`Self::spawn`], from another file, as user and group `id`.
    pub fn spawn_binary(binary: &std::path::Path, id: Option<u32>) -> Vmm {
        Self::spawn_as(binary, |command| {
            if let Some(id) = id {
                command.uid(id).gid(id);
            }
        })
    }

    /// As [`Self::spawn`], with all it logs to be read from `child.stderr`.
    pub fn spawn_logging() -> Vmm {
        Self::spawn_as(env!("CARGO_BIN_EXE_thaw-vmm").as_ref(), |command| {
            command.env("THAW_LOG", "info").stderr(Stdio::piped());
        })
    }

    /// As [`Self::spawn_logging`], of one that is to have a whole jail or to end.
    pub fn spawn_whole() -> Vmm {
        Self::spawn_as(env!("CARGO_BIN_EXE_thaw-vmm").as_ref(), |command| {
            command.env(JAIL_VARIABLE, JAIL_WHOLE).stderr(Stdio::piped());
        })
    }

    /// As [`Self::spawn`], of one that may write no file larger than this many bytes.
    pub fn spawn_with_file_limit(most: u64) -> Vmm {
        Self::spawn_as(env!("CARGO_BIN_EXE_thaw-vmm").as_ref(), |command| {
            let limit = libc::rlimit {
                rlim_cur: most,
                rlim_max: most,
            };
            // SAFETY: one system call, on a limit of the closure's own.
            unsafe {
                command.pre_exec(
                    move || match libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) {
                        0 => Ok(()),
                        _ => Err(std::io::Error::last_os_error()),
                    },
                );
            }
        })
    }

    /// As [`Self::spawn`], of one that is to enter the namespaces of descriptors that are not open.
    pub fn spawn_with_promised_namespaces() -> Vmm {
        Self::spawn_as(env!("CARGO_BIN_EXE_thaw-vmm").as_ref(), |command| {
            command.env(NAMESPACES_VARIABLE, "9000");
        })
    }

    /// As [`Self::spawn`], with all it logs appended to `file`.
    pub fn spawn_logging_to(file: File) -> Vmm {
        Self::spawn_as(env!("CARGO_BIN_EXE_thaw-vmm").as_ref(), |command| {
            command.env("THAW_LOG", "info").stderr(file);
        })
    }

    /// As [`Self::spawn_logging`], where no namespace can be made, and no capability is had.
    pub fn spawn_without_namespaces(binary: &std::path::Path, id: u32) -> Vmm {
        use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch};
        let refuse = SeccompAction::Errno(libc::EPERM as u32);
        let rules = [(libc::SYS_unshare, vec![])].into();
        let filter = SeccompFilter::new(rules, SeccompAction::Allow, refuse, TargetArch::x86_64).unwrap();
        let program: BpfProgram = filter.try_into().unwrap();
        Self::spawn_as(binary, |command| {
            command
                .uid(id)
                .gid(id)
                .env("THAW_LOG", "info")
                .stderr(Stdio::piped());
            // SAFETY: two system calls, on a program that was compiled before.
            unsafe {
                command.pre_exec(move || {
                    seccompiler::apply_filter(&program).map_err(|_| std::io::Error::last_os_error())
                });
            }
        })
    }

    fn spawn_as(binary: &std::path::Path, configure: impl FnOnce(&mut std::process::Command)) -> Vmm {
        let name = format!(
            "thaw-vmm-test-{}-{}",
            std::process::id(),
            NEXT.fetch_add(1, Ordering::Relaxed)
        );
        let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
        let listener = socket();
        rustix::net::bind(&listener, &address).unwrap();
        rustix::net::listen(&listener, 8).unwrap();
        let raw = listener.as_raw_fd();
        let mut command = std::process::Command::new(binary);
        command.stdin(Stdio::null()).env("THAW_LOG", "warn");
        configure(&mut command);
        // SAFETY: only dup2, which is async-signal-safe, between fork and exec.
        unsafe {
            command.pre_exec(move || match libc::dup2(raw, CONTROL_FD) {
                -1 => Err(std::io::Error::last_os_error()),
                // dup2 onto itself would leave close-on-exec set.
                fd if fd == raw && libc::fcntl(fd, libc::F_SETFD, 0) == -1 => {
                    Err(std::io::Error::last_os_error())
                }
                _ => Ok(()),
            });
        }
        Vmm {
            child: command.spawn().unwrap(),
            address,
        }
    }

    pub fn connect(&self) -> Connection {
        let socket = socket();
        rustix::net::connect(&socket, &self.address).unwrap();
        Connection::on(socket)
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Which of its pages are there: what a freeze is handed.
    pub fn pagemap(&self) -> File {
        File::open(format!("/proc/{}/pagemap", self.pid())).unwrap()
    }

    /// What `/proc/PID/status` says in `field`.
    pub fn status(&self, field: &str) -> String {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
        line.unwrap_or_else(|| panic!("no {field} in {status}"))
            .trim()
            .to_string()
    }

    /// Waits for the process to end by itself.
    pub fn wait(&mut self) -> i32 {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code().unwrap_or(-1);
            }
            assert!(Instant::now() < deadline, "thaw-vmm does not end");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Vmm {
    fn drop(&mut self) {
        if !std::thread::panicking()
            && let Ok(Some(status)) = self.child.try_wait()
        {
            assert_ne!(
                status.code(),
                Some(FORBIDDEN_CODE),
                "its filters lack a call it makes"
            );
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn socket() -> OwnedFd {
    rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .unwrap()
}

/// A control connection.
pub struct Connection {
    pub socket: OwnedFd,
    next: u32,
    events: VecDeque<Event>,
}

impl Connection {
    /// A connection over a connected socket.
    pub fn on(socket: OwnedFd) -> Connection {
        Connection {
            socket,
            next: 1,
            events: VecDeque::new(),
        }
    }

    pub fn request(&mut self, command: Command, fds: &[BorrowedFd<'_>]) -> Result<Response, ControlError> {
        self.request_for_fds(command, fds).map(|(response, _)| response)
    }

    /// As [`Self::request`]; with the descriptors beside the reply.
    pub fn request_for_fds(
        &mut self,
        command: Command,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(Response, Vec<OwnedFd>), ControlError> {
        let id = self.next;
        self.next += 1;
        packet::send(&self.socket, &Request { id, command }, fds).unwrap();
        loop {
            match self.receive_with_fds().expect("the connection stays open") {
                (FromVmm::Reply { id: answered, result }, fds) => {
                    assert_eq!(answered, id);
                    return result.map(|response| (response, fds));
                }
                (FromVmm::Event(event), _) => self.events.push_back(event),
            }
        }
    }

    pub fn event(&mut self) -> Event {
        if let Some(event) = self.events.pop_front() {
            return event;
        }
        match self.receive().expect("the connection stays open") {
            FromVmm::Event(event) => event,
            reply => panic!("unasked reply {reply:?}"),
        }
    }

    /// Expects the machine to end, and says why it did.
    pub fn exit(&mut self) -> ExitReason {
        loop {
            if let Event::Exited(reason) = self.event() {
                return reason;
            }
        }
    }

    pub fn receive(&self) -> Result<FromVmm, PacketError> {
        self.receive_with_fds().map(|(message, _)| message)
    }

    fn receive_with_fds(&self) -> Result<(FromVmm, Vec<OwnedFd>), PacketError> {
        assert!(readable(&self.socket, PATIENCE), "thaw-vmm says nothing");
        packet::receive::<FromVmm>(&self.socket)
    }

    pub fn create(&mut self, machine: MachineSpec) -> Result<Response, ControlError> {
        let kvm = File::options()
            .read(true)
            .write(true)
            .open("/dev/kvm")
            .expect("this test needs /dev/kvm");
        self.request(
            Command::Create {
                version: CONTROL_VERSION,
                machine,
            },
            &[kvm.as_fd()],
        )
    }

    /// Gives the console a pipe; its other end.
    pub fn console(&mut self) -> File {
        let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        let command = Command::Attach {
            device: DeviceId::Console,
            backend: Backend::Console,
        };
        self.request(command, &[write.as_fd()]).unwrap();
        File::from(read)
    }

    pub fn boot(&mut self, kernel: &File) -> Result<Response, ControlError> {
        self.request(
            Command::Boot {
                cmdline: String::new(),
            },
            &[kernel.as_fd()],
        )
    }

    pub fn state(&mut self) -> MachineState {
        self.status().0
    }

    /// Page faults of a running machine, exactly: of a vCPU that does not get a processor in time, [`Self::status`] has an earlier count.
    pub fn faults_when_stopped(&mut self) -> u64 {
        self.request(Command::Pause, &[]).unwrap();
        let (_, _, faults) = self.status();
        self.request(Command::Resume, &[]).unwrap();
        faults
    }

    /// State, moments of the start, page faults.
    pub fn status(&mut self) -> (MachineState, StartTimes, u64) {
        match self.request(Command::Status, &[]).unwrap() {
            Response::Status { state, times, faults } => (state, times, faults),
            other => panic!("{other:?}"),
        }
    }
}

pub fn spec(vcpus: u8, memory_mib: u32) -> MachineSpec {
    MachineSpec {
        vcpus,
        memory_mib,
        cpu: CpuBaseline::Host,
        tethered: false,
    }
}

pub fn readable(fd: impl AsFd, within: Duration) -> bool {
    let timeout = Timespec {
        tv_sec: within.as_secs() as i64,
        tv_nsec: within.subsec_nanos().into(),
    };
    poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout)).unwrap() == 1
}

/// A machine of `spec` running `kernel`, with its console.
pub fn started(spec: MachineSpec, kernel: &File) -> (Vmm, Connection, File) {
    let vmm = Vmm::spawn();
    let mut control = vmm.connect();
    control.create(spec).unwrap();
    let console = control.console();
    control.boot(kernel).unwrap();
    (vmm, control, console)
}
