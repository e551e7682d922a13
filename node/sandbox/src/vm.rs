//! A VMM without a running guest, in each state that it can be made ahead in.
//!
//! ```text
//! Process ──create──> Shell ──restore──> Parked
//! ```
//!
//! | state | has | cost of its next step |
//! |---|---|---|
//! | [`Process`] | a jailed thaw-vmm and our connection to it | creating a VM, which takes all host-wide locks |
//! | [`Shell`] | a VM, vCPUs, every device with an empty backend | mapping a snapshot, setting state |
//! | [`Parked`] | a snapshot loaded; nothing has run | attaching backends, running |
//!
//! [`Vm`] is any of them: a caller continues from whatever state its VM is in. Steps block until the VMM has answered. After the last step,
//! [`Vm::into_parts`] returns the process and the connection.
//!
//! Invariant: a VMM without a machine ends when the connection closes. A tethered VMM with a machine does too; an untethered one ends when
//! its [`VmmProcess`] is dropped. So the owner must record the process between [`Process::start`] and [`Process::create`].

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::SocketType;
use thaw_protocol::control::{
    Command, ControlError, Event, ExitReason, FromVmm, MachineSpec, MappedRegion, MemoryMode, Request,
    Response,
};
use thaw_protocol::packet::{self, PacketError, Receiver};
use thaw_protocol::tags::Tagged;
use thaw_protocol::versions::CONTROL;

use thaw_failpoint::{Failpoint, reach};
use thaw_pools::resource::Unfit;
use thaw_pools::vmm::{self, Jail, VmmProcess};

/// Why a step failed.
#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    /// The process could not be started.
    #[error(transparent)]
    Start(#[from] thaw_pools::Error),
    /// The VMM refused.
    #[error(transparent)]
    Refused(#[from] ControlError),
    /// The VMM ended; its log has the reason.
    #[error("thaw-vmm ended")]
    Ended,
    /// The machine ended.
    #[error("the machine ended: {0:?}")]
    Exited(ExitReason),
    /// The connection failed.
    #[error("cannot speak with thaw-vmm: {0}")]
    Connection(PacketError),
    /// The VMM's reply is of another kind, or to another request.
    #[error("thaw-vmm answered another question")]
    UnexpectedAnswer,
    /// The VMM did not answer in time.
    #[error("thaw-vmm has not answered {asked} within {} s", after.as_secs())]
    TimedOut { asked: &'static str, after: Duration },
}

/// How a VMM is started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmmOptions {
    /// Path of its control socket. The path of a tethered VMM is unlinked once we are connected, so that no other process can connect.
    pub control: PathBuf,
    /// Path of the file that its output is appended to.
    pub log: PathBuf,
    /// Whether the VMM ends when the connection closes.
    pub tethered: bool,
    pub jail: Jail,
}

/// The files that a snapshot is restored from.
#[derive(Debug)]
pub struct SnapshotFiles {
    pub state: OwnedFd,
    /// Layers of memory, lowest first.
    pub memory: Vec<OwnedFd>,
    pub working_set: Option<OwnedFd>,
}

/// The result of a restore.
#[derive(Debug)]
pub struct Restored {
    /// Guest memory as mapped in the VMM, for the server of its page faults.
    pub regions: Vec<MappedRegion>,
    /// The userfaultfd, with [`MemoryMode::Uffd`].
    pub userfault: Option<OwnedFd>,
    /// Number of pages mapped in advance, and the nanoseconds that took.
    pub populated_pages: u64,
    pub populate_ns: u64,
}

/// A spawned VMM without a machine.
#[derive(Debug)]
pub struct Process {
    vmm: Connected,
    tethered: bool,
}

/// A VMM with a machine into which no snapshot has been loaded.
#[derive(Debug)]
pub struct Shell {
    vmm: Connected,
    machine: MachineSpec,
}

/// A VMM with a loaded snapshot, whose guest has not run yet.
#[derive(Debug)]
pub struct Parked {
    vmm: Connected,
    machine: MachineSpec,
    restored: Restored,
}

/// A VM in any of these states.
#[derive(Debug)]
pub enum Vm {
    Process(Process),
    Shell(Shell),
    Parked(Parked),
}

/// A process and our end of its control socket.
#[derive(Debug)]
struct Connected {
    process: VmmProcess,
    control: OwnedFd,
    /// Number of the last request.
    last: u32,
    /// Version of the control protocol it speaks.
    version: u32,
}

impl Process {
    /// Starts `program`. We connect before the process exists, and the listening socket keeps the connection for it. So if this process is
    /// killed, however early, the VMM finds the connection closed and ends.
    pub fn start(program: &Path, options: &VmmOptions) -> Result<Process, MachineError> {
        let listener = vmm::listen(&options.control, SocketType::SEQPACKET)?;
        reach(Failpoint::VmmListening);
        let control = vmm::connect(&options.control, SocketType::SEQPACKET)?;
        if options.tethered {
            std::fs::remove_file(&options.control)
                .map_err(thaw_pools::Error::io("unlink", &options.control))?;
            reach(Failpoint::VmmUnlisted);
        }
        let log = std::fs::File::options()
            .create(true)
            .read(true)
            .append(true)
            .open(&options.log)
            .map_err(thaw_pools::Error::io("open", &options.log))?;
        reach(Failpoint::VmmLogMade);
        let process = vmm::spawn(program, &listener, &log.into(), options.jail)?;
        reach(Failpoint::VmmSpawned);
        Ok(Process {
            vmm: Connected {
                process,
                control,
                last: 0,
                version: CONTROL.current,
            },
            tethered: options.tethered,
        })
    }

    /// The VMM's process.
    pub fn process(&self) -> &VmmProcess {
        &self.vmm.process
    }

    /// Creates the machine. [`Process::start`] decided whether it is tethered; `machine` does not change that.
    pub fn create(mut self, kvm: BorrowedFd<'_>, machine: MachineSpec) -> Result<Shell, MachineError> {
        let machine = MachineSpec {
            tethered: self.tethered,
            ..machine
        };
        loop {
            let create = Command::Create {
                version: self.vmm.version,
                machine: machine.clone(),
            };
            match self.vmm.call(create, &[kvm]) {
                Ok(_) => {
                    return Ok(Shell {
                        vmm: self.vmm,
                        machine,
                    });
                }
                Err(MachineError::Refused(e)) => match e.older_version(self.vmm.version) {
                    Some(older) => self.vmm.version = older,
                    None => return Err(e.into()),
                },
                Err(e) => return Err(e),
            }
        }
    }
}

impl Shell {
    /// The machine's specification.
    pub fn machine(&self) -> &MachineSpec {
        &self.machine
    }

    /// Loads a snapshot. With [`MemoryMode::Uffd`], `userfaultfd` is /dev/userfaultfd and the memory files are not sent.
    pub fn restore(
        mut self,
        snapshot: &SnapshotFiles,
        mode: MemoryMode,
        userfaultfd: Option<BorrowedFd<'_>>,
    ) -> Result<Parked, MachineError> {
        let (command, fds) = snapshot.restore(mode, userfaultfd);
        let (response, fds) = self.vmm.call(command, &fds)?;
        let Response::Restored {
            regions,
            populated_pages,
            populate_ns,
        } = response
        else {
            return Err(MachineError::UnexpectedAnswer);
        };
        Ok(Parked {
            vmm: self.vmm,
            machine: self.machine,
            restored: Restored {
                regions,
                userfault: fds.into_iter().next(),
                populated_pages,
                populate_ns,
            },
        })
    }
}

impl SnapshotFiles {
    /// The request that loads the snapshot, and the descriptors sent beside it, in order.
    pub fn restore<'a>(
        &'a self,
        mode: MemoryMode,
        userfaultfd: Option<BorrowedFd<'a>>,
    ) -> (Command, Vec<BorrowedFd<'a>>) {
        let layers: Vec<BorrowedFd<'_>> = match mode {
            MemoryMode::Uffd => userfaultfd.into_iter().collect(),
            MemoryMode::Cow | MemoryMode::Populate => self.memory.iter().map(|m| m.as_fd()).collect(),
        };
        let command = Command::Restore {
            layers: match mode {
                // No memory file is sent, and only a snapshot of one layer is served.
                MemoryMode::Uffd => 1,
                // A packet carries at most 253 descriptors, and a snapshot has far fewer layers.
                _ => u8::try_from(layers.len()).unwrap_or(u8::MAX),
            },
            working_set: self.working_set.is_some(),
            mode,
        };
        let working_set = self.working_set.iter().map(|w| w.as_fd());
        let fds = std::iter::once(self.state.as_fd())
            .chain(layers)
            .chain(working_set);
        (command, fds.collect())
    }
}

impl Parked {
    /// The machine's specification.
    pub fn machine(&self) -> &MachineSpec {
        &self.machine
    }

    /// The result of the restore.
    pub fn restored(&self) -> &Restored {
        &self.restored
    }
}

impl Vm {
    /// The name of its state, for traces.
    pub fn state(&self) -> &'static str {
        match self {
            Vm::Process(_) => "process",
            Vm::Shell(_) => "shell",
            Vm::Parked(_) => "parked",
        }
    }

    /// The VMM's process.
    pub fn process(&self) -> &VmmProcess {
        &self.vmm().process
    }

    /// Version of the control protocol that its VMM speaks. Before the VMM has a machine: this release's version.
    pub fn control_version(&self) -> u32 {
        self.vmm().version
    }

    /// The process, our end of its control socket, on which no reply is outstanding, and the result of the restore if it is parked.
    pub fn into_parts(self) -> (VmmProcess, OwnedFd, Option<Restored>) {
        match self {
            Vm::Process(Process { vmm, .. }) | Vm::Shell(Shell { vmm, .. }) => {
                (vmm.process, vmm.control, None)
            }
            Vm::Parked(Parked { vmm, restored, .. }) => (vmm.process, vmm.control, Some(restored)),
        }
    }

    /// Whether its process is alive and waits for a request.
    pub fn check(&self) -> Result<(), Unfit> {
        let vmm = self.vmm();
        let mut ready = [
            PollFd::from_borrowed_fd(vmm.process.pidfd(), PollFlags::IN),
            PollFd::new(&vmm.control, PollFlags::IN),
        ];
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let polled = rustix::io::retry_on_intr(|| poll(&mut ready, Some(&now)));
        match polled {
            Ok(0) => Ok(()),
            Ok(_) if !ready[0].revents().is_empty() => Err(Unfit("thaw-vmm has ended".into())),
            // In these states the only unrequested message of a VMM is that it ends.
            Ok(_) => Err(Unfit("thaw-vmm says that it ends".into())),
            Err(e) => Err(Unfit(format!("cannot look at thaw-vmm: {e}"))),
        }
    }

    /// Attaches a backend. Blocks until the VMM has answered.
    pub fn attach(&mut self, command: Command, fds: &[BorrowedFd<'_>]) -> Result<(), MachineError> {
        let (Vm::Process(Process { vmm, .. })
        | Vm::Shell(Shell { vmm, .. })
        | Vm::Parked(Parked { vmm, .. })) = self;
        vmm.call(command, fds).map(drop)
    }

    fn vmm(&self) -> &Connected {
        match self {
            Vm::Process(Process { vmm, .. })
            | Vm::Shell(Shell { vmm, .. })
            | Vm::Parked(Parked { vmm, .. }) => vmm,
        }
    }
}

impl Connected {
    /// Sends a request and waits for the reply. No guest has run, so the only event that may come first is the machine's end.
    fn call(
        &mut self,
        command: Command,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(Response, Vec<OwnedFd>), MachineError> {
        let failed = |e: PacketError| match e {
            PacketError::Closed => MachineError::Ended,
            PacketError::Io(e) if is_hangup(&e) => MachineError::Ended,
            e => MachineError::Connection(e),
        };
        let (asked, after) = (command.variant(), command.time_limit());
        let is_answer = command.is_answered_by();
        self.last += 1;
        let request = Request {
            id: self.last,
            command,
        };
        packet::send(&self.control, &request, fds).map_err(failed)?;
        if !is_readable_within(&self.control, after).map_err(|e| failed(e.into()))? {
            return Err(MachineError::TimedOut { asked, after });
        }
        // A userfaultfd comes beside the answer to a restore.
        let received = Receiver::for_descriptors(1).receive::<FromVmm>(&self.control);
        match received.map_err(failed)? {
            (FromVmm::Reply { id, result }, fds) if id == self.last => match result? {
                response if is_answer(&response) => Ok((response, fds)),
                _ => Err(MachineError::UnexpectedAnswer),
            },
            (FromVmm::Event(Event::Exited(reason)), _) => Err(MachineError::Exited(reason)),
            (FromVmm::Reply { .. } | FromVmm::Event(Event::Doorbell { .. }), _) => {
                Err(MachineError::UnexpectedAnswer)
            }
        }
    }
}

fn is_readable_within(socket: &OwnedFd, limit: Duration) -> rustix::io::Result<bool> {
    let until = Instant::now() + limit;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).map_err(|_| Errno::INVAL)?;
        match poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&left)) {
            Err(Errno::INTR) => {}
            ready => return ready.map(|count| count > 0),
        }
    }
}

fn is_hangup(error: &std::io::Error) -> bool {
    matches!(
        error.kind(),
        std::io::ErrorKind::BrokenPipe | std::io::ErrorKind::ConnectionReset
    )
}

#[cfg(test)]
#[path = "vm_test.rs"]
mod tests;
