//! Thaws a sandbox from a snapshot: the same images in the same slots, copies of its disks, a new identity.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use thaw_failpoint::{Failpoint, reach};
use thaw_pools::disk::Disk;
use thaw_pools::process::ProcessRecord;
use thaw_protocol::api::{CPU_LIMIT_MILLIS, NetworkPolicy, PublishedPort};
use thaw_protocol::control::MemoryMode;
use thaw_sys::lock::Lock;

use super::create::{Making, Parts};
use super::freeze::{DISK_ID, Workload};
use super::pools::Claimed;
use super::retry::retry_once;
use super::spec::new_record;
use super::wanted_machine::{machine, refuse_test_hooks, refuse_untethered_pages};
use super::{NetworkMode, NetworkSource, Node, Sandbox, Shown, disk, kept_components, network};
use crate::blocking::blocking;
use crate::container::{IMAGE_DISK_SLOT, RootServing};
use crate::error::{Error, ErrorKind};
use crate::slow::Slow;
use crate::snapshot::{Kind, Registered, Subject};
use crate::state::{Record, Terms};
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
    /// `None`: the policy of the frozen sandbox.
    pub network_policy: Option<NetworkPolicy>,
    pub publish: Vec<PublishedPort>,
    /// Rate limits given here replace those of the frozen sandbox.
    pub terms: Terms,
}

/// The snapshots that this process has thawed sandboxes from; clones of a snapshot share its memory.
#[derive(Clone, Debug, Default)]
pub struct Snapshots(Arc<Mutex<HashMap<PathBuf, Weak<Registered>>>>);

impl Snapshots {
    /// Verifies and holds a snapshot, or reuses it if a living sandbox was thawed from the same one.
    fn register(&self, node: &Node, directory: &Path) -> Result<Arc<Registered>, Error> {
        let registry = node.templates.registry();
        let directory = std::fs::canonicalize(directory).unwrap_or_else(|_| directory.to_owned());
        let found = registry.find(&directory)?.hash();
        let held = self.table().get(&directory).and_then(Weak::upgrade);
        if let Some(held) = held.filter(|held| held.hash == found) {
            return Ok(held);
        }
        let registered = Arc::new(registry.register(&directory)?);
        let mut table = self.table();
        table.retain(|_, held| held.strong_count() > 0);
        table.insert(directory, Arc::downgrade(&registered));
        Ok(registered)
    }

    fn table(&self) -> MutexGuard<'_, HashMap<PathBuf, Weak<Registered>>> {
        self.0.locked()
    }
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
        let (node, directory) = (node.clone(), spec.directory.clone());
        blocking(move || node.snapshots.register(&node, &directory)).await?
    };
    reach(Failpoint::ThawRegistered);
    let workload = workload(&registered)?;
    let subject = &registered.manifest.subject;
    refuse_test_hooks(node, subject.command_line.as_deref().unwrap_or_default())?;
    let image = {
        let (node, registered) = (node.clone(), registered.clone());
        blocking(move || kept_components::guest_image(&node, &registered)).await?
    };
    let told = |text: &str| trace.reason(Slow::MadeAgain, text);
    let frozen = Frozen {
        registered: &registered,
        workload: &workload,
        guest_image: image.as_ref(),
    };
    let made = retry_once(told, || make(node, &spec, &frozen, trace)).await;
    let sandbox = made.map_err(|e| kept_components::name_vmm(node, &registered, e))?;
    let node = node.clone();
    blocking(move || {
        kept_components::note_thawed(&node, &registered);
        Ok(())
    })
    .await?;
    Ok(sandbox)
}

/// The snapshot to thaw.
struct Frozen<'a> {
    registered: &'a Arc<Registered>,
    workload: &'a Workload,
    /// Its guest image, if it is not this node's.
    guest_image: Option<&'a File>,
}

/// Makes the sandbox. A failure leaves nothing behind.
async fn make(node: &Node, spec: &ThawSpec, frozen: &Frozen<'_>, trace: &Trace) -> Result<Sandbox, Error> {
    let (registered, workload) = (frozen.registered, frozen.workload);
    let subject = &registered.manifest.subject;
    let record = Record {
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
        root: match subject.images.iter().any(|image| image.slot == IMAGE_DISK_SLOT) {
            true => RootServing::Erofs,
            false => RootServing::Virtiofs,
        },
        ..new_record()?
    };
    let share_of_disk = node.budget.sandbox(frozen_disk(registered)?.1).await?;
    let machine = machine(
        Shape {
            vcpus: subject.machine.vcpus,
            memory_mib: subject.machine.memory_mib,
            cpu: subject.cpu.baseline,
        },
        spec.tethered,
    );
    let mut making = Making::claim(node, record, &machine, None, trace)?;
    making.resources.share_of_disk = Some(share_of_disk);
    if let (Some(image), Some(files)) = (frozen.guest_image, &mut making.files) {
        let copied = image.try_clone();
        files.guest_image = copied
            .map_err(|e| Error::system("cannot copy a descriptor", &e))?
            .into();
    }
    let directory = making.resources.directory.path().to_owned();
    let parts = parts(node, registered, workload, spec, &directory, trace);
    let restored = async {
        making.spawn(machine).await?;
        trace.reason(
            Slow::NoParkedVm,
            "no machine was parked with this snapshot in it: one was restored now",
        );
        making.restore(registered.clone(), spec.memory_mode).await
    };
    let (parts, ()) = tokio::try_join!(parts, restored)?;
    if let Some(thawing) = making.attach(parts, Some(workload.memory_mib)).await? {
        making.await_thaw(thawing).await?;
    }
    // Written first: once the sandbox is ready, it may be adopted.
    if let Some(container) = workload.containers.first() {
        container.write(making.resources.directory.path())?;
    }
    making.give_identity(spec.hostname.clone(), false).await?;
    making.note_thawed().await?;
    making.done()
}

/// The disk it was frozen with, and its size in bytes.
fn frozen_disk(registered: &Registered) -> Result<(&OwnedFd, u64), Error> {
    let frozen = registered.disks.iter().find(|(id, _)| id == DISK_ID);
    let (_, frozen) = frozen.ok_or_else(|| {
        let what = format!(
            "the snapshot at {} has no disk {DISK_ID}",
            registered.directory.display()
        );
        Error::new(ErrorKind::SnapshotIncompatible, what)
    })?;
    let stat = rustix::fs::fstat(frozen)
        .map_err(|e| Error::system("cannot look at a snapshot's disk", &e.into()))?;
    Ok((frozen, u64::try_from(stat.st_size).unwrap_or(0)))
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
    match workload.cpu_limit_millis {
        Some(millis) if !CPU_LIMIT_MILLIS.contains(&millis) => Err(refuse(&format!(
            "cpu_limit_millis is {millis}, and not {} to {}",
            CPU_LIMIT_MILLIS.start(),
            CPU_LIMIT_MILLIS.end()
        ))),
        _ => Ok(workload),
    }
}

async fn parts(
    node: &Node,
    registered: &Arc<Registered>,
    workload: &Workload,
    spec: &ThawSpec,
    directory: &Path,
    trace: &Trace,
) -> Result<Parts, Error> {
    let mode = match workload.network {
        true => NetworkMode::Private,
        false => NetworkMode::None,
    };
    let policy = spec.network_policy.as_ref().or(workload.network_policy.as_ref());
    let terms = network::read(policy, &spec.publish)?;
    let images = {
        let _stage = trace.stage("image");
        images(node, &registered.manifest.subject)?
    };
    let disk = async {
        let _stage = trace.stage("disk");
        let (registered, directory) = (registered.clone(), node.paths.disks());
        let pools = node.pools.clone();
        blocking(move || {
            let (frozen, _) = frozen_disk(&registered)?;
            let copied = disk::nameless_copy(frozen, &directory).and_then(Disk::of);
            reach(Failpoint::ThawDiskCopied);
            copied
                .map(|disk| Claimed::new(disk, &pools, |p| &p.disks))
                .map_err(|e| Error::system(format!("cannot copy a disk into {}", directory.display()), &e))
        })
        .await
    };
    let source = NetworkSource::Ours(mode);
    let (disk, network) = tokio::try_join!(
        disk,
        network::claim(node, None, (&source, &terms), directory, trace)
    )?;
    Ok(Parts {
        images,
        attached: None,
        disk,
        network,
        prefetch: None,
        supply: node.images.counting_alone(),
        record: None,
        share: None,
    })
}

/// The images that the guest had, with the same metadata, because the guest holds inode numbers of it.
fn images(node: &Node, subject: &Subject) -> Result<Vec<Shown>, Error> {
    let stamps = node.templates.registry().stamps();
    let shown = subject.images.iter().map(|record| {
        let image = node.images.by_digest(&record.digest)?.ok_or_else(|| {
            let what = format!(
                "image {}, which the snapshot needs, is not in the store",
                record.digest
            );
            Error::new(ErrorKind::ImageNotStored, what)
        })?;
        let metadata = stamps.hash_file(&image.metadata)?;
        if metadata != record.metadata {
            let what = format!(
                "image {} has other metadata here than it was frozen with",
                record.digest
            );
            return Err(Error::new(ErrorKind::SnapshotIncompatible, what));
        }
        Ok(Shown {
            slot: record.slot,
            name: record.name.clone(),
            image,
        })
    });
    shown.collect()
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
