//! The backend of the root device: a sandbox's images as one FUSE file system, served in this process.
//!
//! The file system itself is [`thaw_imagefs::fs::RootFs`]. If a read's bytes are not in a cache file yet, the read is parked and its bytes
//! are requested over the miss socket ([`crate::virtio::misses`]), so no read waits for another.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use thaw_imagefs::fs::RootFs;
use thaw_log::LogLimit;
use thaw_protocol::control::{Backend, ImageSpec};

use super::dax::Dax;
use super::message::{Messenger, Verdict};
use super::worker::{BACKEND, Event, Worker};
use super::{Fs, FsBackend};
use crate::memory::GuestMemory;
use crate::virtio::accesses::AccessLog;
use crate::virtio::blk::image::placed_blobs;
use crate::virtio::device::{Activation, AttachError, Call, DeviceError, SharedMemory, active_queue};
use crate::virtio::gate::Gate;
use crate::virtio::misses::{Misses, Request, Resumed, Waits, check_heads, packet_socket};
use crate::virtio::queue::{Answer, DeviceQueue, QueueError};
use crate::virtio::state::{FsState, QueueRecord};
use crate::virtio::window::HostWindow;

/// The tag the guest mounts the root device by.
pub const ROOT_TAG: &str = "thaw";

/// The region that files are mapped into for DAX (§5.11.4.1, `VIRTIO_FS_SHMCAP_ID_CACHE`).
const CACHE_REGION: u8 = 0;

/// The images, and the requests that wait for their bytes.
pub struct Images {
    images: Arc<RootFs>,
    /// Present while the driver is up.
    messenger: Option<Messenger>,
    misses: Misses,
    accesses: AccessLog,
    dax: Dax,
    /// Requests that waited at the freeze: queue and head.
    to_replay: Vec<(usize, u16)>,
    /// Shared with every messenger, so that a guest cannot get a fresh budget of log lines by resetting the device.
    log: Arc<LogLimit>,
}

impl Fs<Images> {
    /// The root device: image slots and a DAX window.
    pub fn root(dax: HostWindow, gate: Arc<Gate>) -> Fs<Images> {
        let region = SharedMemory {
            id: CACHE_REGION,
            window: dax.window(),
        };
        let worker = Worker::start(ROOT_TAG, gate, |epoll, _| Images {
            images: Arc::new(RootFs::with_window()),
            messenger: None,
            misses: Misses::new(Waits::Epoll(epoll.clone(), BACKEND)),
            accesses: AccessLog::default(),
            dax: Dax::new(dax),
            to_replay: Vec::new(),
            log: Arc::default(),
        });
        Fs::new(ROOT_TAG, vec![region], worker)
    }

    /// Adds an image in a slot. `fds` are as [`ImageSpec::blobs`] describes. The guest sees it at its next lookup.
    pub fn add_image(&mut self, slot: u16, image: ImageSpec, fds: Vec<OwnedFd>) -> Result<(), AttachError> {
        let expected = 1 + 2 * image.blobs.len();
        if fds.len() != expected {
            return Err(AttachError::Descriptors {
                expected,
                got: fds.len(),
            });
        }
        let invalid =
            |error: &dyn std::fmt::Display| AttachError::Invalid(format!("image {:?}: {error}", image.name));
        let mut fds = fds.into_iter();
        let metadata = fds
            .next()
            .map(File::from)
            .ok_or(AttachError::Descriptors { expected, got: 0 })?;
        let blobs = placed_blobs(&image.blobs, &mut fds).map_err(|error| invalid(&error))?;
        self.images()?
            .add_image(slot, &image.name, &metadata, blobs)
            .map_err(|error| invalid(&error))?;
        self.backed = true;
        Ok(())
    }

    /// Removes an image. The guest must have unmounted it.
    pub fn remove_image(&mut self, slot: u16) -> Result<(), AttachError> {
        self.images()?
            .remove_image(slot)
            .map_err(|error| AttachError::Invalid(error.to_string()))?;
        self.attachable()?
            .with(|Images { dax, images, .. }| dax.forget(images, slot));
        Ok(())
    }

    /// The file system. It has its own lock, so the device's thread does not wait while an image is read.
    fn images(&self) -> Result<Arc<RootFs>, AttachError> {
        Ok(self.attachable()?.with(|backend| backend.images.clone()))
    }
}

impl Images {
    /// Executes again the requests that waited at the freeze.
    fn replay(&mut self, active: &mut Option<Activation>) -> Result<(), DeviceError> {
        if self.to_replay.is_empty() {
            return Ok(());
        }
        for (index, head) in std::mem::take(&mut self.to_replay) {
            let Some(queue) = active_queue(active, index) else {
                continue;
            };
            let chain = queue.chain_at(head)?;
            let answer = self.answer(Request {
                queue: index,
                chain,
                rounds: 0,
            });
            queue.settle(head, answer)?;
        }
        self.finish(active)
    }

    /// Serves the available requests of a queue.
    fn kicked(&mut self, queue: &mut DeviceQueue) -> Result<(), DeviceError> {
        let index = queue.index();
        queue.serve(|_, chain| {
            let head = chain.head();
            if self.misses.has(index, head) {
                return Err(QueueError::Chain { queue: index, head });
            }
            Ok(self.answer(Request {
                queue: index,
                chain,
                rounds: 0,
            }))
        })?;
        self.misses.ask()
    }

    /// Takes answers, and runs the requests that waited for them.
    fn answers(&mut self, active: &mut Option<Activation>) -> Result<(), DeviceError> {
        for Resumed { request, failure } in self.misses.answers() {
            let Some(queue) = active_queue(active, request.queue) else {
                continue;
            };
            let head = request.chain.head();
            let answer = match failure {
                Some(reason) => self.refuse(&request, &reason),
                None => self.answer(request),
            };
            queue.settle(head, answer)?;
        }
        self.finish(active)
    }

    /// Interrupts the driver for the answers, and requests the missing bytes.
    fn finish(&mut self, active: &mut Option<Activation>) -> Result<(), DeviceError> {
        if let Some(active) = active {
            active.signal()?;
        }
        self.misses.ask()
    }

    /// Answers a request, or parks it until its bytes are there.
    fn answer(&mut self, request: Request) -> Answer {
        // There is a messenger while there are queues.
        let Some(messenger) = &mut self.messenger else {
            return Answer::Stop;
        };
        // A read that is executed again was reported the first time.
        let accesses = (request.rounds == 0).then_some(&mut self.accesses);
        match messenger.handle(&request.chain, &mut self.dax, accesses) {
            Verdict::Done(written) => Answer::Done(written),
            Verdict::Wait(missing) => match self.misses.park(request, &missing) {
                Ok(()) => Answer::Deferred,
                Err(refused) => Answer::Done(messenger.reply_error(&refused.chain, libc::EIO)),
            },
        }
    }

    /// Answers a request with an error, because the node cannot provide its bytes.
    fn refuse(&mut self, request: &Request, reason: &str) -> Answer {
        if let Some(dropped) = self.log.pass() {
            tracing::error!(
                reason,
                dropped,
                "a read of the root file system failed: its bytes cannot be had"
            );
        }
        match &self.messenger {
            Some(messenger) => Answer::Done(messenger.reply_error(&request.chain, libc::EIO)),
            None => Answer::Stop,
        }
    }
}

impl FsBackend for Images {
    const IS_OF_THE_HOST: bool = false;

    fn activate(&mut self, memory: &GuestMemory) -> Result<(), DeviceError> {
        let messenger = Messenger::new(self.images.clone(), memory.clone(), self.log.clone());
        self.messenger = Some(messenger.map_err(|error| DeviceError::System {
            what: "scratch memory of virtio-fs",
            error,
        })?);
        Ok(())
    }

    fn reset(&mut self) {
        self.misses.clear();
        self.dax.clear();
        self.to_replay.clear();
        self.messenger = None;
    }

    /// Makes no calls: what must wait is parked.
    fn serve(
        &mut self,
        active: &mut Option<Activation>,
        event: Event,
    ) -> Result<Option<Box<dyn Call>>, DeviceError> {
        self.replay(active)?;
        match event {
            Event::Kick(index) => {
                if let Some(queue) = active_queue(active, index) {
                    self.kicked(queue)?;
                }
            }
            Event::Backend => self.answers(active)?,
            Event::Timeout | Event::Wake | Event::Called => {}
        }
        Ok(None)
    }

    fn attach(&mut self, backend: Backend, fds: Vec<OwnedFd>) -> Result<bool, AttachError> {
        match backend {
            Backend::Misses => {
                self.misses.connect(packet_socket(fds)?);
                Ok(true)
            }
            Backend::Accesses => {
                self.accesses.connect(packet_socket(fds)?);
                Ok(false)
            }
            _ => Err(AttachError::WrongKind(
                "the root virtio-fs device takes sockets for misses and accesses",
            )),
        }
    }

    /// Saves the reads that wait for bytes by their heads. In this device they go on waiting.
    fn save(&self, queues: usize) -> FsState {
        let mut parked = vec![Vec::new(); queues];
        let waiting = self.misses.heads();
        for (queue, head) in waiting.iter().chain(&self.to_replay) {
            parked[*queue].push(*head);
        }
        FsState {
            parked,
            mappings: self.dax.save(),
        }
    }

    fn check(state: &FsState, queues: Option<&[QueueRecord]>, window: u64) -> Result<(), String> {
        let FsState { parked, mappings } = state;
        // Without a driver there is no file system and no mapping.
        let window = if queues.is_some() { window } else { 0 };
        Dax::check(window, mappings)?;
        let queues = queues.unwrap_or_default();
        if parked.len() > queues.len() {
            return Err(format!(
                "reads wait in {} queues of {}",
                parked.len(),
                queues.len()
            ));
        }
        for (index, (heads, queue)) in parked.iter().zip(queues).enumerate() {
            check_heads(index, heads, Some(queue))?;
        }
        Ok(())
    }

    /// The saved requests are executed before any other.
    fn restore(&mut self, state: &FsState) -> bool {
        let queues = state.parked.iter().enumerate();
        self.to_replay = queues
            .flat_map(|(queue, heads)| heads.iter().map(move |head| (queue, *head)))
            .collect();
        self.dax.restore(&state.mappings);
        !self.to_replay.is_empty()
    }

    /// Makes the frozen guest's mappings again, after their bytes have been fetched.
    fn before_running(&mut self) -> Result<(), String> {
        let missing = self.dax.frozen_missing(&self.images);
        if !missing.is_empty() {
            self.misses.fetch(&missing)?;
        }
        self.dax.map_frozen(&self.images)
    }
}

#[cfg(test)]
#[path = "images_test.rs"]
mod tests;
