//! A network device between a driver and a wire, whose other end sends any frames and may be full; with rate limits.

use std::num::NonZeroU64;
use std::os::unix::net::UnixDatagram;
use std::sync::{Arc, Mutex};

use thaw_protocol::control::DeviceId;
use thaw_protocol::device_limits::{Bucket, DeviceLimits, DeviceLimit};
use thaw_vmm::virtio::VirtioDevice;
use thaw_vmm::virtio::event_loop::EventLoop;
use thaw_vmm::virtio::net::{DEFAULT_MAC, Net};

use crate::guest::{self, World};
use crate::script::Script;

#[derive(Default)]
struct Wire {
    device: Option<Arc<Mutex<Net>>>,
    peer: Option<UnixDatagram>,
}

impl World for Wire {
    const ID: DeviceId = DeviceId::Net;

    fn device(&mut self, event_loop: &EventLoop) -> Arc<Mutex<dyn VirtioDevice>> {
        let device = Arc::new(Mutex::new(Net::new(DEFAULT_MAC, event_loop.registrar(DeviceId::Net))));
        self.device = Some(device.clone());
        device
    }

    fn attach(&mut self) {
        let (ours, peer) = UnixDatagram::pair().expect("sockets");
        peer.set_nonblocking(true).expect("a socket");
        if let Some(device) = &self.device {
            let mut device = device.lock().expect("nobody panicked");
            device.attach_frames(ours.into()).expect("a socket is taken");
        }
        self.peer = Some(peer);
    }

    fn act(&mut self, script: &mut Script<'_>) {
        let Some(peer) = &self.peer else { return };
        match script.byte() % 6 {
            // Behind a header that says nothing.
            0 => drop(peer.send(&[&[0; 12], script.run()].concat())),
            1 => drop(peer.send(script.run())),
            2 => drop(peer.send(&vec![0; script.word().into()])),
            3 => while peer.recv(&mut [0; 16]).is_ok() {},
            4 => {
                let mut limit = || DeviceLimit {
                    bytes: bucket(script),
                    operations: bucket(script),
                };
                let (send, receive) = (limit(), limit());
                if let Some(device) = &self.device {
                    let mut device = device.lock().expect("nobody panicked");
                    let limited = device.limit(DeviceLimits::Network { send, receive });
                    limited.expect("the network has limits");
                }
            }
            _ => self.attach(),
        }
    }
}

fn bucket(script: &mut Script<'_>) -> Option<Bucket> {
    let (per_second, burst, once) = (script.byte(), script.byte(), script.byte());
    Some(Bucket {
        per_second: NonZeroU64::new(u64::from(per_second) << 10)?,
        burst: NonZeroU64::new(burst.into())?,
        once: once.into(),
    })
}

/// See [`guest`].
pub fn run(input: &[u8]) {
    guest::run(Wire::default(), input);
}
