//! Clocks and timers in a clone.

use super::*;

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

#[test]
fn other_tsc_frequency_is_scaled_or_refused() {
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
fn tsc_excludes_the_time_parked() {
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
fn kvmclock_excludes_the_time_parked() {
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
fn armed_deadline_fires_in_the_clone_at_its_time() {
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
fn pending_apic_interrupt_is_delivered_in_the_clone() {
    // Long past: KVM takes it as fired as soon as it is set.
    let original = with_deadline(1);
    let frozen = freeze(&original);
    let mut clone = restore(&original, &frozen);
    start(&mut clone, &frozen.0);
    assert_eq!(written(&mut clone.vcpus[0]).0, 0x43);
}
