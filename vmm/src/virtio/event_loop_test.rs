use std::os::fd::OwnedFd;
use std::sync::Barrier;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use thaw_protocol::control::Backend;

use super::*;
use crate::virtio::config::ConfigSpace;
use crate::virtio::device::{Activation, AttachError, DeviceSpec, Saved};
use crate::virtio::device_thread::WAKE;
use crate::virtio::state::{DeviceState, QueueRecord};
use crate::virtio::testing::{eventfd, open_gate};

const PATIENCE: Duration = Duration::from_secs(10);

/// Why a device was called.
#[derive(Debug, PartialEq, Eq)]
enum Call {
    Queue(usize),
    Backend(u32),
    Woken,
    Reset,
}

struct Probe {
    calls: Sender<Call>,
    fail: bool,
    backend: Arc<EventFd>,
}

impl VirtioDevice for Probe {
    fn spec(&self) -> DeviceSpec {
        DeviceSpec {
            device_type: 0,
            features: 0,
            queue_sizes: &[16, 16],
        }
    }
    fn config(&self) -> Arc<ConfigSpace> {
        Arc::new(ConfigSpace::new(Vec::new()))
    }
    fn activate(&mut self, _: Activation) -> Result<(), DeviceError> {
        Ok(())
    }
    fn reset(&mut self) {
        self.calls.send(Call::Reset).unwrap();
    }
    fn attach(&mut self, _: Backend, _: Vec<OwnedFd>) -> Result<(), AttachError> {
        Ok(())
    }
    fn save(&mut self) -> Saved {
        Saved::plain(None)
    }
    fn check(&self, _: &DeviceState, _: Option<&[QueueRecord]>) -> Result<(), String> {
        Ok(())
    }
    fn restore(&mut self, _: Option<Activation>, _: &DeviceState) -> Result<(), DeviceError> {
        Ok(())
    }
    fn queue_ready(&mut self, queue: usize) -> Result<(), DeviceError> {
        self.calls.send(Call::Queue(queue)).unwrap();
        match self.fail {
            true => Err(DeviceError::Unanswerable {
                head: 0,
                what: "told to",
            }),
            false => Ok(()),
        }
    }
    fn backend_ready(&mut self, token: u32, _: EventSet) -> Result<(), DeviceError> {
        let _ = self.backend.read();
        self.calls.send(Call::Backend(token)).unwrap();
        Ok(())
    }
    fn woken(&mut self) -> Result<(), DeviceError> {
        self.calls.send(Call::Woken).unwrap();
        Ok(())
    }
}

struct Fixture {
    calls: Receiver<Call>,
    kicks: Vec<Arc<EventFd>>,
    backend: Arc<EventFd>,
    interrupt: Arc<Interrupt>,
}

fn serve(event_loop: &mut EventLoop, id: DeviceId, fail: bool) -> Fixture {
    let (sender, calls) = mpsc::channel();
    let backend = Arc::new(eventfd());
    let device = Arc::new(Mutex::new(Probe {
        calls: sender,
        fail,
        backend: backend.clone(),
    }));
    let kicks = vec![Arc::new(eventfd()), Arc::new(eventfd())];
    let interrupt = Arc::new(Interrupt::new(eventfd()));
    event_loop
        .serve(id, device, interrupt.clone(), kicks.clone())
        .unwrap();
    event_loop
        .registrar(id)
        .add(backend.as_raw_fd(), 7, EventSet::IN)
        .unwrap();
    Fixture {
        calls,
        kicks,
        backend,
        interrupt,
    }
}

#[test]
fn kicks_and_backends_reach_their_device() {
    let mut event_loop = EventLoop::new().unwrap();
    let a = serve(&mut event_loop, DeviceId::Blk0, false);
    let b = serve(&mut event_loop, DeviceId::Rng, false);
    let running = event_loop.start("devices", Thread::Devices, open_gate()).unwrap();
    a.kicks[1].write(1).unwrap();
    assert_eq!(a.calls.recv_timeout(PATIENCE).unwrap(), Call::Queue(1));
    b.backend.write(1).unwrap();
    assert_eq!(b.calls.recv_timeout(PATIENCE).unwrap(), Call::Backend(7));
    drop(running);
    assert!(a.calls.try_recv().is_err() && b.calls.try_recv().is_err());
}

#[test]
fn a_device_that_fails_is_idled_and_the_others_go_on() {
    let mut event_loop = EventLoop::new().unwrap();
    let bad = serve(&mut event_loop, DeviceId::Blk0, true);
    let good = serve(&mut event_loop, DeviceId::Rng, false);
    let running = event_loop.start("devices", Thread::Devices, open_gate()).unwrap();
    bad.kicks[0].write(1).unwrap();
    assert_eq!(bad.calls.recv_timeout(PATIENCE).unwrap(), Call::Queue(0));
    assert_eq!(bad.calls.recv_timeout(PATIENCE).unwrap(), Call::Reset);
    bad.kicks[0].write(1).unwrap();
    good.kicks[0].write(1).unwrap();
    assert_eq!(good.calls.recv_timeout(PATIENCE).unwrap(), Call::Queue(0));
    drop(running);
    assert!(bad.interrupt.failed());
    assert!(bad.calls.try_recv().is_err(), "not called again before a reset");
}

#[test]
fn wake_at_calls_the_device_then_and_once() {
    let mut event_loop = EventLoop::new().unwrap();
    let sleeper = serve(&mut event_loop, DeviceId::Blk0, false);
    let other = serve(&mut event_loop, DeviceId::Net, false);
    let registrar = event_loop.registrar(DeviceId::Blk0);
    let running = event_loop.start("devices", Thread::Devices, open_gate()).unwrap();
    let moment = crate::clock::monotonic_ns() + 30_000_000;
    registrar.wake_at(Some(moment));
    // Meanwhile the thread serves other devices that have work.
    other.kicks[0].write(1).unwrap();
    assert_eq!(other.calls.recv_timeout(PATIENCE).unwrap(), Call::Queue(0));
    assert_eq!(sleeper.calls.recv_timeout(PATIENCE).unwrap(), Call::Woken);
    assert!(crate::clock::monotonic_ns() >= moment);
    drop(running);
    assert!(sleeper.calls.try_recv().is_err() && other.calls.try_recv().is_err());
}

/// A device with calls that end only when so many are being made at once.
struct Meeting {
    left: usize,
    met: Arc<Barrier>,
    kick: Arc<EventFd>,
}

struct Meet(Arc<Barrier>);

impl crate::virtio::device::Call for Meet {
    fn make(self: Box<Self>) {
        self.0.wait();
    }
}

impl VirtioDevice for Meeting {
    fn spec(&self) -> DeviceSpec {
        DeviceSpec {
            device_type: 0,
            features: 0,
            queue_sizes: &[16],
        }
    }
    fn config(&self) -> Arc<ConfigSpace> {
        Arc::new(ConfigSpace::new(Vec::new()))
    }
    fn activate(&mut self, _: Activation) -> Result<(), DeviceError> {
        Ok(())
    }
    fn reset(&mut self) {}
    fn save(&mut self) -> Saved {
        Saved::plain(None)
    }
    fn queue_ready(&mut self, _: usize) -> Result<(), DeviceError> {
        Ok(())
    }
    fn next_call(&mut self) -> Result<Option<Box<dyn crate::virtio::device::Call>>, DeviceError> {
        let Some(left) = self.left.checked_sub(1) else {
            return Ok(None);
        };
        self.left = left;
        self.kick.write(1).unwrap();
        Ok(Some(Box::new(Meet(self.met.clone()))))
    }
}

#[test]
fn threads_of_a_loop_make_calls_at_the_same_time() {
    const THREADS: usize = 3;
    let (met, kick) = (Arc::new(Barrier::new(THREADS + 1)), Arc::new(eventfd()));
    let device = Meeting {
        left: THREADS,
        met: met.clone(),
        kick: kick.clone(),
    };
    let device: Arc<Mutex<dyn VirtioDevice>> = Arc::new(Mutex::new(device));
    let interrupt = Arc::new(Interrupt::new(eventfd()));
    let mut event_loop = EventLoop::new().unwrap();
    event_loop
        .serve(DeviceId::Blk0, device.clone(), interrupt, vec![kick.clone()])
        .unwrap();
    let gate = open_gate();
    let running = event_loop
        .start_several(THREADS, "disk", Thread::Disk, &gate)
        .unwrap();
    kick.write(1).unwrap();
    // All threads are in their calls now: each waits at the barrier, as this thread does. None holds the device's lock.
    met.wait();
    drop(device.lock().unwrap());
    gate.close();
    drop(running);
}

#[test]
fn sources_survive_packing() {
    for source in [
        Source::Alarm,
        Source::Kick { device: 12, queue: 3 },
        Source::Backend { device: 0, token: 0 },
        Source::Backend {
            device: 7,
            token: u32::MAX,
        },
    ] {
        assert_eq!(Source::unpack(source.pack()), Some(source));
    }
    assert_eq!(Source::unpack(WAKE), None, "the thread's own");
}
