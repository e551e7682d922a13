use thaw_hypervisor::Kvm;

use super::*;
use crate::memory;

/// A machine of devices on the host's KVM; none where it cannot be opened.
fn machine() -> Option<(Inventory, Arc<Vm>)> {
    let device = match std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/kvm")
    {
        Ok(device) => device,
        Err(error) => {
            eprintln!("skipped: /dev/kvm: {error}");
            return None;
        }
    };
    let kvm = Kvm::from_fd(device.into()).unwrap();
    let vm = kvm.create_vm().unwrap();
    let memory = memory::create(&vm, 64).unwrap();
    vm.create_irqchip().unwrap();
    let inventory = Inventory::new(&memory, &vm, EventSink::new().unwrap()).unwrap();
    Some((inventory, vm))
}

fn read(inventory: &Inventory, address: u64) -> u32 {
    let mut data = [0xAA; 4];
    inventory.mmio_read(address, &mut data);
    u32::from_le_bytes(data)
}

#[test]
fn every_slot_answers_with_its_device_type() {
    let Some((inventory, _vm)) = machine() else { return };
    let types: Vec<u32> = DeviceId::ALL[..13]
        .iter()
        .map(|id| {
            let window = layout::mmio_window(*id).unwrap();
            assert_eq!(read(&inventory, window.start).to_le_bytes(), *b"virt");
            read(&inventory, window.start + register::DEVICE_ID)
        })
        .collect();
    // fs, fs, blk x 4, net, vsock, pmem x 2, mem, balloon, rng (virtio 1.2 §5).
    assert_eq!(types, [26, 26, 2, 2, 2, 2, 1, 19, 27, 27, 24, 5, 4]);
}

#[test]
fn addresses_of_no_device_read_as_zero_and_ignore_writes() {
    let Some((inventory, _vm)) = machine() else { return };
    for address in [0, MMIO_BASE - 4, MMIO_BASE + 13 * MMIO_WINDOW, u64::MAX] {
        inventory.mmio_write(address, &[1; 4]);
        assert_eq!(read(&inventory, address), 0);
    }
}

#[test]
fn backends_go_to_their_device_and_only_there() {
    let Some((inventory, _vm)) = machine() else { return };
    let file = || OwnedFd::from(tempfile::tempfile().unwrap());
    inventory
        .attach(DeviceId::Blk2, Backend::Disk { read_only: false }, vec![file()])
        .unwrap();
    for device in [
        DeviceId::Net,
        DeviceId::Pmem1,
        DeviceId::Rng,
        DeviceId::Mem,
        DeviceId::Console,
    ] {
        let refused = inventory.attach(device, Backend::Disk { read_only: false }, vec![file()]);
        assert!(matches!(refused, Err(AttachError::WrongKind(_))), "{device:?}");
    }
}

