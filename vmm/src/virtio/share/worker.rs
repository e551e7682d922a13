//! The device's thread: waits for kicks and for the relay, and for nothing else.
//!
//! As that of the root device ([`crate::virtio::fs`]) it is made with the device, and what it serves is behind a lock that
//! it takes for each event.

use std::io;
use std::os::fd::{OwnedFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fuse_backend_rs::abi::fuse_abi::{InHeader, OutHeader};
use thaw_log::LogLimit;
use thaw_protocol::share::{INIT, LOOKUP, MESSAGE, REPLY};
use vm_memory::ByteValued;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

use super::relay::{Broken, Relay, Request, Step};
use crate::jail::threads::Thread;
use crate::memory::GuestMemory;
use crate::virtio::chain::Chain;
use crate::virtio::device::{Activation, DeviceError};
use crate::virtio::device_thread::{
    DeviceThread, TIMEOUT, Timeout, WAKE, epoll_error, forget_kicks, wait_for_kicks,
};
use crate::virtio::gate::Gate;
use crate::virtio::guest_io;
use crate::virtio::queue::{DeviceQueue, QueueError};
use crate::virtio::state::QueueRecord;

/// Epoll data of the relay; below it are queues.
const RELAY: u64 = TIMEOUT - 1;
/// Bytes of a message that may be an INIT: its header, and more than its body has on any kernel.
const MOST_INIT: u32 = 1024;
/// Requests and replies of one event: then a freeze, or a reset, gets its turn.
const AT_ONCE: usize = 256;

/// The running thread, and what it serves; dropped, it ends.
pub struct Worker {
    served: Arc<Mutex<Served>>,
    _thread: DeviceThread,
}

impl Worker {
    /// Starts a thread with no queues, which touches guest memory while `gate` is open.
    /// When thaw-share dies, the guest waits so long for another.
    pub fn start(gate: Arc<Gate>, patience: Duration) -> io::Result<Worker> {
        let epoll = Arc::new(Epoll::new()?);
        let timeout = Timeout::default();
        let served = Arc::new(Mutex::new(Served {
            epoll: epoll.clone(),
            active: None,
            link: Link::Absent,
            next: None,
            init: None,
            held: Vec::new(),
            patience,
            timeout: timeout.clone(),
            log: LogLimit::default(),
        }));
        let thread = DeviceThread::start_timed("fs-shared", Thread::Files, epoll, gate, timeout, {
            let served = served.clone();
            move |event, _| {
                let mut served = lock(&served);
                if let Err(error) = served.serve(event) {
                    served.fail(&error);
                }
            }
        })?;
        Ok(Worker {
            served,
            _thread: thread,
        })
    }

    /// The driver is up.
    pub fn activate(&self, activation: Activation) -> Result<(), DeviceError> {
        self.served().activate(activation)
    }

    /// When this returns the thread does not touch guest memory.
    pub fn reset(&self) {
        self.served().deactivate();
    }

    /// Has requests served over this non-blocking socket: from now on, or once what serves them is seen to have ended.
    pub fn connect(&self, relay: OwnedFd) -> io::Result<()> {
        self.served().connect(relay)
    }

    /// Its queues; none if the device is not active.
    pub fn save(&self) -> Option<Vec<QueueRecord>> {
        let served = self.served();
        let active = served.active.as_ref()?;
        Some(active.queues.iter().map(DeviceQueue::save).collect())
    }

    fn served(&self) -> MutexGuard<'_, Served> {
        lock(&self.served)
    }
}

fn lock(served: &Mutex<Served>) -> MutexGuard<'_, Served> {
    served.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What an active device has.
struct Active {
    queues: Vec<DeviceQueue>,
    memory: GuestMemory,
}

/// Whom requests go to.
enum Link {
    /// Nobody yet.
    Absent,
    /// And which of its events are waited for.
    Up(Box<Relay>, EventSet),
    /// Nobody now. Until then another is waited for.
    Down(Instant),
    /// Nobody any more, unless another comes all the same.
    Gone,
}

/// What the thread serves.
struct Served {
    epoll: Arc<Epoll>,
    active: Option<Active>,
    link: Link,
    /// Takes the place of the one that is up, which is ending.
    next: Option<OwnedFd>,
    /// The guest's INIT: one that takes over is told it again.
    init: Option<Vec<u8>>,
    /// Names that were being looked up when thaw-share died: one that takes over is asked again. The guest would take an error for the
    /// end of what it has mounted there.
    held: Vec<Request>,
    patience: Duration,
    timeout: Timeout,
    log: LogLimit,
}

impl Served {
    fn serve(&mut self, event: u64) -> Result<(), DeviceError> {
        match event {
            WAKE => Ok(()),
            TIMEOUT => self.pass_on(),
            RELAY => self.relay_ready(),
            queue => self.kicked(queue as usize),
        }
    }

    fn watch(&self, operation: ControlOperation, fd: RawFd, events: EventSet, data: u64) -> io::Result<()> {
        self.epoll.ctl(operation, fd, EpollEvent::new(events, data))
    }

    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError> {
        self.deactivate();
        wait_for_kicks(&self.epoll, &activation.queues)?;
        self.active = Some(Active {
            queues: activation.queues,
            memory: activation.memory,
        });
        Ok(())
    }

    fn deactivate(&mut self) {
        if let Link::Up(relay, _) = &mut self.link {
            relay.forget();
        }
        // The driver begins anew.
        self.init = None;
        self.held.clear();
        if let Some(active) = self.active.take() {
            forget_kicks(&self.epoll, &active.queues);
        }
    }

    /// The device cannot go on until the driver resets it.
    fn fail(&mut self, error: &DeviceError) {
        if let Some(dropped) = self.log.pass() {
            tracing::warn!(%error, dropped, "the shared virtio-fs device stopped until the guest resets it");
        }
        if let Some(queue) = self.active.as_ref().and_then(|active| active.queues.first()) {
            queue.interrupt().fail();
        }
        self.deactivate();
    }

    fn connect(&mut self, socket: OwnedFd) -> io::Result<()> {
        if let Link::Up(relay, _) = &self.link {
            // Its end is seen by our thread, which answers what waits for it and then takes the next.
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
        // It can be written to at once, by which our thread sends what waits.
        let events = EventSet::IN | EventSet::OUT;
        self.watch(ControlOperation::Add, relay.socket(), events, RELAY)?;
        self.link = Link::Up(Box::new(relay), events);
        self.timeout.set(None);
        Ok(())
    }

    /// Whether requests wait for another thaw-share. When that has taken too long, names that were held are answered.
    fn waits(&mut self) -> Result<bool, DeviceError> {
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
            .try_for_each(|request| self.refuse(request, libc::EIO))?;
        Ok(false)
    }

    fn kicked(&mut self, index: usize) -> Result<(), DeviceError> {
        let Some(queue) = self.active.as_mut().and_then(|a| a.queues.get_mut(index)) else {
            return Ok(());
        };
        // Nothing to read: another event of the same batch was about this kick.
        let _ = queue.kick().read();
        queue.disable_kicks()?;
        self.pass_on()
    }

    /// Takes replies, then what they made room for.
    fn relay_ready(&mut self) -> Result<(), DeviceError> {
        for _ in 0..AT_ONCE {
            let Link::Up(relay, _) = &mut self.link else { break };
            match relay.receive(self.active.as_ref().map(|active| &active.memory)) {
                Ok(Step::Done(Some((request, length)))) => self.give_back(&request, length)?,
                Ok(Step::Done(None)) => {}
                Ok(Step::Blocked) => break,
                Err(why) => self.lose(&why)?,
            }
        }
        self.pass_on()
    }

    /// Sends requests until the relay is full or there are none left.
    fn pass_on(&mut self) -> Result<(), DeviceError> {
        let mut left = AT_ONCE;
        loop {
            if let Link::Up(relay, _) = &mut self.link {
                match relay.send(self.active.as_ref().map(|active| &active.memory)) {
                    Ok(Step::Done(Some(request))) => self.give_back(&request, 0)?,
                    Ok(Step::Done(None)) => {}
                    Ok(Step::Blocked) => break,
                    Err(why) => self.lose(&why)?,
                }
            }
            if matches!(&self.link, Link::Up(relay, _) if !relay.has_room()) {
                // A reply, which makes room, brings us back.
                break;
            }
            if self.waits()? {
                break;
            }
            if let Link::Up(relay, _) = &mut self.link
                && let Some(request) = self.held.pop()
            {
                relay.begin(request);
                continue;
            }
            let Some((queue, chain)) = self.next()? else {
                break;
            };
            self.take(queue, chain)?;
            left -= 1;
            if left == 0 {
                self.active
                    .iter()
                    .flat_map(|a| &a.queues)
                    .for_each(DeviceQueue::kick_again);
                break;
            }
        }
        for queue in self.active.iter_mut().flat_map(|active| &mut active.queues) {
            queue.signal()?;
        }
        self.wait_for_relay().map_err(epoll_error)
    }

    /// The next request: of those that have no reply first, for they free what the host holds.
    fn next(&mut self) -> Result<Option<(usize, Chain)>, QueueError> {
        for queue in self.active.iter_mut().flat_map(|active| &mut active.queues) {
            if let Some(chain) = queue.pop_or_enable_kicks()? {
                return Ok(Some((queue.index(), chain)));
            }
        }
        Ok(None)
    }

    /// Begins to send a request, or answers it here.
    fn take(&mut self, queue: usize, chain: Chain) -> Result<(), DeviceError> {
        let Some(memory) = self.active.as_ref().map(|active| &active.memory) else {
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
            return self.give_back(&request, 0);
        }
        if request.length > *MESSAGE.end() {
            return self.refuse(&request, libc::E2BIG);
        }
        match &mut self.link {
            Link::Absent => self.refuse(&request, libc::ENOTCONN),
            Link::Gone | Link::Down(_) => self.refuse(&request, libc::EIO),
            Link::Up(relay, _) => {
                let head = request.chain.head();
                let is_held = |held: &Request| held.queue == queue && held.chain.head() == head;
                if relay.has(queue, head) || self.held.iter().any(is_held) {
                    return Err(QueueError::Chain { queue, head }.into());
                }
                if request.length <= MOST_INIT && header(&request, memory).opcode == INIT {
                    self.init = Some(whole(&request, memory));
                }
                relay.begin(request);
                Ok(())
            }
        }
    }

    /// Answers a request with an error, if it wants an answer.
    fn refuse(&mut self, request: &Request, errno: i32) -> Result<(), DeviceError> {
        let memory = self.active.as_ref().map(|active| &active.memory);
        let written = memory.map_or(0, |memory| write_error(request, memory, errno));
        self.give_back(request, written)
    }

    fn give_back(&mut self, request: &Request, written: u32) -> Result<(), DeviceError> {
        let queues = self.active.iter_mut().flat_map(|active| &mut active.queues);
        match queues.into_iter().nth(request.queue) {
            Some(queue) => Ok(queue.add_used(request.chain.head(), written)?),
            None => Ok(()),
        }
    }

    /// thaw-share is gone: whoever waits for it is told, but for who looks a name up; whoever asks from now on waits for another.
    fn lose(&mut self, why: &Broken) -> Result<(), DeviceError> {
        let link = Link::Down(Instant::now() + self.patience);
        let Link::Up(relay, _) = std::mem::replace(&mut self.link, link) else {
            return Ok(());
        };
        // Closing it would do, unless the descriptor was duplicated.
        let _ = self.watch(ControlOperation::Delete, relay.socket(), EventSet::empty(), RELAY);
        let unanswered = relay.close();
        tracing::error!(
            pending = unanswered.len(),
            "{why}: what the guest waited for answers EIO, and what it asks now waits for another"
        );
        for request in unanswered {
            let memory = self.active.as_ref().map(|active| &active.memory);
            let opcode = memory.map(|memory| header(&request, memory).opcode);
            match opcode {
                Some(LOOKUP) if request.room > 0 => self.held.push(request),
                _ => self.refuse(&request, libc::EIO)?,
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
        self.watch(ControlOperation::Modify, socket, events, RELAY)
    }
}

/// The header of a request's message; zeros where that has none.
fn header(request: &Request, memory: &GuestMemory) -> InHeader {
    let mut header = InHeader::default();
    if let Ok(message) = request.chain.readable(memory) {
        guest_io::copy_out(&message, 0, header.as_mut_slice());
    }
    header
}

/// A request's message.
fn whole(request: &Request, memory: &GuestMemory) -> Vec<u8> {
    let mut bytes = vec![0; request.length as usize];
    if let Ok(message) = request.chain.readable(memory) {
        guest_io::copy_out(&message, 0, &mut bytes);
    }
    bytes
}

/// Writes an error as the reply of a request that has room for one: the bytes written.
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
