//! A driver's register accesses, rings and resets, in any order, of the device that has least of its own: the transport's and the
//! queues' share of what a guest reaches.

use std::sync::{Arc, Mutex};

use thaw_protocol::control::DeviceId;
use thaw_vmm::virtio::VirtioDevice;
use thaw_vmm::virtio::event_loop::EventLoop;
use thaw_vmm::virtio::rng::Rng;

use crate::guest::{self, World};

struct Entropy;

impl World for Entropy {
    const ID: DeviceId = DeviceId::Rng;

    fn device(&mut self, _: &EventLoop) -> Arc<Mutex<dyn VirtioDevice>> {
        Arc::new(Mutex::new(Rng::default()))
    }
}

/// See [`guest`].
pub fn run(input: &[u8]) {
    guest::run(Entropy, input);
}
