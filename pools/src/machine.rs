//! A VMM before anybody's guest runs in it, in each state it can be made ahead in.
//!
//! ```text
//! Process ──create──> Shell ──restore──> Parked
//! ```
//!
//! | state | has | its next step costs |
//! |---|---|---|
//! | [`Process`] | a jailed thaw-vmm and our connection to it | making a VM: all that takes host-wide locks |
//! | [`Shell`] | a VM, vCPUs, every device with an empty backend | mapping a snapshot, setting state |
//! | [`Parked`] | a snapshot in it; nothing has run | backends, then letting it run |
//!
//! [`Vm`] is one of them: whoever claims a VM drives it on from wherever it is. Steps block until the VMM has answered;
//! afterwards [`Vm::into_parts`] gives the connection to whoever drives it from there.
//!
//! Invariant: a VMM without a machine ends when the connection closes, and one with a machine when it is tethered or its
//! [`VmmProcess`] is dropped; so between [`Process::start`] and [`Process::create`] its owner writes down who it is.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::SocketType;
use thaw_protocol::control::{
    Command, ControlError, ErrorCode, Event, ExitReason, FromVmm, MachineSpec, MappedRegion, MemoryMode,
    Request, Response,
};
use thaw_protocol::packet::{self, PacketError, Receiver};
use thaw_protocol::tags::Tagged;
use thaw_protocol::versions::CONTROL;

use crate::resource::Unfit;
use crate::vmm::{self, Jail, VmmProcess};
use thaw_failpoint::{Failpoint, reach};

/// Why a VMM did not take a step.
#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    /// The process could not be started.
    #[error(transparent)]
    Start(#[from] crate::Error),
    /// The VMM refused.
    #[error(transparent)]
    Refused(#[from] ControlError),
    /// It ended instead; its log says why.
    #[error("thaw-vmm ended")]
    Ended,
    /// Its machine ended instead.
    #[error("the machine ended: {0:?}")]
    Exited(ExitReason),
    /// The connection failed.
    #[error("cannot speak with thaw-vmm: {0}")]
    Connection(PacketError),
    /// It answered what was not asked.
    #[error("thaw-vmm answered another question")]
    UnexpectedAnswer,
    /// It did not answer.
    #[error("thaw-vmm has not answered {asked} within {} s", after.as_secs())]
    TimedOut { asked: &'static str, after: Duration },
}

/// How long a VMM may take to make its machine, and to read a snapshot's memory.
const PROMPT: Duration = Duration::from_secs(60);
const BULK: Duration = Duration::from_secs(30 * 60);

/// How a VMM is started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmmOptions {
    /// Its control socket. A tethered VMM's has no name any more once we are connected: nobody else is to connect.
    pub control: PathBuf,
    /// What it writes is appended here.
    pub log: PathBuf,
    /// It ends with the connection.
    pub tethered: bool,
    pub jail: Jail,
}

/// What a snapshot is restored from.
#[derive(Debug)]
pub struct SnapshotFiles {
    pub state: OwnedFd,
    /// The one at the bottom first.
    pub memory: Vec<OwnedFd>,
    pub working_set: Option<OwnedFd>,
}

/// What a restore did.
#[derive(Debug)]
pub struct Restored {
    /// Guest memory in the VMM, for whoever serves its faults.
    pub regions: Vec<MappedRegion>,
    /// With [`MemoryMode::Uffd`].
    pub userfault: Option<OwnedFd>,
    /// Pages mapped in advance, and for how long that took, in nanoseconds.
    pub populated_pages: u64,
    pub populate_ns: u64,
}

/// A spawned VMM without a machine.
#[derive(Debug)]
pub struct Process {
    vmm: Connected,
    tethered: bool,
}

/// A VMM with a machine in which nothing is.
#[derive(Debug)]
pub struct Shell {
    vmm: Connected,
    machine: MachineSpec,
}

/// A VMM with a snapshot loaded and nothing run.
#[derive(Debug)]
pub struct Parked {
    vmm: Connected,
    machine: MachineSpec,
    restored: Restored,
}

/// A VM, as far as it has been made.
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
    /// Starts `program`. We connect before it exists: the socket keeps the connection for it, so however early we are
    /// killed, it finds the connection closed, and ends.
    pub fn start(program: &Path, options: &VmmOptions) -> Result<Process, MachineError> {
        let listener = vmm::listen(&options.control, SocketType::SEQPACKET)?;
        reach(Failpoint::VmmListening);
        let control = vmm::connect(&options.control, SocketType::SEQPACKET)?;
        if options.tethered {
            std::fs::remove_file(&options.control).map_err(crate::Error::io("unlink", &options.control))?;
            reach(Failpoint::VmmUnlisted);
        }
        let log = std::fs::File::options()
            .create(true)
            .read(true)
            .append(true)
            .open(&options.log)
            .map_err(crate::Error::io("open", &options.log))?;
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

    /// Who it is.
    pub fn process(&self) -> &VmmProcess {
        &self.vmm.process
    }

    /// Makes the machine. `machine.tethered` is as the process was started.
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
                Ok((Response::Done, _)) => {
                    return Ok(Shell {
                        vmm: self.vmm,
                        machine,
                    });
                }
                Ok(_) => return Err(MachineError::UnexpectedAnswer),
                // It may be the program of an earlier release, kept for its snapshots.
                Err(MachineError::Refused(e))
                    if e.code == ErrorCode::Invalid && self.vmm.version > CONTROL.oldest =>
                {
                    self.vmm.version -= 1;
                }
                Err(e) => return Err(e),
            }
        }
    }
}

impl Shell {
    /// What it is.
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
    /// The request that loads it, and the descriptors beside it, in order.
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
                MemoryMode::Uffd => 0,
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
    /// What it is.
    pub fn machine(&self) -> &MachineSpec {
        &self.machine
    }

    /// What was restored, and how.
    pub fn restored(&self) -> &Restored {
        &self.restored
    }
}

impl Vm {
    /// Its state, for traces.
    pub fn state(&self) -> &'static str {
        match self {
            Vm::Process(_) => "process",
            Vm::Shell(_) => "shell",
            Vm::Parked(_) => "parked",
        }
    }

    /// Who it is.
    pub fn process(&self) -> &VmmProcess {
        &self.vmm().process
    }

    /// Version of the control protocol its VMM speaks: that of this release, until it has a machine.
    pub fn control_version(&self) -> u32 {
        self.vmm().version
    }

    /// The process and our end of its control socket, on which no answer is outstanding; what the restore said, if it
    /// is parked.
    pub fn into_parts(self) -> (VmmProcess, OwnedFd, Option<Restored>) {
        match self {
            Vm::Process(Process { vmm, .. }) | Vm::Shell(Shell { vmm, .. }) => {
                (vmm.process, vmm.control, None)
            }
            Vm::Parked(Parked { vmm, restored, .. }) => (vmm.process, vmm.control, Some(restored)),
        }
    }

    /// Whether its process lives and listens.
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
            // In none of these states does a VMM speak unasked, but to say that it ends.
            Ok(_) => Err(Unfit("thaw-vmm says that it ends".into())),
            Err(e) => Err(Unfit(format!("cannot look at thaw-vmm: {e}"))),
        }
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
    /// Asks and waits for the answer. What else is said before it can only be that the machine has ended: no guest has run.
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
        let (asked, after) = match &command {
            Command::Restore { .. } => (command.variant(), BULK),
            _ => (command.variant(), PROMPT),
        };
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
            (FromVmm::Reply { id, result }, fds) if id == self.last => Ok((result?, fds)),
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
#[path = "machine_test.rs"]
mod tests;
