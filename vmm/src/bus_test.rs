//! A whole machine's devices on the host's KVM, driven by register writes like those of a vCPU.

use std::sync::Arc;
use std::time::{Duration, Instant};

use thaw_hypervisor::{Kvm, Vm};
use virtio_queue::desc::split::Descriptor;
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::events::EventSink;
use crate::layout;
use crate::memory::{self, GuestMemory};
use crate::virtio::Windows;
use crate::virtio::mmio::register;
use crate::virtio::testing::Layout;

/// A machine's bus and memory. `None` if /dev/kvm cannot be opened.
fn machine() -> Option<(Bus, Arc<Vm>, &'static GuestMemory)> {
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
    let vm = Kvm::from_fd(device.into()).unwrap().create_vm().unwrap();
    let memory = memory::create(&vm, 64).unwrap();
    let windows = Windows::create(&vm).unwrap();
    vm.create_irqchip().unwrap();
    let bus = Bus {
        inventory: Inventory::new(&memory, windows, &vm, EventSink::new().unwrap()).unwrap(),
        console: Console::new(&vm).unwrap(),
    };
    Some((bus, vm, Box::leak(Box::new(memory))))
}

const RINGS: u64 = 0x10_0000;
const BUFFER: u64 = 0x20_0000;

fn set(bus: &Bus, offset: u64, value: u32) {
    let window = layout::mmio_window(DeviceId::Rng).unwrap();
    bus.mmio_write(window.start + offset, &value.to_le_bytes());
}

/// The rng's driver starts and requests 8 bytes.
fn ask(bus: &Bus, memory: &'static GuestMemory) -> Layout {
    for status in [1, 3] {
        set(bus, register::STATUS, status);
    }
    set(bus, register::DRIVER_FEATURES_SEL, 1);
    set(bus, register::DRIVER_FEATURES, 1);
    set(bus, register::STATUS, 11);
    let layout = Layout::new(memory, RINGS, 16);
    set(bus, register::QUEUE_NUM, 16);
    set(bus, register::QUEUE_DESC_LOW, layout.descriptors as u32);
    set(bus, register::QUEUE_DRIVER_LOW, layout.available as u32);
    set(bus, register::QUEUE_DEVICE_LOW, layout.used as u32);
    set(bus, register::QUEUE_READY, 1);
    set(bus, register::STATUS, 15);
    layout.describe(0, Descriptor::new(BUFFER, 8, 2, 0));
    layout.offer_at(0, 0);
    layout.set_available_index(1);
    set(bus, register::QUEUE_NOTIFY, 0);
    layout
}

/// Copies the first bytes of memory, as a snapshot would.
fn copy(from: &GuestMemory, to: &GuestMemory) {
    let mut bytes = vec![0; 0x1000];
    for address in [RINGS, BUFFER] {
        from.read_slice(&mut bytes, GuestAddress(address)).unwrap();
        to.write_slice(&bytes, GuestAddress(address)).unwrap();
    }
}

fn answered(layout: &Layout) -> u16 {
    let patience = Instant::now() + Duration::from_secs(20);
    while layout.used_index() == 0 {
        assert!(Instant::now() < patience, "no answer in 20 s");
        std::thread::yield_now();
    }
    layout.used_index()
}

#[test]
fn parked_devices_touch_nothing_and_lose_nothing() {
    let Some((frozen, _vm, memory)) = machine() else {
        return;
    };
    // Its threads were never let in, so the request is in flight at the freeze.
    let before = ask(&frozen, memory);
    let records = frozen.quiesce().save();

    let Some((thawed, _vm, other)) = machine() else {
        return;
    };
    copy(memory, other);
    let after = Layout::at(other, RINGS, 16);
    thawed.restore(&records).unwrap();
    let not_mentioned: Vec<DeviceId> = thawed.not_settled(&[]).iter().map(|(id, _)| *id).collect();
    assert_eq!(
        not_mentioned.len(),
        11,
        "ten devices and the console: {not_mentioned:?}"
    );
    assert!(thawed.not_settled(&not_mentioned).is_empty());
    thawed.request_memory(128).unwrap();
    thawed.notify_generation();
    assert_eq!(after.used_index(), 0, "parked");
    thawed.start_work();
    assert_eq!(answered(&after), 1);
    let mut random = [0u8; 8];
    other.read_slice(&mut random, GuestAddress(BUFFER)).unwrap();
    assert_ne!(random, [0; 8]);
    assert_eq!(before.used_index(), 0, "the frozen one has not moved");
    frozen.start_work();
    assert_eq!(answered(&before), 1);

    // Frozen at this point, the record is the same as before, with answer and interrupt.
    let quiesced = thawed.quiesce();
    let again = quiesced.save();
    let rng = &again.devices[DeviceId::Rng as usize].transport;
    assert_eq!((rng.queues[0].next_available, rng.queues[0].next_used), (1, 1));
    assert!(!rng.queues[0].has_work);
    assert_eq!(rng.reasons, 1);
}

#[test]
fn the_guard_of_a_freeze_lets_the_devices_go_on() {
    let Some((bus, _vm, memory)) = machine() else {
        return;
    };
    bus.start_work();
    let guard = bus.quiesce();
    let layout = ask(&bus, memory);
    assert_eq!(layout.used_index(), 0);
    drop(guard);
    assert_eq!(answered(&layout), 1);
}

#[test]
fn a_machine_refuses_the_records_of_another_and_stays_as_it_was() {
    let Some((bus, _vm, _memory)) = machine() else {
        return;
    };
    let good = bus.quiesce().save();
    let mut bad = good.clone();
    bad.devices[DeviceId::Blk3 as usize].inventory.features ^= 1 << 9;
    let error = bus.restore(&bad).unwrap_err().to_string();
    assert!(error.contains("Blk3: features"), "{error}");
    assert!(bus.not_settled(&[]).is_empty());
    let mut bad = good.clone();
    bad.console.in_buffer = vec![0; 65];
    assert!(bus.restore(&bad).is_err());
    assert_eq!(bus.quiesce().save(), good);
}

#[test]
fn backend_smaller_than_the_frozen_one_is_refused_by_name() {
    let disk = |bytes: u64| {
        let file = tempfile::tempfile().unwrap();
        file.set_len(bytes).unwrap();
        vec![OwnedFd::from(file)]
    };
    let writable = || Backend::Disk { read_only: false };
    let Some((frozen, _vm, _memory)) = machine() else {
        return;
    };
    frozen.attach(DeviceId::Blk0, writable(), disk(1 << 20)).unwrap();
    let records = frozen.quiesce().save();
    let Some((thawed, _vm, _memory)) = machine() else {
        return;
    };
    thawed.restore(&records).unwrap();
    for (backend, fds, says) in [
        (
            writable(),
            disk(1 << 19),
            "Blk0: a disk of 1024 sectors is smaller",
        ),
        (
            Backend::Disk { read_only: true },
            disk(1 << 20),
            "Blk0: a read-only disk",
        ),
    ] {
        let error = thawed.attach(DeviceId::Blk0, backend, fds).unwrap_err();
        assert!(matches!(error, AttachError::Frozen(_)));
        assert!(error.to_string().starts_with(says), "{error}");
    }
    let blk0 = |why| (DeviceId::Blk0, why);
    assert!(thawed.not_settled(&[]).contains(&blk0(NotSettled::NotMentioned)));
    assert_eq!(thawed.not_settled(&DeviceId::ALL), [blk0(NotSettled::WasBacked)]);
}
