//! Answers the requests of a virtio-blk device: at once, or, for an image, when their bytes are there.
//!
//! A request is parsed once each time it is executed, so its rate limit is charged for exactly the operation that is executed.

use thaw_log::LogLimit;

use super::backing::Backing;
use super::request::{Kind, Request, Status};
use crate::memory::GuestMemory;
use crate::virtio::accesses::AccessLog;
use crate::virtio::chain::Chain;
use crate::virtio::device::DeviceError;
use crate::virtio::guest_io;
use crate::virtio::misses::{self, Misses, Resumed};
use crate::virtio::queue::{Answer, QueueError};
use crate::virtio::throttle::Throttle;

/// The device's only queue.
const QUEUE: usize = 0;

/// The backend, and the requests that wait for it.
pub struct Server {
    pub backend: Option<Backing>,
    /// The answer to `GET_ID`.
    serial: String,
    /// Reads of an image that wait for their bytes.
    pub misses: Misses,
    pub accesses: AccessLog,
    pub throttle: Throttle,
    log: LogLimit,
}

impl Server {
    /// A server without a backend.
    pub fn new(serial: String, misses: Misses) -> Server {
        Server {
            backend: None,
            serial,
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

    /// Answers a chain from the queue, unless it is over the rate limit.
    pub fn take(&mut self, memory: &GuestMemory, chain: Chain) -> Result<Answer, DeviceError> {
        let (queue, head) = (QUEUE, chain.head());
        if self.misses.has(queue, head) {
            return Err(QueueError::Chain { queue, head }.into());
        }
        let parsed = parse(memory, &chain)?;
        match self.admits(&parsed) {
            true => Ok(self.answer(&parsed, Server::request(chain))),
            false => Ok(Answer::Stop),
        }
    }

    /// Answers a request that was taken from the queue before. The rate limit is not charged again.
    pub fn execute(&mut self, memory: &GuestMemory, request: misses::Request) -> Result<Answer, DeviceError> {
        let parsed = parse(memory, &request.chain)?;
        Ok(self.answer(&parsed, request))
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
                disk = self.serial,
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

    /// Answers a request, or parks it until its bytes are there.
    fn answer(&mut self, parsed: &Request<'_>, request: misses::Request) -> Answer {
        if let (Ok(Kind::In { sector, data }), Some(Backing::Image(image))) = (&parsed.kind, &self.backend) {
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
        let (status, data) = match (&parsed.kind, &mut self.backend) {
            (Err(status), _) => (*status, 0),
            (Ok(_), None) => (Status::IoErr, 0),
            (Ok(kind), Some(backing)) => backing.execute(kind, &self.serial),
        };
        finish(parsed, status, data)
    }
}

fn parse<'m>(memory: &'m GuestMemory, chain: &Chain) -> Result<Request<'m>, DeviceError> {
    Request::parse(memory, chain).map_err(|what| DeviceError::unanswerable(chain, what))
}

/// Writes the status and returns the answer's length: `data` bytes and the status.
fn finish(request: &Request<'_>, status: Status, data: u32) -> Answer {
    request.status.copy_from(&[status as u8]);
    Answer::Done(data.saturating_add(1))
}
