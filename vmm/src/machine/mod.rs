//! The machine's life, as states that own what each of them needs.
//!
//! ```text
//! NoMachine ── create ──> Created ── boot ──────────────────────> Running <── pause/resume ──> Paused ── freeze ──> Paused
//!                            └── restore ──> Parked ── thaw ────────^ │                          │
//!                                                                     └──────── guest ends ──────┴──> Exited
//! ```
//!
//! | module | contents |
//! |---|---|
//! | [`create`] | everything KVM must know of, made before a sandbox needs it |
//! | [`boot`] | a cold boot |
//! | [`restore`] | loads a snapshot into a created machine: the slow part of a thaw |
//! | [`freeze`] | writes a paused machine to files |
//! | [`live`] | writes a machine to files while it runs |
//! | [`refusal`] | the error code of each refused request |
//!
//! Invariant: a refused request leaves the machine as it was. If a system call fails half-way through a boot or a restore,
//! after the vCPUs were given to their threads, the machine has ended and reports so.

mod boot;
mod create;
mod freeze;
mod live;
mod refusal;
mod restore;

use std::os::fd::OwnedFd;
use std::sync::Arc;

use thaw_hypervisor::{ClockState, CpuId, GuestTime, InterruptState, VcpuState, Vm};
use thaw_protocol::control::{
    Backend, ControlError, DeviceId, ErrorCode, Event, ExitReason, FreezeKind, ImageSpec, MachineSpec,
    MachineState, MemoryMode, StartTimes,
};
use thaw_protocol::device_limits::DeviceLimits;

use crate::bus::Bus;
use crate::clock::monotonic_ns;
use crate::events::EventSink;
use crate::memory::GuestMemory;
use crate::multihit::Multihit;
use crate::snapshot::MemoryMap;
use crate::snapshot::protection::Protector;
use crate::snapshot::uffd::Watch;
use crate::vcpu::VcpuThreads;
use crate::vmgenid;
use refusal::{attach_error, invalid, kvm_error, refused};
pub use restore::Restored;

/// One microVM and the state it is in.
pub struct Machine {
    /// A freeze that the guest runs through. Before `state`: dropped first, because the machine's threads serve it.
    freezing: Option<live::Freezing>,
    state: State,
    events: EventSink,
    times: StartTimes,
    multihit: Multihit,
}

enum State {
    NoMachine,
    Created(Created),
    Parked(Parked),
    Running(Started),
    Paused(Started),
}

/// Everything that a machine has from its creation to its end.
struct Body {
    vm: Arc<Vm>,
    bus: Arc<Bus>,
    /// Boot memory.
    memory: GuestMemory,
    spec: MachineSpec,
    /// The CPU features that this host's KVM supports.
    supported: CpuId,
    protector: Protector,
}

/// Created, not started. The vCPU threads wait.
struct Created {
    body: Body,
    vcpus: VcpuThreads,
}

/// A snapshot is loaded. The vCPU threads wait.
struct Parked {
    body: Body,
    vcpus: VcpuThreads,
    base: Base,
    /// The frozen vCPU states: guest time continues from theirs.
    frozen: Arc<Vec<VcpuState>>,
    interrupts: Box<InterruptState>,
    clock: ClockState,
}

/// Started.
struct Started {
    body: Body,
    vcpus: VcpuThreads,
    /// `None` after a cold boot.
    base: Option<Base>,
}

/// The source of a restored machine's memory.
struct Base {
    map: MemoryMap,
    /// Keeps the userfaultfd open as long as the machine.
    watch: Option<Watch>,
}

type Outcome<T> = Result<T, ControlError>;

impl Machine {
    /// A process without a machine. `times` has the moments measured so far; `multihit`: whether the processor has the iTLB multihit
    /// erratum.
    pub fn new(events: EventSink, times: StartTimes, multihit: Multihit) -> Machine {
        Machine {
            state: State::NoMachine,
            events,
            times,
            multihit,
            freezing: None,
        }
    }

    /// Makes the machine, every device with an empty backend. `fds`: /dev/kvm.
    pub fn create(&mut self, version: u32, spec: &MachineSpec, fds: Vec<OwnedFd>) -> Outcome<()> {
        if !matches!(self.state, State::NoMachine) {
            return Err(self.wrong_state("create"));
        }
        self.state = State::Created(create::create(version, spec, fds, &self.events, self.multihit)?);
        self.times.created = monotonic_ns();
        Ok(())
    }

    /// Gives a device its backend.
    pub fn attach(&mut self, device: DeviceId, backend: Backend, fds: Vec<OwnedFd>) -> Outcome<()> {
        self.bus("attach a backend")?
            .attach(device, backend, fds)
            .map_err(attach_error)
    }

    /// Removes a started machine's disk.
    pub fn detach(&mut self, device: DeviceId) -> Outcome<()> {
        let what = "detach a disk";
        self.refuse_exited(what)?;
        let started = self.started().ok_or_else(|| self.wrong_state(what))?;
        started.body.bus.inventory.detach(device).map_err(attach_error)
    }

    /// Sets a device's rate limits.
    pub fn limit(&mut self, device: DeviceId, limits: DeviceLimits) -> Outcome<()> {
        self.bus("limit a device")?
            .inventory
            .limit(device, limits)
            .map_err(attach_error)
    }

    /// Adds an image in a slot of the root device.
    pub fn add_image(&mut self, slot: u16, image: ImageSpec, fds: Vec<OwnedFd>) -> Outcome<()> {
        self.bus("add an image")?
            .inventory
            .add_image(slot, image, fds)
            .map_err(attach_error)
    }

    /// Removes an image.
    pub fn remove_image(&mut self, slot: u16) -> Outcome<()> {
        self.bus("remove an image")?
            .inventory
            .remove_image(slot)
            .map_err(attach_error)
    }

    /// Cold boot. `fds`: the kernel.
    pub fn boot(&mut self, cmdline: &str, fds: Vec<OwnedFd>) -> Outcome<()> {
        let State::Created(created) = &self.state else {
            return Err(self.wrong_state("boot"));
        };
        boot::prepare(created, cmdline, fds)?;
        self.state = State::Running(boot::start(self.take_created()));
        Ok(())
    }

    /// Loads a snapshot. Only [`Self::thaw`] is needed afterwards. `fds` are as `Command::Restore` describes.
    pub fn restore(
        &mut self,
        layers: u8,
        working_set: bool,
        mode: MemoryMode,
        fds: Vec<OwnedFd>,
    ) -> Outcome<Restored> {
        let State::Created(created) = &self.state else {
            return Err(self.wrong_state("restore"));
        };
        let files = restore::Files::sort(layers, working_set, mode, fds)?;
        let plan = restore::Plan::check(created, files)?;
        let (memory, restored) = plan.map_memory(&created.body)?;
        let parked = restore::load(self.take_created(), plan, memory).inspect_err(|e| self.end(e))?;
        self.state = State::Parked(parked);
        self.times.restored = monotonic_ns();
        Ok(restored)
    }

    /// Runs a parked machine as a new one: its generation ID differs from that of its original and of every other clone. If `memory_mib`
    /// exceeds boot memory, virtio-mem offers the difference; otherwise the size last requested from the guest stays. The devices in
    /// `empty` have no backend. [`Self::wake_rest`] must follow.
    pub fn thaw(&mut self, memory_mib: u32, empty: &[DeviceId]) -> Outcome<()> {
        let State::Parked(parked) = &self.state else {
            return Err(self.wrong_state("thaw"));
        };
        parked.check_thaw(memory_mib, empty)?;
        let devices = parked.body.bus.inventory.before_running();
        devices.map_err(|(device, why)| refused(ErrorCode::System, format!("{device:?}: {why}")))?;
        parked.prepare_thaw().inspect_err(|e| self.end(e))?;
        self.times.thawed = parked.go();
        match std::mem::replace(&mut self.state, State::NoMachine) {
            State::Parked(Parked {
                body, vcpus, base, ..
            }) => {
                self.state = State::Running(Started {
                    body,
                    vcpus,
                    base: Some(base),
                });
                Ok(())
            }
            _ => unreachable!("it was Parked, and nobody else has the machine"),
        }
    }

    /// Wakes the vCPUs that a [`Self::thaw`] has not started, because they wait for their startup.
    pub fn wake_rest(&self) {
        if let State::Running(started) = &self.state {
            started.vcpus.wake_rest();
        }
    }

    /// Writes a paused machine to files. Returns the bytes of memory data written. The machine stays paused. `fds` are as `Command::Freeze`
    /// describes.
    pub fn freeze(&mut self, kind: FreezeKind, fds: Vec<OwnedFd>) -> Outcome<u64> {
        self.refuse_exited("freeze")?;
        self.refuse_freezing("freeze")?;
        match &self.state {
            State::Paused(started) => freeze::freeze(started, kind, fds),
            _ => Err(self.wrong_state("freeze")),
        }
    }

    /// Writes the set of pages touched since the restore. `fds` are as `Command::WorkingSet` describes.
    pub fn working_set(&mut self, fds: Vec<OwnedFd>) -> Outcome<()> {
        // The marks of protected pages would look like pages that were written.
        self.refuse_freezing("record the working set")?;
        match &self.state {
            State::Running(started) | State::Paused(started) => freeze::working_set(started, fds),
            _ => Err(self.wrong_state("record the working set")),
        }
    }

    /// Asks the guest to have this much memory in all.
    pub fn resize(&mut self, memory_mib: u32) -> Outcome<()> {
        self.refuse_exited("resize")?;
        match &self.state {
            State::Running(Started { body, .. }) | State::Paused(Started { body, .. }) => {
                body.request_memory(memory_mib)
            }
            _ => Err(self.wrong_state("resize")),
        }
    }

    /// Stops the vCPUs.
    pub fn pause(&mut self) -> Outcome<()> {
        self.refuse_exited("pause")?;
        match std::mem::replace(&mut self.state, State::NoMachine) {
            State::Running(started) => {
                started.vcpus.pause();
                started.body.bus.console.flush();
                self.state = State::Paused(started);
                Ok(())
            }
            other => {
                self.state = other;
                Err(self.wrong_state("pause"))
            }
        }
    }

    /// Lets the vCPUs run again. Guest time includes the pause.
    pub fn resume(&mut self) -> Outcome<()> {
        self.refuse_exited("resume")?;
        match std::mem::replace(&mut self.state, State::NoMachine) {
            State::Paused(started) => {
                started.vcpus.resume();
                self.state = State::Running(started);
                Ok(())
            }
            other => {
                self.state = other;
                Err(self.wrong_state("resume"))
            }
        }
    }

    /// The machine's state.
    pub fn state(&self) -> MachineState {
        match (&self.state, self.events.exited()) {
            (_, Some(reason)) => MachineState::Exited(reason),
            (State::NoMachine, None) => MachineState::NoMachine,
            (State::Created(_), None) => MachineState::Created,
            (State::Parked(_), None) => MachineState::Parked,
            (State::Running(_), None) => MachineState::Running,
            (State::Paused(_), None) => MachineState::Paused,
        }
    }

    /// The moments of its start.
    pub fn times(&self) -> StartTimes {
        StartTimes {
            entered: self.started().map_or(0, |started| started.vcpus.entered()),
            ..self.times
        }
    }

    /// Page faults of the vCPU threads since the guest was first entered.
    pub fn faults(&self) -> u64 {
        self.started().map_or(0, |started| started.vcpus.faults())
    }

    /// For the end of the process: writes out what the console still holds. If the guest never rang its doorbell, logs where its vCPUs
    /// were.
    pub fn last_words(&self) {
        if let (State::Running(started), None, false) =
            (&self.state, self.events.exited(), self.events.rang())
        {
            for vcpu in started.vcpus.last_seen() {
                tracing::info!("ended before the guest was ready: {vcpu}");
            }
        }
        if let Some(body) = self.body() {
            body.bus.console.flush();
        }
    }

    fn started(&self) -> Option<&Started> {
        match &self.state {
            State::Running(started) | State::Paused(started) => Some(started),
            State::NoMachine | State::Created(_) | State::Parked(_) => None,
        }
    }

    fn body(&self) -> Option<&Body> {
        match &self.state {
            State::NoMachine => None,
            State::Created(Created { body, .. })
            | State::Parked(Parked { body, .. })
            | State::Running(Started { body, .. })
            | State::Paused(Started { body, .. }) => Some(body),
        }
    }

    /// The buses of a machine that exists and has not ended.
    fn bus(&self, what: &str) -> Outcome<&Bus> {
        self.refuse_exited(what)?;
        match self.body() {
            Some(body) => Ok(&body.bus),
            None => Err(self.wrong_state(what)),
        }
    }

    fn take_created(&mut self) -> Created {
        match std::mem::replace(&mut self.state, State::NoMachine) {
            State::Created(created) => created,
            _ => unreachable!("it was Created, and nobody else has the machine"),
        }
    }

    /// Ends the machine after a request failed half-way. Its vCPUs are gone, so it cannot go back to its earlier state.
    fn end(&self, why: &ControlError) {
        let reason = ExitReason::Fault(why.message.clone());
        self.events.send(Event::Exited(reason));
    }

    fn refuse_exited(&self, what: &str) -> Outcome<()> {
        match self.events.exited() {
            Some(_) => Err(self.wrong_state(what)),
            None => Ok(()),
        }
    }

    fn wrong_state(&self, what: &str) -> ControlError {
        let why = match self.state() {
            MachineState::NoMachine => "there is no machine yet",
            MachineState::Created => "the machine has not been started",
            MachineState::Parked => "the machine is parked: a snapshot is loaded and has not been thawed",
            MachineState::Running => "the machine is running",
            MachineState::Paused => "the machine is paused",
            MachineState::Exited(_) => "the machine has ended",
        };
        refused(ErrorCode::WrongState, format!("cannot {what}: {why}"))
    }
}

impl Parked {
    /// Makes every check of a thaw that can refuse it.
    fn check_thaw(&self, memory_mib: u32, empty: &[DeviceId]) -> Outcome<()> {
        let Body { bus, spec, .. } = &self.body;
        let not_settled = bus.not_settled(empty);
        if !not_settled.is_empty() {
            return Err(refusal::not_settled(&not_settled));
        }
        match memory_mib > spec.memory_mib {
            true => self.body.request_memory(memory_mib),
            false => Ok(()),
        }
    }

    /// Prepares what the guest must find when it runs: vCPUs, generation ID, clock.
    fn prepare_thaw(&self) -> Outcome<()> {
        let Body { vm, memory, .. } = &self.body;
        if self.base.watch.is_some() {
            self.await_vcpus()?;
        }
        vmgenid::write(memory).map_err(|e| refused(ErrorCode::System, e.to_string()))?;
        vm.set_clock(&self.clock).map_err(kvm_error)
    }

    /// Lets the guest continue from where it was frozen. Returns when it continued, CLOCK_MONOTONIC nanoseconds.
    fn go(&self) -> u64 {
        let bus = &self.body.bus;
        // Before the guest's first instruction, so that it does not use secrets that other clones have too.
        bus.notify_generation();
        let time = GuestTime::start(&self.frozen);
        let now = monotonic_ns();
        // vCPUs that wait for their startup have nothing to do yet, and would only delay the others.
        let first = (0..self.frozen.len()).filter(|index| !self.frozen[*index].awaits_startup());
        self.vcpus.thaw(time, first);
        bus.start_work();
        now
    }
}

impl Body {
    fn request_memory(&self, memory_mib: u32) -> Outcome<()> {
        self.bus
            .request_memory(memory_mib)
            .map_err(|e| invalid(e.to_string()))
    }
}

/// Returns the descriptors of a request if there are exactly `N`. `what` names them in the error.
fn descriptors<const N: usize>(fds: Vec<OwnedFd>, what: &str) -> Outcome<[OwnedFd; N]> {
    let count = fds.len();
    <[OwnedFd; N]>::try_from(fds).map_err(|_| {
        let descriptors = if N == 1 {
            "descriptor belongs"
        } else {
            "descriptors belong"
        };
        invalid(format!(
            "{N} {descriptors} beside the request ({what}), {count} came"
        ))
    })
}
