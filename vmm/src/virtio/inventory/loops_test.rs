use std::os::fd::AsRawFd;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::EventFd;

use super::*;
use crate::virtio::interrupt::Interrupt;
use crate::virtio::rng::Rng;
use crate::virtio::testing::{eventfd, open_gate};

/// A device in the loop of `id`, and its kick.
fn served(loops: &mut Loops, id: DeviceId) -> (Arc<Mutex<Rng>>, Arc<EventFd>) {
    let (device, kick) = (Arc::new(Mutex::new(Rng::default())), Arc::new(eventfd()));
    let interrupt = Arc::new(Interrupt::new(eventfd()));
    let serving = loops
        .of(id)
        .serve(id, device.clone(), interrupt, vec![kick.clone()]);
    serving.unwrap();
    (device, kick)
}

/// Whether a loop takes the kick.
fn is_taken(kick: &EventFd) -> bool {
    let epoll = Epoll::new().unwrap();
    let event = EpollEvent::new(EventSet::IN, 0);
    epoll.ctl(ControlOperation::Add, kick.as_raw_fd(), event).unwrap();
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(10) {
        if epoll.wait(0, &mut [EpollEvent::default()]).unwrap() == 0 {
            return true;
        }
        std::thread::yield_now();
    }
    false
}

#[test]
fn a_disk_that_waits_delays_no_other_device() {
    let mut loops = Loops::new().unwrap();
    let ids = [DeviceId::Blk0, DeviceId::Blk1, DeviceId::Blk3, DeviceId::Net];
    let devices = ids.map(|id| served(&mut loops, id));
    let _threads = loops.start(&open_gate()).unwrap();
    for (slow, (disk, kick)) in devices.iter().enumerate().take(3) {
        // Its thread waits, as for a sync.
        let waiting = disk.lock().unwrap();
        // However often it is kicked.
        for _ in 0..2 * DISK_THREADS {
            kick.write(1).unwrap();
            assert!(is_taken(kick));
        }
        for (other, (_, kick)) in devices.iter().enumerate().filter(|(other, _)| *other != slow) {
            kick.write(1).unwrap();
            assert!(is_taken(kick), "{:?} behind {:?}", ids[other], ids[slow]);
        }
        drop(waiting);
        assert!(is_taken(kick));
    }
}
