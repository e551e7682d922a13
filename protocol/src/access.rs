//! The access log: which bytes of its images a guest reads, in order, for `--record`.
//!
//! Packets from the VMM to the node over a SEQPACKET socket attached to the root device, or the disk that is the image ([`crate::control::Backend::Accesses`]).
//! The VMM never waits: a packet that does not fit is dropped, and the next one says how many were.

use serde::{Deserialize, Serialize};

/// Bytes a guest read, or mapped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Access {
    /// The blob: [`crate::control::BlobRange::digest`].
    pub blob: [u8; 32],
    /// First byte within the blob's cache file.
    pub offset: u64,
    /// Bytes.
    pub length: u32,
    /// Accesses dropped since the one before, for want of room.
    pub dropped: u32,
}
