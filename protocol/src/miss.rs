//! Chunk misses: the VMM requests bytes of a blob that are not in its cache file yet.
//!
//! Each request and answer is one packet. thawd fills the cache file and sets the ready bits *before* it
//! answers, and the VMM checks the bits again. A lost answer therefore causes a repeated request, and a wrong
//! one does no harm. When the socket closes, the VMM keeps its pending misses and sends them again over the
//! next socket.

use serde::{Deserialize, Serialize};

/// A request for bytes of a blob.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Miss {
    /// Chosen by the VMM; the answer repeats it.
    pub id: u64,
    /// The layer's DiffID, as in [`crate::control::BlobRange::digest`].
    pub blob: [u8; 32],
    /// First byte, as an offset into the blob's cache file.
    pub offset: u64,
    /// Length in bytes, at most 1 MiB.
    pub length: u32,
}

/// The answer to a [`Miss`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Filled {
    pub id: u64,
    /// On failure the guest's read fails with EIO, and the VMM logs this sentence.
    pub result: Result<(), String>,
}
