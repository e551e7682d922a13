//! Block devices of the host as disks of a running sandbox: attached to it and detached from it.
//!
//! The VMM gets a descriptor and sees no path. Only the VMM keeps the device open, so its end releases the device. Invariant: a
//! device is in the record while the VMM may have it open, except in the moments before the attachment is reported.

use std::os::fd::OwnedFd;

use thaw_pools::block;
use thaw_protocol::control::{Backend, Command, DeviceId, HOST_DISKS};

use super::Sandbox;
use super::backends::{Backends, has_image_disk};
use crate::blocking::blocking;
use crate::container::IMAGE_DISK;
use crate::error::{Error, ErrorKind};
use crate::state::HostDisk;
use thaw_sys::lock::Lock;

impl Sandbox {
    /// Attaches a block device. Returns the slot in which the guest has it.
    ///
    /// # Errors
    /// [`ErrorKind::VolumeUnavailable`] if the device is missing or cannot be opened, or if no slot is free; errors of the VMM.
    pub async fn add_disk(&self, disk: HostDisk) -> Result<DeviceId, Error> {
        let HostDisk {
            major,
            minor,
            read_only,
        } = disk;
        let opened: OwnedFd = blocking(move || {
            block::open(major, minor, read_only)
                .map_err(|e| Error::new(ErrorKind::VolumeUnavailable, e.to_string()))
        })
        .await?;
        // Nothing that a freeze reads may change during the freeze.
        let _one = self.freezing.lock().await;
        let slot = self.free_slot().ok_or_else(|| {
            let what = format!(
                "block device {major}:{minor}: the sandbox has {} of the host's at a time, and all of them are in use",
                HOST_DISKS.len()
            );
            Error::new(ErrorKind::VolumeUnavailable, what)
        })?;
        let mut backends = Backends::default();
        backends.attach(slot, Backend::Disk { read_only }, &opened);
        backends.send(self.resources.control()?).await?;
        self.resources.host_disks.locked().insert(slot, disk);
        if let Err(e) = self.resources.directory.write(&self.record_now()) {
            self.detach(slot).await?;
            return Err(e);
        }
        Ok(slot)
    }

    /// Detaches a disk and closes it. Further requests of the guest fail.
    ///
    /// # Errors
    /// Errors of the VMM.
    pub async fn remove_disk(&self, slot: DeviceId) -> Result<(), Error> {
        let _one = self.freezing.lock().await;
        if !self.resources.host_disks.locked().contains_key(&slot) {
            return Ok(());
        }
        self.detach(slot).await?;
        self.resources.directory.write(&self.record_now())
    }

    async fn detach(&self, slot: DeviceId) -> Result<(), Error> {
        let detach = Command::Detach { device: slot };
        self.resources.control()?.call(detach, &[]).await?;
        self.resources.host_disks.locked().remove(&slot);
        Ok(())
    }

    fn free_slot(&self) -> Option<DeviceId> {
        let image = has_image_disk(&self.resources.images.locked()).then_some(IMAGE_DISK);
        let disks = self.resources.host_disks.locked();
        HOST_DISKS
            .into_iter()
            .find(|slot| Some(*slot) != image && !disks.contains_key(slot))
    }
}
