//! Chunk misses: the VMM asks for bytes of a blob that are not in its cache file yet.
//!
//! One packet each way. thawd fills the cache file and sets the ready bits *before* it answers; the VMM looks at the
//! bits again, so a lost answer costs a repeated question and a wrong one costs nothing. When the socket closes, the
//! VMM keeps its pending misses and issues them again over the next socket it is handed.

use serde::{Deserialize, Serialize};

/// "I need these bytes."
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Miss {
    /// Chosen by the VMM; the answer repeats it.
    pub id: u64,
    /// The blob: [`crate::control::BlobRange::digest`].
    pub blob: [u8; 32],
    /// First byte within the blob's cache file.
    pub offset: u64,
    /// Bytes wanted; at most 1 MiB.
    pub length: u32,
}

/// The answer to a [`Miss`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Filled {
    pub id: u64,
    /// On failure the guest's read is answered EIO and this sentence is logged.
    pub result: Result<(), String>,
}
