//! Images that are shown to a guest that runs already: those of a pod's containers, each when it is made.
//!
//! Invariant: an image is leased before its guest sees it, and in the record before anybody is told where it is; so a later
//! owner leases it too.

use super::backends::Backends;
use super::{Node, Sandbox, Shown, locked};
use crate::container::{IMAGE_SLOT, image_name};
use crate::exit::{ExitCode, Failure};
use crate::images;
use crate::state::Record;

impl Sandbox {
    /// Shows an image of the store, by its manifest's digest; its directory in the root device. One that is shown keeps its own.
    ///
    /// # Errors
    /// [`ExitCode::ImageNotStored`]; those of its VMM.
    pub async fn show(&self, node: &Node, digest: &str) -> Result<String, Failure> {
        // What a freeze writes down must be what there is.
        let _one = self.freezing.lock().await;
        let image = node.images.by_digest(digest)?.ok_or_else(|| {
            let what = format!("image {digest} is not in the store");
            Failure::new(ExitCode::ImageNotStored, what).remedy("pull it through Thaw's snapshotter")
        })?;
        let slot = {
            let shown = locked(&self.resources.images);
            if let Some(there) = shown.iter().find(|shown| shown.image.digest == image.digest) {
                return Ok(there.name.clone());
            }
            let last = shown.iter().map(|shown| shown.slot).max();
            last.map_or(Some(IMAGE_SLOT), |last| last.checked_add(1))
        };
        let full = || Failure::new(ExitCode::Runtime, "the sandbox has no room for another image");
        let slot = slot.ok_or_else(full)?;
        let name = image_name(slot);
        let lease = image.lease().map_err(images::failure)?;
        let exported = images::export(&image, name.clone())?;
        let mut backends = Backends::default();
        backends.image(slot, &exported);
        backends.send(self.resources.control()?).await?;
        locked(&self.resources.leases).push(lease);
        let prefetch = node
            .images
            .prefetch(&image, std::sync::Arc::new(thaw_rootfs::progress::Silent));
        locked(&self.resources.prefetch).extend(prefetch);
        locked(&self.resources.images).push(Shown {
            slot,
            name: name.clone(),
            image,
        });
        self.resources.directory.write(&self.record_now())?;
        Ok(name)
    }

    /// Its record, with the images it shows now, and its network, its thaw-share and the host's disks as they are.
    pub(super) fn record_now(&self) -> Record {
        let provenance = self.record.provenance.clone();
        Record {
            provenance: provenance.map(|p| p.showing(&locked(&self.resources.images))),
            network: self.network().or_else(|| self.record.network.clone()),
            share: locked(&self.resources.share)
                .as_ref()
                .map(|share| share.process.record()),
            host_disks: locked(&self.resources.host_disks).clone(),
            ..self.record.clone()
        }
    }
}
