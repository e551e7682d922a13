//! Freezing and thawing over the control socket.

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd};

use thaw_protocol::control::*;

use super::{Connection, PATIENCE, Vmm, readable, spec};

/// The files of a snapshot.
pub struct Snapshot {
    pub state: File,
    /// From the bottom up.
    pub layers: Vec<File>,
}

impl Snapshot {
    /// Freezes a paused machine in full.
    pub fn full(vmm: &Vmm, control: &mut Connection) -> Snapshot {
        let (state, memory) = (empty(), empty());
        freeze(vmm, control, FreezeKind::Full, &state, &memory).unwrap();
        Snapshot {
            state,
            layers: vec![memory],
        }
    }

    /// Freezes a paused machine that was restored from this, and says how many bytes of memory that took.
    pub fn delta(&self, vmm: &Vmm, control: &mut Connection) -> (Snapshot, u64) {
        self.above(FreezeKind::Delta, self.layers.len(), vmm, control)
    }

    /// The same over the lowest of its layers alone.
    pub fn delta_over(&self, layers: u8, vmm: &Vmm, control: &mut Connection) -> (Snapshot, u64) {
        self.above(FreezeKind::DeltaOver { layers }, layers.into(), vmm, control)
    }

    fn above(&self, kind: FreezeKind, kept: usize, vmm: &Vmm, control: &mut Connection) -> (Snapshot, u64) {
        let (state, memory) = (empty(), empty());
        let frozen = freeze(vmm, control, kind, &state, &memory).unwrap();
        let Response::Frozen { memory_bytes } = frozen else {
            panic!("{frozen:?}")
        };
        let below = self.layers[..kept].iter().map(|file| file.try_clone().unwrap());
        let layers = below.chain([memory]).collect();
        (Snapshot { state, layers }, memory_bytes)
    }

    /// Asks a created machine to load this.
    pub fn restore(&self, control: &mut Connection) -> Result<Response, ControlError> {
        self.restore_as(control, MemoryMode::Cow, None)
    }

    pub fn restore_as(
        &self,
        control: &mut Connection,
        mode: MemoryMode,
        working_set: Option<&File>,
    ) -> Result<Response, ControlError> {
        let files = [&self.state].into_iter().chain(&self.layers).chain(working_set);
        let fds: Vec<_> = files.map(|file| file.as_fd()).collect();
        let command = Command::Restore {
            layers: self.layers.len() as u8,
            working_set: working_set.is_some(),
            mode,
        };
        control.request(command, &fds)
    }

    /// A clone of a machine of this shape, parked, with a console and nothing else.
    pub fn parked(&self, machine: MachineSpec) -> (Vmm, Connection, File) {
        let vmm = Vmm::spawn();
        let mut control = vmm.connect();
        control.create(machine).unwrap();
        self.restore(&mut control).unwrap();
        assert_eq!(control.state(), MachineState::Parked);
        let console = control.console();
        (vmm, control, console)
    }

    /// A clone that runs.
    pub fn thawed(&self, machine: MachineSpec) -> (Vmm, Connection, File) {
        let (vmm, mut control, console) = self.parked(machine);
        thaw(&mut control).unwrap();
        (vmm, control, console)
    }

    /// The state file's bytes.
    pub fn state_bytes(&self) -> Vec<u8> {
        contents(&self.state)
    }

    /// This with another state file.
    pub fn with_state(&self, bytes: &[u8]) -> Snapshot {
        Snapshot {
            state: thaw_tiny_guest::memfd(bytes),
            layers: self.layers.iter().map(|file| file.try_clone().unwrap()).collect(),
        }
    }
}

/// Thaws a machine that has a console and nothing else.
pub fn thaw(control: &mut Connection) -> Result<Response, ControlError> {
    thaw_without(control, &DeviceId::ALL[..DeviceId::Console as usize])
}

/// Thaws a machine in which the devices in `empty` have no backend.
pub fn thaw_without(control: &mut Connection, empty: &[DeviceId]) -> Result<Response, ControlError> {
    let empty = empty.to_vec();
    control.request(Command::Thaw { memory_mib: 0, empty }, &[])
}

pub fn freeze(
    vmm: &Vmm,
    control: &mut Connection,
    kind: FreezeKind,
    state: &File,
    memory: &File,
) -> Result<Response, ControlError> {
    let pagemap = vmm.pagemap();
    let fds: [BorrowedFd<'_>; 3] = [state.as_fd(), memory.as_fd(), pagemap.as_fd()];
    control.request(Command::Freeze { kind }, &fds)
}

/// /dev/userfaultfd, unless this host has none for us.
pub fn userfaultfd() -> Option<File> {
    let device = File::options().read(true).write(true).open("/dev/userfaultfd");
    device.ok()
}

/// A new file without a name.
pub fn empty() -> File {
    tempfile::tempfile().unwrap()
}

pub fn contents(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
    std::os::unix::fs::FileExt::read_exact_at(file, &mut bytes, 0).unwrap();
    bytes
}

/// Exactly `count` bytes of the console.
pub fn read_exactly(console: &mut File, count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count];
    let mut filled = 0;
    while filled < count {
        assert!(
            readable(&*console, PATIENCE),
            "the console is silent after {:?}",
            String::from_utf8_lossy(&bytes[..filled])
        );
        let read = console.read(&mut bytes[filled..]).unwrap();
        assert!(read > 0, "the console is closed");
        filled += read;
    }
    bytes
}

/// A machine of `machine` that runs `kernel` and has printed `ready`, and is paused.
pub fn paused_at(machine: MachineSpec, kernel: &File, ready: &str) -> (Vmm, Connection, File) {
    let (vmm, mut control, mut console) = super::started(machine, kernel);
    assert_eq!(read_exactly(&mut console, ready.len()), ready.as_bytes());
    control.request(Command::Pause, &[]).unwrap();
    (vmm, control, console)
}

/// A frozen machine of one vCPU and 64 MiB that runs `kernel` and has printed `ready`.
pub fn frozen_at(kernel: &File, ready: &str) -> Snapshot {
    let (vmm, mut control, _console) = paused_at(spec(1, 64), kernel, ready);
    Snapshot::full(&vmm, &mut control)
}
