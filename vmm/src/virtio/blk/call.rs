//! The system call of a request, which a thread of the disk makes without the device's lock.
//!
//! The request was parsed and checked under the lock. Of guest memory the call reads only data: operation, sectors and ranges are copies,
//! so a guest that changes them meanwhile changes nothing.

use std::sync::Arc;

use super::backing::Backing;
use super::request::{Operation, Request};
use crate::memory::GuestMemory;
use crate::virtio::chain::Chain;
use crate::virtio::device::Call;
use crate::virtio::flight::InFlight;

/// The call.
pub struct DiskCall {
    pub memory: GuestMemory,
    pub chain: Chain,
    pub operation: Operation,
    pub backing: Arc<Backing>,
    /// The answer to `GET_ID`.
    pub serial: Arc<str>,
    pub in_flight: InFlight,
}

impl Call for DiskCall {
    fn make(self: Box<Self>) {
        let DiskCall {
            memory,
            chain,
            operation,
            backing,
            serial,
            in_flight,
        } = *self;
        if operation == Operation::Flush {
            in_flight.wait_for_changes();
        }
        let Ok(request) = Request::again(operation, &memory, &chain) else {
            // Impossible: the status byte was in guest memory when the request was parsed, and guest memory stays.
            return;
        };
        let (status, data) = match &request.kind {
            Ok(kind) => backing.execute(kind, &serial),
            Err(status) => (*status, 0),
        };
        let written = request.finish(status, data);
        // First: a disk that is taken away must be closed when nothing is in flight.
        drop(backing);
        in_flight.end(written);
    }
}
