//! From the guest to the tap.

use std::io;
use std::os::fd::AsFd;

use super::HEADER;
use super::tap::Tap;
use crate::virtio::device::DeviceError;
use crate::virtio::guest_io::{self, MAX_SLICES};
use crate::virtio::queue::{Chain, DeviceQueue};

/// Least bytes of a frame: an Ethernet header.
const LEAST: usize = HEADER + 14;
/// Most bytes: a header and 64 KiB of segments with theirs.
const MOST: usize = HEADER + 65_535 + 18;

/// Sends what is queued. True if it stopped because the tap is full.
pub fn transmit(queue: &mut DeviceQueue, tap: Option<&Tap>) -> Result<bool, DeviceError> {
    queue.disable_kicks()?;
    for _ in 0..queue.size() {
        let Some(chain) = queue.pop()? else {
            if queue.enable_kicks()? {
                continue;
            }
            queue.signal()?;
            return Ok(false);
        };
        if let Some(tap) = tap
            && full(send(queue, &chain, tap))
        {
            queue.unpop();
            queue.signal()?;
            return Ok(true);
        }
        queue.add_used(chain.head(), 0)?;
    }
    queue.kick_again();
    queue.signal()?;
    Ok(false)
}

/// One frame, if it is one. What the tap refuses is lost, as on a wire.
fn send(queue: &DeviceQueue, chain: &Chain, tap: &Tap) -> io::Result<()> {
    let Ok(slices) = chain.readable(queue.memory()) else {
        return Ok(());
    };
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
