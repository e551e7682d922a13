//! The device's thread: waits for kicks and answers of the miss socket, and for nothing else.
//!
//! What it serves is behind a lock that it takes for each event, so the device attaches, resets and saves from any thread
//! without asking it.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use thaw_imagefs::fs::RootFs;
use thaw_log::LogLimit;
use vmm_sys_util::epoll::Epoll;

use super::dax::Dax;
use super::message::{Messenger, Verdict};
use crate::jail::threads::Thread;
use crate::virtio::accesses::AccessLog;
use crate::virtio::device::{Activation, DeviceError, Saved};
use crate::virtio::device_thread::{DeviceThread, WAKE, forget_kicks, wait_for_kicks};
use crate::virtio::gate::Gate;
use crate::virtio::misses::{Misses, Request, Resumed, Waits};
use crate::virtio::queue::{Answer, DeviceQueue, QueueError};
use crate::virtio::state::{DeviceState, MappingRecord};

/// Epoll data of the miss socket; below it are queues.
const SOCKET: u64 = WAKE - 1;

/// The running thread, and what it serves; dropped, it ends.
pub struct Worker {
    served: Arc<Mutex<Served>>,
    thread: DeviceThread,
}

impl Worker {
    /// Starts a thread with no queues, which touches guest memory while `gate` is open.
    pub fn start(tag: &str, images: Arc<RootFs>, dax: Dax, gate: Arc<Gate>) -> io::Result<Worker> {
        let epoll = Arc::new(Epoll::new()?);
        let served = Arc::new(Mutex::new(Served {
            epoll: epoll.clone(),
            images,
            active: None,
            misses: Misses::new(Waits::Epoll(epoll.clone(), SOCKET)),
            accesses: AccessLog::default(),
            dax,
            to_replay: Vec::new(),
            log: Arc::default(),
        }));
        let thread = DeviceThread::start(&format!("fs-{tag}"), Thread::Files, epoll, gate, {
            let served = served.clone();
            move |event, _| {
                let mut served = lock(&served);
                if let Err(error) = served.serve(event) {
                    served.fail(&error);
                }
            }
        })?;
        Ok(Worker { served, thread })
    }

    /// The driver is up. `replay`: requests that waited at a freeze, by queue and head; they are executed again before
    /// anything else is.
    pub fn activate(&self, activation: Activation, replay: Vec<(usize, u16)>) -> Result<(), DeviceError> {
        let mut served = self.served();
        served.activate(activation)?;
        served.to_replay = replay;
        if !served.to_replay.is_empty() {
            self.thread.wake();
        }
        Ok(())
    }

    /// When this returns the thread does not touch guest memory.
    pub fn reset(&self) {
        self.served().deactivate();
    }

    /// Asks for missing bytes over this non-blocking socket from now on.
    pub fn connect(&self, socket: OwnedFd) {
        self.served().misses.connect(socket);
    }

    /// Tells this non-blocking socket from now on what is read.
    pub fn tell(&self, socket: OwnedFd) {
        self.served().accesses.connect(socket);
    }

    /// An image goes: nothing of it is mapped any more.
    pub fn forget_image(&self, slot: u16) {
        let mut served = self.served();
        let Served { dax, images, .. } = &mut *served;
        dax.forget(images, slot);
    }

    /// Takes what a frozen guest had mapped; [`Self::map_frozen`] is to come before it runs.
    pub fn restore(&self, mappings: &[MappingRecord]) {
        self.served().dax.restore(mappings);
    }

    /// Makes the mappings of a frozen guest anew, and waits for what has to be fetched for it. The error is a sentence.
    pub fn map_frozen(&self) -> Result<(), String> {
        self.served().map_frozen()
    }

    /// For each queue the heads of requests that wait, what is mapped, and the queues; none if the device is not active.
    pub fn save(&self) -> Option<Saved> {
        let served = self.served();
        let active = served.active.as_ref()?;
        let mut parked = vec![Vec::new(); active.queues.len()];
        let waiting = served.misses.heads();
        for (queue, head) in waiting.iter().chain(&served.to_replay) {
            parked[*queue].push(*head);
        }
        let mappings = served.dax.save();
        Some(Saved {
            state: DeviceState::Fs { parked, mappings },
            queues: Some(active.queues.iter().map(DeviceQueue::save).collect()),
        })
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
    messenger: Messenger,
}

/// What the thread serves.
struct Served {
    epoll: Arc<Epoll>,
    images: Arc<RootFs>,
    active: Option<Active>,
    misses: Misses,
    accesses: AccessLog,
    dax: Dax,
    /// Requests that waited when the guest was frozen: queue and head.
    to_replay: Vec<(usize, u16)>,
    /// Its messengers have it too, and not one each: a guest that resets the device earns nothing.
    log: Arc<LogLimit>,
}

impl Served {
    fn serve(&mut self, event: u64) -> Result<(), DeviceError> {
        self.replay()?;
        match event {
            WAKE => Ok(()),
            SOCKET => self.answers(),
            queue => self.kicked(queue as usize),
        }
    }

    /// Executes again what waited when the guest was frozen.
    fn replay(&mut self) -> Result<(), DeviceError> {
        if self.to_replay.is_empty() {
            return Ok(());
        }
        for (index, head) in std::mem::take(&mut self.to_replay) {
            let Some(active) = &mut self.active else { break };
            let Some(queue) = active.queues.get_mut(index) else {
                continue;
            };
            let chain = queue.chain_at(head)?;
            let request = Request {
                queue: index,
                chain,
                rounds: 0,
            };
            self.execute(request)?;
        }
        self.signal()?;
        self.misses.ask()
    }

    /// Executes a request that was popped before, and gives it back if it is answered.
    fn execute(&mut self, request: Request) -> Result<(), DeviceError> {
        let Served {
            active: Some(Active { queues, messenger }),
            misses,
            accesses,
            dax,
            ..
        } = self
        else {
            return Ok(());
        };
        let Some(queue) = queues.get_mut(request.queue) else {
            return Ok(());
        };
        let head = request.chain.head();
        let answer = execute(messenger, misses, accesses, dax, request);
        Ok(queue.settle(head, answer)?)
    }

    fn signal(&mut self) -> Result<(), DeviceError> {
        for queue in self.active.iter_mut().flat_map(|active| &mut active.queues) {
            queue.signal()?;
        }
        Ok(())
    }

    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError> {
        self.deactivate();
        let messenger =
            Messenger::new(self.images.clone(), activation.memory, self.log.clone()).map_err(|error| {
                DeviceError::System {
                    what: "scratch memory of virtio-fs",
                    error,
                }
            })?;
        wait_for_kicks(&self.epoll, &activation.queues)?;
        self.active = Some(Active {
            queues: activation.queues,
            messenger,
        });
        Ok(())
    }

    fn deactivate(&mut self) {
        self.misses.clear();
        self.dax.clear();
        self.to_replay.clear();
        if let Some(active) = self.active.take() {
            forget_kicks(&self.epoll, &active.queues);
        }
    }

    /// The device cannot go on until the driver resets it.
    fn fail(&mut self, error: &DeviceError) {
        if let Some(dropped) = self.log.pass() {
            tracing::warn!(%error, dropped, "virtio-fs stopped until the guest resets it");
        }
        if let Some(queue) = self.active.as_ref().and_then(|active| active.queues.first()) {
            queue.interrupt().fail();
        }
        self.deactivate();
    }

    /// Serves what is available in a queue.
    fn kicked(&mut self, index: usize) -> Result<(), DeviceError> {
        let Served {
            active: Some(Active { queues, messenger }),
            misses,
            accesses,
            dax,
            ..
        } = self
        else {
            return Ok(());
        };
        let Some(queue) = queues.get_mut(index) else {
            return Ok(());
        };
        // Nothing to read: another event of the same batch was about this kick.
        let _ = queue.kick().read();
        queue.serve(|_, chain| {
            let head = chain.head();
            if misses.has(index, head) {
                return Err(QueueError::Chain { queue: index, head });
            }
            let request = Request {
                queue: index,
                chain,
                rounds: 0,
            };
            Ok(execute(messenger, misses, accesses, dax, request))
        })?;
        self.misses.ask()
    }

    /// Takes answers, and runs the requests they set free.
    fn answers(&mut self) -> Result<(), DeviceError> {
        for Resumed { request, failure } in self.misses.answers() {
            match failure {
                Some(reason) => self.refuse(&request, &reason)?,
                None => self.execute(request)?,
            }
        }
        self.signal()?;
        self.misses.ask()
    }

    /// Maps again what a frozen guest had mapped, once its bytes are there.
    fn map_frozen(&mut self) -> Result<(), String> {
        let missing = self.dax.frozen_missing(&self.images);
        if !missing.is_empty() {
            self.misses.fetch(&missing)?;
        }
        self.dax.map_frozen(&self.images)
    }

    /// Answers a request whose bytes cannot be had.
    fn refuse(&mut self, request: &Request, reason: &str) -> Result<(), DeviceError> {
        if let Some(dropped) = self.log.pass() {
            tracing::error!(
                reason,
                dropped,
                "a read of the root file system failed: its bytes cannot be had"
            );
        }
        let Some(active) = &mut self.active else {
            return Ok(());
        };
        let Some(queue) = active.queues.get_mut(request.queue) else {
            return Ok(());
        };
        let written = active.messenger.reply_error(&request.chain, libc::EIO);
        Ok(queue.add_used(request.chain.head(), written)?)
    }
}

/// Answers a request, or parks it until its bytes are there.
fn execute(
    messenger: &mut Messenger,
    misses: &mut Misses,
    accesses: &mut AccessLog,
    dax: &mut Dax,
    request: Request,
) -> Answer {
    // What is asked for again was told the first time.
    let accesses = (request.rounds == 0).then_some(accesses);
    match messenger.handle(&request.chain, dax, accesses) {
        Verdict::Done(written) => Answer::Done(written),
        Verdict::Wait(missing) => match misses.park(request, &missing) {
            Ok(()) => Answer::Deferred,
            Err(refused) => Answer::Done(messenger.reply_error(&refused.chain, libc::EIO)),
        },
    }
}
