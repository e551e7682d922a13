//! The device's thread: waits for kicks, answers of the miss socket and orders, and for nothing else.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread::{self, JoinHandle};

use thaw_protocol::miss::Filled;
use thaw_protocol::packet::{self, PacketError};
use thaw_rootfs::fs::RootFs;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::EventFd;

use super::message::{Messenger, Verdict};
use super::parked::{Parked, Request};
use crate::virtio::device::{Activation, DeviceError};
use crate::virtio::queue::{DeviceQueue, QueueError};

/// Epoll data of the order eventfd and the miss socket; below them are queues.
const ORDER: u64 = u64::MAX;
const SOCKET: u64 = u64::MAX - 1;
/// How often a read is asked for again when its bytes, said to be there, are not.
const MAX_ROUNDS: u32 = 8;
/// Answers taken from the socket before others get their turn.
const ANSWERS: usize = 64;

/// What the device tells its thread.
pub enum Order {
    Activate(Box<Activation>),
    /// Forget the queues, then say so.
    Reset(SyncSender<()>),
    /// Ask for missing bytes over this non-blocking socket from now on.
    Misses(OwnedFd),
    Exit,
}

/// The running thread; dropped, it ends.
pub struct Worker {
    orders: Sender<Order>,
    wake: Arc<EventFd>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    /// Starts a thread with no queues.
    pub fn start(tag: &str, images: Arc<RootFs>) -> io::Result<Worker> {
        let epoll = Epoll::new()?;
        let wake = Arc::new(EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?);
        epoll.ctl(
            ControlOperation::Add,
            wake.as_raw_fd(),
            EpollEvent::new(EventSet::IN, ORDER),
        )?;
        let (orders, received) = channel();
        let served = Served {
            epoll,
            wake: wake.clone(),
            orders: received,
            images,
            active: None,
            socket: None,
            waits_to_send: false,
            parked: Parked::default(),
        };
        let thread = thread::Builder::new()
            .name(format!("fs-{tag}"))
            .spawn(move || served.run())?;
        Ok(Worker {
            orders,
            wake,
            thread: Some(thread),
        })
    }

    /// Gives an order, to be carried out soon.
    pub fn order(&self, order: Order) {
        // The thread ends only by an order to, so it hears this one; a failed write means a wake-up is pending.
        let _ = self.orders.send(order);
        let _ = self.wake.write(1);
    }

    /// When this returns the thread does not touch guest memory.
    pub fn reset(&self) {
        let (done, wait) = sync_channel(1);
        self.order(Order::Reset(done));
        // An error means that the thread is gone, and its queues with it.
        let _ = wait.recv();
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.order(Order::Exit);
        if let Some(thread) = self.thread.take() {
            // A panic in the thread was reported when it happened.
            let _ = thread.join();
        }
    }
}

/// What an active device has.
struct Active {
    queues: Vec<DeviceQueue>,
    messenger: Messenger,
}

/// The thread's own.
struct Served {
    epoll: Epoll,
    wake: Arc<EventFd>,
    orders: Receiver<Order>,
    images: Arc<RootFs>,
    active: Option<Active>,
    socket: Option<OwnedFd>,
    /// Whether the socket is full and waited for.
    waits_to_send: bool,
    parked: Parked,
}

impl Served {
    fn run(mut self) {
        let mut events = [EpollEvent::default(); 16];
        loop {
            let ready = match self.epoll.wait(-1, &mut events) {
                Ok(ready) => ready,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => {
                    tracing::error!(%error, "epoll_wait failed; a virtio-fs device is no longer served");
                    return;
                }
            };
            for event in &events[..ready] {
                let result = match event.data() {
                    ORDER => match self.obey() {
                        Some(result) => result,
                        None => return,
                    },
                    SOCKET => self.answers(),
                    queue => self.kicked(queue as usize),
                };
                if let Err(error) = result {
                    self.fail(&error);
                }
            }
        }
    }

    /// Carries out the orders that came. None to end.
    fn obey(&mut self) -> Option<Result<(), DeviceError>> {
        // Nothing to read: an earlier event has taken the orders.
        let _ = self.wake.read();
        while let Ok(order) = self.orders.try_recv() {
            match order {
                Order::Activate(activation) => {
                    if let Err(error) = self.activate(*activation) {
                        return Some(Err(error));
                    }
                }
                Order::Reset(done) => {
                    self.deactivate();
                    // Nobody waits any more: as good as told.
                    let _ = done.send(());
                }
                Order::Misses(socket) => self.connect(socket),
                Order::Exit => return None,
            }
        }
        Some(Ok(()))
    }

    fn watch(
        &self,
        operation: ControlOperation,
        fd: RawFd,
        events: EventSet,
        data: u64,
    ) -> Result<(), DeviceError> {
        self.epoll
            .ctl(operation, fd, EpollEvent::new(events, data))
            .map_err(|error| DeviceError::System {
                what: "epoll_ctl",
                error,
            })
    }

    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError> {
        self.deactivate();
        let messenger =
            Messenger::new(self.images.clone(), activation.memory).map_err(|error| DeviceError::System {
                what: "scratch memory of virtio-fs",
                error,
            })?;
        for (index, queue) in activation.queues.iter().enumerate() {
            self.watch(
                ControlOperation::Add,
                queue.kick().as_raw_fd(),
                EventSet::IN,
                index as u64,
            )?;
        }
        self.active = Some(Active {
            queues: activation.queues,
            messenger,
        });
        Ok(())
    }

    fn deactivate(&mut self) {
        self.parked.clear();
        if let Some(active) = self.active.take() {
            for queue in &active.queues {
                // Not registered if activation failed half-way.
                let _ = self.watch(
                    ControlOperation::Delete,
                    queue.kick().as_raw_fd(),
                    EventSet::empty(),
                    0,
                );
            }
        }
    }

    /// The device cannot go on until the driver resets it.
    fn fail(&mut self, error: &DeviceError) {
        tracing::warn!(%error, "virtio-fs stopped until the guest resets it");
        if let Some(queue) = self.active.as_ref().and_then(|active| active.queues.first()) {
            queue.interrupt().fail();
        }
        self.deactivate();
    }

    /// Serves what is available in a queue, at most its size so that others get their turn.
    fn kicked(&mut self, index: usize) -> Result<(), DeviceError> {
        let Some(active) = &mut self.active else {
            return Ok(());
        };
        let Some(queue) = active.queues.get_mut(index) else {
            return Ok(());
        };
        // Nothing to read: another event of the same batch was about this kick.
        let _ = queue.kick().read();
        queue.disable_kicks()?;
        let mut budget = queue.state().size;
        loop {
            match queue.pop()? {
                Some(chain) if self.parked.has(index, chain.head()) => {
                    return Err(QueueError::Chain {
                        queue: index,
                        head: chain.head(),
                    }
                    .into());
                }
                Some(chain) => match active.messenger.handle(&chain) {
                    Verdict::Done(written) => queue.add_used(chain.head(), written)?,
                    Verdict::Wait(missing) => self.parked.park(
                        Request {
                            queue: index,
                            chain,
                            rounds: 0,
                        },
                        &missing,
                    ),
                },
                None if queue.enable_kicks()? => {}
                None => break,
            }
            budget = budget.saturating_sub(1);
            if budget == 0 {
                queue.kick_again();
                break;
            }
        }
        queue.signal()?;
        self.ask()
    }

    /// Takes a new miss socket: every open question goes out over it.
    fn connect(&mut self, socket: OwnedFd) {
        self.disconnect();
        let events = EventSet::IN;
        if let Err(error) = self.watch(ControlOperation::Add, socket.as_raw_fd(), events, SOCKET) {
            tracing::error!(%error, "the miss socket cannot be waited for");
            return;
        }
        self.socket = Some(socket);
        if let Err(error) = self.ask() {
            tracing::error!(%error, "the miss socket cannot be waited for");
        }
    }

    /// Drops the socket; what it was asked is asked again over the next one.
    fn disconnect(&mut self) {
        if let Some(socket) = self.socket.take() {
            // Closing it would do, unless the descriptor was duplicated.
            let _ = self.watch(
                ControlOperation::Delete,
                socket.as_raw_fd(),
                EventSet::empty(),
                SOCKET,
            );
        }
        self.waits_to_send = false;
        self.parked.ask_again();
    }

    /// Sends questions until the socket is full or there are none left.
    fn ask(&mut self) -> Result<(), DeviceError> {
        while let (Some(socket), Some(miss)) = (&self.socket, self.parked.next_unsent()) {
            match packet::send(socket, miss, &[]) {
                Ok(()) => {
                    let id = miss.id;
                    self.parked.sent(id);
                }
                Err(PacketError::Io(error)) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => {
                    tracing::warn!(%error, "the miss socket is gone; reads wait for the next one");
                    self.disconnect();
                }
            }
        }
        let must_wait = self.parked.next_unsent().is_some();
        if let Some(socket) = &self.socket
            && must_wait != self.waits_to_send
        {
            let events = if must_wait {
                EventSet::IN | EventSet::OUT
            } else {
                EventSet::IN
            };
            self.watch(ControlOperation::Modify, socket.as_raw_fd(), events, SOCKET)?;
            self.waits_to_send = must_wait;
        }
        Ok(())
    }

    /// Takes answers, and runs the requests they set free.
    fn answers(&mut self) -> Result<(), DeviceError> {
        for _ in 0..ANSWERS {
            let Some(socket) = &self.socket else { break };
            match packet::receive::<Filled>(socket) {
                Ok((filled, _)) => self.filled(filled)?,
                Err(PacketError::Io(error)) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(PacketError::Closed) => {
                    tracing::info!("the miss socket was closed; reads wait for the next one");
                    self.disconnect();
                }
                Err(error) => {
                    tracing::warn!(%error, "the miss socket is not usable; reads wait for the next one");
                    self.disconnect();
                }
            }
        }
        for queue in self.active.iter_mut().flat_map(|active| &mut active.queues) {
            queue.signal()?;
        }
        self.ask()
    }

    fn filled(&mut self, filled: Filled) -> Result<(), DeviceError> {
        for resumed in self.parked.answered(filled) {
            let Request {
                queue: index,
                chain,
                rounds,
            } = resumed.request;
            let Some(active) = &mut self.active else {
                return Ok(());
            };
            let Some(queue) = active.queues.get_mut(index) else {
                return Ok(());
            };
            let verdict = match resumed.failure {
                Some(reason) => {
                    tracing::error!(
                        reason,
                        "a read of the root file system failed: its bytes cannot be had"
                    );
                    Verdict::Done(active.messenger.reply_error(&chain, libc::EIO))
                }
                None => active.messenger.handle(&chain),
            };
            match verdict {
                Verdict::Done(written) => queue.add_used(chain.head(), written)?,
                Verdict::Wait(_) if rounds >= MAX_ROUNDS => {
                    tracing::error!(
                        rounds,
                        "a read of the root file system failed: its bytes were promised, and never came"
                    );
                    let written = active.messenger.reply_error(&chain, libc::EIO);
                    queue.add_used(chain.head(), written)?;
                }
                Verdict::Wait(missing) => {
                    self.parked.park(
                        Request {
                            queue: index,
                            chain,
                            rounds: rounds + 1,
                        },
                        &missing,
                    );
                }
            }
        }
        Ok(())
    }
}
