//! Hostile records: every device is restored from modified bytes, over memory that does not match them.

use std::sync::{Arc, Mutex};

use proptest::prelude::*;
use thaw_protocol::control::DeviceId;
use vm_memory::{Bytes, GuestAddress, GuestRegionMmap, MmapRegion};

use super::*;
use crate::events::EventSink;
use crate::layout::Window;
use crate::memory::GuestMemory;
use crate::virtio::balloon::Balloon;
use crate::virtio::blk::Blk;
use crate::virtio::device::VirtioDevice;
use crate::virtio::event_loop::EventLoop;
use crate::virtio::fs::Fs;
use crate::virtio::interrupt::Interrupt;
use crate::virtio::mem::{Mem, MemorySlots, Slots};
use crate::virtio::mmio::{MmioDevice, register};
use crate::virtio::net::Net;
use crate::virtio::pmem::Pmem;
use crate::virtio::rng::Rng;
use crate::virtio::testing::{Layout, eventfd, memory, open_gate};
use crate::virtio::vsock::Vsock;
use crate::virtio::window::HostWindow;

const WINDOW: Window = Window {
    start: 1 << 36,
    size: 1 << 21,
};

thread_local! {
    /// Shared by all cases: bytes that a device wrote in one are noise in the next.
    static MEMORY: &'static GuestMemory = memory();
}

/// Shows memory to no guest.
struct Nobody;

impl Slots for Nobody {
    fn show(&self, _: u32, _: Arc<GuestRegionMmap<()>>) -> Result<(), thaw_hypervisor::Error> {
        Ok(())
    }
    fn hide(&self, _: u32) -> Result<(), thaw_hypervisor::Error> {
        Ok(())
    }
}

/// A device of each kind behind its transport.
struct Bench {
    device: Arc<Mutex<dyn VirtioDevice>>,
    transport: MmioDevice,
    queues: usize,
    _event_loop: EventLoop,
}

const KINDS: usize = 8;

fn bench(kind: usize, memory: &GuestMemory) -> Bench {
    let event_loop = EventLoop::new().unwrap();
    let id = DeviceId::Rng;
    let window = || HostWindow::reserve(WINDOW).unwrap();
    let region = || {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let mapping = MmapRegion::build(None, 1 << 30, libc::PROT_READ | libc::PROT_WRITE, flags).unwrap();
        Arc::new(GuestRegionMmap::new(mapping, GuestAddress(1 << 38)).unwrap())
    };
    let device: Arc<Mutex<dyn VirtioDevice>> = match kind {
        0 => Arc::new(Mutex::new(Fs::root(window(), open_gate()))),
        1 => Arc::new(Mutex::new(Blk::new("blk", event_loop.registrar(id)))),
        2 => Arc::new(Mutex::new(Net::new([2; 6], event_loop.registrar(id)))),
        3 => Arc::new(Mutex::new(Vsock::new(
            event_loop.registrar(id),
            EventSink::new().unwrap(),
        ))),
        4 => Arc::new(Mutex::new(Pmem::new(window()))),
        5 => Arc::new(Mutex::new(Mem::new(MemorySlots::new(region(), Nobody)))),
        6 => Arc::new(Mutex::new(Balloon::new(Arc::default()))),
        _ => Arc::new(Mutex::new(Rng::default())),
    };
    let queues = device.lock().unwrap().spec().queue_sizes.len();
    let interrupt = Arc::new(Interrupt::new(eventfd()));
    let kicks = (0..queues).map(|_| Arc::new(eventfd())).collect();
    let transport = MmioDevice::new(id, device.clone(), interrupt, kicks, memory.clone()).unwrap();
    Bench {
        device,
        transport,
        queues,
        _event_loop: event_loop,
    }
}

/// The record of a running device of this kind whose state is not empty.
fn record(kind: usize) -> DeviceRecord {
    let memory = MEMORY.with(|memory| *memory);
    let bench = bench(kind, memory);
    let set = |offset: u64, value: u32| bench.transport.write(offset, &value.to_le_bytes());
    for status in [1, 3] {
        set(register::STATUS, status);
    }
    set(register::DRIVER_FEATURES_SEL, 1);
    set(register::DRIVER_FEATURES, 1);
    set(register::STATUS, 11);
    for queue in 0..bench.queues as u32 {
        let layout = Layout::new(memory, 0x4000 * (u64::from(queue) + 1), 16);
        set(register::QUEUE_SEL, queue);
        set(register::QUEUE_NUM, 16);
        set(register::QUEUE_DESC_LOW, layout.descriptors as u32);
        set(register::QUEUE_DRIVER_LOW, layout.available as u32);
        set(register::QUEUE_DEVICE_LOW, layout.used as u32);
        set(register::QUEUE_READY, 1);
    }
    set(register::STATUS, 15);
    let mut record = bench.transport.save();
    match &mut record.state {
        DeviceState::Fs(FsState { parked, .. }) => *parked = vec![vec![3], vec![1, 5]],
        DeviceState::Blk(BlkState { parked, .. }) => *parked = vec![2, 0],
        DeviceState::Vsock(VsockState { connections, .. }) => *connections = vec![(1 << 30, 7); 3],
        DeviceState::Mem(MemState {
            usable,
            plugged,
            requested,
        }) => {
            (*requested, *usable, *plugged) = (4 << 21, 8 << 21, vec![(0, 2), (4, 1)]);
        }
        _ => {}
    }
    bench.transport.check(&record).unwrap();
    record
}

/// Restores a record if it is accepted, and lets the device work with it. Returns whether it was accepted.
fn survive(kind: usize, record: &DeviceRecord, noise: &[u8]) -> bool {
    let memory = MEMORY.with(|memory| *memory);
    let everywhere: Vec<u8> = noise.iter().copied().cycle().take(0x10_0000).collect();
    memory.write_slice(&everywhere, GuestAddress(0)).unwrap();
    let bench = bench(kind, memory);
    if bench.transport.check(record).is_err() {
        return false;
    }
    bench.transport.restore(record).unwrap();
    bench.transport.release();
    for queue in 0..bench.queues {
        // A corrupt ring is an error, which stops the device.
        let _ = bench.device.lock().unwrap().queue_ready(queue);
        while let Ok(Some(call)) = bench.device.lock().unwrap().next_call() {
            call.make();
        }
    }
    bench.device.lock().unwrap().save();
    bench.device.lock().unwrap().reset();
    true
}

#[test]
fn an_honest_record_of_each_device_is_restored() {
    for kind in 0..KINDS {
        let record = record(kind);
        assert!(survive(
            kind,
            &DeviceRecord::decode(&record.encode()).unwrap(),
            &[0]
        ));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    /// No change to a record's bytes makes decoding, checking, restoring or serving panic or reach outside memory.
    #[test]
    fn records_with_changed_bytes_are_survived(
        kind in 0..KINDS,
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0u8..4), 1..6),
        noise in proptest::collection::vec(any::<u8>(), 1..64),
    ) {
        let mut bytes = record(kind).encode();
        for (at, byte, how) in changes {
            let at = at.index(bytes.len());
            match how {
                0 => bytes[at] = byte,
                1 => bytes[at] ^= 1 << (byte % 8),
                2 => bytes.insert(at, byte),
                _ => { bytes.remove(at); }
            }
        }
        if let Ok(record) = DeviceRecord::decode(&bytes) {
            survive(kind, &record, &noise);
        }
    }

    /// The same for all indices and addresses of queues, which the check accepts if they are in memory.
    #[test]
    fn queues_that_are_anywhere_are_survived(
        kind in 0..KINDS,
        queues in proptest::collection::vec((any::<u16>(), any::<u16>(), 0u64..0x4000, any::<bool>()), 3),
        heads in proptest::collection::vec(0u16..20, 0..4),
        noise in proptest::collection::vec(any::<u8>(), 1..64),
    ) {
        let mut record = record(kind);
        for (queue, (available, used, at, has_work)) in record.transport.queues.iter_mut().zip(queues) {
            (queue.next_available, queue.next_used, queue.has_work) = (available, used, has_work);
            queue.descriptors = at << 12;
            queue.available = (at << 12) + 0x800;
            queue.used = (at << 12) + 0xc00;
        }
        match &mut record.state {
            DeviceState::Fs(FsState { parked, .. }) => *parked = vec![vec![], heads],
            DeviceState::Blk(BlkState { parked, .. }) => *parked = heads,
            _ => {}
        }
        survive(kind, &record, &noise);
    }

    #[test]
    fn any_bytes_are_decoded_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..256)) {
        let _ = DeviceRecord::decode(&bytes);
        let _ = ConsoleRecord::decode(&bytes);
        let _ = DeviceRecord::decode(&[&[VERSION as u8], &bytes[..]].concat());
    }
}
