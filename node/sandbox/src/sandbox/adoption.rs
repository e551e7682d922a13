//! Adoption: takes over a sandbox whose thawd is gone.
//!
//! Invariants: the end of the VMM is reported from the moment of the connection. If a part cannot be restored, that is logged and the
//! sandbox runs on without it. The exception is a pod's host files: without them the pod must be created anew. Any other failure while the
//! VMM lives (a VMM of another release, a VMM that does not answer, a missing descriptor or disk) leaves the sandbox running, so that the
//! next thawd can try again.

use std::sync::atomic::AtomicU16;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use oci_spec::image::ImageConfiguration;
use thaw_failpoint::{Failpoint, reach};
use thaw_images::store::Image;
use thaw_pools::process::ProcessRecord;
use thaw_pools::vmm::VmmProcess;
use thaw_protocol::api::DEFAULT_DISK_MIB;
use thaw_protocol::control::{Command, MachineState, Response};

use super::backends::{Backends, Ends};
use super::pools::Claimed;
use super::resources::Resources;
use super::share::Served;
use super::{Node, Origin, Sandbox, freeze_note, network, rate_limits, remote_thaw};
use crate::admission::Shape;
use crate::container::{IMAGE_SLOT, RootServing};
use crate::control_client::{ControlClient, Vmm};
use crate::error::{Error, ErrorKind};
use crate::state::{Record, SandboxDirectory};
use thaw_sys::lock::Lock;

/// How long a VMM may take to answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// Why a sandbox was not taken over.
#[derive(Debug, thiserror::Error)]
pub enum NotAdopted {
    /// The sandbox has ended, and was removed.
    #[error("{0}")]
    Ended(Error),
    /// The sandbox runs on, without an owner.
    #[error("{0}")]
    Left(Error),
}

/// Connects to the sandbox's VMM, and gives it a new miss socket and console.
pub(super) async fn adopt(
    node: &Node,
    record: Record,
    directory: SandboxDirectory,
) -> Result<Sandbox, NotAdopted> {
    let mut resources = Resources::new(directory, node.require.limits);
    let adopted = take_over(node, record, &mut resources).await;
    let adopted = adopted.and_then(|(record, config, origin)| {
        // The VMM process gets its control connection before anything else.
        let life = resources.control().map_err(NotAdopted::Left)?.life();
        Ok((record, config, origin, life))
    });
    match adopted {
        Ok((record, config, origin, life)) => Ok(Sandbox::of(record, config, origin, life, resources)),
        Err(e) => {
            if let NotAdopted::Left(_) = &e {
                resources.keep();
            }
            Err(e)
        }
    }
}

type Adopted = (Record, Option<ImageConfiguration>, Option<Origin>);

async fn take_over(node: &Node, record: Record, resources: &mut Resources) -> Result<Adopted, NotAdopted> {
    let ended = |what: &str| NotAdopted::Ended(Error::new(ErrorKind::VmmFailed, what));
    let vmm = record.vmm.and_then(VmmProcess::adopt);
    resources.vmm = Some(vmm.ok_or_else(|| ended("its VMM has ended"))?);
    let cgroup = record.cgroup.as_deref().map(|name| node.cgroups.adopt(name));
    resources.cgroup = cgroup.map(|cgroup| Claimed::new(cgroup, &node.pools, |p| &p.cgroups));
    resources.host_disks = Mutex::new(record.host_disks.clone());
    let ender = remote_thaw::serve_again(node, &record, resources).map_err(NotAdopted::Left)?;
    let control = connect(node, &record, resources)
        .await
        .map_err(NotAdopted::Left)?;
    if let Some(ender) = ender {
        ender.over(&control);
    }
    reach(Failpoint::AdoptAttached);
    freeze_note::undo(node, &resources.directory, &control).await;
    rate_limits::adopt(&control, &record).await;
    if let Some(share) = record.share {
        let supervised = resources.supervised(&record, &control);
        let served = match VmmProcess::adopt(share) {
            Some(share) => Served::new(share, supervised),
            // The mounts ended with thaw-share, and no record lists them.
            None if record.client.is_some() => return Err(ended("its thaw-share has ended")),
            None => Served::ended(supervised),
        };
        *resources.share.locked() = Some(served);
    }
    resources.control = Some(control);
    let image = image(node, &record);
    if let Some(image) = &image {
        match image.lease() {
            Ok(lease) => resources.leases.locked().push(lease),
            Err(e) => tracing::warn!(sandbox = record.id, "adopted, but its image is not leased: {e}"),
        }
    }
    resources.network = network::adopt(node, &record).await;
    let record = Record {
        owner: ProcessRecord::myself(),
        ..record
    };
    resources.directory.write(&record).map_err(NotAdopted::Left)?;
    reach(Failpoint::AdoptRecorded);
    let origin = recover(resources, node, &record);
    // A disk that cannot be opened still exists: count it with the default size.
    let disk_bytes = resources
        .disk
        .as_ref()
        .map_or(u64::from(DEFAULT_DISK_MIB) << 20, |disk| disk.size);
    resources.share_of_disk = Some(node.budget.adopt(disk_bytes));
    let shape = Shape {
        vcpus: record.vcpus,
        memory_mib: record.memory_mib,
    };
    let place = node
        .admission
        .adopt(record.terms.tenant.as_ref(), shape, disk_bytes);
    resources.place = Some(Arc::new(place));
    Ok((record, image.map(|i| i.config), origin))
}

/// Connects to the VMM, if this release knows its release, and gives it the sockets for its requests.
async fn connect(
    node: &Node,
    record: &Record,
    resources: &mut Resources,
) -> Result<Arc<ControlClient>, Error> {
    let failed = |what: String| Error::new(ErrorKind::VmmFailed, what);
    let silent = |_| {
        failed(format!(
            "its VMM has not answered for {} s",
            ANSWER_LIMIT.as_secs()
        ))
    };
    let socket = resources.directory.control_socket();
    let pid = Vmm(record.vmm.map_or(0, |vmm| vmm.pid));
    let control = ControlClient::adopt(&socket, pid, record.control);
    let control = tokio::time::timeout(ANSWER_LIMIT, control).await;
    let control = Arc::new(control.map_err(silent)??);
    reach(Failpoint::AdoptConnected);
    let has_disk = record.root == RootServing::Erofs;
    // The VMM repeats its requests as soon as it has a socket.
    grant(resources, node, record);
    let ends = Ends::make(node.images.clone(), &resources.given, has_disk)?;
    let mut backends = Backends::default();
    ends.attach_again(&mut backends);
    let take = async {
        match has_ended(&control).await {
            // The guest ended while no thawd ran, and the VMM takes no backends. Adopt the sandbox, to report why it failed.
            true => Ok(()),
            false => backends.send(&control).await.map(drop),
        }
    };
    let answered = tokio::time::timeout(ANSWER_LIMIT, take).await;
    answered.map_err(silent)??;
    (resources.misses, resources.console) = (ends.misses, Some(ends.console));
    Ok(control)
}

/// The sandbox's image, if the store still has it.
fn image(node: &Node, record: &Record) -> Option<Image> {
    let found = node.images.by_digest(record.image_digest.as_ref()?);
    found
        .inspect_err(|e| tracing::warn!(sandbox = record.id, "adopted, but its image cannot be read: {e}"))
        .ok()?
}

/// Lets the VMM ask for the bytes of its images. A booted sandbox has no provenance: its record names its only image.
fn grant(resources: &Resources, node: &Node, record: &Record) {
    match &record.provenance {
        Some(provenance) => {
            let (images, _) = provenance.images(node);
            for shown in images {
                resources.given.grant(shown.slot, &shown.image);
            }
        }
        None => {
            if let Some(image) = image(node, record) {
                resources.given.grant(IMAGE_SLOT, &image);
            }
        }
    }
}

/// Whether the VMM reports that its machine has ended.
async fn has_ended(control: &ControlClient) -> bool {
    let state = control.call(Command::Status, &[]).await;
    matches!(
        state,
        Ok(Response::Status {
            state: MachineState::Exited(_),
            ..
        })
    )
}

/// Recovers what a freeze of an adopted sandbox needs: its disk, its images and its origin. If one is missing, the sandbox runs on with the
/// others, and cannot be frozen.
fn recover(resources: &mut Resources, node: &Node, record: &Record) -> Option<Origin> {
    let (provenance, vmm) = (record.provenance.as_ref()?, record.vmm?);
    let told = |e: Error| tracing::warn!(sandbox = record.id, "adopted, but it cannot be frozen: {e}");
    resources.used_slots = AtomicU16::new(provenance.last_slot());
    let (images, lost) = provenance.images(node);
    for shown in &images {
        match shown.image.lease() {
            Ok(lease) => resources.leases.locked().push(lease),
            Err(e) => tracing::warn!(sandbox = record.id, "an image is not leased: {e}"),
        }
    }
    resources.images = Mutex::new(images);
    let disk = provenance.disk(vmm).map_err(told).ok();
    let has_disk = disk.is_some();
    resources.disk = disk.map(|disk| Claimed::new(disk, &node.pools, |p| &p.disks));
    let origin = provenance
        .origin(node, resources.directory.path())
        .map_err(told)
        .ok();
    let has_images = lost.map(told).is_none();
    origin.filter(|_| has_disk && has_images)
}
