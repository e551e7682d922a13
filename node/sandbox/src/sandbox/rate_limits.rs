//! Rate limits of a sandbox's disks and network.
//!
//! Invariant: the limits in a sandbox's record are in force, or the process that adopts the sandbox puts them in force: they are
//! recorded before the VMM gets them. A new sandbox's VMM gets them before its guest runs, also if the machine was made ahead.

use std::num::NonZeroU64;
use std::sync::Arc;

use thaw_protocol::api::{RateLimit, RateLimits};
use thaw_protocol::control::{Command, DeviceId};
use thaw_protocol::device_limits::{Bucket, DeviceLimit, DeviceLimits};

use super::Sandbox;
use crate::blocking::blocking;
use crate::container::{IMAGE_DISK, RootServing};
use crate::control_client::ControlClient;
use crate::error::{Error, ErrorKind};
use crate::state::Record;
use thaw_sys::lock::Lock;

/// The slots of the sandbox's own disks and of the host's.
const DISKS: [DeviceId; 4] = [DeviceId::Blk0, DeviceId::Blk1, DeviceId::Blk2, DeviceId::Blk3];

/// The commands that limit a machine's devices. A disk that is the image has no limit, because its bytes are shared with other sandboxes.
pub(super) fn commands(limits: &RateLimits, image_disk: bool) -> Vec<Command> {
    let disks = DISKS
        .into_iter()
        .filter(|disk| !(image_disk && *disk == IMAGE_DISK));
    let disk = DeviceLimits::Disk(device_limit(limits.disk));
    let network = DeviceLimits::Network {
        send: device_limit(limits.net_out),
        receive: device_limit(limits.net_in),
    };
    let mut commands: Vec<Command> = disks
        .map(|device| Command::Limit { device, limits: disk })
        .collect();
    commands.push(Command::Limit {
        device: DeviceId::Net,
        limits: network,
    });
    commands
}

fn device_limit(limit: Option<RateLimit>) -> DeviceLimit {
    let limit = limit.unwrap_or_default();
    DeviceLimit {
        bytes: bucket(limit.bytes_per_s, limit.burst_bytes, limit.once_bytes),
        operations: bucket(limit.ops_per_s, limit.burst_ops, limit.once_ops),
    }
}

/// [`RateLimits::check`] has refused a rate of 0.
fn bucket(per_second: Option<u64>, burst: Option<u64>, once: Option<u64>) -> Option<Bucket> {
    let per_second = per_second.and_then(NonZeroU64::new)?;
    Some(Bucket {
        per_second,
        burst: burst.and_then(NonZeroU64::new).unwrap_or(per_second),
        once: once.unwrap_or(0),
    })
}

fn has_image_disk(record: &Record) -> bool {
    record.root == RootServing::Erofs
}

/// Sends a machine its limits. Returns its first refusal as the error.
pub(super) async fn send(
    control: &ControlClient,
    limits: &RateLimits,
    image_disk: bool,
) -> Result<(), Error> {
    let mut pending = Vec::new();
    for command in commands(limits, image_disk) {
        pending.push(control.request(command, &[]).await?);
    }
    for pending in pending {
        pending.answer().await?;
    }
    Ok(())
}

/// Puts the recorded limits of an adopted sandbox in force. Does nothing if its VMM does not support limits.
pub(super) async fn adopt(control: &ControlClient, record: &Record) {
    let Some(limits) = &record.terms.rate_limits else {
        return;
    };
    if let Err(e) = send(control, limits, has_image_disk(record)).await {
        tracing::warn!(
            sandbox = record.id,
            "the rate limits of an adopted sandbox are what they were: {e}"
        );
    }
}

impl Sandbox {
    /// The current rate limits of its disks and network.
    pub fn rate_limits(&self) -> RateLimits {
        self.rate_limits.locked().unwrap_or_default()
    }

    /// Changes the limits from now on. Returns the new limits. Buckets are full after a change.
    pub async fn set_rate_limits(self: &Arc<Sandbox>, change: RateLimits) -> Result<RateLimits, Error> {
        change
            .check()
            .map_err(|why| Error::new(ErrorKind::Runtime, why))?;
        let _one = self.freezing.lock().await;
        let before = *self.rate_limits.locked();
        let Some(limits) = before else {
            let what = format!(
                "sandbox {}: its thaw-vmm is of a release without rate limits (Command::Limit)",
                self.record().id
            );
            return Err(Error::new(ErrorKind::VmmTooOld, what));
        };
        let after = limits.changed(change);
        self.note_rate_limits(after).await?;
        let sent = send(self.resources.control()?, &after, has_image_disk(self.record())).await;
        if let Err(e) = sent {
            // The old limits are still in force. If they cannot be recorded either, the first error is the more useful one.
            let _ = self.note_rate_limits(limits).await;
            return Err(e);
        }
        Ok(after)
    }

    async fn note_rate_limits(self: &Arc<Sandbox>, limits: RateLimits) -> Result<(), Error> {
        *self.rate_limits.locked() = Some(limits);
        let sandbox = self.clone();
        blocking(move || sandbox.resources.directory.write(&sandbox.record_now())).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_speak_of_every_disk_but_the_image_and_the_network() {
        let limits = RateLimits {
            disk: Some(RateLimit {
                bytes_per_s: Some(1 << 20),
                once_bytes: Some(5000),
                ..RateLimit::default()
            }),
            net_in: Some(RateLimit {
                ops_per_s: Some(100),
                burst_ops: Some(10),
                ..RateLimit::default()
            }),
            net_out: None,
        };
        let bucket = |per_second, burst, once| {
            Some(Bucket {
                per_second: NonZeroU64::new(per_second).unwrap(),
                burst: NonZeroU64::new(burst).unwrap(),
                once,
            })
        };
        let disk = DeviceLimit {
            bytes: bucket(1 << 20, 1 << 20, 5000),
            operations: None,
        };
        let receive = DeviceLimit {
            bytes: None,
            operations: bucket(100, 10, 0),
        };
        for image_disk in [false, true] {
            let mut expected: Vec<Command> = DISKS
                .into_iter()
                .filter(|device| !image_disk || *device != DeviceId::Blk3)
                .map(|device| Command::Limit {
                    device,
                    limits: DeviceLimits::Disk(disk),
                })
                .collect();
            expected.push(Command::Limit {
                device: DeviceId::Net,
                limits: DeviceLimits::Network {
                    send: DeviceLimit::default(),
                    receive,
                },
            });
            assert_eq!(commands(&limits, image_disk), expected);
        }
    }
}
