//! A vCPU restored in another machine is as it was: with the host's KVM and guests of a few instructions.

#![allow(clippy::unwrap_used)]

mod forged;
mod time;

use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, Instant};

use thaw_hypervisor::{
    Access, ClockState, Error, Exit, GuestTime, InterruptState, Kvm, Vcpu, VcpuPart, VcpuState, Vm, cpuid,
    kvm_regs,
};
use vm_memory::{Bytes, GuestAddress, GuestMemoryRegion, GuestRegionMmap, MemoryRegionAddress};

const CODE: u64 = 0x1000;
const MEMORY: usize = 0x10000;
const IA32_PAT: u32 = 0x277;
const IA32_TSC: u32 = 0x10;
const TSC_DEADLINE: u32 = 0x6e0;
const KERNEL_GS_BASE: u32 = 0xc000_0102;

struct Machine {
    vm: Arc<Vm>,
    vcpus: Vec<Vcpu>,
    memory: Arc<GuestRegionMmap<()>>,
}

fn kvm() -> Kvm {
    let device = File::options()
        .read(true)
        .write(true)
        .open("/dev/kvm")
        .expect("this test needs /dev/kvm");
    Kvm::from_fd(device.into()).unwrap()
}

/// 64 KiB of memory, interrupt controllers, and `vcpus` vCPUs as KVM makes them.
fn shell(vcpus: u8) -> Machine {
    let vm = kvm().create_vm().unwrap();
    let memory = Arc::new(GuestRegionMmap::from_range(GuestAddress(0), MEMORY, None).unwrap());
    vm.set_memory(0, memory.clone(), Access::ReadWrite).unwrap();
    vm.set_tss_address(0xfffb_d000).unwrap();
    vm.set_identity_map_address(0xfffb_c000).unwrap();
    vm.create_irqchip().unwrap();
    let vcpus = (0..vcpus).map(|i| vm.create_vcpu(i).unwrap()).collect();
    Machine { vm, vcpus, memory }
}

/// A machine about to run `code` in real mode on its first vCPU.
fn machine(vcpus: u8, code: &[u8]) -> Machine {
    let mut machine = shell(vcpus);
    machine
        .memory
        .write_slice(code, MemoryRegionAddress(CODE))
        .unwrap();
    let kvm = kvm();
    for vcpu in &mut machine.vcpus {
        let cpuid = cpuid::for_vcpu(kvm.supported_cpuid(), vcpu.index(), vcpus).unwrap();
        vcpu.set_cpuid(&cpuid).unwrap();
    }
    let first = &machine.vcpus[0];
    let mut sregs = first.sregs().unwrap();
    (sregs.cs.base, sregs.cs.selector) = (0, 0);
    first.set_sregs(&sregs).unwrap();
    first
        .set_regs(&kvm_regs {
            rip: CODE,
            rflags: 2,
            ..Default::default()
        })
        .unwrap();
    machine
}

/// Stops the vCPU with nothing half done.
fn settle(vcpu: &mut Vcpu) {
    vcpu.kicker().kick();
    assert!(matches!(vcpu.run().unwrap(), Exit::Interrupted));
}

/// The machine's state by way of its bytes.
fn freeze(machine: &Machine) -> (Vec<VcpuState>, InterruptState, ClockState) {
    let vcpus = machine.vcpus.iter().map(|v| reread(&v.save().unwrap())).collect();
    let interrupts = machine.vm.save_interrupts().unwrap().parts();
    let borrowed: Vec<_> = interrupts.iter().map(|(p, b)| (*p, b.as_slice())).collect();
    let clock = ClockState::from_bytes(&machine.vm.clock().unwrap().to_bytes()).unwrap();
    (vcpus, InterruptState::from_parts(&borrowed).unwrap(), clock)
}

fn reread(state: &VcpuState) -> VcpuState {
    let parts = state.parts();
    let borrowed: Vec<_> = parts.iter().map(|(p, b)| (*p, b.as_slice())).collect();
    let reread = VcpuState::from_parts(&borrowed).unwrap();
    assert_eq!(reread.parts(), parts);
    reread
}

/// A new machine with `original`'s memory and state; its time is still to be started.
fn restore(
    original: &Machine,
    (vcpus, interrupts, clock): &(Vec<VcpuState>, InterruptState, ClockState),
) -> Machine {
    let mut clone = shell(vcpus.len() as u8);
    let mut memory = vec![0; original.memory.len() as usize];
    original
        .memory
        .read_slice(&mut memory, MemoryRegionAddress(0))
        .unwrap();
    clone.memory.write_slice(&memory, MemoryRegionAddress(0)).unwrap();
    for (vcpu, state) in clone.vcpus.iter_mut().zip(vcpus) {
        vcpu.restore(state).unwrap();
    }
    clone.vm.restore_interrupts(interrupts).unwrap();
    clone.vm.set_clock(clock).unwrap();
    clone
}

fn start(machine: &mut Machine, states: &[VcpuState]) {
    let time = GuestTime::start(states);
    for vcpu in &mut machine.vcpus {
        vcpu.start_time(&time).unwrap();
    }
}

/// The next port write, of which there must be one.
fn written(vcpu: &mut Vcpu) -> (u16, u64) {
    match vcpu.run().unwrap() {
        Exit::PortWrite { port, data } => {
            let mut value = [0; 8];
            value[..data.len()].copy_from_slice(data);
            (port, u64::from_le_bytes(value))
        }
        other => panic!("{other:?}"),
    }
}

/// A part's bytes, but those of MSRs that tell the time.
fn timeless(state: &VcpuState) -> Vec<(VcpuPart, Vec<u8>)> {
    let mut parts = state.parts();
    for (part, bytes) in &mut parts {
        if *part == VcpuPart::Msrs {
            *bytes = bytes
                .chunks_exact(16)
                .filter(|msr| msr[..4] != IA32_TSC.to_le_bytes())
                .flatten()
                .copied()
                .collect();
        }
    }
    parts
}

#[test]
fn computation_continues_in_the_clone() {
    // mov cx, 3; again: inc word [0x2000]; mov ax, [0x2000]; out 0x43, ax; loop again; mov al, 0xee; out 0x44, al
    let code = [
        0xb9, 3, 0, 0xff, 0x06, 0x00, 0x20, 0xa1, 0x00, 0x20, 0xe7, 0x43, 0xe2, 0xf5, 0xb0, 0xee, 0xe6, 0x44,
    ];
    let mut original = machine(1, &code);
    assert_eq!(written(&mut original.vcpus[0]), (0x43, 1));
    settle(&mut original.vcpus[0]);
    let frozen = freeze(&original);
    for _ in 0..2 {
        let mut clone = restore(&original, &frozen);
        start(&mut clone, &frozen.0);
        let vcpu = &mut clone.vcpus[0];
        assert_eq!(written(vcpu), (0x43, 2));
        assert_eq!(written(vcpu), (0x43, 3));
        assert_eq!(written(vcpu), (0x44, 0xee));
    }
    // The original knows nothing of its clones.
    assert_eq!(written(&mut original.vcpus[0]), (0x43, 2));
}

#[test]
fn every_state_part_is_equal_in_the_clone() {
    let mut original = machine(2, &[0xeb, 0xfe]);
    let vcpu = &original.vcpus[0];
    vcpu.set_msrs(&[
        (IA32_PAT, 0x0007_0406_0007_0406),
        (KERNEL_GS_BASE, 0xffff_8880_0bad_cafe),
    ])
    .unwrap();
    let mut state = vcpu.save().unwrap();
    // Breakpoints, vector registers, general registers: through the bytes, as a state file has them.
    let mut parts = state.parts();
    for (part, bytes) in &mut parts {
        match part {
            VcpuPart::DebugRegs => bytes[..8].copy_from_slice(&0x1234_5678u64.to_le_bytes()),
            // MXCSR, XMM0, and in the header that x87 and SSE are in use.
            VcpuPart::Xsave => {
                bytes[24..28].copy_from_slice(&0x1f80u32.to_le_bytes());
                bytes[160..176].copy_from_slice(b"vector registers");
                bytes[512] = 3;
            }
            VcpuPart::Regs => bytes[..8].copy_from_slice(&0xdead_beef_u64.to_le_bytes()),
            _ => {}
        }
    }
    let borrowed: Vec<_> = parts.iter().map(|(p, b)| (*p, b.as_slice())).collect();
    state = VcpuState::from_parts(&borrowed).unwrap();
    let mut set = shell(1);
    set.vcpus[0].restore(&state).unwrap();
    let second = set.vcpus[0].save().unwrap();
    for ((part, expected), (_, actual)) in timeless(&state).iter().zip(timeless(&second)) {
        assert_eq!(*expected, actual, "{part:?}");
    }
    assert_eq!(second.msr(KERNEL_GS_BASE), Some(0xffff_8880_0bad_cafe));
    assert_eq!(second.regs().rax, 0xdead_beef);
    settle(&mut original.vcpus[0]);
    // The second vCPU waits for its INIT, in the clone too.
    let frozen = freeze(&original);
    let clone = restore(&original, &frozen);
    for (expected, vcpu) in frozen.0.iter().zip(&clone.vcpus) {
        assert_eq!(timeless(expected), timeless(&vcpu.save().unwrap()));
    }
}

#[test]
fn state_includes_more_than_general_registers() {
    let machine = machine(1, &[]);
    let state = machine.vcpus[0].save().unwrap();
    println!("{} MSRs, TSC {} kHz", state.msr_count(), state.tsc_khz());
    for (part, bytes) in state.parts() {
        println!("{part:?}: {} bytes", bytes.len());
    }
    // SYSENTER's, MISC_ENABLE, kvmclock's, STAR.
    for msr in [
        IA32_TSC,
        IA32_PAT,
        KERNEL_GS_BASE,
        TSC_DEADLINE,
        0x174,
        0x1a0,
        0x4b56_4d01,
        0xc000_0081,
    ] {
        assert!(state.msr(msr).is_some(), "MSR {msr:#x}");
    }
    let set = cpuid::for_vcpu(kvm().supported_cpuid(), 0, 1).unwrap();
    assert_eq!(state.cpuid().as_slice(), set.as_slice());
    assert_eq!(cpuid::missing(state.cpuid(), &set), Vec::<String>::new());
    assert_eq!(machine.vcpus[0].save().unwrap().msr_count(), state.msr_count());
}

#[test]
fn vcpu_during_a_device_access_is_not_saved() {
    // in al, 0x42; out 0x43, al
    let mut original = machine(1, &[0xe4, 0x42, 0xe6, 0x43]);
    match original.vcpus[0].run().unwrap() {
        Exit::PortRead { data, .. } => data[0] = 9,
        other => panic!("{other:?}"),
    }
    assert!(matches!(
        original.vcpus[0].save(),
        Err(Error::Unfinished { vcpu: 0 })
    ));
    settle(&mut original.vcpus[0]);
    let frozen = freeze(&original);
    let mut clone = restore(&original, &frozen);
    start(&mut clone, &frozen.0);
    // What the device answered is not lost, and not asked for again.
    assert_eq!(written(&mut clone.vcpus[0]), (0x43, 9));
}

#[test]
fn restored_vcpu_does_not_run_before_its_time_starts() {
    let original = machine(1, &[0xe6, 0x43]);
    let frozen = freeze(&original);
    let mut clone = restore(&original, &frozen);
    assert!(matches!(
        clone.vcpus[0].run(),
        Err(Error::TimeStopped { vcpu: 0 })
    ));
    start(&mut clone, &frozen.0);
    assert_eq!(written(&mut clone.vcpus[0]).0, 0x43);
}
