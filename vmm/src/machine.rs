//! The machine's life, as states that own what each of them needs.
//!
//! ```text
//! Shell ── create ──> Created ── boot ──> Running <── pause/resume ──> Paused
//!                                            └────────── guest ends ──────┴──> Exited
//! ```
//!
//! A request that fails leaves the machine in the state it was in; but where the threads of a boot cannot be started the
//! machine has ended.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use thaw_hypervisor::{Kvm, Vcpu, Vm, cpuid};
use thaw_protocol::control::{
    Backend, CONTROL_VERSION, ControlError, DeviceId, ErrorCode, Event, ExitReason, ImageSpec, MEMORY_MIB,
    MachineSpec, MachineState, StartTimes, VCPUS,
};

use crate::arch::x86_64::{acpi, pvh, registers};
use crate::bus::Bus;
use crate::clock::monotonic_ns;
use crate::console::Console;
use crate::events::EventSink;
use crate::kernel::{self, KernelError};
use crate::layout::{ADDRESS_BITS, IDENTITY_MAP_ADDRESS, PVH_START_INFO, TSS_ADDRESS, memslot};
use crate::memory::{self, GuestMemory, MemoryError};
use crate::vcpu::{Prepare, SpawnError, VcpuThreads};
use crate::virtio::{AttachError, Inventory, InventoryError};
use crate::{jail, vmgenid};

/// One microVM and where it is in its life.
pub struct Machine {
    state: State,
    events: EventSink,
    times: StartTimes,
}

enum State {
    Shell,
    Created(Created),
    Running(Started),
    Paused(Started),
}

/// Made, not started.
struct Created {
    memory: GuestMemory,
    bus: Arc<Bus>,
    vcpus: Vec<Vcpu>,
}

/// Started: the vCPUs belong to their threads.
struct Started {
    bus: Arc<Bus>,
    vcpus: VcpuThreads,
}

type Outcome<T> = Result<T, ControlError>;

impl Machine {
    /// A process without a machine. `times` has what was measured before.
    pub fn new(events: EventSink, times: StartTimes) -> Machine {
        Machine {
            state: State::Shell,
            events,
            times,
        }
    }

    /// Makes the machine, every device with an empty backend. `fds`: /dev/kvm.
    pub fn create(&mut self, version: u32, spec: &MachineSpec, fds: Vec<OwnedFd>) -> Outcome<()> {
        if !matches!(self.state, State::Shell) {
            return Err(self.wrong_state("create"));
        }
        if version != CONTROL_VERSION {
            return Err(invalid(format!(
                "this thaw-vmm speaks version {CONTROL_VERSION} of the control protocol, not {version}"
            )));
        }
        if !VCPUS.contains(&spec.vcpus) {
            return Err(invalid(format!("{} vCPUs are not within {VCPUS:?}", spec.vcpus)));
        }
        if !MEMORY_MIB.contains(&spec.memory_mib) {
            return Err(invalid(format!(
                "{} MiB of memory are not within {MEMORY_MIB:?}",
                spec.memory_mib
            )));
        }
        let kvm = Kvm::from_fd(one_descriptor(fds, "/dev/kvm")?).map_err(kvm_error)?;
        self.state = State::Created(build(&kvm, spec, &self.events)?);
        self.times.created = monotonic_ns();
        Ok(())
    }

    /// Gives a device its backend.
    pub fn attach(&mut self, device: DeviceId, backend: Backend, fds: Vec<OwnedFd>) -> Outcome<()> {
        let bus = self.bus("attach a backend")?;
        bus.attach(device, backend, fds).map_err(attach_error)
    }

    /// Shows an image in a slot of the root device.
    pub fn add_image(&mut self, slot: u16, image: ImageSpec, fds: Vec<OwnedFd>) -> Outcome<()> {
        self.bus("add an image")?
            .inventory
            .add_image(slot, image, fds)
            .map_err(attach_error)
    }

    /// Takes an image away.
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
        let mut file = File::from(one_descriptor(fds, "the kernel")?);
        prepare_boot(created, cmdline, &mut file)?;
        let State::Created(Created { bus, vcpus, .. }) = std::mem::replace(&mut self.state, State::Shell)
        else {
            unreachable!("it was Created, and nobody else has the machine");
        };
        let started = start(&bus, vcpus, &self.events).inspect_err(|e| {
            // Its vCPUs are gone with the threads that could not be had.
            self.events
                .send(Event::Exited(ExitReason::Fault(e.message.clone())));
        })?;
        self.state = State::Running(started);
        Ok(())
    }

    /// Stops the vCPUs.
    pub fn pause(&mut self) -> Outcome<()> {
        self.refuse_exited("pause")?;
        match std::mem::replace(&mut self.state, State::Shell) {
            State::Running(started) => {
                started.vcpus.pause();
                started.bus.console.flush();
                self.state = State::Paused(started);
                Ok(())
            }
            other => {
                self.state = other;
                Err(self.wrong_state("pause"))
            }
        }
    }

    /// Lets the vCPUs run again.
    pub fn resume(&mut self) -> Outcome<()> {
        self.refuse_exited("resume")?;
        match std::mem::replace(&mut self.state, State::Shell) {
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

    /// Where the machine is in its life.
    pub fn state(&self) -> MachineState {
        match (&self.state, self.events.exited()) {
            (_, Some(reason)) => MachineState::Exited(reason),
            (State::Shell, None) => MachineState::Shell,
            (State::Created(_), None) => MachineState::Created,
            (State::Running(_), None) => MachineState::Running,
            (State::Paused(_), None) => MachineState::Paused,
        }
    }

    /// Moments of its start.
    pub fn times(&self) -> StartTimes {
        let entered = match &self.state {
            State::Running(started) | State::Paused(started) => started.vcpus.entered(),
            State::Shell | State::Created(_) => 0,
        };
        StartTimes {
            entered,
            ..self.times
        }
    }

    /// Page faults of the vCPU threads since the guest was first entered.
    pub fn faults(&self) -> u64 {
        match &self.state {
            State::Running(started) | State::Paused(started) => started.vcpus.faults(),
            State::Shell | State::Created(_) => 0,
        }
    }

    /// Writes out what the console still holds: the process ends.
    pub fn flush_console(&self) {
        if let Ok(bus) = self.any_bus("flush") {
            bus.console.flush();
        }
    }

    /// The buses of a machine that exists and has not ended.
    fn bus(&self, what: &str) -> Outcome<&Bus> {
        self.refuse_exited(what)?;
        self.any_bus(what)
    }

    fn any_bus(&self, what: &str) -> Outcome<&Bus> {
        match &self.state {
            State::Shell => Err(self.wrong_state(what)),
            State::Created(Created { bus, .. })
            | State::Running(Started { bus, .. })
            | State::Paused(Started { bus, .. }) => Ok(bus),
        }
    }

    fn refuse_exited(&self, what: &str) -> Outcome<()> {
        match self.events.exited() {
            Some(_) => Err(self.wrong_state(what)),
            None => Ok(()),
        }
    }

    fn wrong_state(&self, what: &str) -> ControlError {
        let message = match self.state() {
            MachineState::Shell => format!("cannot {what}: there is no machine yet"),
            MachineState::Created => format!("cannot {what}: the machine has not been started"),
            MachineState::Parked => format!("cannot {what}: a snapshot is loaded and has not been thawed"),
            MachineState::Running => format!("cannot {what}: the machine is running"),
            MachineState::Paused => format!("cannot {what}: the machine is paused"),
            MachineState::Exited(_) => format!("cannot {what}: the machine has ended"),
        };
        ControlError {
            code: ErrorCode::WrongState,
            message,
        }
    }
}

/// Makes all that KVM must know of, in the order that is cheap: memory slots, interrupt controllers, vCPUs, then irqfds
/// and ioeventfds.
fn build(kvm: &Kvm, spec: &MachineSpec, events: &EventSink) -> Outcome<Created> {
    check_host(kvm, spec)?;
    let vm = kvm.create_vm().map_err(kvm_error)?;
    if kvm.capabilities().disable_nx_huge_pages && !vm.disable_nx_huge_pages() {
        tracing::debug!("KVM_CAP_VM_DISABLE_NX_HUGE_PAGES needs CAP_SYS_BOOT; going without");
    }
    jail::give_up_last_capability().map_err(system("giving up CAP_SYS_BOOT"))?;
    let memory = memory::create(&vm, spec.memory_mib).map_err(memory_error)?;
    vm.set_tss_address(TSS_ADDRESS).map_err(kvm_error)?;
    vm.set_identity_map_address(IDENTITY_MAP_ADDRESS)
        .map_err(kvm_error)?;
    vm.create_irqchip().map_err(kvm_error)?;
    let vcpus: Vec<Vcpu> = (0..spec.vcpus)
        .map(|index| create_vcpu(kvm, &vm, index, spec.vcpus))
        .collect::<Outcome<_>>()?;
    let inventory = Inventory::new(&memory, &vm, events.clone()).map_err(inventory_error)?;
    let console = Console::new(&vm).map_err(kvm_error)?;
    Ok(Created {
        memory,
        bus: Arc::new(Bus { console, inventory }),
        vcpus,
    })
}

fn check_host(kvm: &Kvm, spec: &MachineSpec) -> Outcome<()> {
    let capabilities = kvm.capabilities();
    let has_needs = [
        (
            "guest-physical address bits",
            cpuid::physical_address_bits(kvm.supported_cpuid()).into(),
            ADDRESS_BITS.into(),
        ),
        ("vCPUs for one machine", capabilities.max_vcpus, spec.vcpus.into()),
        (
            "memory slots for one machine",
            capabilities.memory_slots,
            memslot::COUNT,
        ),
    ];
    for (what, has, needs) in has_needs {
        if has < needs {
            let message = format!("this host's KVM has {has} {what}; {needs} are needed");
            return Err(ControlError {
                code: ErrorCode::Kvm,
                message,
            });
        }
    }
    Ok(())
}

fn create_vcpu(kvm: &Kvm, vm: &Arc<Vm>, index: u8, vcpus: u8) -> Outcome<Vcpu> {
    let vcpu = vm.create_vcpu(index).map_err(kvm_error)?;
    let cpuid = cpuid::for_vcpu(kvm.supported_cpuid(), index, vcpus).map_err(kvm_error)?;
    vcpu.set_cpuid(&cpuid).map_err(kvm_error)?;
    registers::set_firmware_msrs(&vcpu).map_err(kvm_error)?;
    Ok(vcpu)
}

/// Puts kernel, start info and ACPI tables into memory and points the boot vCPU at them.
fn prepare_boot(created: &Created, cmdline: &str, file: &mut File) -> Outcome<()> {
    let Created { memory, vcpus, .. } = created;
    let [boot_vcpu, ..] = vcpus.as_slice() else {
        return Err(invalid("the machine has no vCPU".into()));
    };
    let entry = kernel::load(memory, file).map_err(kernel_error)?;
    let rsdp = acpi::write_tables(memory, vcpus.len() as u8).map_err(|e| invalid(e.to_string()))?;
    pvh::write_start_info(memory, cmdline, rsdp).map_err(|e| invalid(e.to_string()))?;
    vmgenid::write(memory).map_err(|e| ControlError {
        code: ErrorCode::System,
        message: e.to_string(),
    })?;
    registers::set_entry(boot_vcpu, entry, PVH_START_INFO).map_err(kvm_error)
}

/// Starts device and vCPU threads and lets the guest run.
fn start(bus: &Arc<Bus>, vcpus: Vec<Vcpu>, events: &EventSink) -> Outcome<Started> {
    bus.inventory.start().map_err(inventory_error)?;
    let ready = |vcpu| (vcpu, Box::new(|_: &Vcpu| Ok(())) as Prepare);
    let vcpus =
        VcpuThreads::spawn(vcpus.into_iter().map(ready).collect(), bus, events).map_err(spawn_error)?;
    vcpus.resume();
    Ok(Started {
        bus: bus.clone(),
        vcpus,
    })
}

fn one_descriptor(fds: Vec<OwnedFd>, what: &str) -> Outcome<OwnedFd> {
    let count = fds.len();
    match <[OwnedFd; 1]>::try_from(fds) {
        Ok([fd]) => Ok(fd),
        Err(_) => Err(invalid(format!(
            "one descriptor ({what}) belongs beside the request, {count} came"
        ))),
    }
}

fn invalid(message: String) -> ControlError {
    ControlError {
        code: ErrorCode::Invalid,
        message,
    }
}

fn system(what: &'static str) -> impl FnOnce(std::io::Error) -> ControlError {
    move |e| ControlError {
        code: ErrorCode::System,
        message: format!("{what}: {e}"),
    }
}

fn spawn_error(e: SpawnError) -> ControlError {
    let code = match e {
        SpawnError::Thread(_) => ErrorCode::System,
        SpawnError::Prepare(_) => ErrorCode::Kvm,
    };
    ControlError {
        code,
        message: e.to_string(),
    }
}

fn kvm_error(e: thaw_hypervisor::Error) -> ControlError {
    let code = match e {
        thaw_hypervisor::Error::NotKvm(_) => ErrorCode::Invalid,
        _ => ErrorCode::Kvm,
    };
    ControlError {
        code,
        message: e.to_string(),
    }
}

fn memory_error(e: MemoryError) -> ControlError {
    let code = match e {
        MemoryError::Slot { .. } => ErrorCode::Kvm,
        MemoryError::Map { .. } | MemoryError::Regions(_) => ErrorCode::System,
    };
    ControlError {
        code,
        message: e.to_string(),
    }
}

fn kernel_error(e: KernelError) -> ControlError {
    let code = match e {
        KernelError::NotElf(_) | KernelError::NoPvhNote | KernelError::Damaged(_) | KernelError::Load(_) => {
            ErrorCode::NotPvh
        }
        KernelError::MemoryTooSmall { .. } => ErrorCode::MemoryTooSmall,
        KernelError::Io(_) => ErrorCode::System,
    };
    ControlError {
        code,
        message: e.to_string(),
    }
}

fn attach_error(e: AttachError) -> ControlError {
    let code = match e {
        AttachError::System { .. } => ErrorCode::System,
        _ => ErrorCode::Invalid,
    };
    ControlError {
        code,
        message: e.to_string(),
    }
}

fn inventory_error(e: InventoryError) -> ControlError {
    let code = match e {
        InventoryError::Kvm { .. } => ErrorCode::Kvm,
        _ => ErrorCode::System,
    };
    ControlError {
        code,
        message: e.to_string(),
    }
}
