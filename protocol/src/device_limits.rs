//! Rate limits of devices: the token buckets of [`crate::control::Command::Limit`].

use std::num::NonZeroU64;

use serde::{Deserialize, Serialize};

use crate::tags;

/// A token bucket. It starts full and refills at a steady rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bucket {
    /// Tokens added per second.
    pub per_second: NonZeroU64,
    /// Capacity in tokens.
    pub burst: NonZeroU64,
    /// Extra tokens that are used once and never refilled.
    pub once: u64,
}

/// The limits of a disk, or of one direction of a network. `None` is unlimited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceLimit {
    /// Disk: bytes read and written. Network: bytes of frames, including Ethernet headers.
    pub bytes: Option<Bucket>,
    /// Disk: requests. Network: frames.
    pub operations: Option<Bucket>,
}

/// The limits of one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(remote = "Self")]
pub enum DeviceLimits {
    /// A virtio-blk device.
    Disk(DeviceLimit),
    /// virtio-net: the limits of sending and of receiving.
    Network { send: DeviceLimit, receive: DeviceLimit },
}

tags!(DeviceLimits {
    Disk = 0,
    Network = 1,
});
