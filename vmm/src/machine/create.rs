//! Makes a machine: everything that must be registered with KVM, and everything that takes host-wide locks.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use thaw_hypervisor::{CpuId, Exit, Kvm, Vcpu, Vm, cpuid};
use thaw_protocol::control::{CpuBaseline, ErrorCode, MEMORY_MIB, MachineSpec, VCPUS};
use thaw_protocol::versions;

use super::refusal::{invalid, inventory_error, kvm_error, memory_error, refused, system};
use super::{Body, Created, Outcome, descriptors};
use crate::arch::x86_64::registers;
use crate::bus::Bus;
use crate::console::Console;
use crate::events::EventSink;
use crate::jail;
use crate::layout::{ADDRESS_BITS, IDENTITY_MAP_ADDRESS, TSS_ADDRESS, memslot};
use crate::multihit::Multihit;
use crate::snapshot::protection::Protector;
use crate::vcpu::VcpuThreads;
use crate::virtio::{Inventory, Windows};
use crate::{memory, snapshot};

/// Makes a machine that fits `spec`. `fds`: /dev/kvm.
pub fn create(
    version: u32,
    spec: &MachineSpec,
    fds: Vec<OwnedFd>,
    events: &EventSink,
    multihit: Multihit,
) -> Outcome<Created> {
    versions::CONTROL
        .check(version)
        .map_err(|e| invalid(e.to_string()))?;
    if !VCPUS.contains(&spec.vcpus) {
        return Err(invalid(format!("{} vCPUs are not within {VCPUS:?}", spec.vcpus)));
    }
    if !MEMORY_MIB.contains(&spec.memory_mib) {
        return Err(invalid(format!(
            "{} MiB of memory are not within {MEMORY_MIB:?}",
            spec.memory_mib
        )));
    }
    let [kvm] = descriptors(fds, "/dev/kvm")?;
    let kvm = Kvm::from_fd(kvm).map_err(kvm_error)?;
    check_host(&kvm, spec)?;
    build(&kvm, spec, events, multihit)
}

/// Builds in the cheapest order: all memory slots, interrupt controllers, vCPUs, then irqfds and ioeventfds.
fn build(kvm: &Kvm, spec: &MachineSpec, events: &EventSink, multihit: Multihit) -> Outcome<Created> {
    let vm = kvm.create_vm().map_err(kvm_error)?;
    if multihit == Multihit::NotAffected {
        go_without_guard(kvm, &vm);
    }
    jail::give_up_last_capability().map_err(system("giving up CAP_SYS_BOOT"))?;
    let memory = memory::create(&vm, spec.memory_mib).map_err(memory_error)?;
    let windows = Windows::create(&vm).map_err(inventory_error)?;
    vm.set_tss_address(TSS_ADDRESS).map_err(kvm_error)?;
    vm.set_identity_map_address(IDENTITY_MAP_ADDRESS)
        .map_err(kvm_error)?;
    vm.create_irqchip().map_err(kvm_error)?;
    let features = baseline(spec.cpu)
        .limit(kvm.supported_cpuid())
        .map_err(kvm_error)?;
    let mut vcpus: Vec<Vcpu> = (0..spec.vcpus)
        .map(|index| create_vcpu(&vm, &features, index, spec))
        .collect::<Outcome<_>>()?;
    if let Some(boot_vcpu) = vcpus.first_mut() {
        enter_once(boot_vcpu)?;
    }
    let inventory = Inventory::new(&memory, windows, &vm, events.clone()).map_err(inventory_error)?;
    let console = Console::new(&vm).map_err(kvm_error)?;
    let bus = Arc::new(Bus { console, inventory });
    let vcpus = VcpuThreads::spawn(vcpus, &bus, events).map_err(system("starting vCPU threads"))?;
    let protector = Protector::start().map_err(system("starting the thread that protects memory"))?;
    snapshot::warm_up();
    jail::seal();
    let body = Body {
        bus,
        vm,
        memory,
        spec: spec.clone(),
        supported: kvm.supported_cpuid().clone(),
        protector,
    };
    Ok(Created { body, vcpus })
}

/// Turns off KVM's guard against iTLB multihit for this machine. Only for processors without the erratum: on others the guest could crash
/// the host.
fn go_without_guard(kvm: &Kvm, vm: &Vm) {
    if kvm.capabilities().disable_nx_huge_pages && !vm.disable_nx_huge_pages() {
        tracing::debug!("KVM_CAP_VM_DISABLE_NX_HUGE_PAGES needs CAP_SYS_BOOT; going without");
    }
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
            return Err(refused(ErrorCode::Kvm, message));
        }
    }
    Ok(())
}

fn baseline(cpu: CpuBaseline) -> cpuid::Baseline {
    match cpu {
        CpuBaseline::Host => cpuid::Baseline::Host,
        CpuBaseline::V2 => cpuid::Baseline::V2,
        CpuBaseline::V3 => cpuid::Baseline::V3,
        CpuBaseline::V4 => cpuid::Baseline::V4,
    }
}

fn create_vcpu(vm: &Arc<Vm>, features: &CpuId, index: u8, spec: &MachineSpec) -> Outcome<Vcpu> {
    let mut vcpu = vm.create_vcpu(index).map_err(kvm_error)?;
    let cpuid = cpuid::for_vcpu(features, index, spec.vcpus).map_err(kvm_error)?;
    vcpu.set_cpuid(&cpuid).map_err(kvm_error)?;
    registers::set_firmware_msrs(&vcpu).map_err(kvm_error)?;
    Ok(vcpu)
}

/// Enters the guest but returns before it runs an instruction. KVM defers some work to a machine's first entry (Linux 6.14 and later start
/// a thread then, which recovers huge pages); this does that work now, not in a thaw.
fn enter_once(vcpu: &mut Vcpu) -> Outcome<()> {
    vcpu.kicker().kick();
    match vcpu.run().map_err(kvm_error)? {
        Exit::Interrupted => Ok(()),
        other => Err(refused(
            ErrorCode::Kvm,
            format!("KVM entered a guest that has no code: {other:?}"),
        )),
    }
}
