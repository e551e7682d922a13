//! Reasons why a VMM's misses are refused, and a counter for each.

use std::sync::atomic::{AtomicU64, Ordering};

use thaw_imagefs::digest::Digest;
use thaw_protocol::miss::Miss;

/// Maximum number of bytes of a miss ([`Miss::length`]).
pub const MAX_LENGTH: u32 = 1 << 20;

/// Why a VMM's miss is not filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Its blob belongs to no image that the VMM was given.
    NotGiven,
    /// It ends beyond the end of its blob.
    OutOfRange,
    /// It asks for no bytes, or for more than [`MAX_LENGTH`].
    Length,
    /// It could not be decoded. The VMM's miss socket is closed.
    Malformed,
}

impl Refusal {
    /// All of them.
    pub const ALL: [Refusal; 4] = [
        Refusal::NotGiven,
        Refusal::OutOfRange,
        Refusal::Length,
        Refusal::Malformed,
    ];

    /// The label in metrics.
    pub const fn slug(self) -> &'static str {
        match self {
            Refusal::NotGiven => "not-given",
            Refusal::OutOfRange => "out-of-range",
            Refusal::Length => "length",
            Refusal::Malformed => "malformed",
        }
    }

    /// The text sent to the VMM.
    pub(crate) fn sentence(self, miss: &Miss) -> String {
        let (offset, length) = (miss.offset, miss.length);
        match self {
            Refusal::NotGiven => format!("blob {} is of no image of this machine", Digest::from(miss.blob)),
            Refusal::OutOfRange => format!("{length} bytes at {offset} end beyond the blob"),
            Refusal::Length => format!("a miss is of 1 to {MAX_LENGTH} bytes, this one is of {length}"),
            Refusal::Malformed => "it cannot be decoded".into(),
        }
    }
}

/// Counts of refused and delayed misses in this process.
#[derive(Debug, Default)]
pub struct MissCounts {
    refused: [AtomicU64; Refusal::ALL.len()],
    /// How often a VMM exceeded its rate of misses and was delayed.
    held_back: AtomicU64,
}

impl MissCounts {
    /// Misses refused for this reason.
    pub fn refused(&self, why: Refusal) -> u64 {
        self.refused[why as usize].load(Ordering::Relaxed)
    }

    /// How often a VMM was delayed.
    pub fn held_back(&self) -> u64 {
        self.held_back.load(Ordering::Relaxed)
    }

    pub(crate) fn count(&self, why: Refusal) {
        self.refused[why as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn hold_back(&self) {
        self.held_back.fetch_add(1, Ordering::Relaxed);
    }
}
