//! A driver that gives pages back: any page numbers, any reported buffers.

use std::sync::{Arc, Mutex};

use thaw_protocol::control::DeviceId;
use thaw_vmm::virtio::VirtioDevice;
use thaw_vmm::virtio::balloon::Balloon;
use thaw_vmm::virtio::event_loop::EventLoop;

use crate::guest::{self, World};

struct Host;

impl World for Host {
    const ID: DeviceId = DeviceId::Balloon;

    fn device(&mut self, _: &EventLoop) -> Arc<Mutex<dyn VirtioDevice>> {
        Arc::new(Mutex::new(Balloon::new(Arc::default())))
    }
}

/// See [`guest`].
pub fn run(input: &[u8]) {
    guest::run(Host, input);
}
