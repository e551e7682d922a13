//! From the guest to the tap.

use std::io;
use std::os::fd::AsFd;

use super::HEADER;
use super::tap::Tap;
use crate::virtio::chain::Chain;
use crate::virtio::device::DeviceError;
use crate::virtio::guest_io::{self, MAX_SLICES};
use crate::virtio::queue::DeviceQueue;
use crate::virtio::throttle::Throttle;

/// Least bytes of a frame: an Ethernet header.
const LEAST: usize = HEADER + 14;
/// Most bytes: a header and 64 KiB of segments with theirs.
const MOST: usize = HEADER + 65_535 + 18;

/// Why sending stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// Nothing is left, or others have their turn and the queue was kicked for the rest.
    Served,
    /// The tap is full.
    Full,
    /// The next frame is over the rate limit.
    Throttled,
}

/// Sends what is queued.
pub fn transmit(
    queue: &mut DeviceQueue,
    tap: Option<&Tap>,
    throttle: &mut Throttle,
) -> Result<Stop, DeviceError> {
    if tap.is_some() && throttle.waits() {
        return Ok(Stop::Throttled);
    }
    queue.disable_kicks()?;
    for _ in 0..queue.size() {
        let Some(chain) = queue.pop()? else {
            if queue.enable_kicks()? {
                continue;
            }
            queue.signal()?;
            return Ok(Stop::Served);
        };
        if let Some(tap) = tap {
            let bytes = chain.readable_len().saturating_sub(HEADER as u64);
            let stop = match throttle.admits(bytes, 1) {
                false => Some(Stop::Throttled),
                true => full(send(queue, &chain, tap)).then_some(Stop::Full),
            };
            if let Some(stop) = stop {
                queue.unpop();
                queue.signal()?;
                return Ok(stop);
            }
            throttle.charge(bytes, 1);
        }
        queue.add_used(chain.head(), 0)?;
    }
    queue.kick_again();
    queue.signal()?;
    Ok(Stop::Served)
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
