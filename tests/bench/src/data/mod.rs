//! What `make bench-data` measures: requests of a guest's driver to disks, through the threads of a machine's devices, beside a plain
//! program that does the same to a file beside them, in turn. The driver is this program, so nothing is emulated.
//!
//! | module | holds |
//! |---|---|
//! | [`driver`] | the driver's end of a queue |
//! | [`workload`] | what is asked of a disk, and of a file |

pub mod driver;
pub mod workload;

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Instant;

use thaw_protocol::control::{Backend, DeviceId};
use thaw_vmm::virtio::blk::Blk;
use thaw_vmm::virtio::device_thread::DeviceThread;
use thaw_vmm::virtio::gate::Gate;
use thaw_vmm::virtio::{Loops, VirtioDevice};

use driver::{Driver, Operation};
use workload::{BLOCK, Offsets, Store};

/// A machine's disks: one under load, and its neighbour.
pub struct Disks {
    pub disk: Driver,
    pub neighbour: Driver,
    _threads: Vec<DeviceThread>,
}

impl Disks {
    /// Disks over these files, with the threads that a machine has.
    pub fn new(disk: OwnedFd, neighbour: OwnedFd) -> Result<Disks, String> {
        let mut loops = Loops::new().map_err(|e| format!("epoll: {e}"))?;
        let mut driver = |id, serial, file| -> Result<Driver, String> {
            let mut device = Blk::new(serial, loops.of(id).registrar(id));
            let attached = device.attach(Backend::Disk { read_only: false }, vec![file]);
            attached.map_err(|e| format!("a disk: {e}"))?;
            Driver::new(&mut loops, id, Arc::new(Mutex::new(device)))
        };
        let mut disk = driver(DeviceId::Blk0, "blk0", disk)?;
        let mut neighbour = driver(DeviceId::Blk1, "blk1", neighbour)?;
        let gate = Arc::new(Gate::new());
        gate.open();
        let threads = loops.start(&gate).map_err(|e| format!("a thread: {e}"))?;
        disk.bring_up();
        neighbour.bring_up();
        Ok(Disks {
            disk,
            neighbour,
            _threads: threads,
        })
    }

    /// Times reads of the neighbour, one after the other, µs.
    pub fn round_trips(&mut self, count: usize) -> Result<Vec<f64>, String> {
        round_trips(&mut self.neighbour, count)
    }

    /// The same while the disk is written and synced without a pause.
    pub fn round_trips_beside_syncs(&mut self, count: usize) -> Result<Vec<f64>, String> {
        let Disks { disk, neighbour, .. } = self;
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            let syncing = scope.spawn(|| {
                let mut offsets = Offsets::new(workload::BYTES);
                while !done.load(Ordering::Relaxed) {
                    disk.write_and_sync(&mut offsets, 1)?;
                }
                Ok::<(), String>(())
            });
            let trips = round_trips(neighbour, count);
            done.store(true, Ordering::Relaxed);
            let synced = syncing.join();
            synced.map_err(|_| "the thread that syncs panicked".to_string())??;
            trips
        })
    }
}

fn round_trips(driver: &mut Driver, count: usize) -> Result<Vec<f64>, String> {
    let mut offsets = Offsets::new(workload::BYTES);
    let trips = (0..count).map(|_| {
        let began = Instant::now();
        driver.request(Operation::Read, offsets.random(), BLOCK)?;
        Ok(began.elapsed().as_secs_f64() * 1e6)
    });
    trips.collect()
}
