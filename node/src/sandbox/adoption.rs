//! Taking over a sandbox whose thawd is gone.
//!
//! Invariant: its VMM's end is told from the moment it is connected to; what of it cannot be found again is said, and it runs on
//! without, but for a pod's files of the host: who made the pod makes it anew.

use std::sync::atomic::AtomicU16;
use std::sync::{Arc, Mutex};

use thaw_failpoint::{Failpoint, reach};
use thaw_pools::process::ProcessRecord;
use thaw_pools::vmm::VmmProcess;
use thaw_rootfs::store::Image;

use super::backends::{Backends, Ends};
use super::pools::Claimed;
use super::resources::Resources;
use super::share::Served;
use super::{Node, Origin, RootServing, Sandbox, freezing, locked, network};
use crate::control_client::ControlClient;
use crate::exit::{ExitCode, Failure};
use crate::images;
use crate::state::{Record, SandboxDirectory};

/// Connects to its VMM, and gives it a new miss socket and console.
pub(super) async fn adopt(
    node: &Node,
    record: Record,
    directory: SandboxDirectory,
) -> Result<Sandbox, Failure> {
    let lost = |what: &str| Failure::new(ExitCode::VmmFailed, format!("sandbox {}: {what}", record.id));
    let vmm = record
        .vmm
        .and_then(VmmProcess::adopt)
        .ok_or_else(|| lost("its VMM has ended"))?;
    let mut resources = Resources::new(directory);
    resources.vmm = Some(vmm);
    let cgroup = record.cgroup.as_deref().map(|name| node.cgroups.adopt(name));
    resources.cgroup = cgroup.map(|cgroup| Claimed::new(cgroup, &node.pools, |p| &p.cgroups));
    resources.host_disks = Mutex::new(record.host_disks.clone());
    let control = ControlClient::connect(&resources.directory.control_socket())?;
    reach(Failpoint::AdoptConnected);
    let has_disk = record.root == RootServing::Erofs;
    let ends = Ends::make(node.images.clone(), has_disk)?;
    let mut backends = Backends::default();
    ends.attach_again(&mut backends);
    backends.send(&control).await?;
    reach(Failpoint::AdoptAttached);
    freezing::undo(node, &resources.directory, &control).await;
    let control = Arc::new(control);
    if let Some(share) = record.share {
        match VmmProcess::adopt(share) {
            Some(share) => *locked(&resources.share) = Some(Served::new(&record, share, &control)),
            None if record.client.is_some() => return Err(lost("its thaw-share has ended")),
            None => tracing::error!(
                "sandbox {}: its thaw-share has ended: its volumes answer EIO",
                record.id
            ),
        }
    }
    (resources.misses, resources.console) = (ends.misses, Some(ends.console));
    let image: Option<Image> = match &record.image_digest {
        Some(digest) => node.images.by_digest(digest)?,
        None => None,
    };
    if let Some(image) = &image {
        locked(&resources.leases).push(image.lease().map_err(images::failure)?);
    }
    resources.control = Some(control);
    resources.network = network::adopt(node, &record).await;
    let record = Record {
        owner: ProcessRecord::myself(),
        ..record
    };
    resources.directory.write(&record)?;
    reach(Failpoint::AdoptRecorded);
    let origin = recover(&mut resources, node, &record);
    Sandbox::new(record, image.map(|i| i.config), origin, resources)
}

/// Of an adopted sandbox: its disk, its images and what it was thawed from, which a freeze takes all of. Without one of them it
/// runs on with the others.
fn recover(resources: &mut Resources, node: &Node, record: &Record) -> Option<Origin> {
    let (provenance, vmm) = (record.provenance.as_ref()?, record.vmm?);
    let told = |e: Failure| tracing::warn!(sandbox = record.id, "adopted, but it cannot be frozen: {e}");
    resources.used_slots = AtomicU16::new(provenance.last_slot());
    let (images, lost) = provenance.images(node);
    for shown in &images {
        match shown.image.lease() {
            Ok(lease) => locked(&resources.leases).push(lease),
            Err(e) => tracing::warn!(sandbox = record.id, "an image is not leased: {e}"),
        }
    }
    resources.images = Mutex::new(images);
    let disk = provenance.disk(vmm).map_err(told).ok();
    let has_disk = disk.is_some();
    resources.disk = disk.map(|disk| Claimed::new(disk, &node.pools, |p| &p.disks));
    let origin = provenance.origin(node).map_err(told).ok();
    let has_images = lost.map(told).is_none();
    origin.filter(|_| has_disk && has_images)
}
