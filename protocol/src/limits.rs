//! How much a device may do: token buckets, as [`crate::control::Command::Limit`] carries them.

use std::num::NonZeroU64;

use serde::{Deserialize, Serialize};

use crate::tags;

/// A token bucket. It starts full, and refills at a steady rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bucket {
    /// Tokens that come each second.
    pub per_second: NonZeroU64,
    /// Tokens it holds.
    pub burst: NonZeroU64,
    /// Tokens on top of that, which do not come again.
    pub once: u64,
}

/// What a disk, or one direction of a network, may do. A bucket that is missing limits nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RateLimit {
    /// Of a disk what is read and written, of a network its frames, Ethernet headers included.
    pub bytes: Option<Bucket>,
    /// Of a disk its requests, of a network its frames.
    pub operations: Option<Bucket>,
}

/// The limits of one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(remote = "Self")]
pub enum DeviceLimits {
    /// Of a virtio-blk device, whatever is behind it.
    Disk(RateLimit),
    /// Of virtio-net: what the guest sends, and what it receives.
    Network { send: RateLimit, receive: RateLimit },
}

tags!(DeviceLimits {
    Disk = 0,
    Network = 1,
});
