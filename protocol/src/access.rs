//! The access log: which bytes of its images a guest reads, in order. `--record` stores it as a load order.
//!
//! The VMM sends one packet per access over the SEQPACKET socket of [`crate::control::Backend::Accesses`]. It
//! never blocks: it drops a packet that does not fit, and the next packet says how many were dropped.

use serde::{Deserialize, Serialize};

/// One range of bytes that a guest read or mapped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Access {
    /// The layer's DiffID, as in [`crate::control::BlobRange::digest`].
    pub blob: [u8; 32],
    /// First byte, as an offset into the blob's cache file.
    pub offset: u64,
    /// Length in bytes.
    pub length: u32,
    /// Accesses dropped since the previous packet because the socket was full.
    pub dropped: u32,
}
