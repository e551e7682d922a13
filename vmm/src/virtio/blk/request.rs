//! Parsing a virtio-blk request (virtio 1.2 §5.2.6): header, data, one status byte, in any framing.
//!
//! A request without room for its status cannot be answered; all other errors become a [`Status`].

use virtio_bindings::virtio_blk as b;
use vm_memory::VolatileSlice;

use super::super::chain::Chain;
use super::super::guest_io;
use super::{MAX_DISCARD, MAX_RANGES, MAX_ZEROES, SECTOR};
use crate::memory::GuestMemory;

const HEADER: usize = 16;
/// `struct virtio_blk_discard_write_zeroes`.
const RANGE: usize = 16;
/// Bytes of a `GET_ID` answer.
const ID: usize = b::VIRTIO_BLK_ID_BYTES as usize;
/// The `unmap` flag of a range.
const UNMAP: u32 = 1;

/// The status a request is answered with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    Ok = b::VIRTIO_BLK_S_OK as u8,
    IoErr = b::VIRTIO_BLK_S_IOERR as u8,
    Unsupported = b::VIRTIO_BLK_S_UNSUPP as u8,
}

/// Sectors to discard or zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    pub sector: u64,
    pub sectors: u32,
    /// Zeroing may deallocate the range.
    pub unmap: bool,
}

/// The operation that is requested.
#[derive(Debug)]
pub enum Kind<'m> {
    In {
        sector: u64,
        data: Vec<VolatileSlice<'m>>,
    },
    Out {
        sector: u64,
        data: Vec<VolatileSlice<'m>>,
    },
    Flush,
    GetId {
        data: Vec<VolatileSlice<'m>>,
    },
    Discard(Vec<Range>),
    WriteZeroes(Vec<Range>),
}

impl Kind<'_> {
    /// The operation without the request's buffers, for [`Operation::with_buffers`].
    pub fn operation(&self) -> Operation {
        match self {
            Kind::In { sector, .. } => Operation::In { sector: *sector },
            Kind::Out { sector, .. } => Operation::Out { sector: *sector },
            Kind::Flush => Operation::Flush,
            Kind::GetId { .. } => Operation::GetId,
            Kind::Discard(ranges) => Operation::Discard(ranges.clone()),
            Kind::WriteZeroes(ranges) => Operation::WriteZeroes(ranges.clone()),
        }
    }

    /// Whether it changes the disk.
    pub fn changes(&self) -> bool {
        matches!(self, Kind::Out { .. } | Kind::Discard(_) | Kind::WriteZeroes(_))
    }

    /// The request's cost for the rate limit: bytes and operations. Zeroes count as bytes, because they may have to be written. Each range
    /// to discard counts as an operation.
    pub fn cost(&self) -> (u64, u64) {
        match self {
            Kind::In { data, .. } | Kind::Out { data, .. } => (guest_io::total(data) as u64, 1),
            Kind::Flush | Kind::GetId { .. } => (0, 1),
            Kind::Discard(ranges) => (0, ranges.len() as u64),
            Kind::WriteZeroes(ranges) => {
                let sectors: u64 = ranges.iter().map(|range| u64::from(range.sectors)).sum();
                (sectors * SECTOR, ranges.len() as u64)
            }
        }
    }
}

/// An operation without the buffers of its request, which are in guest memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operation {
    In { sector: u64 },
    Out { sector: u64 },
    Flush,
    GetId,
    Discard(Vec<Range>),
    WriteZeroes(Vec<Range>),
}

impl Operation {
    /// The operation with the buffers of `chain`.
    pub fn with_buffers<'m>(self, memory: &'m GuestMemory, chain: &Chain) -> Result<Kind<'m>, Status> {
        let from_driver = chain.readable(memory).map_err(|_| Status::IoErr)?;
        let to_driver = chain.writable(memory).map_err(|_| Status::IoErr)?;
        let data = || guest_io::part(&to_driver, 0, guest_io::total(&to_driver).saturating_sub(1));
        Ok(match self {
            Operation::In { sector } => Kind::In { sector, data: data() },
            Operation::Out { sector } => Kind::Out {
                sector,
                data: guest_io::part(&from_driver, HEADER, usize::MAX),
            },
            Operation::Flush => Kind::Flush,
            Operation::GetId => Kind::GetId { data: data() },
            Operation::Discard(ranges) => Kind::Discard(ranges),
            Operation::WriteZeroes(ranges) => Kind::WriteZeroes(ranges),
        })
    }
}

/// A request: its operation, or the error it gets, and where the status goes.
#[derive(Debug)]
pub struct Request<'m> {
    pub kind: Result<Kind<'m>, Status>,
    pub status: VolatileSlice<'m>,
}

impl<'m> Request<'m> {
    /// # Errors
    /// If there is no room for a status: a description of what is missing.
    pub fn parse(memory: &'m GuestMemory, chain: &Chain) -> Result<Request<'m>, &'static str> {
        let status = status(memory, chain)?;
        let kind = operation(memory, chain).and_then(|operation| operation.with_buffers(memory, chain));
        Ok(Request { kind, status })
    }

    /// The request of a chain that was parsed before. Its header is not read again.
    ///
    /// # Errors
    /// As [`Self::parse`].
    pub fn again(
        operation: Operation,
        memory: &'m GuestMemory,
        chain: &Chain,
    ) -> Result<Request<'m>, &'static str> {
        Ok(Request {
            status: status(memory, chain)?,
            kind: operation.with_buffers(memory, chain),
        })
    }

    /// Writes the status. Returns the bytes written to the request's buffers: `data` and the status.
    pub fn finish(&self, status: Status, data: u32) -> u32 {
        self.status.copy_from(&[status as u8]);
        data.saturating_add(1)
    }
}

fn status<'m>(memory: &'m GuestMemory, chain: &Chain) -> Result<VolatileSlice<'m>, &'static str> {
    chain
        .last_writable_byte(memory)
        .ok_or("no writable status byte in guest memory")
}

fn operation(memory: &GuestMemory, chain: &Chain) -> Result<Operation, Status> {
    let from_driver = chain.readable(memory).map_err(|_| Status::IoErr)?;
    let mut header = [0; HEADER];
    if guest_io::copy_out(&from_driver, 0, &mut header) < HEADER {
        return Err(Status::IoErr);
    }
    let (operation, sector) = (word(&header, 0), long(&header, 8));
    let out = || guest_io::part(&from_driver, HEADER, usize::MAX);
    match operation {
        b::VIRTIO_BLK_T_IN => Ok(Operation::In { sector }),
        b::VIRTIO_BLK_T_OUT => Ok(Operation::Out { sector }),
        b::VIRTIO_BLK_T_FLUSH => Ok(Operation::Flush),
        b::VIRTIO_BLK_T_GET_ID => Ok(Operation::GetId),
        b::VIRTIO_BLK_T_DISCARD => Ok(Operation::Discard(ranges(&out(), MAX_DISCARD, 0)?)),
        b::VIRTIO_BLK_T_WRITE_ZEROES => Ok(Operation::WriteZeroes(ranges(&out(), MAX_ZEROES, UNMAP)?)),
        _ => Err(Status::Unsupported),
    }
}

/// The ranges of a discard or write-zeroes request, within the limits the configuration states (§5.2.6.2).
fn ranges(data: &[VolatileSlice<'_>], max_sectors: u32, flags_allowed: u32) -> Result<Vec<Range>, Status> {
    let length = guest_io::total(data);
    if length == 0 || !length.is_multiple_of(RANGE) || length / RANGE > MAX_RANGES as usize {
        return Err(Status::IoErr);
    }
    (0..length / RANGE)
        .map(|i| {
            let mut raw = [0; RANGE];
            guest_io::copy_out(data, i * RANGE, &mut raw);
            let range = Range {
                sector: long(&raw, 0),
                sectors: word(&raw, 8),
                unmap: word(&raw, 12) & UNMAP != 0,
            };
            if word(&raw, 12) & !flags_allowed != 0 {
                Err(Status::Unsupported)
            } else if range.sectors > max_sectors {
                Err(Status::IoErr)
            } else {
                Ok(range)
            }
        })
        .collect()
}

/// Writes the answer to `GET_ID`: the serial, padded with zeros. Returns how many bytes fitted.
pub fn write_id(serial: &str, data: &[VolatileSlice<'_>]) -> u32 {
    let mut id = [0; ID];
    let n = serial.len().min(ID);
    id[..n].copy_from_slice(&serial.as_bytes()[..n]);
    guest_io::copy_in(data, 0, &id) as u32
}

fn word(bytes: &[u8; 16], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn long(bytes: &[u8; 16], at: usize) -> u64 {
    u64::from(word(bytes, at)) | u64::from(word(bytes, at + 4)) << 32
}
