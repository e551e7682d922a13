//! The backend of the device for writable host directories: a relay to another process, thaw-share
//! ([`thaw_protocol::share`]).
//!
//! This process opens no file, because it must not have the rights that this needs. It forwards each FUSE message and writes the reply to
//! the guest's buffers ([`relay`]), except that it repeats one answer ([`capabilities`]), and reads and writes what thaw-share opened for the
//! guest and handed over ([`open_files`]). Invariant: every request that the device took is answered once: with its reply, or with an error
//! if thaw-share is gone or never came. No other device waits for this one, and no vCPU but one that resets it while a write is made.
//!
//! When thaw-share dies, its unanswered requests get EIO, except lookups of names. Those, and all later requests, wait a bounded time for
//! another thaw-share. One that takes over gets the guest's INIT first.
//!
//! The files that the guest has open belong to thaw-share, so a machine with a share cannot be frozen. Without a share, only the queues are
//! frozen.

mod capabilities;
pub mod open_files;
pub mod relay;
pub mod request;

use std::io;
use std::os::fd::{OwnedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fuse_backend_rs::abi::fuse_abi::OutHeader;
use rustix::net::SocketType;
use thaw_protocol::control::Backend;
use thaw_protocol::share::{INIT, LOOKUP, MESSAGE, PATIENCE_MS, REPLY, TAG};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

use self::capabilities::WithoutCapabilities;
use self::open_files::{OpenFiles, WriteCall};
use self::relay::{Broken, Relay, Reply, Step};
use self::request::Request;
use super::worker::{BACKEND, Event, Worker};
use super::{Fs, FsBackend};
use crate::memory::GuestMemory;
use crate::virtio::chain::Chain;
use crate::virtio::device::{Activation, AttachError, Call, DeviceError, active_queue, one_descriptor};
use crate::virtio::device_thread::{Timeout, epoll_error};
use crate::virtio::flight::Flight;
use crate::virtio::gate::Gate;
use crate::virtio::queue::QueueError;
use crate::virtio::state::{FsState, QueueRecord};

/// How long requests wait for another thaw-share after one dies.
pub const PATIENCE: Duration = Duration::from_millis(PATIENCE_MS);
/// Most bytes of a message that is kept as INIT: its header, and more than its body has on any kernel.
const MOST_INIT: u32 = 1024;
/// The queue of requests that are not urgent (§5.11.2).
const REQUESTS: usize = 1;
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
    /// Requests to be sent before those of the queues: a write that this process could not make, and lookups that were unanswered when
    /// thaw-share died. If these failed, the guest would drop what it has mounted there.
    held: Vec<Request>,
    without_capabilities: WithoutCapabilities,
    open_files: OpenFiles,
    /// The write that the device's thread makes itself, without the lock.
    flight: Arc<Flight>,
    /// Requests that may still be taken in this event.
    turns: usize,
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
            open_files: OpenFiles::default(),
            flight: Arc::default(),
            turns: 0,
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
        // The device's thread makes it without the lock that the caller has.
        self.flight.drain();
        self.flight.completions();
        // The driver starts anew.
        self.init = None;
        self.held.clear();
        self.without_capabilities.clear();
        self.open_files.clear();
    }

    fn serve(
        &mut self,
        active: &mut Option<Activation>,
        event: Event,
    ) -> Result<Option<Box<dyn Call>>, DeviceError> {
        if event != Event::Called {
            self.turns = AT_ONCE;
        }
        match event {
            Event::Wake => Ok(None),
            Event::Timeout => self.pass_on(active),
            Event::Called => {
                for ended in self.flight.completions() {
                    if let Some(queue) = active_queue(active, REQUESTS) {
                        queue.add_used(ended.head, ended.written)?;
                    }
                }
                self.held.extend(self.open_files.called());
                self.pass_on(active)
            }
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
    fn relay_ready(&mut self, active: &mut Option<Activation>) -> Result<Option<Box<dyn Call>>, DeviceError> {
        for _ in 0..AT_ONCE {
            let Link::Up(relay, _) = &mut self.link else { break };
            match relay.receive(memory_of(active)) {
                Ok(Step::Done(reply)) => {
                    // Nothing else can have come.
                    let is_last = relay.is_idle();
                    if let Some(reply) = reply {
                        self.answer(active, reply)?;
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

    /// Gives the guest a reply.
    fn answer(&mut self, active: &mut Option<Activation>, reply: Reply) -> Result<(), DeviceError> {
        let Reply {
            request,
            length,
            file,
        } = reply;
        self.remember(active, &request, length);
        if let (Some(file), Some(memory)) = (file, memory_of(active)) {
            self.open_files.add(&request, length, memory, file);
        }
        give_back(active, &request, length)
    }

    /// Remembers a reply of `length` bytes that says that a file has no capabilities.
    fn remember(&mut self, active: &Option<Activation>, request: &Request, length: u32) {
        if length as usize == size_of::<OutHeader>()
            && let Some(memory) = memory_of(active)
            && let Some(node) = capabilities::asked_for(request, memory)
            && request.reply_header(memory).error == -libc::ENODATA
        {
            self.without_capabilities.add(node, Instant::now());
        }
    }

    /// Serves requests until the relay is full, none are left, or one is for the device's thread to make.
    fn pass_on(&mut self, active: &mut Option<Activation>) -> Result<Option<Box<dyn Call>>, DeviceError> {
        let mut call = None;
        while call.is_none() {
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
            if self.turns == 0 {
                active.iter().for_each(Activation::kick_again);
                break;
            }
            let Some((queue, chain)) = next_chain(active)? else {
                break;
            };
            self.turns -= 1;
            call = self.take(active, queue, chain)?;
        }
        if let Some(active) = active {
            active.signal()?;
        }
        self.wait_for_relay().map_err(epoll_error)?;
        Ok(call)
    }

    /// Serves a request, begins to send it, or answers it with an error. Returns the write that serves it.
    fn take(
        &mut self,
        active: &mut Option<Activation>,
        queue: usize,
        chain: Chain,
    ) -> Result<Option<Box<dyn Call>>, DeviceError> {
        let Some(memory) = memory_of(active) else {
            return Ok(None);
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
            give_back(active, &request, 0)?;
        } else if request.length > *MESSAGE.end() {
            refuse(active, &request, libc::E2BIG)?;
        } else {
            match &self.link {
                Link::Absent => refuse(active, &request, libc::ENOTCONN)?,
                Link::Gone | Link::Down(_) => refuse(active, &request, libc::EIO)?,
                Link::Up(..) => return self.forward(active, request),
            }
        }
        Ok(None)
    }

    /// Begins to send a request to thaw-share, or serves it here if that is possible.
    fn forward(
        &mut self,
        active: &mut Option<Activation>,
        request: Request,
    ) -> Result<Option<Box<dyn Call>>, DeviceError> {
        let (Link::Up(relay, _), Some(memory)) = (&mut self.link, memory_of(active)) else {
            return Ok(None);
        };
        let (queue, head) = (request.queue, request.chain.head());
        let is_held = |held: &Request| held.queue == queue && held.chain.head() == head;
        if relay.has(queue, head) || self.held.iter().any(is_held) {
            return Err(QueueError::Chain { queue, head }.into());
        }
        let known = |node| self.without_capabilities.has(node, Instant::now());
        if capabilities::asked_for(&request, memory).is_some_and(known) {
            refuse(active, &request, libc::ENODATA)?;
            return Ok(None);
        }
        let asked = request.header(memory);
        if let Some(length) = self.open_files.read(&asked, &request, memory) {
            give_back(active, &request, length)?;
            return Ok(None);
        }
        // Only chains of this queue are returned after a call.
        if queue == REQUESTS
            && let Some(write) = self.open_files.write(&asked, &request, memory)
            && let Some(seat) = self.flight.seat()
        {
            return Ok(Some(Box::new(WriteCall {
                write,
                memory: memory.clone(),
                in_flight: seat.begin(head, true),
                request,
            })));
        }
        self.open_files.see(&asked, &request, memory);
        if request.length <= MOST_INIT && asked.opcode == INIT {
            self.init = Some(request.whole(memory));
            // Its node IDs begin anew.
            self.without_capabilities.clear();
        }
        relay.begin(request);
        Ok(None)
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
        // Their handles were thaw-share's, and end with it.
        self.open_files.clear();
        tracing::error!(
            pending = unanswered.len(),
            "{why}: what the guest waited for answers EIO, and what it asks now waits for another"
        );
        for request in unanswered {
            let memory = memory_of(active);
            let opcode = memory.map(|memory| request.header(memory).opcode);
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
    let written = memory_of(active).map_or(0, |memory| request.write_error(memory, errno));
    give_back(active, request, written)
}

fn give_back(active: &mut Option<Activation>, request: &Request, written: u32) -> Result<(), DeviceError> {
    match active_queue(active, request.queue) {
        Some(queue) => Ok(queue.add_used(request.chain.head(), written)?),
        None => Ok(()),
    }
}

#[cfg(test)]
#[path = "share_test.rs"]
mod tests;
