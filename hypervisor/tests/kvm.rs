//! The host's KVM, with guests of a few 16-bit instructions.

#![allow(clippy::unwrap_used)]

use std::fs::File;
use std::sync::Arc;
use std::time::Duration;

use thaw_hypervisor::{Access, Error, EventFd, Exit, Kvm, Vcpu, Vm, kvm_regs};
use vm_memory::{Bytes, GuestAddress, GuestRegionMmap, MemoryRegionAddress};

const CODE: u64 = 0x1000;

fn kvm() -> Kvm {
    let device = File::options()
        .read(true)
        .write(true)
        .open("/dev/kvm")
        .expect("this test needs /dev/kvm");
    Kvm::from_fd(device.into()).unwrap()
}

fn region(start: u64, size: usize) -> Arc<GuestRegionMmap<()>> {
    Arc::new(GuestRegionMmap::from_range(GuestAddress(start), size, None).unwrap())
}

/// A machine of 64 KiB at 0 with `code` at [`CODE`], about to run it in real mode.
fn machine(code: &[u8]) -> (Arc<Vm>, Vcpu) {
    let vm = kvm().create_vm().unwrap();
    let memory = region(0, 0x10000);
    memory.write_slice(code, MemoryRegionAddress(CODE)).unwrap();
    vm.set_memory(0, memory, Access::ReadWrite).unwrap();
    vm.set_tss_address(0xfffb_d000).unwrap();
    vm.set_identity_map_address(0xfffb_c000).unwrap();
    vm.create_irqchip().unwrap();
    let vcpu = vm.create_vcpu(0).unwrap();
    let mut sregs = vcpu.sregs().unwrap();
    (sregs.cs.base, sregs.cs.selector) = (0, 0);
    vcpu.set_sregs(&sregs).unwrap();
    vcpu.set_regs(&kvm_regs {
        rip: CODE,
        rflags: 2,
        ..Default::default()
    })
    .unwrap();
    (vm, vcpu)
}

#[test]
fn what_is_not_kvm_is_refused() {
    for path in ["/dev/null", "/proc/self/status", "/"] {
        let refused = Kvm::from_fd(File::open(path).unwrap().into());
        assert!(matches!(refused, Err(Error::NotKvm(_))), "{path}: {refused:?}");
    }
}

#[test]
fn ports_carry_data_both_ways() {
    // in al, 0x42; inc al; out 0x43, al
    let (_vm, mut vcpu) = machine(&[0xe4, 0x42, 0xfe, 0xc0, 0xe6, 0x43]);
    match vcpu.run().unwrap() {
        Exit::PortRead { port: 0x42, data } => data[0] = 6,
        other => panic!("{other:?}"),
    }
    assert!(matches!(
        vcpu.run().unwrap(),
        Exit::PortWrite {
            port: 0x43,
            data: [7]
        }
    ));
}

#[test]
fn unbacked_memory_exits_as_mmio_and_read_only_stays() {
    // mov ax, 0x2000; mov ds, ax; mov [0], al; mov al, [0]; mov byte [0x1000], 5; out 0x43, al
    let code = [
        0xb8, 0x00, 0x20, 0x8e, 0xd8, 0xa2, 0x00, 0x00, 0xa0, 0x00, 0x00, 0xc6, 0x06, 0x00, 0x10, 0x05, 0xe6,
        0x43,
    ];
    let (vm, mut vcpu) = machine(&code);
    let read_only = region(0x21000, 0x1000);
    vm.set_memory(1, read_only.clone(), Access::ReadOnly).unwrap();
    assert!(matches!(
        vcpu.run().unwrap(),
        Exit::MmioWrite {
            address: 0x20000,
            data: [0]
        }
    ));
    match vcpu.run().unwrap() {
        Exit::MmioRead {
            address: 0x20000,
            data,
        } => data.fill(9),
        other => panic!("{other:?}"),
    }
    assert!(matches!(
        vcpu.run().unwrap(),
        Exit::MmioWrite {
            address: 0x21000,
            data: [5]
        }
    ));
    assert!(matches!(
        vcpu.run().unwrap(),
        Exit::PortWrite {
            port: 0x43,
            data: [9]
        }
    ));
    assert_eq!(read_only.read_obj::<u8>(MemoryRegionAddress(0)).unwrap(), 0);
}

#[test]
fn a_slot_keeps_its_mapping_until_it_is_removed() {
    let (vm, _vcpu) = machine(&[]);
    let mapping = region(0x100000, 0x1000);
    vm.set_memory(3, mapping.clone(), Access::ReadWrite).unwrap();
    assert_eq!(Arc::strong_count(&mapping), 2);
    vm.remove_memory(3).unwrap();
    assert_eq!(Arc::strong_count(&mapping), 1);
    vm.remove_memory(3).unwrap();
}

#[test]
fn a_refused_slot_is_named() {
    let (vm, _vcpu) = machine(&[]);
    for (start, size) in [(0x100000, 100), (0x100001, 0x1000)] {
        let refused = vm.set_memory(2, region(start, size), Access::ReadWrite);
        assert!(
            matches!(refused, Err(Error::Unaligned { slot: 2, .. })),
            "{refused:?}"
        );
    }
    // Overlaps slot 0.
    let refused = vm.set_memory(2, region(0x8000, 0x1000), Access::ReadWrite);
    assert!(
        matches!(
            refused,
            Err(Error::Ioctl {
                call: "KVM_SET_USER_MEMORY_REGION",
                ..
            })
        ),
        "{refused:?}"
    );
}

#[test]
fn an_ioeventfd_is_signalled_instead_of_an_exit() {
    // mov ax, 0x2000; mov ds, ax; mov eax, 7; mov [0], eax; inc eax; mov [0], eax
    let code = [
        0xb8, 0x00, 0x20, 0x8e, 0xd8, 0x66, 0xb8, 7, 0, 0, 0, 0x66, 0xa3, 0, 0, 0x66, 0x40, 0x66, 0xa3, 0, 0,
    ];
    let (vm, mut vcpu) = machine(&code);
    let event = EventFd::new(libc::EFD_NONBLOCK).unwrap();
    vm.register_ioevent(&event, 0x20000, Some(7)).unwrap();
    // The 7 went to the eventfd; the 8 does not match.
    assert!(matches!(
        vcpu.run().unwrap(),
        Exit::MmioWrite {
            address: 0x20000,
            data: [8, 0, 0, 0]
        }
    ));
    assert_eq!(event.read().unwrap(), 1);
}

#[test]
fn a_kick_is_not_lost_whenever_it_comes() {
    // jmp $
    let (_vm, mut vcpu) = machine(&[0xeb, 0xfe]);
    let kicker = vcpu.kicker();
    kicker.bind_current_thread();
    // Before the vCPU enters.
    kicker.kick();
    assert!(matches!(vcpu.run().unwrap(), Exit::Interrupted));
    // While it runs; and a second one would find immediate_exit cleared, not stuck.
    for wait in [0, 1, 5] {
        let kicker = kicker.clone();
        let other = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(wait));
            kicker.kick();
        });
        assert!(matches!(vcpu.run().unwrap(), Exit::Interrupted));
        other.join().unwrap();
    }
    kicker.unbind();
}

#[test]
fn a_kicker_may_outlive_its_vcpu() {
    let (vm, vcpu) = machine(&[]);
    let kicker = vcpu.kicker();
    drop((vcpu, vm));
    kicker.kick();
}

#[test]
fn a_refused_msr_is_named() {
    let (_vm, vcpu) = machine(&[]);
    let refused = vcpu.set_msrs(&[(0x1a0, 1), (0xdead_beef, 1)]);
    assert!(
        matches!(
            refused,
            Err(Error::Msr {
                index: 0xdead_beef,
                value: 1
            })
        ),
        "{refused:?}"
    );
}
