//! Sends frames: from the guest to the tap.

use std::io;
use std::os::fd::AsFd;

use super::tap::Tap;
use super::{FrameSlices, HEADER};
use crate::memory::GuestMemory;
use crate::virtio::chain::Chain;
use crate::virtio::device::DeviceError;
use crate::virtio::guest_io::{self, MAX_SLICES};
use crate::virtio::queue::{Answer, DeviceQueue};
use crate::virtio::throttle::Throttle;

/// Least bytes of a frame: vnet header and Ethernet header.
const LEAST: usize = HEADER + 14;
/// Most bytes: vnet header, 64 KiB of segments, and their Ethernet header with VLAN tag.
const MOST: usize = HEADER + 65_535 + 18;

/// Sends queued frames, as far as the rate limit allows. Returns true if it stopped because the tap is full.
pub fn transmit(
    queue: &mut DeviceQueue,
    tap: Option<&Tap>,
    throttle: &mut Throttle,
) -> Result<bool, DeviceError> {
    if tap.is_some() && throttle.waits() {
        return Ok(false);
    }
    let mut is_full = false;
    queue.serve(|memory, chain| {
        if let Some(tap) = tap {
            let bytes = chain.readable_len().saturating_sub(HEADER as u64);
            if !throttle.admits(bytes, 1) {
                return Ok(Answer::Stop);
            }
            is_full = full(send(memory, &chain, tap));
            if is_full {
                return Ok(Answer::Stop);
            }
            throttle.charge(bytes, 1);
        }
        Ok::<_, DeviceError>(Answer::Done(0))
    })?;
    Ok(is_full)
}

/// Sends one frame, if the chain is one. A frame that the tap refuses is lost, as on a wire.
fn send(memory: &GuestMemory, chain: &Chain, tap: &Tap) -> io::Result<()> {
    let mut slices = FrameSlices::new();
    for slice in chain.readable_slices(memory) {
        let Ok(slice) = slice else {
            return Ok(());
        };
        slices.push(slice);
    }
    if (LEAST..=MOST).contains(&guest_io::total(&slices)) && slices.len() <= MAX_SLICES {
        guest_io::write_some(tap.as_fd(), &slices)?;
    }
    Ok(())
}

fn full(sent: io::Result<()>) -> bool {
    match sent {
        Ok(()) => false,
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => true,
        Err(error) => {
            tracing::debug!(%error, "the tap refused a frame");
            false
        }
    }
}
