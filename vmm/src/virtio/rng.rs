//! virtio-rng (virtio 1.2 §5.4): random bytes of the host. It has no configuration and takes no backend.

use std::sync::Arc;

use rustix::rand::{GetRandomFlags, getrandom};
use virtio_bindings::virtio_ids::VIRTIO_ID_RNG;

use super::chain::Chain;
use super::config::{Config, ConfigSpace};
use super::device::{Activation, DeviceError, DeviceSpec, Saved, VirtioDevice, active_queue};
use super::guest_io;
use super::queue::Answer;
use crate::memory::GuestMemory;

const QUEUE_SIZES: [u16; 1] = [64];
/// Most bytes that one request gets. A driver that wants more sends another.
const MAX_REQUEST: usize = 4096;

/// The device.
pub struct Rng {
    active: Option<Activation>,
    config: Config<[u8; 0]>,
}

impl Default for Rng {
    fn default() -> Rng {
        Rng {
            active: None,
            config: Config::new([]),
        }
    }
}

impl VirtioDevice for Rng {
    fn spec(&self) -> DeviceSpec {
        DeviceSpec {
            device_type: VIRTIO_ID_RNG,
            features: 0,
            queue_sizes: &QUEUE_SIZES,
        }
    }

    fn config(&self) -> Arc<ConfigSpace> {
        self.config.space()
    }

    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError> {
        self.active = Some(activation);
        Ok(())
    }

    fn reset(&mut self) {
        self.active = None;
    }

    fn save(&mut self) -> Saved {
        Saved::plain(self.active.as_ref())
    }

    fn queue_ready(&mut self, queue: usize) -> Result<(), DeviceError> {
        if let Some(queue) = active_queue(&mut self.active, queue) {
            queue.serve(|memory, chain| answer(memory, &chain).map(Answer::Done))?;
        }
        Ok(())
    }
}

fn answer(memory: &GuestMemory, chain: &Chain) -> Result<u32, DeviceError> {
    let Ok(buffers) = chain.writable(memory) else {
        return Ok(0);
    };
    let mut random = [0; MAX_REQUEST];
    let wanted = guest_io::total(&buffers).min(MAX_REQUEST);
    let mut filled = 0;
    while filled < wanted {
        match getrandom(&mut random[filled..wanted], GetRandomFlags::empty()) {
            Ok(n) => filled += n,
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => {
                return Err(DeviceError::System {
                    what: "getrandom",
                    error: e.into(),
                });
            }
        }
    }
    Ok(guest_io::copy_in(&buffers, 0, &random[..filled]) as u32)
}

#[cfg(test)]
#[path = "rng_test.rs"]
mod tests;
