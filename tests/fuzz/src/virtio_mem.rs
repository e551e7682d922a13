//! A driver that plugs and unplugs blocks of memory while the host asks for more and for less of it.
//!
//! Checked: what is plugged lies in the region, in whole blocks, and is never more than was ever asked for at once.

use std::sync::{Arc, Mutex};

use thaw_hypervisor::Error;
use thaw_protocol::control::DeviceId;
use thaw_vmm::layout::Window;
use thaw_vmm::virtio::VirtioDevice;
use thaw_vmm::virtio::event_loop::EventLoop;
use thaw_vmm::virtio::mem::{BLOCK, Mem, MemorySlots, Slots, reserve};
use vm_memory::GuestRegionMmap;

use crate::guest::{self, World};
use crate::script::Script;

const REGION: Window = Window {
    start: 256 << 30,
    size: 2 << 30,
};

/// No guest is shown anything.
struct Nobody;

impl Slots for Nobody {
    fn show(&self, _: u32, _: Arc<GuestRegionMmap<()>>) -> Result<(), Error> {
        Ok(())
    }

    fn hide(&self, _: u32) -> Result<(), Error> {
        Ok(())
    }
}

#[derive(Default)]
struct Host {
    device: Option<Arc<Mutex<Mem>>>,
    most: u64,
}

impl World for Host {
    const ID: DeviceId = DeviceId::Mem;

    fn device(&mut self, _: &EventLoop) -> Arc<Mutex<dyn VirtioDevice>> {
        let region = Arc::new(reserve(REGION).expect("address space"));
        let device = Arc::new(Mutex::new(Mem::new(MemorySlots::new(region, Nobody))));
        self.device = Some(device.clone());
        device
    }

    fn act(&mut self, script: &mut Script<'_>) {
        let asked = match script.byte() % 4 {
            0 => script.quad(),
            1 => 0,
            _ => u64::from(script.byte()) * BLOCK,
        };
        if let Some(device) = &self.device {
            let mut device = device.lock().expect("nobody panicked");
            let taken = device.set_requested_size(asked).is_ok();
            assert_eq!(taken, asked <= REGION.size && asked.is_multiple_of(BLOCK));
            if taken {
                self.most = self.most.max(asked);
            }
        }
    }

    fn check(&self) {
        let Some(device) = &self.device else { return };
        let plugged = device.lock().expect("nobody panicked").plugged();
        let mut end = REGION.start;
        for window in &plugged {
            assert!(window.start >= end && window.size > 0);
            assert!((window.start - REGION.start).is_multiple_of(BLOCK) && window.size.is_multiple_of(BLOCK));
            end = window.start + window.size;
        }
        assert!(end <= REGION.start + REGION.size);
        assert!(plugged.iter().map(|window| window.size).sum::<u64>() <= self.most);
    }
}

/// See [`guest`].
pub fn run(input: &[u8]) {
    guest::run(Host::default(), input);
}
