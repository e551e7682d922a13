//! virtio-balloon (virtio 1.2 §5.5): the guest returns pages, by free-page reporting and by inflating.
//!
//! Guests use reporting: the driver names free pages, and the host may reclaim them until they are touched again. The balloon's size is 0,
//! so a driver inflates nothing; if one returns a page all the same, that page is reclaimed too. Each page is first checked to be guest
//! memory.

use std::mem::offset_of;
use std::sync::Arc;

use virtio_bindings::virtio_ids::VIRTIO_ID_BALLOON;
use vm_memory::{GuestAddress, GuestMemory as _};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::chain::Chain;
use super::config::{Config, ConfigSpace};
use super::device::{Activation, DeviceError, DeviceSpec, Saved, VirtioDevice};
use super::discards::Discards;
use super::guest_io;
use super::queue::Answer;
use crate::memory::GuestMemory;

/// `VIRTIO_BALLOON_F_DEFLATE_ON_OOM`: the guest may take pages back when it runs out.
const F_DEFLATE_ON_OOM: u32 = 2;
/// `VIRTIO_BALLOON_F_PAGE_REPORTING`.
const F_REPORTING: u32 = 5;

/// Without the statistics and hinting features, reporting is the third queue: Linux numbers only the existing queues.
const QUEUE_SIZES: [u16; 3] = [128; 3];
const INFLATE: usize = 0;
const DEFLATE: usize = 1;
const REPORTING: usize = 2;

/// Bytes of a page in the protocol, whatever the guest's page size is.
const PAGE: u64 = 4096;
/// Most page numbers processed in one request. Linux sends at most 256.
const MAX_PAGES: usize = 4096;

/// `struct virtio_balloon_config` (§5.5.4).
#[derive(Default, FromBytes, Immutable, IntoBytes)]
#[repr(C)]
struct BalloonConfig {
    /// Pages the driver is asked to give up: none.
    num_pages: u32,
    /// Pages that the driver says it has given up.
    actual: u32,
    free_page_hint_cmd_id: u32,
    poison_val: u32,
}

/// The device.
pub struct Balloon {
    active: Option<Activation>,
    config: Config<BalloonConfig>,
    discards: Arc<Discards>,
}

impl Balloon {
    /// While `discards` are held, pages that the guest returns stay, and the guest can use them all the same.
    pub fn new(discards: Arc<Discards>) -> Balloon {
        let actual = offset_of!(BalloonConfig, actual)..offset_of!(BalloonConfig, free_page_hint_cmd_id);
        Balloon {
            active: None,
            config: Config::with_writable(BalloonConfig::default(), actual),
            discards,
        }
    }
}

impl VirtioDevice for Balloon {
    fn spec(&self) -> DeviceSpec {
        DeviceSpec {
            device_type: VIRTIO_ID_BALLOON,
            features: 1 << F_DEFLATE_ON_OOM | 1 << F_REPORTING,
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

    fn queue_ready(&mut self, index: usize) -> Result<(), DeviceError> {
        let Some(active) = &mut self.active else {
            return Ok(());
        };
        let reporting = active.negotiated(F_REPORTING);
        let Some(queue) = active.queues.get_mut(index) else {
            return Ok(());
        };
        let discards = &self.discards;
        queue.serve(|memory, chain| {
            let _ = discards.unless_held(|| match index {
                INFLATE => inflate(memory, &chain),
                // The guest gets deflated pages back by touching them.
                DEFLATE => {}
                REPORTING if reporting => report(memory, &chain),
                _ => {}
            });
            Ok::<_, DeviceError>(Answer::Done(0))
        })?;
        Ok(())
    }
}

/// The driver gives up the pages whose numbers it lists.
fn inflate(memory: &GuestMemory, chain: &Chain) {
    let Ok(list) = chain.readable(memory) else { return };
    let mut bytes = vec![0; guest_io::total(&list).min(MAX_PAGES * 4)];
    guest_io::copy_out(&list, 0, &mut bytes);
    let (numbers, _) = bytes.as_chunks::<4>();
    for (first, pages) in runs(numbers.iter().map(|n| u32::from_le_bytes(*n))) {
        discard(memory, u64::from(first) * PAGE, pages * PAGE);
    }
}

/// The driver names free pages: the buffers are the pages.
fn report(memory: &GuestMemory, chain: &Chain) {
    for buffer in chain.writable_buffers() {
        discard(memory, buffer.address.0, u64::from(buffer.length));
    }
}

/// Page numbers as runs of neighbours: first and count.
fn runs(numbers: impl Iterator<Item = u32>) -> Vec<(u32, u64)> {
    let mut runs: Vec<(u32, u64)> = Vec::new();
    for number in numbers {
        match runs.last_mut() {
            Some((first, count)) if u64::from(*first) + *count == u64::from(number) => *count += 1,
            _ => runs.push((number, 1)),
        }
    }
    runs
}

/// Reclaims whole pages of guest memory. Any other range is the guest's mistake and is ignored.
fn discard(memory: &GuestMemory, address: u64, length: u64) {
    if length == 0 || !address.is_multiple_of(PAGE) || !length.is_multiple_of(PAGE) {
        return;
    }
    match memory.get_slice(GuestAddress(address), length as usize) {
        Ok(pages) => {
            if let Err(error) = guest_io::discard(&pages) {
                tracing::debug!(%error, address, length, "pages kept");
            }
        }
        Err(_) => tracing::debug!(address, length, "guest gave back what is not memory"),
    }
}

#[cfg(test)]
#[path = "balloon_test.rs"]
mod tests;
