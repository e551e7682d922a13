//! Thaws a sandbox from a snapshot: the same images in the same slots, copies of its disks, a new identity.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use thaw_failpoint::{Failpoint, reach};
use thaw_pools::process::ProcessRecord;
use thaw_protocol::api::{CPU_LIMIT_MILLIS, NetworkPolicy, PublishedPort};
use thaw_protocol::control::{CONTROL_VERSION, MemoryMode};

use super::create::{Making, Parts};
use super::fitted::{Fitted, FittedDisk, FittedParts, Fitting};
use super::freeze::Workload;
use super::parked::ParkedWant;
use super::provenance::{frozen_images, keep_manifest};
use super::retry::retry_once;
use super::spare::Id;
use super::spec::new_record;
use super::wanted_machine::{machine, refuse_test_hooks, refuse_untethered_pages};
use super::{
    NetworkMode, NetworkSource, Node, RemoteSnapshot, Sandbox, first_thaw, frozen_disk, hooks,
    kept_components, network,
};
use crate::admission::{self, Place};
use crate::blocking::blocking;
use crate::container::{IMAGE_DISK_SLOT, RootServing};
use crate::error::{Error, ErrorKind};
use crate::slow::Slow;
use crate::snapshot::{Kind, Registered};
use crate::state::{Paused, Record, Terms};
use crate::template::Shape;
use crate::trace::Trace;

/// A sandbox to be thawed from a snapshot.
#[derive(Clone, Debug)]
pub struct ThawSpec {
    /// The snapshot.
    pub directory: PathBuf,
    pub hostname: Option<String>,
    pub name: Option<String>,
    /// See [`super::SandboxSpec`].
    pub tethered: bool,
    pub client: Option<ProcessRecord>,
    pub memory_mode: MemoryMode,
    /// Fail unless its container has a hook after a thaw and this succeeds.
    pub require_hook: bool,
    /// `None`: as it was frozen, a private network of this node or none.
    pub network: Option<NetworkSource>,
    /// `None`: the policy of the frozen sandbox.
    pub network_policy: Option<NetworkPolicy>,
    pub publish: Vec<PublishedPort>,
    /// Rate limits given here replace those of the frozen sandbox.
    pub terms: Terms,
    /// The snapshot is being fetched, and is not in `directory`.
    pub remote: Option<Arc<RemoteSnapshot>>,
    /// The paused sandbox that this one continues under the same identity. `None`: it is a new one.
    pub paused: Option<Paused>,
    /// It is a pod: Kubernetes has admitted it.
    pub is_pod: bool,
}

pub(super) async fn thaw(node: &Node, spec: ThawSpec, trace: &Trace) -> Result<Sandbox, Error> {
    let directory = spec.directory.clone();
    let thawed = thaw_it(node, spec, trace).await;
    thawed.map_err(|failure| of_users_own(failure, &directory))
}

/// Says what to do about a damaged snapshot of the user: unlike a template, it is not built again.
fn of_users_own(failure: Error, directory: &Path) -> Error {
    let is_it = failure.what.contains(&directory.display().to_string());
    match failure.kind {
        ErrorKind::SnapshotDamaged if is_it && failure.remedy.is_none() => {
            failure.remedy("thaw another copy of it; without one, what was frozen there is lost")
        }
        _ => failure,
    }
}

async fn thaw_it(node: &Node, spec: ThawSpec, trace: &Trace) -> Result<Sandbox, Error> {
    refuse_untethered_pages(spec.memory_mode, spec.tethered)?;
    let registered = {
        let _stage = trace.stage("snapshot");
        match &spec.remote {
            Some(remote) => remote.registered.clone(),
            None => {
                let (node, directory) = (node.clone(), spec.directory.clone());
                blocking(move || node.snapshots.register(&node, &directory)).await?
            }
        }
    };
    reach(Failpoint::ThawRegistered);
    let workload = workload(&registered)?;
    if spec.require_hook {
        let what = format!(
            "the snapshot at {} cannot be thawed",
            registered.directory.display()
        );
        hooks::check_required(workload.containers.first(), &what)?;
    }
    let subject = &registered.manifest.subject;
    refuse_test_hooks(node, subject.command_line.as_deref().unwrap_or_default())?;
    let image = {
        let (node, frozen) = (node.clone(), subject.guest_image);
        blocking(move || kept_components::guest_image(&node.templates, &node.paths, frozen)).await?
    };
    let place = Arc::new(admitted(node, &spec, &registered, &workload)?);
    let told = |text: &str| trace.reason(Slow::MadeAgain, text);
    let frozen = Frozen {
        registered: &registered,
        workload: &workload,
        guest_image: image.as_ref(),
    };
    let made = match &spec.remote {
        None => retry_once(told, || make(node, &spec, &frozen, &place, trace)).await,
        // If it was lost, then most likely because its memory cannot be had, for which it has waited long enough.
        Some(_) => make(node, &spec, &frozen, &place, trace)
            .await
            .map_err(Error::for_good),
    };
    let sandbox = made.map_err(|e| kept_components::name_vmm(node, &registered, e))?;
    if spec.paused.is_some() || spec.remote.is_some() {
        // Its snapshot is removed soon, or is not stored yet; and all pages that were fetched for it would count as touched. Once that is
        // stored, the next thaw of its reference is one of the stored snapshot, and records.
        return Ok(sandbox);
    }
    first_thaw::record(node, &registered, &sandbox, workload.containers.first());
    let node = node.clone();
    // Not awaited: the caller has its sandbox.
    tokio::task::spawn_blocking(move || kept_components::note_thawed(&node, &registered));
    Ok(sandbox)
}

/// The place of the sandbox among those of its tenant and of the node.
fn admitted(
    node: &Node,
    spec: &ThawSpec,
    registered: &Registered,
    workload: &Workload,
) -> Result<Place, Error> {
    let shape = admission::Shape {
        vcpus: workload.cpus,
        memory_mib: workload.memory_mib,
    };
    if let Some(paused) = spec.paused.as_ref().and_then(Paused::place) {
        return paused.resume(shape);
    }
    let (tenant, disk_bytes) = (spec.terms.tenant.as_ref(), frozen_disk::size(registered)?);
    match spec.is_pod {
        true => Ok(node.admission.adopt(tenant, shape, disk_bytes)),
        false => node.admission.create(tenant, shape, disk_bytes),
    }
}

/// The snapshot to thaw.
struct Frozen<'a> {
    registered: &'a Arc<Registered>,
    workload: &'a Workload,
    /// Its guest image, if it is not this node's.
    guest_image: Option<&'a File>,
}

/// Makes the sandbox. A failure leaves nothing behind.
async fn make(
    node: &Node,
    spec: &ThawSpec,
    frozen: &Frozen<'_>,
    place: &Arc<Place>,
    trace: &Trace,
) -> Result<Sandbox, Error> {
    let (registered, workload) = (frozen.registered, frozen.workload);
    let subject = &registered.manifest.subject;
    let record = record(spec, frozen)?;
    let share_of_disk = node.budget.sandbox(frozen_disk::size(registered)?).await?;
    let machine = machine(
        Shape {
            vcpus: subject.machine.vcpus,
            memory_mib: subject.machine.memory_mib,
            cpu: subject.cpu.baseline,
        },
        spec.tethered,
    );
    let parked = ParkedWant {
        machine: machine.clone(),
        origin: registered.clone(),
        mode: spec.memory_mode,
        fitting: Fitting {
            disk: FittedDisk::Frozen,
            private_network: network_source(spec, workload) == NetworkSource::Ours(NetworkMode::Private),
        },
    };
    // No machine is parked with a snapshot that is not stored yet, or that is thawed once.
    let parked = (spec.remote.is_none() && spec.paused.is_none()).then_some(parked);
    let id = match &spec.paused {
        None => Id::OfSpare,
        Some(_) => Id::Kept,
    };
    let mut making = Making::claim(node, (record, id), &machine, parked, trace)?;
    making.resources.share_of_disk = Some(share_of_disk);
    making.resources.place = Some(place.clone());
    if let (Some(image), Some(files)) = (frozen.guest_image, &mut making.files) {
        let copied = image.try_clone();
        files.guest_image = copied
            .map_err(|e| Error::system("cannot copy a descriptor", &e))?
            .into();
    }
    let (fitted, directory) = (making.fitted.take(), making.resources.directory.path().to_owned());
    let parts = parts(node, frozen, spec, fitted, &directory, trace);
    let restored = async {
        if making.origin.is_some() {
            return Ok(());
        }
        making.spawn(machine).await?;
        match &spec.remote {
            Some(remote) => making.restore_remote(remote).await,
            None => making.restore(registered.clone(), spec.memory_mode).await,
        }
    };
    let (mut parts, ()) = tokio::try_join!(parts, restored)?;
    let speaks = making.resources.control()?.version();
    frozen_disk::fit(&mut parts.disk, &node.pools, speaks).await?;
    if let Some(thawing) = making.attach(parts, Some(workload.memory_mib)).await? {
        making.await_thaw(thawing).await?;
    }
    // Written first: once the sandbox is ready, it may be adopted.
    if let Some(container) = workload.containers.first() {
        container.write(making.resources.directory.path())?;
    }
    if let Some(paused) = &spec.paused {
        give_kept(paused, making.resources.directory.path()).await?;
    }
    making.give_identity(spec.hostname.clone(), false).await?;
    // Before it is noted as ready: if its owner dies meanwhile, nothing is left of it.
    making
        .after_thaw(workload.containers.first(), spec.require_hook)
        .await?;
    making.note_thawed().await?;
    making.done()
}

/// The record of the sandbox: with a new id, or with that of the paused sandbox.
fn record(spec: &ThawSpec, frozen: &Frozen<'_>) -> Result<Record, Error> {
    let (workload, subject) = (frozen.workload, &frozen.registered.manifest.subject);
    let new = new_record()?;
    let (id, created) = match spec.paused.as_ref().map(Paused::record) {
        Some(paused) => (paused.id.clone(), paused.created),
        None => (new.id.clone(), new.created),
    };
    Ok(Record {
        name: spec.name.clone(),
        image: workload.image.clone(),
        image_digest: subject.images.first().map(|i| i.digest.clone()),
        command: workload.command.clone(),
        client: spec.client,
        terms: Terms {
            rate_limits: Some(
                workload
                    .rate_limits
                    .changed(spec.terms.rate_limits.unwrap_or_default()),
            ),
            ..spec.terms.clone()
        },
        tethered: spec.tethered,
        vcpus: workload.cpus,
        memory_mib: workload.memory_mib,
        cpu_limit_millis: workload.cpu_limit_millis,
        hostname: spec.hostname.clone(),
        pod_network: spec
            .network
            .as_ref()
            .and_then(|source| source.namespace().cloned()),
        root: match subject.images.iter().any(|image| image.slot == IMAGE_DISK_SLOT) {
            true => RootServing::Erofs,
            false => RootServing::Virtiofs,
        },
        id,
        created,
        ..new
    })
}

/// Gives the directory of a sandbox that continues a paused one what is kept of that.
async fn give_kept(paused: &Paused, directory: &Path) -> Result<(), Error> {
    let (paused, directory) = (paused.clone(), directory.to_owned());
    blocking(move || {
        keep_manifest(&paused.snapshot(), &directory)?;
        paused.restore(&directory)
    })
    .await
}

fn workload(registered: &Registered) -> Result<Workload, Error> {
    let refuse = |why: &str| {
        let what = format!(
            "{} is no snapshot of a sandbox: {why}",
            registered.directory.display()
        );
        Error::new(ErrorKind::SnapshotIncompatible, what)
    };
    match registered.manifest.subject.kind {
        Kind::Sandbox => {}
        Kind::Template => return Err(refuse("it is a template").remedy("thaw run uses templates by itself")),
        Kind::Bare => return Err(refuse("it is a template of a bare test guest")),
    }
    let value = registered.manifest.subject.workload.clone();
    let value = value.ok_or_else(|| refuse("it does not say what runs in it"))?;
    let workload: Workload = serde_json::from_value(value)
        .map_err(|e| refuse(&format!("what it says runs in it cannot be read: {e}")))?;
    for container in &workload.containers {
        let hooks = container.hooks.check();
        hooks.map_err(|why| refuse(&format!("its hooks are invalid: {why}")))?;
    }
    match workload.cpu_limit_millis {
        Some(millis) if !CPU_LIMIT_MILLIS.contains(&millis) => Err(refuse(&format!(
            "cpu_limit_millis is {millis}, and not {} to {}",
            CPU_LIMIT_MILLIS.start(),
            CPU_LIMIT_MILLIS.end()
        ))),
        _ => Ok(workload),
    }
}

/// The network that the sandbox gets.
fn network_source(spec: &ThawSpec, workload: &Workload) -> NetworkSource {
    let frozen_with = match workload.network {
        true => NetworkMode::Private,
        false => NetworkMode::None,
    };
    spec.network.clone().unwrap_or(NetworkSource::Ours(frozen_with))
}

/// Collects the parts that are made beside the machine, or that it was parked with.
async fn parts(
    node: &Node,
    frozen: &Frozen<'_>,
    spec: &ThawSpec,
    fitted: Option<Fitted>,
    directory: &Path,
    trace: &Trace,
) -> Result<Parts, Error> {
    let (registered, workload) = (frozen.registered, frozen.workload);
    let source = network_source(spec, workload);
    let policy = spec.network_policy.as_ref().or(workload.network_policy.as_ref());
    let terms = network::read(policy, &spec.publish)?;
    let images = {
        let _stage = trace.stage("image");
        frozen_images(node, &registered.manifest.subject)?
    };
    let fitted = FittedParts::of(fitted, &node.images);
    let disk = async {
        if let Some(disk) = fitted.disk {
            return Ok(disk);
        }
        let _stage = trace.stage("disk");
        let (registered, pools) = (registered.clone(), node.pools.clone());
        // For a VMM of this release: which it is shows only when its machine is made, beside this.
        blocking(move || frozen_disk::thawed(&registered, &pools, CONTROL_VERSION)).await
    };
    let (disk, network) = tokio::try_join!(
        disk,
        network::claim(node, fitted.network, (&source, &terms), directory, trace)
    )?;
    Ok(Parts {
        images,
        attached: fitted.attached,
        disk,
        network,
        prefetch: None,
        supply: fitted.supply,
        record: None,
        share: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_damaged_snapshot_of_the_users_is_no_template() {
        let damaged = |directory: &str| {
            let what =
                format!("the snapshot at {directory} is damaged: memory is not what the manifest says");
            of_users_own(Error::new(ErrorKind::SnapshotDamaged, what), Path::new("/mine")).remedy
        };
        let own = damaged("/mine").unwrap();
        assert!(own.contains("another copy"), "{own}");
        assert_eq!(
            damaged("/data/templates/k"),
            None,
            "the kind's remedy names `thaw template rm`"
        );
    }
}
