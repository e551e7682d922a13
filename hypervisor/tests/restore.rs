//! What a vCPU was in one machine, it is in another: with the host's KVM and guests of a few instructions.

#![allow(clippy::unwrap_used)]

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

/// Whether this KVM gives a guest a TSC of its own. A software one may let the guest see the host's, and take every value
/// set for granted.
fn has_tsc_of_its_own() -> bool {
    let machine = machine(1, &[]);
    let vcpu = &machine.vcpus[0];
    let far = vcpu.save().unwrap().msr(IA32_TSC).unwrap() ^ 1 << 60;
    vcpu.set_msrs(&[(IA32_TSC, far)]).unwrap();
    let own = vcpu.save().unwrap().msr(IA32_TSC).unwrap() >> 60 == far >> 60;
    if !own {
        eprintln!("this KVM shows guests the host's TSC: only that it goes on is tested");
    }
    own
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
fn a_computation_goes_on_where_it_was() {
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
fn every_part_is_the_same_in_the_clone() {
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
fn what_is_saved_is_more_than_the_usual_registers() {
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
fn a_vcpu_amid_a_device_access_is_not_saved() {
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
fn a_restored_vcpu_does_not_run_without_its_time() {
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

#[test]
fn an_msr_that_cannot_be_set_is_named() {
    let original = machine(1, &[]);
    let parts = original.vcpus[0].save().unwrap().parts();
    let with = |index: u32, value: u64| {
        let mut parts = parts.clone();
        let msrs = &mut parts[VcpuPart::Msrs as usize - 1].1;
        let pat = msrs
            .chunks_exact_mut(16)
            .find(|m| m[..4] == IA32_PAT.to_le_bytes())
            .unwrap();
        pat[..4].copy_from_slice(&index.to_le_bytes());
        pat[8..].copy_from_slice(&value.to_le_bytes());
        let borrowed: Vec<_> = parts.iter().map(|(p, b)| (*p, b.as_slice())).collect();
        VcpuState::from_parts(&borrowed).unwrap()
    };
    let mut vcpu = shell(1).vcpus.remove(0);
    vcpu.restore(&with(IA32_PAT, 0x0606)).unwrap();
    assert_eq!(vcpu.save().unwrap().msr(IA32_PAT), Some(0x0606));
    let refused = shell(1).vcpus[0].restore(&with(0xdead_beef, 7));
    assert!(
        matches!(
            refused,
            Err(Error::Msr {
                index: 0xdead_beef,
                value: 7
            })
        ),
        "{refused:?}"
    );
}

/// A state with one more MSR.
fn with_msr(state: &VcpuState, index: u32, value: u64) -> VcpuState {
    let mut parts = state.parts();
    let msrs = &mut parts[VcpuPart::Msrs as usize - 1].1;
    let entry = [u64::from(index).to_le_bytes(), value.to_le_bytes()].concat();
    msrs.extend(entry);
    let borrowed: Vec<_> = parts.iter().map(|(p, b)| (*p, b.as_slice())).collect();
    VcpuState::from_parts(&borrowed).unwrap()
}

#[test]
fn forged_msrs_beyond_a_vcpus_state_are_refused() {
    let state = machine(1, &[]).vcpus[0].save().unwrap();
    // EFER, SVM's control, VMX's capabilities, Hyper-V's interface, Xen's usual page.
    let ranges = [
        0xc000_0080..=0xc000_0080,
        0xc001_0114..=0xc001_0114,
        0x480..=0x493,
        0x4000_0000..=0x4000_0123,
        0x4000_0200..=0x4000_0200,
    ];
    let (mut clone, mut forged) = (shell(1), 0);
    for index in ranges.into_iter().flatten() {
        // What this KVM counts as state, it checks.
        if state.msr(index).is_some() {
            continue;
        }
        forged += 1;
        let value = 0x1501;
        let refused = clone.vcpus[0].restore(&with_msr(&state, index, value));
        let is_named = matches!(refused, Err(Error::Msr { index: named, .. }) if named == index);
        assert!(is_named, "{index:#x}: {refused:?}");
    }
    assert!(forged > 250, "{forged}");
}

#[test]
fn forged_nested_virtualisation_is_refused() {
    // Of struct kvm_sregs: 8 segments of 24 bytes, 2 tables of 16, CR0, CR2, CR3, CR4, CR8, EFER.
    const CR4: usize = 8 * 24 + 2 * 16 + 3 * 8;
    const EFER: usize = CR4 + 2 * 8;
    let state = machine(1, &[]).vcpus[0].save().unwrap();
    for (at, bit, name) in [(EFER, 12, "EFER.SVME"), (CR4, 13, "CR4.VMXE")] {
        let mut parts = state.parts();
        let sregs = &mut parts[VcpuPart::Sregs as usize - 1].1;
        sregs[at + bit / 8] |= 1 << (bit % 8);
        let borrowed: Vec<_> = parts.iter().map(|(p, b)| (*p, b.as_slice())).collect();
        let forged = VcpuState::from_parts(&borrowed).unwrap();
        let refused = shell(1).vcpus[0].restore(&forged);
        assert!(
            matches!(refused, Err(Error::Virtualises(named)) if named == name),
            "{refused:?}"
        );
    }
}

#[test]
fn another_frequency_is_scaled_or_refused_by_name() {
    let original = machine(1, &[]);
    let state = original.vcpus[0].save().unwrap();
    let host = state.tsc_khz();
    let with = |khz: u32| {
        let mut parts = state.parts();
        parts[VcpuPart::TscKhz as usize - 1].1 = khz.to_le_bytes().into();
        let borrowed: Vec<_> = parts.iter().map(|(p, b)| (*p, b.as_slice())).collect();
        VcpuState::from_parts(&borrowed).unwrap()
    };
    let near = host + host / 10_000;
    let mut vcpu = shell(1).vcpus.remove(0);
    vcpu.restore(&with(near)).unwrap();
    assert_eq!(vcpu.tsc_khz().unwrap(), host, "100 ppm is within NTP's reach");
    let far = host / 2;
    match shell(1).vcpus[0].restore(&with(far)) {
        Ok(()) => assert!(kvm().capabilities().tsc_control),
        Err(Error::TscFrequency { saved, host: named }) => assert_eq!((saved, named), (far, host)),
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_tsc_goes_on_without_the_time_it_was_parked() {
    let second = |state: &VcpuState| u64::from(state.tsc_khz()) * 1000;
    let original = machine(2, &[0xeb, 0xfe]);
    let own = has_tsc_of_its_own();
    // Beyond what this process could have counted; and as young as a machine that was frozen in its first second.
    for age in [1u64 << 50, 0] {
        for vcpu in &original.vcpus {
            vcpu.set_msrs(&[(IA32_TSC, age + 1)]).unwrap();
        }
        let frozen = freeze(&original);
        let saved = frozen.0.iter().map(|v| v.msr(IA32_TSC).unwrap()).max().unwrap();
        let mut clone = restore(&original, &frozen);
        std::thread::sleep(Duration::from_millis(300));
        let before = Instant::now();
        start(&mut clone, &frozen.0);
        let now: Vec<u64> = clone
            .vcpus
            .iter()
            .map(|v| v.save().unwrap().msr(IA32_TSC).unwrap())
            .collect();
        let most = before.elapsed().as_nanos() as u64 * u64::from(frozen.0[0].tsc_khz()) / 1_000_000;
        for tsc in &now {
            assert!(*tsc >= saved, "the TSC went back by {}", saved - tsc);
            // A thousandth more for the host's own idea of its frequency.
            assert!(
                !own || tsc - saved <= most + most / 1000 + second(&frozen.0[0]) / 10_000,
                "the TSC jumped by {} of a {} Hz clock; {most} passed",
                tsc - saved,
                second(&frozen.0[0])
            );
        }
        assert!(now[1] >= now[0], "the vCPUs' TSCs differ: {now:?}");
    }
}

#[test]
fn kvmclock_goes_on_without_the_time_it_was_parked() {
    let original = machine(1, &[]);
    original
        .vm
        .set_clock(&ClockState {
            nanoseconds: 86_400_000_000_000,
        })
        .unwrap();
    let frozen = freeze(&original);
    std::thread::sleep(Duration::from_millis(200));
    let before = Instant::now();
    let clone = restore(&original, &frozen);
    let now = clone.vm.clock().unwrap().nanoseconds;
    let passed = now - frozen.2.nanoseconds;
    assert!(
        u128::from(passed) <= before.elapsed().as_nanos() + 1_000_000,
        "{passed} ns"
    );
}

/// A real-mode guest whose APIC timer, TSC-deadline mode, vector 0x50, writes to port 0x43 when it fires; it waits for it
/// with interrupts on, spinning.
fn with_deadline(deadline: u64) -> Machine {
    // spin: jmp spin; handler at 0x1010: out 0x43, al; iret
    let mut code = vec![0x90; 0x20];
    code[..2].copy_from_slice(&[0xeb, 0xfe]);
    code[0x10..0x13].copy_from_slice(&[0xe6, 0x43, 0xcf]);
    let machine = machine(1, &code);
    machine
        .memory
        .write_slice(&[0x10, 0x10, 0, 0], MemoryRegionAddress(0x50 * 4))
        .unwrap();
    let vcpu = &machine.vcpus[0];
    vcpu.set_regs(&kvm_regs {
        rip: CODE,
        rsp: 0x8000,
        rflags: 0x202,
        ..Default::default()
    })
    .unwrap();
    let mut parts = vcpu.save().unwrap().parts();
    let lapic = &mut parts[VcpuPart::Lapic as usize - 1].1;
    // Spurious-interrupt vector with the APIC on; timer: TSC deadline, vector 0x50.
    lapic[0xf0..0xf4].copy_from_slice(&0x1ffu32.to_le_bytes());
    lapic[0x320..0x324].copy_from_slice(&(2u32 << 17 | 0x50).to_le_bytes());
    let msrs = &mut parts[VcpuPart::Msrs as usize - 1].1;
    let armed = msrs
        .chunks_exact_mut(16)
        .find(|m| m[..4] == TSC_DEADLINE.to_le_bytes())
        .unwrap();
    armed[8..].copy_from_slice(&deadline.to_le_bytes());
    let borrowed: Vec<_> = parts.iter().map(|(p, b)| (*p, b.as_slice())).collect();
    let states = vec![VcpuState::from_parts(&borrowed).unwrap()];
    let frozen = (
        states,
        machine.vm.save_interrupts().unwrap(),
        machine.vm.clock().unwrap(),
    );
    let mut armed = restore(&machine, &frozen);
    start(&mut armed, &frozen.0);
    armed
}

#[test]
fn an_armed_deadline_fires_in_the_clone_and_not_before_its_time() {
    let khz = u64::from(machine(1, &[]).vcpus[0].tsc_khz().unwrap());
    let from_now = 400 * khz;
    let base = machine(1, &[]).vcpus[0].save().unwrap().msr(IA32_TSC).unwrap();
    let original = with_deadline(base + from_now);
    let frozen = freeze(&original);
    let deadline = frozen.0[0].msr(TSC_DEADLINE).unwrap();
    assert_eq!(deadline, base + from_now);
    let mut clone = restore(&original, &frozen);
    // Longer than the deadline was away: parked time does not count.
    std::thread::sleep(Duration::from_millis(600));
    start(&mut clone, &frozen.0);
    assert_eq!(clone.vcpus[0].save().unwrap().msr(TSC_DEADLINE), Some(deadline));
    clone.vcpus[0].kicker().bind_current_thread();
    assert_eq!(written(&mut clone.vcpus[0]).0, 0x43);
    let tsc = clone.vcpus[0].save();
    assert!(matches!(tsc, Err(Error::Unfinished { .. })));
    settle(&mut clone.vcpus[0]);
    let tsc = clone.vcpus[0].save().unwrap().msr(IA32_TSC).unwrap();
    assert!(tsc >= deadline, "fired {} cycles early", deadline - tsc);
}

#[test]
fn an_interrupt_pending_in_the_apic_is_delivered_in_the_clone() {
    // Long past: KVM takes it as fired as soon as it is set.
    let original = with_deadline(1);
    let frozen = freeze(&original);
    let mut clone = restore(&original, &frozen);
    start(&mut clone, &frozen.0);
    assert_eq!(written(&mut clone.vcpus[0]).0, 0x43);
}
