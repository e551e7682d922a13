//! virtio-net (virtio 1.2 §5.1): one queue pair on a tap.
//!
//! A frame goes between the tap and guest buffers with one `readv` or `writev`, vnet header included; the host kernel checks that
//! header. No memory is allocated for it, and the guest is interrupted once for a burst. Waits are events. Without receive buffers the tap
//! is not watched until the driver adds some. A full tap holds back the transmit queue until it has room. A direction over its rate limit
//! waits ([`super::throttle`]): frames to send stay in their queue; frames to receive wait in the tap, which is not watched, and the host
//! drops them when it is full, as on a slow wire. Without a backend, frames from the guest are dropped and none arrive.
//!
//! The MAC in the configuration matters only for a cold boot. A thawed guest keeps the template's MAC until the agent sets the real one.

mod receive;
mod tap;
mod transmit;

use std::mem::offset_of;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use smallvec::SmallVec;
use thaw_log::LogLimit;
use thaw_protocol::control::Backend;
use thaw_protocol::device_limits::DeviceLimits;
use virtio_bindings::virtio_ids::VIRTIO_ID_NET;
use virtio_bindings::virtio_net as b;
use vm_memory::VolatileSlice;
use vmm_sys_util::epoll::EventSet;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use self::receive::Receiver;
use self::tap::Tap;
use super::config::{Config, ConfigSpace};
use super::device::{Activation, AttachError, DeviceError, DeviceSpec, Saved, VirtioDevice, one_descriptor};
use super::event_loop::Registrar;
use super::guest_io::FEW_SLICES;
use super::throttle::Throttle;

const QUEUE_SIZES: [u16; 2] = [256; 2];
const RX: usize = 0;
const TX: usize = 1;

/// `struct virtio_net_hdr_v1`.
const HEADER: usize = 12;
/// Guest memory of a frame.
type FrameSlices<'m> = SmallVec<[VolatileSlice<'m>; FEW_SLICES]>;
/// The address before a backend sets another: locally administered, "THAW".
pub const DEFAULT_MAC: [u8; 6] = [0x02, 0x54, 0x48, 0x41, 0x57, 0x00];
/// The only descriptor registered with the event loop.
const TAP: u32 = 0;

/// `struct virtio_net_config` (§5.1.4) as far as the features need it.
#[derive(FromBytes, Immutable, IntoBytes)]
#[repr(C)]
struct NetConfig {
    mac: [u8; 6],
    status: u16,
    max_virtqueue_pairs: u16,
    mtu: u16,
}

/// The device.
pub struct Net {
    config: Config<NetConfig>,
    active: Option<Activation>,
    /// Buffers popped for frames that have not come yet.
    receiver: Receiver,
    /// The tap refused a frame, and the event loop waits for room in it.
    transmit_blocked: bool,
    /// The receive queue is empty. The next kick ends this.
    receive_starved: bool,
    send_throttle: Throttle,
    receive_throttle: Throttle,
    backend: Option<Tap>,
    registrar: Registrar,
    log: LogLimit,
}

impl Net {
    pub fn new(mac: [u8; 6], registrar: Registrar) -> Net {
        let config = NetConfig {
            mac,
            status: 0,
            max_virtqueue_pairs: 0,
            mtu: 0,
        };
        Net {
            config: Config::with_varying(config, 0..offset_of!(NetConfig, status)),
            active: None,
            receiver: Receiver::default(),
            transmit_blocked: false,
            receive_starved: false,
            send_throttle: Throttle::default(),
            receive_throttle: Throttle::default(),
            backend: None,
            registrar,
            log: LogLimit::default(),
        }
    }

    /// For fuzzing: connects to a descriptor that is not a tap. Each call on it transfers one frame, header first.
    #[cfg(fuzzing)]
    pub fn attach_frames(&mut self, fd: OwnedFd) -> Result<(), AttachError> {
        self.connect(Tap::with_frames(fd)?)
    }

    /// Connects the tap, instead of an earlier one.
    fn connect(&mut self, tap: Tap) -> Result<(), AttachError> {
        self.registrar
            .add(tap.as_raw_fd(), TAP, EventSet::empty())
            .map_err(AttachError::system("epoll_ctl of the tap"))?;
        if let Some(old) = self.backend.replace(tap) {
            // Fails only if the tap was removed before.
            let _ = self.registrar.remove(old.as_raw_fd());
        }
        self.receive_starved = false;
        let frames_wait = std::mem::take(&mut self.transmit_blocked);
        self.set_offloads();
        self.watch();
        if let Some(active) = self.active.as_ref().filter(|_| frames_wait) {
            active.queues[TX].kick_again();
        }
        Ok(())
    }

    /// Receives frames from the tap while there are buffers.
    fn receive(&mut self) -> Result<(), DeviceError> {
        let (Some(active), Some(tap)) = (self.active.as_mut(), self.backend.as_ref()) else {
            return Ok(());
        };
        let mergeable = active.negotiated(b::VIRTIO_NET_F_MRG_RXBUF);
        if !self.receive_throttle.waits() {
            self.receive_starved =
                self.receiver
                    .receive(&mut active.queues[RX], tap, mergeable, &mut self.receive_throttle)?;
        }
        self.watch();
        Ok(())
    }

    /// Sends the guest's queued frames while the tap takes them.
    fn transmit(&mut self) -> Result<(), DeviceError> {
        let Some(active) = self.active.as_mut() else {
            return Ok(());
        };
        self.transmit_blocked = transmit::transmit(
            &mut active.queues[TX],
            self.backend.as_ref(),
            &mut self.send_throttle,
        )?;
        self.watch();
        Ok(())
    }

    /// Waits for exactly the events that allow work to continue.
    fn watch(&mut self) {
        let mut moment = None;
        let Some(tap) = self.backend.as_mut() else {
            return self.registrar.wake_at(moment);
        };
        let mut events = EventSet::empty();
        if self.active.is_some() {
            let throttled = [self.send_throttle.until(), self.receive_throttle.until()];
            moment = throttled.into_iter().flatten().min();
            let throttled = self.receive_throttle.until().is_some();
            events.set(EventSet::IN, !self.receive_starved && !throttled);
            events.set(EventSet::OUT, self.transmit_blocked);
        }
        self.registrar.wake_at(moment);
        tap.watch(events, |fd, events| self.registrar.modify(fd, TAP, events));
    }

    /// Enables on the tap exactly the offloads that the guest negotiated.
    fn set_offloads(&mut self) {
        if let (Some(active), Some(tap)) = (&self.active, &mut self.backend)
            && let Err(error) = tap.set_offloads(active.features)
        {
            // Without offloads, frames still pass: the host computes checksums and splits segments itself.
            if let Some(dropped) = self.log.pass() {
                tracing::warn!(%error, dropped, "the tap refuses offloads");
            }
        }
    }
}

impl VirtioDevice for Net {
    fn spec(&self) -> DeviceSpec {
        DeviceSpec {
            device_type: VIRTIO_ID_NET,
            features: [
                b::VIRTIO_NET_F_CSUM,
                b::VIRTIO_NET_F_GUEST_CSUM,
                b::VIRTIO_NET_F_MAC,
                b::VIRTIO_NET_F_GUEST_TSO4,
                b::VIRTIO_NET_F_GUEST_TSO6,
                b::VIRTIO_NET_F_GUEST_ECN,
                b::VIRTIO_NET_F_HOST_TSO4,
                b::VIRTIO_NET_F_HOST_TSO6,
                b::VIRTIO_NET_F_HOST_ECN,
                b::VIRTIO_NET_F_MRG_RXBUF,
            ]
            .iter()
            .fold(0, |features, bit| features | 1 << bit),
            queue_sizes: &QUEUE_SIZES,
        }
    }

    fn config(&self) -> Arc<ConfigSpace> {
        self.config.space()
    }

    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError> {
        self.active = Some(activation);
        self.set_offloads();
        self.watch();
        Ok(())
    }

    fn reset(&mut self) {
        self.active = None;
        self.receiver = Receiver::default();
        self.transmit_blocked = false;
        self.receive_starved = false;
        self.send_throttle.forget();
        self.receive_throttle.forget();
        self.watch();
    }

    fn attach(&mut self, backend: Backend, fds: Vec<OwnedFd>) -> Result<(), AttachError> {
        let Backend::Tap { mac, prepared } = backend else {
            return Err(AttachError::WrongKind("virtio-net takes a tap"));
        };
        let fd = one_descriptor(fds)?;
        let tap = match prepared {
            true => Tap::prepared(fd)?,
            false => Tap::open(fd)?,
        };
        self.connect(tap)?;
        if self.config.change(|config| config.mac = mac)
            && let Some(active) = &self.active
        {
            active.config_changed();
        }
        Ok(())
    }

    fn limit(&mut self, limits: DeviceLimits) -> Result<(), AttachError> {
        let DeviceLimits::Network { send, receive } = limits else {
            return Err(AttachError::WrongKind("the network has limits of each direction"));
        };
        self.send_throttle.set(send);
        self.receive_throttle.set(receive);
        if let Some(active) = &self.active {
            active.kick_again();
        }
        Ok(())
    }

    fn is_backed(&self) -> bool {
        self.backend.is_some()
    }

    /// Returns the popped buffers to the guest. Frames that were not sent stay in their queue.
    fn save(&mut self) -> Saved {
        if let Some(active) = &mut self.active {
            self.receiver.give_back(&mut active.queues[RX]);
        }
        let mut saved = Saved::plain(self.active.as_ref());
        if let Some(queues) = &mut saved.queues {
            // Buffers that wait for frames are not work.
            queues[RX].has_work = false;
        }
        saved
    }

    fn queue_ready(&mut self, queue: usize) -> Result<(), DeviceError> {
        match queue {
            RX => self.receive(),
            // While the tap is full, a kick changes nothing.
            TX if !self.transmit_blocked => self.transmit(),
            _ => Ok(()),
        }
    }

    fn woken(&mut self) -> Result<(), DeviceError> {
        if !self.transmit_blocked {
            self.transmit()?;
        }
        self.receive()
    }

    fn backend_ready(&mut self, _token: u32, events: EventSet) -> Result<(), DeviceError> {
        if events.intersects(EventSet::ERROR | EventSet::HANG_UP)
            && let Some(gone) = self.backend.take_if(|tap| tap.is_gone())
        {
            tracing::warn!("the tap's interface was deleted; the guest is offline");
            let _ = self.registrar.remove(gone.as_raw_fd());
            self.transmit_blocked = false;
            return self.transmit();
        }
        if events.contains(EventSet::OUT) {
            self.transmit_blocked = false;
            self.transmit()?;
        }
        if events.contains(EventSet::IN) {
            self.receive()?;
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "net/net_test.rs"]
mod tests;
