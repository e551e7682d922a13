//! Answers the requests of a virtio-blk device: at once, when its system call has been made, or, for an image, when its bytes are there.
//!
//! A request's header is read once each time it is executed, so its rate limit is charged for exactly the operation that is executed.

use std::sync::Arc;

use thaw_log::LogLimit;

use super::backing::Backing;
use super::call::DiskCall;
use super::request::{Kind, Request, Status};
use crate::memory::GuestMemory;
use crate::virtio::accesses::AccessLog;
use crate::virtio::chain::Chain;
use crate::virtio::device::{Call, DeviceError};
use crate::virtio::flight::{Flight, Seat};
use crate::virtio::guest_io;
use crate::virtio::misses::{self, Misses, Resumed};
use crate::virtio::queue::{Answer, QueueError};
use crate::virtio::shared_threads::SharedThreads;
use crate::virtio::throttle::Throttle;

/// The device's only queue.
const QUEUE: usize = 0;

/// The backend, and the requests that wait for it.
pub struct Server {
    pub backend: Option<Arc<Backing>>,
    /// The answer to `GET_ID`.
    serial: Arc<str>,
    /// Requests whose calls are being made.
    pub flight: Arc<Flight>,
    /// The call of the request that was taken last, if it needs one. While it is here, no other request is taken.
    pub call: Option<Box<dyn Call>>,
    /// Reads of an image that wait for their bytes.
    pub misses: Misses,
    pub accesses: AccessLog,
    pub throttle: Throttle,
    log: LogLimit,
}

impl Server {
    /// A server without a backend, of a disk that shares these threads.
    pub fn new(serial: String, misses: Misses, shared: Arc<SharedThreads>) -> Server {
        Server {
            backend: None,
            serial: serial.into(),
            flight: Arc::new(Flight::new(shared)),
            call: None,
            misses,
            accesses: AccessLog::default(),
            throttle: Throttle::default(),
            log: LogLimit::default(),
        }
    }

    /// A request that is executed for the first time.
    pub fn request(chain: Chain) -> misses::Request {
        misses::Request {
            queue: QUEUE,
            chain,
            rounds: 0,
        }
    }

    /// Whether a request may be taken from the queue: it may get a thread.
    pub fn wants(&self) -> bool {
        self.call.is_none() && !self.flight.is_full()
    }

    /// Answers a chain from the queue or hands out its call, unless no thread is free for it, or it is over the rate limit.
    pub fn take(&mut self, memory: &GuestMemory, chain: Chain) -> Result<Answer, DeviceError> {
        let (queue, head) = (QUEUE, chain.head());
        if self.misses.has(queue, head) || self.flight.has(head) {
            return Err(QueueError::Chain { queue, head }.into());
        }
        let parsed = parse(memory, &chain)?;
        match self.flight.seat() {
            Some(seat) if self.admits(&parsed) => {
                Ok(self.answer(memory, &parsed, Server::request(chain), Some(seat)))
            }
            _ => Ok(Answer::Stop),
        }
    }

    /// Answers a request that was taken from the queue before. The rate limit is not charged again.
    pub fn execute(&mut self, memory: &GuestMemory, request: misses::Request) -> Result<Answer, DeviceError> {
        let parsed = parse(memory, &request.chain)?;
        Ok(self.answer(memory, &parsed, request, None))
    }

    /// Answers a request that has waited: its bytes are there now, or the node cannot get them.
    pub fn resume(&mut self, memory: &GuestMemory, resumed: Resumed) -> Result<Answer, DeviceError> {
        let Resumed { request, failure } = resumed;
        let Some(reason) = failure else {
            return self.execute(memory, request);
        };
        if let Some(dropped) = self.log.pass() {
            tracing::error!(
                reason,
                disk = &*self.serial,
                dropped,
                "a read of an image failed: its bytes cannot be had"
            );
        }
        Ok(finish(&parse(memory, &request.chain)?, Status::IoErr, 0))
    }

    /// Whether the rate limit admits a request now; if so, charges it. Without a backend there is nothing to limit.
    fn admits(&mut self, request: &Request<'_>) -> bool {
        if self.backend.is_none() || !self.throttle.limits() {
            return true;
        }
        let (bytes, operations) = match &request.kind {
            Ok(kind) => kind.cost(),
            Err(_) => (0, 1),
        };
        let admitted = self.throttle.admits(bytes, operations);
        if admitted {
            self.throttle.charge(bytes, operations);
        }
        admitted
    }

    /// Answers a request, or parks it until its bytes are there. Its system call is handed out to the thread that has this seat; without one
    /// it is made here, with the device's lock held.
    fn answer(
        &mut self,
        memory: &GuestMemory,
        parsed: &Request<'_>,
        request: misses::Request,
        seat: Option<Seat>,
    ) -> Answer {
        let backing = self.backend.as_deref();
        if let (Ok(Kind::In { sector, data }), Some(Backing::Image(image))) = (&parsed.kind, backing) {
            let length = guest_io::total(data) as u64;
            if request.rounds == 0 {
                image.record_access(&mut self.accesses, *sector, length);
            }
            let missing = image.missing(*sector, length);
            if !missing.is_empty() {
                return match self.misses.park(request, &missing) {
                    Ok(()) => Answer::Deferred,
                    Err(_) => finish(parsed, Status::IoErr, 0),
                };
            }
        }
        // The serial is in memory.
        let seat = seat.filter(|_| !matches!(parsed.kind, Ok(Kind::GetId { .. })));
        let (status, data) = match (&parsed.kind, &self.backend, seat) {
            (Err(status), ..) => (*status, 0),
            (Ok(_), None, _) => (Status::IoErr, 0),
            (Ok(kind), Some(backing), Some(seat)) => {
                self.call = Some(Box::new(DiskCall {
                    memory: memory.clone(),
                    operation: kind.operation(),
                    backing: backing.clone(),
                    serial: self.serial.clone(),
                    in_flight: seat.begin(request.chain.head(), kind.changes()),
                    chain: request.chain,
                }));
                return Answer::Deferred;
            }
            (Ok(kind), Some(backing), None) => backing.execute(kind, &self.serial),
        };
        finish(parsed, status, data)
    }
}

fn parse<'m>(memory: &'m GuestMemory, chain: &Chain) -> Result<Request<'m>, DeviceError> {
    Request::parse(memory, chain).map_err(|what| DeviceError::unanswerable(chain, what))
}

/// Writes the status and returns the answer's length: `data` bytes and the status.
fn finish(request: &Request<'_>, status: Status, data: u32) -> Answer {
    Answer::Done(request.finish(status, data))
}
