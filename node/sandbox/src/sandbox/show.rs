//! Shows images to a running guest: those of a pod's containers, when each container is created.
//!
//! Invariants: an image is leased before its guest sees it, and recorded before its slot is reported, so that a later owner leases it too.
//! A slot is recorded before the VMM is asked to use it, so that no later owner uses it again.

use std::sync::atomic::Ordering;

use super::backends::Backends;
use super::share::Served;
use super::{Node, Sandbox, Shown};
use crate::container::{IMAGE_SLOT, image_name};
use crate::error::{Error, ErrorKind};
use crate::images;
use crate::state::{Record, Terms};
use thaw_sys::lock::Lock;

impl Sandbox {
    /// Shows the guest an image of the store, given by its manifest's digest. Returns its directory in the root device. An image that is
    /// already shown keeps its directory.
    ///
    /// # Errors
    /// [`ErrorKind::ImageNotStored`]; errors of the VMM.
    pub async fn show(&self, node: &Node, digest: &str) -> Result<String, Error> {
        // A freeze must record the images that are there.
        let _one = self.freezing.lock().await;
        let image = node.images.by_digest(digest)?.ok_or_else(|| {
            let what = format!("image {digest} is not in the store");
            Error::new(ErrorKind::ImageNotStored, what).remedy("pull it through Thaw's snapshotter")
        })?;
        let is_it = |shown: &&Shown| shown.image.digest == image.digest;
        if let Some(there) = self.resources.images.locked().iter().find(is_it) {
            return Ok(there.name.clone());
        }
        let slot = self.next_slot()?;
        let name = image_name(slot);
        let lease = image.lease().map_err(images::failure)?;
        let exported = images::export(&image, name.clone())?;
        let mut backends = Backends::default();
        backends.image(slot, &exported);
        self.resources.given.grant(slot, &image);
        let sent = backends.send(self.resources.control()?).await;
        sent.inspect_err(|_| self.resources.given.revoke(slot))?;
        self.resources.leases.locked().push(lease);
        let prefetch = node
            .images
            .prefetch(&image, std::sync::Arc::new(thaw_images::progress::Silent));
        self.resources.prefetch.locked().extend(prefetch);
        self.resources.images.locked().push(Shown {
            slot,
            name: name.clone(),
            image,
        });
        if let Err(e) = self.resources.directory.write(&self.record_now()) {
            // Undone, so that the next attempt records the image again, in a new slot.
            self.resources.images.locked().pop();
            return Err(e);
        }
        Ok(name)
    }

    /// Returns a slot that was never used, and records it.
    fn next_slot(&self) -> Result<u16, Error> {
        let full = || Error::new(ErrorKind::Runtime, "the sandbox has no room for another image");
        let last = self.resources.last_slot();
        let slot = last.checked_add(1).ok_or_else(full)?.max(IMAGE_SLOT);
        self.resources.used_slots.store(slot, Ordering::Relaxed);
        self.resources.directory.write(&self.record_now())?;
        Ok(slot)
    }

    /// Its record with the current images, network, thaw-share and host disks.
    pub(super) fn record_now(&self) -> Record {
        let (provenance, ending) = (self.record.provenance.clone(), *self.ending.borrow());
        let terms = self.record.terms.clone().within(*self.time_limit.borrow());
        Record {
            client: ending.client,
            provenance: provenance.map(|p| p.showing(&self.resources)),
            network: self.network().or_else(|| self.record.network.clone()),
            share: self.resources.share.locked().as_ref().and_then(Served::record),
            host_disks: self.resources.host_disks.locked().clone(),
            terms: Terms {
                rate_limits: *self.rate_limits.locked(),
                ..terms.with_exit(ending.on_exit)
            },
            ..self.record.clone()
        }
    }
}
