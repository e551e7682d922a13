//! virtio-mem (virtio 1.2 §5.15): memory that the guest plugs and unplugs in blocks of 2 MiB.
//!
//! Invariants:
//! - The plugged size never exceeds the requested size at the time of a plug.
//! - A request is done for all its blocks or for none.
//! - The content of an unplugged block is gone, and the guest cannot write to it ([`slots`]).
//! - Plugged memory stays plugged over a device reset (§5.15.5.2), because the guest may be running in it.
//!
//! A new machine has no requested size. So a guest can use boot memory plus the largest size ever requested, and no more.

mod blocks;
mod slots;

use std::mem::offset_of;
use std::sync::Arc;

use thaw_log::LogLimit;
use virtio_bindings::virtio_ids::VIRTIO_ID_MEM;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use self::blocks::{Blocks, Span};
pub use self::slots::{MemorySlots, Slots, reserve};
use super::chain::Chain;
use super::config::{Config, ConfigSpace};
use super::device::{
    Activation, DeviceError, DeviceSpec, Saved, VirtioDevice, active_queue, room_for_answer,
};
use super::discards::Discards;
use super::guest_io;
use super::queue::Answer;
use super::state::{DeviceRecord, DeviceState, MemState, QueueRecord};
use crate::layout::{self, Window};
use crate::memory::GuestMemory;

const QUEUE_SIZES: [u16; 1] = [64];

/// `VIRTIO_MEM_F_UNPLUGGED_INACCESSIBLE`: memory that is not plugged must not be read, because it may have no memslot.
const F_UNPLUGGED_INACCESSIBLE: u32 = 1;

/// Bytes of a block, the unit of plugging.
pub const BLOCK: u64 = 2 << 20;
/// How far the usable region exceeds the requested size, so that the guest finds aligned room for its blocks: Linux adds memory in blocks
/// of 128 MiB, and skips those that it could not put online or offline. It adds addresses, not memory: the plugged size never exceeds the
/// requested size.
const USABLE_EXTENT: u64 = 256 << 20;

/// `struct virtio_mem_config` (§5.15.4): addresses and bytes.
#[derive(Default, FromBytes, Immutable, IntoBytes)]
#[repr(C)]
struct MemConfig {
    block_size: u64,
    node_id: u16,
    padding: [u8; 6],
    addr: u64,
    region_size: u64,
    usable_region_size: u64,
    plugged_size: u64,
    requested_size: u64,
}

/// Bytes of a request and of a response (§5.15.6).
const REQUEST: usize = 24;
const RESPONSE: usize = 10;

/// A driver's request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Request {
    Plug(Asked),
    Unplug(Asked),
    UnplugAll,
    State(Asked),
}

/// Blocks as the driver names them, not checked yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Asked {
    address: u64,
    blocks: u16,
}

/// The answer to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
enum Response {
    Ack = 0,
    Nack = 1,
    Busy = 2,
    Error = 3,
}

/// The state of a range of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
enum State {
    Plugged = 0,
    Unplugged = 1,
    Mixed = 2,
}

/// The device.
pub struct Mem {
    config: Config<MemConfig>,
    active: Option<Activation>,
    /// Which blocks are plugged, and the sizes in the configuration.
    plan: Plan,
    /// The memory of the region.
    slots: MemorySlots,
    discards: Arc<Discards>,
}

/// Which blocks are plugged, and which may be.
#[derive(Debug)]
struct Plan {
    start: u64,
    blocks: Blocks,
    /// Bytes that the guest is asked to plug.
    requested: u64,
    /// Bytes at the region's start in which it may plug blocks.
    usable: u64,
    log: LogLimit,
}

/// Why a size cannot be requested.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("requested size {requested:#x} is not a multiple of 2 MiB up to {region:#x}")]
pub struct SizeError {
    pub requested: u64,
    pub region: u64,
}

impl Mem {
    pub fn new(slots: MemorySlots) -> Mem {
        let (start, size) = (slots.start(), slots.size());
        let plan = Plan {
            start,
            blocks: Blocks::new((size / BLOCK) as usize),
            requested: 0,
            usable: 0,
            log: LogLimit::default(),
        };
        let config = MemConfig {
            block_size: BLOCK,
            addr: start,
            region_size: size,
            ..MemConfig::default()
        };
        let sizes = offset_of!(MemConfig, usable_region_size)..size_of::<MemConfig>();
        Mem {
            config: Config::with_varying(config, sizes),
            active: None,
            plan,
            slots,
            discards: Arc::default(),
        }
    }

    /// While these are held, the driver's requests to plug and unplug are answered with [`Response::Busy`]: it repeats them later.
    pub fn discards(&self) -> Arc<Discards> {
        self.discards.clone()
    }

    /// The plugged parts as guest addresses, in order, neighbours merged.
    pub fn plugged(&self) -> Vec<Window> {
        let runs = self.plan.blocks.runs();
        runs.into_iter()
            .map(|span| window(self.plan.start, span.first as u64, span.count as u64))
            .collect()
    }

    /// Whether `address` is in a block of the region that is not plugged.
    pub fn is_unplugged(&self, address: u64) -> bool {
        let offset = address
            .checked_sub(self.plan.start)
            .filter(|offset| *offset < self.slots.size());
        let block = |offset| Span {
            first: (offset / BLOCK) as usize,
            count: 1,
        };
        offset.is_some_and(|offset| self.plan.blocks.none(block(offset)))
    }

    /// Asks the guest to have `bytes` plugged. It plugs or unplugs blocks in its own time.
    pub fn set_requested_size(&mut self, bytes: u64) -> Result<(), SizeError> {
        let region = self.slots.size();
        if bytes > region || !bytes.is_multiple_of(BLOCK) {
            return Err(SizeError {
                requested: bytes,
                region,
            });
        }
        self.plan.request(bytes, region);
        if self.publish()
            && let Some(active) = &self.active
        {
            active.config_changed();
        }
        Ok(())
    }

    /// Writes the plan's sizes to the configuration. Returns whether any changed.
    fn publish(&self) -> bool {
        self.config.change(|config| {
            config.usable_region_size = self.plan.usable;
            config.plugged_size = self.plan.plugged();
            config.requested_size = self.plan.requested;
        })
    }
}

impl Plan {
    fn plugged(&self) -> u64 {
        self.blocks.plugged() as u64 * BLOCK
    }

    fn request(&mut self, bytes: u64, region: u64) {
        self.requested = bytes;
        let wanted = if bytes == 0 {
            0
        } else {
            (bytes + USABLE_EXTENT).min(region)
        };
        // It shrinks only when nothing is plugged (§5.15.5.2).
        self.usable = if self.blocks.plugged() == 0 {
            wanted
        } else {
            wanted.max(self.usable)
        };
    }

    /// The requested blocks, if there are any and they lie inside the usable region on block boundaries.
    fn span(&self, asked: Asked) -> Option<Span> {
        let offset = asked
            .address
            .checked_sub(self.start)
            .filter(|offset| offset.is_multiple_of(BLOCK))?;
        let end = offset.checked_add(u64::from(asked.blocks) * BLOCK)?;
        let inside = asked.blocks > 0 && end <= self.usable;
        inside.then_some(Span {
            first: (offset / BLOCK) as usize,
            count: usize::from(asked.blocks),
        })
    }

    fn plug(&mut self, asked: Asked, slots: &mut MemorySlots) -> Response {
        let Some(span) = self.span(asked).filter(|span| self.blocks.none(*span)) else {
            return Response::Error;
        };
        if self.plugged() + span.count as u64 * BLOCK > self.requested {
            return Response::Nack;
        }
        if let Err(error) = slots.plug(span) {
            if let Some(dropped) = self.log.pass() {
                tracing::warn!(%error, dropped, "cannot plug memory");
            }
            return Response::Busy;
        }
        self.blocks.set(span, true);
        Response::Ack
    }

    fn unplug(&mut self, asked: Asked, slots: &MemorySlots) -> Response {
        let Some(span) = self.span(asked).filter(|span| self.blocks.all(*span)) else {
            return Response::Error;
        };
        if let Err(error) = slots.unplug(span) {
            if let Some(dropped) = self.log.pass() {
                tracing::warn!(%error, dropped, "cannot unplug memory");
            }
            return Response::Busy;
        }
        self.blocks.set(span, false);
        Response::Ack
    }

    fn unplug_all(&mut self, slots: &MemorySlots) -> Response {
        let everything = Span {
            first: 0,
            count: self.blocks.len(),
        };
        if self.blocks.plugged() > 0
            && let Err(error) = slots.unplug(everything)
        {
            if let Some(dropped) = self.log.pass() {
                tracing::warn!(%error, dropped, "cannot unplug memory");
            }
            return Response::Busy;
        }
        self.blocks.set(everything, false);
        self.request(self.requested, slots.size());
        Response::Ack
    }

    fn state(&self, asked: Asked) -> Option<State> {
        let span = self.span(asked)?;
        Some(match (self.blocks.all(span), self.blocks.none(span)) {
            (true, _) => State::Plugged,
            (_, true) => State::Unplugged,
            _ => State::Mixed,
        })
    }
}

impl VirtioDevice for Mem {
    fn spec(&self) -> DeviceSpec {
        DeviceSpec {
            device_type: VIRTIO_ID_MEM,
            features: 1 << F_UNPLUGGED_INACCESSIBLE,
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
        let runs = self.plan.blocks.runs();
        let state = MemState {
            requested: self.plan.requested,
            usable: self.plan.usable,
            plugged: runs
                .into_iter()
                .map(|span| (span.first as u32, span.count as u32))
                .collect(),
        };
        Saved::new(state, self.active.as_ref())
    }

    fn check(&self, state: &DeviceState, _queues: Option<&[QueueRecord]>) -> Result<(), String> {
        let MemState {
            requested,
            usable,
            plugged,
        } = state.of::<MemState>()?;
        let region = self.slots.size();
        let fits = |bytes: u64| bytes <= region && bytes.is_multiple_of(BLOCK);
        if !fits(*requested) || !fits(*usable) {
            return Err(format!(
                "sizes {requested:#x} and {usable:#x} are not blocks within {region:#x} bytes"
            ));
        }
        let mut free = 0;
        for (first, count) in plugged {
            let end = u64::from(*first) + u64::from(*count);
            if *count == 0 || u64::from(*first) < free || end * BLOCK > *usable {
                return Err(format!(
                    "blocks {first}+{count} are not plugged within {usable:#x} bytes"
                ));
            }
            free = end + 1;
        }
        Ok(())
    }

    fn restore(&mut self, activation: Option<Activation>, state: &DeviceState) -> Result<(), DeviceError> {
        let Ok(MemState {
            requested,
            usable,
            plugged,
        }) = state.of::<MemState>()
        else {
            return Ok(());
        };
        for (first, count) in plugged {
            let span = Span {
                first: *first as usize,
                count: *count as usize,
            };
            self.slots.restore(span).map_err(|error| DeviceError::System {
                what: "showing plugged memory to the guest",
                error: std::io::Error::other(error.to_string()),
            })?;
            self.plan.blocks.set(span, true);
        }
        (self.plan.requested, self.plan.usable) = (*requested, *usable);
        self.publish();
        self.active = activation;
        Ok(())
    }

    fn queue_ready(&mut self, queue: usize) -> Result<(), DeviceError> {
        let Mem {
            active,
            plan,
            slots,
            config,
            discards,
        } = self;
        if let Some(queue) = active_queue(active, queue) {
            queue.serve(|memory, chain| {
                answer(memory, &chain, config, plan, |request, plan| {
                    execute(request, plan, slots, discards)
                })
                .map(Answer::Done)
            })?;
        }
        Ok(())
    }
}

/// The parts that were plugged in these records, as guest addresses in order. The records must have been checked.
pub fn plugged_in(records: &[DeviceRecord]) -> Vec<Window> {
    let state = records
        .iter()
        .find_map(|record| record.state.of::<MemState>().ok());
    let windows = state.into_iter().flat_map(|state| &state.plugged);
    windows
        .map(|(first, count)| window(layout::VIRTIO_MEM.start, (*first).into(), (*count).into()))
        .collect()
}

/// The window of `count` blocks from block `first`, in the region that begins at `start`.
fn window(start: u64, first: u64, count: u64) -> Window {
    Window {
        start: start + first * BLOCK,
        size: count * BLOCK,
    }
}

fn answer(
    memory: &GuestMemory,
    chain: &Chain,
    config: &Config<MemConfig>,
    plan: &mut Plan,
    execute: impl FnOnce(Request, &mut Plan) -> (Response, State),
) -> Result<u32, DeviceError> {
    let response = room_for_answer(memory, chain)?;
    if guest_io::total(&response) < RESPONSE {
        return Err(DeviceError::unanswerable(chain, "response shorter than 10 bytes"));
    }
    let mut raw = [0; REQUEST];
    let read = chain
        .readable(memory)
        .map_or(0, |request| guest_io::copy_out(&request, 0, &mut raw));
    let (answer, state) = match parse(&raw).filter(|_| read == REQUEST) {
        Some(request) => execute(request, plan),
        None => (Response::Error, State::Plugged),
    };
    // The answer tells the driver the new size, so no interrupt is needed; but its next read of the configuration must agree.
    config.change(|config| {
        config.plugged_size = plan.plugged();
        config.usable_region_size = plan.usable;
    });

    let mut bytes = [0; RESPONSE];
    bytes[0..2].copy_from_slice(&(answer as u16).to_le_bytes());
    bytes[8..10].copy_from_slice(&(state as u16).to_le_bytes());
    Ok(guest_io::copy_in(&response, 0, &bytes) as u32)
}

fn execute(
    request: Request,
    plan: &mut Plan,
    slots: &mut MemorySlots,
    discards: &Discards,
) -> (Response, State) {
    let done = match request {
        Request::Plug(asked) => discards.unless_held(|| plan.plug(asked, slots)),
        Request::Unplug(asked) => discards.unless_held(|| plan.unplug(asked, slots)),
        Request::UnplugAll => discards.unless_held(|| plan.unplug_all(slots)),
        Request::State(asked) => match plan.state(asked) {
            Some(state) => return (Response::Ack, state),
            None => Some(Response::Error),
        },
    };
    (done.unwrap_or(Response::Busy), State::Plugged)
}

/// Decodes a `struct virtio_mem_req`. `None` if its type is unknown.
fn parse(raw: &[u8; REQUEST]) -> Option<Request> {
    let mut address = [0; 8];
    address.copy_from_slice(&raw[8..16]);
    let asked = Asked {
        address: u64::from_le_bytes(address),
        blocks: u16::from_le_bytes([raw[16], raw[17]]),
    };
    match u16::from_le_bytes([raw[0], raw[1]]) {
        0 => Some(Request::Plug(asked)),
        1 => Some(Request::Unplug(asked)),
        2 => Some(Request::UnplugAll),
        3 => Some(Request::State(asked)),
        _ => None,
    }
}

#[cfg(test)]
#[path = "mem/mem_test.rs"]
mod tests;
