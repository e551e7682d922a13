//! A guest's soft-lockup watchdog is told of a pause, with the host's KVM.

#![allow(clippy::unwrap_used)]

use std::fs::File;
use std::sync::Arc;

use thaw_hypervisor::{Access, Exit, Kvm, kvm_regs};
use vm_memory::{Bytes, GuestAddress, GuestRegionMmap, MemoryRegionAddress};

const CODE: u64 = 0x1000;
/// Where the guest has its clock: `struct pvclock_vcpu_time_info`, Documentation/virt/kvm/x86/msr.rst.
const CLOCK: u64 = 0x2000;
const FLAGS: u64 = CLOCK + 29;
/// Bit of its flags: the host stopped this vCPU. Linux then forgives its watchdog, and clears it.
const GUEST_STOPPED: u8 = 1 << 1;

/// mov ecx, 0x4b564d01 (MSR_KVM_SYSTEM_TIME_NEW); mov eax, CLOCK | 1; xor edx, edx; wrmsr; out 0x43, al (twice)
const SET_UP_KVMCLOCK: [u8; 21] = [
    0x66, 0xb9, 0x01, 0x4d, 0x56, 0x4b, 0x66, 0xb8, 0x01, 0x20, 0, 0, 0x66, 0x31, 0xd2, 0x0f, 0x30, 0xe6,
    0x43, 0xe6, 0x43,
];

#[test]
fn a_paused_guest_s_soft_lockup_watchdog_is_told() {
    let device = File::options()
        .read(true)
        .write(true)
        .open("/dev/kvm")
        .expect("this test needs /dev/kvm");
    let vm = Kvm::from_fd(device.into()).unwrap().create_vm().unwrap();
    let memory: Arc<GuestRegionMmap<()>> =
        Arc::new(GuestRegionMmap::from_range(GuestAddress(0), 0x10000, None).unwrap());
    memory
        .write_slice(&SET_UP_KVMCLOCK, MemoryRegionAddress(CODE))
        .unwrap();
    vm.set_memory(0, memory.clone(), Access::ReadWrite).unwrap();
    vm.set_tss_address(0xfffb_d000).unwrap();
    vm.set_identity_map_address(0xfffb_c000).unwrap();
    vm.create_irqchip().unwrap();
    let mut vcpu = vm.create_vcpu(0).unwrap();
    let mut sregs = vcpu.sregs().unwrap();
    (sregs.cs.base, sregs.cs.selector) = (0, 0);
    vcpu.set_sregs(&sregs).unwrap();
    let regs = kvm_regs {
        rip: CODE,
        rflags: 2,
        ..Default::default()
    };
    vcpu.set_regs(&regs).unwrap();
    let flags = || memory.read_obj::<u8>(MemoryRegionAddress(FLAGS)).unwrap();

    assert!(
        !vcpu.notify_paused(),
        "this guest has no clock yet, so nobody can be told"
    );
    assert!(matches!(vcpu.run().unwrap(), Exit::PortWrite { .. }));
    assert_eq!(flags() & GUEST_STOPPED, 0);
    assert!(vcpu.notify_paused());
    assert!(matches!(vcpu.run().unwrap(), Exit::PortWrite { .. }));
    assert_eq!(flags() & GUEST_STOPPED, GUEST_STOPPED);
}
