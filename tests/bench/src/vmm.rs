//! One thaw-vmm and its control connection, driven as `thawd` does, but blocking: nothing else runs in this process
//! that could delay what is timed.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::net::SocketType;
use thaw_pools::vmm::{self, VmmProcess};
use thaw_protocol::control::{
    Backend, CONTROL_VERSION, Command, CpuBaseline, DeviceId, Event, ExitReason, FromVmm, MachineSpec,
    Request, Response, StartTimes,
};
use thaw_protocol::packet::{Receiver, send};

/// A thaw-vmm, killed when dropped.
pub struct Vmm {
    process: VmmProcess,
    socket: OwnedFd,
    receiver: Receiver,
    next: u32,
    /// Id of the newest request that was answered.
    answered: u32,
}

impl Vmm {
    /// Starts one and connects to it. Its control socket needs a name in `directory` for as long as this takes; `log`
    /// gets what it writes.
    pub fn spawn(directory: &Path, log: &OwnedFd) -> io::Result<Vmm> {
        let program = vmm::find().map_err(io::Error::other)?;
        let path = directory.join("control");
        let listener = vmm::listen(&path, SocketType::SEQPACKET).map_err(io::Error::other)?;
        let socket = vmm::connect(&path, SocketType::SEQPACKET).map_err(io::Error::other)?;
        std::fs::remove_file(&path)?;
        let process = vmm::spawn(&program, &listener, log, vmm::Jail::Whole).map_err(io::Error::other)?;
        Ok(Vmm {
            process,
            socket,
            receiver: Receiver::default(),
            next: 0,
            answered: 0,
        })
    }

    /// Its process id.
    pub fn pid(&self) -> i32 {
        self.process.record().pid
    }

    /// Its pagemap, for a freeze.
    pub fn pagemap(&self) -> io::Result<File> {
        File::open(format!("/proc/{}/pagemap", self.pid()))
    }

    /// Ends it without waiting for its end.
    pub fn kill(&self) {
        self.process.kill();
    }

    /// Asks without waiting for the answer; requests are served in order.
    pub fn ask(&mut self, command: Command, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.next += 1;
        let request = Request {
            id: self.next,
            command,
        };
        send(&self.socket, &request, fds).map_err(io::Error::other)
    }

    /// Waits until everything asked is answered; the last answer.
    ///
    /// # Errors
    /// The first refusal, or the machine's end.
    pub fn settle(&mut self) -> io::Result<Response> {
        let mut last = Response::Done;
        while self.answered < self.next {
            match self.receive()? {
                FromVmm::Reply { id, result } => {
                    self.answered = id;
                    last = result.map_err(io::Error::other)?;
                }
                FromVmm::Event(Event::Exited(reason)) => return Err(ended(reason)),
                FromVmm::Event(Event::Doorbell { .. }) => {}
            }
        }
        Ok(last)
    }

    /// Asks and waits, for an answer that carries descriptors. Nothing else may be unanswered.
    pub fn call_for_descriptors(
        &mut self,
        command: Command,
        fds: &[BorrowedFd<'_>],
    ) -> io::Result<(Response, Vec<OwnedFd>)> {
        self.settle()?;
        self.ask(command, fds)?;
        loop {
            match self.receiver.receive(&self.socket).map_err(io::Error::other)? {
                (FromVmm::Reply { id, result }, fds) => {
                    self.answered = id;
                    return Ok((result.map_err(io::Error::other)?, fds));
                }
                (FromVmm::Event(Event::Exited(reason)), _) => return Err(ended(reason)),
                (FromVmm::Event(Event::Doorbell { .. }), _) => {}
            }
        }
    }

    /// Asks and waits.
    pub fn call(&mut self, command: Command, fds: &[BorrowedFd<'_>]) -> io::Result<Response> {
        self.ask(command, fds)?;
        self.settle()
    }

    /// Asks for a machine of `vcpus` and `memory_mib`.
    pub fn create(&mut self, kvm: &File, vcpus: u8, memory_mib: u32) -> io::Result<()> {
        let machine = MachineSpec {
            vcpus,
            memory_mib,
            cpu: CpuBaseline::Host,
            tethered: true,
        };
        let create = Command::Create {
            version: CONTROL_VERSION,
            machine,
        };
        self.ask(create, &[kvm.as_fd()])
    }

    /// Asks for `device` to get `backend`.
    pub fn attach(
        &mut self,
        device: DeviceId,
        backend: Backend,
        descriptor: BorrowedFd<'_>,
    ) -> io::Result<()> {
        self.ask(Command::Attach { device, backend }, &[descriptor])
    }

    /// When its guest's agent next rings, in CLOCK_MONOTONIC nanoseconds.
    pub fn doorbell(&mut self) -> io::Result<u64> {
        loop {
            match self.receive()? {
                FromVmm::Event(Event::Doorbell { at }) => return Ok(at),
                FromVmm::Event(Event::Exited(reason)) => return Err(ended(reason)),
                FromVmm::Reply { .. } => {}
            }
        }
    }

    /// Waits until its guest has powered off, or reset.
    pub fn wait_for_end(&mut self) -> io::Result<()> {
        loop {
            match self.receive()? {
                FromVmm::Event(Event::Exited(ExitReason::PowerOff | ExitReason::Reset)) => return Ok(()),
                FromVmm::Event(Event::Exited(reason)) => return Err(ended(reason)),
                FromVmm::Event(Event::Doorbell { .. }) | FromVmm::Reply { .. } => {}
            }
        }
    }

    /// The moments of its start, and the page faults of its vCPUs.
    pub fn status(&mut self) -> io::Result<(StartTimes, u64)> {
        match self.call(Command::Status, &[])? {
            Response::Status { times, faults, .. } => Ok((times, faults)),
            other => Err(io::Error::other(format!(
                "a status request was answered {other:?}"
            ))),
        }
    }

    fn receive(&mut self) -> io::Result<FromVmm> {
        let (message, _) = self.receiver.receive(&self.socket).map_err(io::Error::other)?;
        Ok(message)
    }
}

/// What a thaw declares empty where only the devices in `used` have a backend.
pub fn every_device_but(used: &[DeviceId]) -> Vec<DeviceId> {
    let unused = |id: &DeviceId| !used.contains(id);
    DeviceId::ALL.into_iter().filter(unused).collect()
}

fn ended(reason: impl std::fmt::Debug) -> io::Error {
    io::Error::other(format!("the machine ended: {reason:?}"))
}

/// `/dev/kvm`, open.
pub fn open_kvm() -> io::Result<File> {
    let open = File::options().read(true).write(true).open("/dev/kvm");
    open.map_err(|e| io::Error::new(e.kind(), format!("/dev/kvm: {e}")))
}
