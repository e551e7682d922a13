//! The backend of the device for writable host directories: a relay to another process, thaw-share
//! ([`thaw_protocol::share`]).
//!
//! This process serves no file, because it must not have the rights that this needs. It forwards each FUSE message and writes the reply to
//! the guest's buffers, without looking at either ([`relay`]), except that it repeats one answer ([`capabilities`]). Invariant: every request
//! that the device took is answered once: with its reply, or with an error if thaw-share is gone or never came. No other device or vCPU
//! waits for this one.
//!
//! When thaw-share dies, its unanswered requests get EIO, except lookups of names. Those, and all later requests, wait a bounded time for
//! another thaw-share. One that takes over gets the guest's INIT first.
//!
//! The files that the guest has open belong to thaw-share, so a machine with a share cannot be frozen. Without a share, only the queues are
//! frozen.

mod capabilities;
pub mod relay;

use std::io;
use std::os::fd::{OwnedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fuse_backend_rs::abi::fuse_abi::{InHeader, OutHeader};
use rustix::net::SocketType;
use thaw_protocol::control::Backend;
use thaw_protocol::share::{INIT, LOOKUP, MESSAGE, PATIENCE_MS, REPLY, TAG};
use vm_memory::ByteValued;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

use self::capabilities::WithoutCapabilities;
use self::relay::{Broken, Relay, Request, Step};
use super::worker::{BACKEND, Event, Worker};
use super::{Fs, FsBackend};
use crate::memory::GuestMemory;
use crate::virtio::chain::Chain;
use crate::virtio::device::{Activation, AttachError, DeviceError, active_queue, one_descriptor};
use crate::virtio::device_thread::{Timeout, epoll_error};
use crate::virtio::gate::Gate;
use crate::virtio::guest_io;
use crate::virtio::queue::QueueError;
use crate::virtio::state::{FsState, QueueRecord};

/// How long requests wait for another thaw-share after one dies.
pub const PATIENCE: Duration = Duration::from_millis(PATIENCE_MS);
/// Most bytes of a message that is kept as INIT: its header, and more than its body has on any kernel.
const MOST_INIT: u32 = 1024;
/// Requests and replies handled in one event, so that a freeze or a reset gets its turn.
const AT_ONCE: usize = 256;

/// The connection to the thaw-share that requests go to.
enum Link {
    /// None has come yet.
    Absent,
    /// It is connected. The events are those of the relay that are waited for.
    Up(Box<Relay>, EventSet),
    /// It died. Requests wait for another until this moment.
    Down(Instant),
    /// It died and no other came in time. One that comes later is still used.
    Gone,
}

/// The connection to thaw-share, and the requests that wait for it.
pub struct Share {
    epoll: Arc<Epoll>,
    link: Link,
    /// Replaces the connected one, which is ending.
    next: Option<OwnedFd>,
    /// The guest's INIT, the first message to a thaw-share that takes over.
    init: Option<Vec<u8>>,
    /// Lookups that were unanswered when thaw-share died; they are sent to the one that takes over. If they failed, the guest would drop
    /// what it has mounted there.
    held: Vec<Request>,
    without_capabilities: WithoutCapabilities,
    patience: Duration,
    timeout: Timeout,
}

impl Fs<Share> {
    /// The device for shares. Before any thaw-share has come, its requests are answered ENOTCONN; when one dies, requests wait `patience`
    /// for another.
    pub fn shared(gate: Arc<Gate>, patience: Duration) -> Fs<Share> {
        let worker = Worker::start(TAG, gate, |epoll, timeout| Share {
            epoll: epoll.clone(),
            link: Link::Absent,
            next: None,
            init: None,
            held: Vec::new(),
            without_capabilities: WithoutCapabilities::default(),
            patience,
            timeout: timeout.clone(),
        });
        Fs::new(TAG, Vec::new(), worker)
    }
}

impl FsBackend for Share {
    const IS_OF_THE_HOST: bool = true;

    fn activate(&mut self, _memory: &GuestMemory) -> Result<(), DeviceError> {
        Ok(())
    }

    fn reset(&mut self) {
        if let Link::Up(relay, _) = &mut self.link {
            relay.forget();
        }
        // The driver starts anew.
        self.init = None;
        self.held.clear();
        self.without_capabilities.clear();
    }

    fn serve(&mut self, active: &mut Option<Activation>, event: Event) -> Result<(), DeviceError> {
        match event {
            Event::Wake => Ok(()),
            Event::Timeout => self.pass_on(active),
            Event::Backend => self.relay_ready(active),
            Event::Kick(index) => {
                if let Some(queue) = active_queue(active, index) {
                    queue.disable_kicks()?;
                }
                self.pass_on(active)
            }
        }
    }

    fn attach(&mut self, backend: Backend, fds: Vec<OwnedFd>) -> Result<bool, AttachError> {
        if backend != Backend::Share {
            return Err(AttachError::WrongKind(
                "the shared virtio-fs device takes a share's relay",
            ));
        }
        let relay = one_descriptor(fds)?;
        let kind =
            rustix::net::sockopt::socket_type(&relay).map_err(AttachError::system("the relay's type"))?;
        if kind != SocketType::STREAM {
            return Err(AttachError::Invalid("a relay must be of type STREAM".into()));
        }
        rustix::io::ioctl_fionbio(&relay, true).map_err(AttachError::system("FIONBIO of the relay"))?;
        self.connect(relay)
            .map_err(AttachError::system("waiting for the relay"))?;
        Ok(true)
    }

    /// No request is parked, because a machine with a share cannot be frozen.
    fn save(&self, queues: usize) -> FsState {
        FsState {
            parked: vec![Vec::new(); queues],
            mappings: Vec::new(),
        }
    }

    fn check(state: &FsState, _queues: Option<&[QueueRecord]>, _window: u64) -> Result<(), String> {
        match state.parked.iter().all(Vec::is_empty) && state.mappings.is_empty() {
            true => Ok(()),
            false => Err("requests wait, or files are mapped, in the shared device".into()),
        }
    }

    fn restore(&mut self, _state: &FsState) -> bool {
        false
    }
}

impl Share {
    fn watch(&self, operation: ControlOperation, fd: RawFd, events: EventSet) -> io::Result<()> {
        self.epoll.ctl(operation, fd, EpollEvent::new(events, BACKEND))
    }

    /// Serves requests over this non-blocking socket: from now on, or as soon as the connected thaw-share is seen to have ended.
    fn connect(&mut self, socket: OwnedFd) -> io::Result<()> {
        if let Link::Up(relay, _) = &self.link {
            // The device's thread sees its end, answers the requests that wait for it, and then connects the next.
            relay.shut_down();
            self.next = Some(socket);
            return Ok(());
        }
        self.link_up(socket)
    }

    fn link_up(&mut self, socket: OwnedFd) -> io::Result<()> {
        let relay = match &self.init {
            Some(init) => Relay::resume(socket, init.clone()),
            None => Relay::new(socket),
        };
        // The socket is writable at once. That event makes the device's thread send the waiting requests.
        let events = EventSet::IN | EventSet::OUT;
        self.watch(ControlOperation::Add, relay.socket(), events)?;
        self.link = Link::Up(Box::new(relay), events);
        self.timeout.set(None);
        Ok(())
    }

    /// Whether requests wait for another thaw-share. After the time limit, held lookups are answered with an error.
    fn waits(&mut self, active: &mut Option<Activation>) -> Result<bool, DeviceError> {
        let Link::Down(until) = self.link else {
            return Ok(false);
        };
        let left = until.saturating_duration_since(Instant::now());
        self.timeout.set(Some(left));
        if !left.is_zero() {
            return Ok(true);
        }
        tracing::error!("no other thaw-share has come: the guest's shared files answer EIO");
        self.link = Link::Gone;
        self.timeout.set(None);
        let held = std::mem::take(&mut self.held);
        held.iter()
            .try_for_each(|request| refuse(active, request, libc::EIO))?;
        Ok(false)
    }

    /// Takes replies, then sends the requests they made room for.
    fn relay_ready(&mut self, active: &mut Option<Activation>) -> Result<(), DeviceError> {
        for _ in 0..AT_ONCE {
            let Link::Up(relay, _) = &mut self.link else { break };
            match relay.receive(memory_of(active)) {
                Ok(Step::Done(reply)) => {
                    // Nothing else can have come.
                    let is_last = relay.is_idle();
                    if let Some((request, length)) = reply {
                        self.remember(active, &request, length);
                        give_back(active, &request, length)?;
                    }
                    if is_last {
                        break;
                    }
                }
                Ok(Step::Blocked) => break,
                Err(why) => self.lose(active, &why)?,
            }
        }
        self.pass_on(active)
    }

    /// Remembers a reply of `length` bytes that says that a file has no capabilities.
    fn remember(&mut self, active: &Option<Activation>, request: &Request, length: u32) {
        if length as usize == size_of::<OutHeader>()
            && let Some(memory) = memory_of(active)
            && let Some(node) = capabilities::asked_for(request, memory)
            && reply_header(request, memory).error == -libc::ENODATA
        {
            self.without_capabilities.add(node, Instant::now());
        }
    }

    /// Sends requests until the relay is full or none are left.
    fn pass_on(&mut self, active: &mut Option<Activation>) -> Result<(), DeviceError> {
        let mut left = AT_ONCE;
        loop {
            if let Link::Up(relay, _) = &mut self.link {
                match relay.send(memory_of(active)) {
                    Ok(Step::Done(Some(request))) => give_back(active, &request, 0)?,
                    Ok(Step::Done(None)) => {}
                    Ok(Step::Blocked) => break,
                    Err(why) => self.lose(active, &why)?,
                }
            }
            if matches!(&self.link, Link::Up(relay, _) if !relay.has_room()) {
                // The next reply makes room and calls this function again.
                break;
            }
            if self.waits(active)? {
                break;
            }
            if let Link::Up(relay, _) = &mut self.link
                && let Some(request) = self.held.pop()
            {
                relay.begin(request);
                continue;
            }
            let Some((queue, chain)) = next_chain(active)? else {
                break;
            };
            self.take(active, queue, chain)?;
            left -= 1;
            if left == 0 {
                active.iter().for_each(Activation::kick_again);
                break;
            }
        }
        if let Some(active) = active {
            active.signal()?;
        }
        self.wait_for_relay().map_err(epoll_error)
    }

    /// Begins to send a request, or answers it with an error.
    fn take(
        &mut self,
        active: &mut Option<Activation>,
        queue: usize,
        chain: Chain,
    ) -> Result<(), DeviceError> {
        let Some(memory) = memory_of(active) else {
            return Ok(());
        };
        let (message, room) = (chain.readable_len(), chain.writable_len());
        let is_in_memory = chain.readable(memory).is_ok() && chain.writable(memory).is_ok();
        let too_short = message < u64::from(*MESSAGE.start()) || 0 < room && room < u64::from(*REPLY.start());
        let request = Request {
            queue,
            chain,
            length: u32::try_from(message).unwrap_or(u32::MAX),
            room: u32::try_from(room).unwrap_or(u32::MAX).min(*REPLY.end()),
        };
        if !is_in_memory || too_short {
            tracing::debug!(message, room, "a FUSE message that cannot be answered");
            return give_back(active, &request, 0);
        }
        if request.length > *MESSAGE.end() {
            return refuse(active, &request, libc::E2BIG);
        }
        match &mut self.link {
            Link::Absent => refuse(active, &request, libc::ENOTCONN),
            Link::Gone | Link::Down(_) => refuse(active, &request, libc::EIO),
            Link::Up(relay, _) => {
                let head = request.chain.head();
                let is_held = |held: &Request| held.queue == queue && held.chain.head() == head;
                if relay.has(queue, head) || self.held.iter().any(is_held) {
                    return Err(QueueError::Chain { queue, head }.into());
                }
                let known = |node| self.without_capabilities.has(node, Instant::now());
                if capabilities::asked_for(&request, memory).is_some_and(known) {
                    return refuse(active, &request, libc::ENODATA);
                }
                if request.length <= MOST_INIT && header(&request, memory).opcode == INIT {
                    self.init = Some(whole(&request, memory));
                    // Its node IDs begin anew.
                    self.without_capabilities.clear();
                }
                relay.begin(request);
                Ok(())
            }
        }
    }

    /// Handles the end of thaw-share: its requests are answered EIO, except lookups, which wait for another thaw-share as later requests
    /// do.
    fn lose(&mut self, active: &mut Option<Activation>, why: &Broken) -> Result<(), DeviceError> {
        let link = Link::Down(Instant::now() + self.patience);
        let Link::Up(relay, _) = std::mem::replace(&mut self.link, link) else {
            return Ok(());
        };
        // Closing the socket would do, unless the descriptor was duplicated.
        let _ = self.watch(ControlOperation::Delete, relay.socket(), EventSet::empty());
        let unanswered = relay.close();
        tracing::error!(
            pending = unanswered.len(),
            "{why}: what the guest waited for answers EIO, and what it asks now waits for another"
        );
        for request in unanswered {
            let memory = memory_of(active);
            let opcode = memory.map(|memory| header(&request, memory).opcode);
            match opcode {
                Some(LOOKUP) if request.room > 0 => self.held.push(request),
                _ => refuse(active, &request, libc::EIO)?,
            }
        }
        match self.next.take() {
            Some(next) => self.link_up(next).map_err(epoll_error),
            None => Ok(()),
        }
    }

    fn wait_for_relay(&mut self) -> io::Result<()> {
        let Link::Up(relay, waited) = &mut self.link else {
            return Ok(());
        };
        let events = match relay.is_sending() {
            true => EventSet::IN | EventSet::OUT,
            false => EventSet::IN,
        };
        if *waited == events {
            return Ok(());
        }
        *waited = events;
        let socket = relay.socket();
        self.watch(ControlOperation::Modify, socket, events)
    }
}

fn memory_of(active: &Option<Activation>) -> Option<&GuestMemory> {
    active.as_ref().map(|active| &active.memory)
}

/// The next request. Requests without a reply come first, because they free resources of the host.
fn next_chain(active: &mut Option<Activation>) -> Result<Option<(usize, Chain)>, QueueError> {
    for queue in active.iter_mut().flat_map(|active| &mut active.queues) {
        if let Some(chain) = queue.pop_or_enable_kicks()? {
            return Ok(Some((queue.index(), chain)));
        }
    }
    Ok(None)
}

/// Answers a request with an error if it has room for an answer.
fn refuse(active: &mut Option<Activation>, request: &Request, errno: i32) -> Result<(), DeviceError> {
    let written = memory_of(active).map_or(0, |memory| write_error(request, memory, errno));
    give_back(active, request, written)
}

fn give_back(active: &mut Option<Activation>, request: &Request, written: u32) -> Result<(), DeviceError> {
    match active_queue(active, request.queue) {
        Some(queue) => Ok(queue.add_used(request.chain.head(), written)?),
        None => Ok(()),
    }
}

/// The header of a request's message; zeros if the message is too short.
fn header(request: &Request, memory: &GuestMemory) -> InHeader {
    let mut header = InHeader::default();
    if let Ok(message) = request.chain.readable(memory) {
        guest_io::copy_out(&message, 0, header.as_mut_slice());
    }
    header
}

/// The header of a request's reply.
fn reply_header(request: &Request, memory: &GuestMemory) -> OutHeader {
    let mut header = OutHeader::default();
    if let Ok(reply) = request.chain.writable(memory) {
        guest_io::copy_out(&reply, 0, header.as_mut_slice());
    }
    header
}

/// A request's whole message.
fn whole(request: &Request, memory: &GuestMemory) -> Vec<u8> {
    let mut bytes = vec![0; request.length as usize];
    if let Ok(message) = request.chain.readable(memory) {
        guest_io::copy_out(&message, 0, &mut bytes);
    }
    bytes
}

/// Writes an error as the reply of a request that has room for one. Returns the bytes written.
fn write_error(request: &Request, memory: &GuestMemory, errno: i32) -> u32 {
    let Ok(reply) = request.chain.writable(memory) else {
        return 0;
    };
    if request.room == 0 {
        return 0;
    }
    let header = OutHeader {
        len: size_of::<OutHeader>() as u32,
        error: -errno,
        unique: header(request, memory).unique,
    };
    guest_io::copy_in(&reply, 0, header.as_slice());
    header.len
}

#[cfg(test)]
#[path = "share_test.rs"]
mod tests;
