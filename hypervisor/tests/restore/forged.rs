//! States that a restore refuses.

use thaw_hypervisor::{Error, VcpuPart, VcpuState};

use super::{IA32_PAT, machine, shell};

#[test]
fn unsettable_msr_is_named() {
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
