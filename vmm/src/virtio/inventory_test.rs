use thaw_hypervisor::Kvm;

use super::*;
use crate::memory;
use crate::virtio::mmio::register;

/// A machine's devices on the host's KVM. `None` if KVM cannot be opened.
fn machine() -> Option<(Inventory, Arc<Vm>)> {
    let device = match std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/kvm")
    {
        Ok(device) => device,
        Err(error) => {
            thaw_test_skip::skip(format!("/dev/kvm: {error}"));
            return None;
        }
    };
    let kvm = Kvm::from_fd(device.into()).unwrap();
    let vm = kvm.create_vm().unwrap();
    let memory = memory::create(&vm, 64).unwrap();
    let windows = Windows::create(&vm).unwrap();
    vm.create_irqchip().unwrap();
    let inventory = Inventory::new(&memory, windows, &vm, EventSink::new().unwrap()).unwrap();
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

/// A machine's devices, frozen, and the devices of another machine restored from them.
fn frozen_and_thawed(prepare: impl FnOnce(&Inventory)) -> Option<(Inventory, Arc<Vm>)> {
    let (frozen, _vm) = machine()?;
    prepare(&frozen);
    frozen.quiesce();
    let records = frozen.save();
    let (thawed, vm) = machine()?;
    thawed.restore(&records).unwrap();
    Some((thawed, vm))
}

fn file() -> OwnedFd {
    let file = tempfile::tempfile().unwrap();
    file.set_len(1 << 20).unwrap();
    file.into()
}

const DISK: Backend = Backend::Disk { read_only: false };

#[test]
fn what_was_restored_is_what_was_saved() {
    let Some((frozen, _vm)) = machine() else { return };
    let records = frozen.save();
    let Some((thawed, _vm)) = machine() else { return };
    thawed.restore(&records).unwrap();
    assert_eq!(thawed.save(), records);
}

#[test]
fn restored_devices_need_a_backend_or_the_word_they_have_none() {
    let Some((thawed, _vm)) = frozen_and_thawed(|frozen| {
        frozen.attach(DeviceId::Blk0, DISK, vec![file()]).unwrap();
    }) else {
        return;
    };
    let not_mentioned = DeviceId::ALL.map(|id| (id, NotSettled::NotMentioned));
    assert_eq!(
        thawed.not_settled(&[]),
        not_mentioned[..10],
        "memory, balloon and random numbers need nothing"
    );
    let blk0 = |why| [(DeviceId::Blk0, why)];
    assert_eq!(thawed.not_settled(&DeviceId::ALL), blk0(NotSettled::WasBacked));
    let others: Vec<DeviceId> = DeviceId::ALL
        .into_iter()
        .filter(|id| *id != DeviceId::Blk0)
        .collect();
    let wrong = thawed.attach(DeviceId::Blk0, Backend::Pmem, vec![file()]);
    assert!(matches!(wrong, Err(AttachError::WrongKind(_))));
    assert_eq!(thawed.not_settled(&others), blk0(NotSettled::NotMentioned));
    thawed.attach(DeviceId::Blk0, DISK, vec![file()]).unwrap();
    assert!(thawed.not_settled(&others).is_empty());
    assert_eq!(thawed.not_settled(&DeviceId::ALL), blk0(NotSettled::IsBacked));
}

#[test]
fn a_miss_socket_is_enough_for_the_root_device() {
    let Some((thawed, _vm)) = frozen_and_thawed(|_| {}) else {
        return;
    };
    let (socket, _peer) = rustix::net::socketpair(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::SEQPACKET,
        rustix::net::SocketFlags::CLOEXEC,
        None,
    )
    .unwrap();
    thawed
        .attach(DeviceId::Root, Backend::Misses, vec![socket])
        .unwrap();
    let not_settled = thawed.not_settled(&[]);
    assert!(not_settled.iter().all(|(id, _)| *id != DeviceId::Root));
}

#[test]
fn a_machine_that_was_not_restored_owes_nothing() {
    let Some((inventory, _vm)) = machine() else { return };
    assert!(inventory.not_settled(&[]).is_empty());
    assert!(inventory.not_settled(&DeviceId::ALL).is_empty());
}

#[test]
fn records_of_other_devices_are_refused_whole() {
    let Some((frozen, _vm)) = machine() else { return };
    let records = frozen.save();
    let missing = records[1..].to_vec();
    let extra = [&records[..], &records[12..]].concat();
    let mut swapped = records.clone();
    swapped.swap(2, 3);
    for wrong in [missing, extra, swapped, Vec::new()] {
        let error = frozen.restore(&wrong).unwrap_err();
        assert!(matches!(error, RestoreError::Device { .. }), "{error}");
    }
    let mut other = records.clone();
    other[9].config[8] ^= 1;
    let error = frozen.restore(&other).unwrap_err().to_string();
    assert!(error.contains("Pmem1: configuration"), "{error}");
    assert!(frozen.not_settled(&[]).is_empty());
    assert_eq!(frozen.save(), records);
}

#[test]
fn memory_beyond_boot_memory_is_asked_of_the_guest_in_blocks() {
    let Some((inventory, _vm)) = machine() else { return };
    let requested = || {
        let mut size = [0; 8];
        let window = layout::mmio_window(DeviceId::Mem).unwrap();
        inventory.mmio_read(window.start + register::CONFIG + 48, &mut size);
        u64::from_le_bytes(size)
    };
    const MIB: u64 = 1 << 20;
    for (total, offered) in [(64, 0), (32, 0), (65, 2), (128, 64), (64 + 65536, 65536)] {
        inventory.request_memory(total * MIB).unwrap();
        assert_eq!(requested(), offered * MIB, "{total} MiB in all");
    }
    assert!(inventory.request_memory((64 + 65536 + 1) * MIB).is_err());
    assert!(inventory.plugged().is_empty());
}

#[test]
fn quiesced_devices_work_again_only_when_told() {
    let Some((inventory, _vm)) = machine() else { return };
    assert!(!inventory.quiesce(), "they had not started");
    inventory.start_work();
    assert!(inventory.quiesce());
    assert!(!inventory.quiesce());
    inventory.start_work();
    assert!(inventory.quiesce());
    // The machine ends while the threads are kept out.
    drop(inventory);
}
