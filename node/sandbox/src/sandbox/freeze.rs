//! Freezes a running sandbox: runs its hook, stops its workloads, then its vCPUs, then writes its state, memory and disks.
//!
//! Invariant: if any step fails, also because the owner dies ([`super::freeze_note`]), the original resumes as if it had not been frozen,
//! also if the caller asked to stop it. The machine is paused only while state and disks are written, and memory where it cannot be written
//! while the machine runs ([`super::live_freeze`]); hashing comes after. Of a disk over a base only the layer is written meanwhile: its base is
//! copied before, or is the disk of a snapshot that this one lies on.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use thaw_failpoint::{Failpoint, reach};
use thaw_pools::disk::Disk;
use thaw_protocol::api::{NetworkPolicy, RateLimits};
use thaw_protocol::control::{Command, FreezeKind, MachineState};

use super::base::Below;
use super::freeze_note::Freezing;
use super::frozen_disk::DISK_ID;
use super::live_freeze::{Way, memory_bytes};
use super::pagemap::pagemap;
use super::{Node, READY_LIMIT, Sandbox, budget, host_limits, kept_components};
use crate::admission::SnapshotPlace;
use crate::blocking::blocking;
use crate::container::{RUNNING_FILE, Running};
use crate::error::{Error, ErrorKind};
use crate::handshake;
use crate::snapshot::store::Making;
use crate::snapshot::{Draft, ImageRecord, Kind, SigningKey, SnapshotError, Stored, Subject};
use thaw_sys::lock::Lock;

/// How to freeze.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FreezeOptions {
    /// Write only the changes since the sandbox was thawed, as a layer above the snapshot it was thawed from. If that has as many layers as
    /// can be, the lowest of these is the base, and the changes are those since it.
    pub delta: bool,
    /// Leave the original stopped, for its owner to end.
    pub stop: bool,
    /// The private key file to sign with.
    pub sign: Option<PathBuf>,
    /// Fail unless its container has a hook after a thaw.
    pub require_hook: bool,
}

/// The result of a freeze.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frozen {
    /// Bytes of memory written.
    pub memory_bytes: u64,
    /// How long the machine was paused, nanoseconds.
    pub paused_ns: u64,
    /// How long the workloads were stopped, nanoseconds: from before the agent stopped them until it let them run on, or until all was
    /// written if they stay stopped.
    pub stopped_ns: u64,
}

/// A complete snapshot that no record names yet.
pub(super) struct Unrecorded {
    pub frozen: Frozen,
    /// A later owner resumes the sandbox as long as the note exists.
    pub freezing: Freezing,
    /// Keeps what it lies on.
    pub below: Option<Below>,
}

/// The `workload` of a manifest: what a node must know to serve the containers again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Workload {
    /// The image as the user named it.
    pub image: String,
    pub command: Vec<String>,
    /// CPUs online.
    pub cpus: u8,
    /// Total memory, MiB.
    pub memory_mib: u32,
    /// Whether the sandbox had a network interface in use.
    pub network: bool,
    /// Its network policy.
    #[serde(default)]
    pub network_policy: Option<NetworkPolicy>,
    /// Rate limits of its disks and network.
    #[serde(default, skip_serializing_if = "RateLimits::is_none")]
    pub rate_limits: RateLimits,
    pub containers: Vec<Running>,
    /// Limit of the host's CPU time, thousandths of a CPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_limit_millis: Option<u32>,
}

impl Sandbox {
    fn disk(&self) -> Result<&Disk, Error> {
        self.resources.disk.as_deref().ok_or_else(|| {
            let what = format!(
                "sandbox {} cannot be frozen: its disk is an earlier thawd's, and could not be had",
                self.record().id
            );
            Error::new(ErrorKind::Runtime, what)
        })
    }

    /// Admits a snapshot of it to the node's store, against the quota of its tenant.
    ///
    /// # Errors
    /// [`ErrorKind::TenantQuota`].
    pub async fn admit_snapshot(&self, node: &Node) -> Result<SnapshotPlace, Error> {
        let bytes = budget::largest_snapshot(self.record().memory_mib, self.disk()?)?;
        node.admit_snapshot(self.record().terms.tenant.clone(), bytes)
            .await
    }

    /// Freezes the sandbox into a new directory.
    pub async fn freeze(&self, node: &Node, target: &Path, options: FreezeOptions) -> Result<Frozen, Error> {
        let below = self.below(node, &options).await?;
        Ok(self.freeze_over(node, target, options, below).await?.frozen)
    }

    /// Freezes the sandbox into the store. If that fails, it runs on, also if it was to stop.
    ///
    /// # Errors
    /// Those of a freeze, and of [`Making::finish`].
    pub async fn freeze_stored(
        &self,
        node: &Node,
        making: Making,
        options: FreezeOptions,
    ) -> Result<(Frozen, Arc<Stored>), Error> {
        let stops = options.stop;
        let below = self.below(node, &options).await?;
        let Unrecorded {
            frozen,
            freezing: _freezing,
            below,
        } = self.freeze_over(node, &making.snapshot(), options, below).await?;
        let stored = blocking(move || {
            let _below = below;
            making.finish()
        })
        .await;
        if stored.is_err() && stops {
            self.run_on(node).await;
        }
        Ok((frozen, stored?))
    }

    /// What it is frozen over with these options; `None` for all memory.
    async fn below(&self, node: &Node, options: &FreezeOptions) -> Result<Option<Below>, Error> {
        match options.delta {
            true => self.base_of_delta(node).await,
            false => Ok(None),
        }
    }

    /// Freezes it, in full or over `below`.
    pub(super) async fn freeze_over(
        &self,
        node: &Node,
        target: &Path,
        options: FreezeOptions,
        below: Option<Below>,
    ) -> Result<Unrecorded, Error> {
        // One freeze at a time: each would resume what the other has paused.
        let _one = self.freezing.lock().await;
        let subject = self.subject(node, below.as_ref())?;
        let key = options.sign.as_deref().map(SigningKey::load).transpose()?;
        let state = self.machine().await?;
        if state != MachineState::Running {
            let what = format!("sandbox {} cannot be frozen: it does not run", self.record().id);
            return Err(Error::new(ErrorKind::Runtime, what).remedy("thaw resume it first"));
        }
        // While it runs, and before anything is made.
        self.before_freeze(node, options.require_hook).await?;
        let share_of_disk = node
            .budget
            .snapshot(self.record().memory_mib, self.disk()?)
            .await?;
        let place = target.to_owned();
        let freezing = Freezing::note(&self.directory(), target)?;
        let mut draft = blocking(move || Ok(Draft::begin(&place)?)).await?;
        reach(Failpoint::FreezeDrafted);
        self.begin_disk(node, &mut draft, below.as_ref()).await?;
        let kind = below.as_ref().map_or(FreezeKind::Full, |below| below.kind);
        let frozen = self.write(node, &draft, &options, kind).await?;
        let of = node.clone();
        let made = blocking(move || {
            let made = draft.finish(subject, key.as_ref())?;
            kept_components::note(&of, &made);
            of.snapshots.hold_ahead(&of, &made);
            Ok(below)
        });
        let made = made.await;
        if made.is_err() && options.stop {
            self.run_on(node).await;
        }
        let below = made?;
        let (budget, place) = (node.budget.clone(), target.to_owned());
        blocking(move || {
            budget.written(share_of_disk, &place);
            Ok(())
        })
        .await?;
        Ok(Unrecorded {
            frozen,
            freezing,
            below,
        })
    }

    /// Writes its files. Its workloads are stopped for as short a time as the host allows.
    async fn write(
        &self,
        node: &Node,
        draft: &Draft,
        options: &FreezeOptions,
        kind: FreezeKind,
    ) -> Result<Frozen, Error> {
        let cgroup = self.resources.cgroup.as_deref();
        host_limits::make_room(cgroup, draft.memory(), self.record(), &self.disk()?.file);
        let pagemap = pagemap(self.record().vmm)?;
        // A machine that stays stopped gains nothing from running meanwhile.
        let way = match options.stop {
            true => Way::Stopped(kind),
            false => self.prepare_freeze(kind, draft, &pagemap).await?,
        };
        reach(Failpoint::FreezePrepared);
        let written = self.stop(node, draft, options, way, &pagemap).await;
        match way {
            Way::Stopped(_) => written,
            Way::Running => {
                let (frozen, memory_bytes) = self.finish_freeze(written).await?;
                Ok(Frozen {
                    memory_bytes,
                    ..frozen
                })
            }
        }
    }

    /// Adds its disk to the draft, before anything is stopped: as a layer, if what it is frozen over has the base of its disk. Otherwise copies
    /// that base, which does not change.
    async fn begin_disk(&self, node: &Node, draft: &mut Draft, below: Option<&Below>) -> Result<(), Error> {
        let disk = Arc::new(self.disk()?.try_clone().map_err(not_copied)?);
        let over = below.map(|below| draft.path().join(&below.base.place));
        let (node, looked_at) = (node.clone(), disk.clone());
        let is_layer = blocking(move || {
            let registry = node.templates.registry();
            // What cannot be opened is no reason not to freeze it: then its disk is whole.
            let whole = over.and_then(|over| registry.whole_disk(&over, DISK_ID).ok().flatten());
            whole
                .map_or(Ok(false), |file| super::disk::is_base(&looked_at, &file))
                .map_err(not_copied)
        });
        if is_layer.await? {
            draft.add_layer(DISK_ID)?;
            return Ok(());
        }
        let to: OwnedFd = draft.add_disk(DISK_ID)?.try_clone().map_err(not_copied)?.into();
        blocking(move || super::disk::copy_base(&disk, &to).map_err(not_copied)).await
    }

    /// Stops its workloads and its machine, writes what must be of one moment, and lets both run on unless it is to stop.
    async fn stop(
        &self,
        node: &Node,
        draft: &Draft,
        options: &FreezeOptions,
        way: Way,
        pagemap: &OwnedFd,
    ) -> Result<Frozen, Error> {
        let vsock = self.vsock();
        let path = vsock.clone();
        let has_agent = node.has_agents();
        let stopped = Instant::now();
        let quiesced = blocking(move || match has_agent {
            true => handshake::quiesce(&path, READY_LIMIT),
            false => Ok(()),
        })
        .await;
        reach(Failpoint::FreezeQuiesced);
        let written = match quiesced {
            Ok(()) => self.pause_and_write(draft, options, way, pagemap).await,
            Err(e) => Err(e),
        };
        let stays = options.stop && written.is_ok();
        let resumed = match stays || !has_agent {
            true => Ok(()),
            false => blocking(move || handshake::resume(&vsock, READY_LIMIT)).await,
        };
        if let Err(e) = &resumed {
            tracing::error!(sandbox = self.record().id, "{e}");
        }
        reach(Failpoint::FreezeContinued);
        let frozen = written?;
        resumed?;
        Ok(Frozen {
            stopped_ns: nanoseconds(stopped),
            ..frozen
        })
    }

    /// Pauses the machine, writes it, and resumes it unless it is to stop.
    async fn pause_and_write(
        &self,
        draft: &Draft,
        options: &FreezeOptions,
        way: Way,
        pagemap: &OwnedFd,
    ) -> Result<Frozen, Error> {
        let control = self.resources.control()?;
        if let Err(e) = control.call(Command::Pause, &[]).await {
            // A guest may wait long for memory that is still in a registry: a machine that pauses late must not stay so.
            drop(control.request(Command::Resume, &[]).await);
            return Err(e.into());
        }
        reach(Failpoint::FreezePaused);
        let paused = Instant::now();
        let written = self.write_files(draft, way, pagemap).await;
        let resumed = match options.stop && written.is_ok() {
            true => Ok(()),
            false => control.call(Command::Resume, &[]).await.map(drop),
        };
        reach(Failpoint::FreezeResumed);
        let memory_bytes = written?;
        resumed?;
        Ok(Frozen {
            memory_bytes,
            paused_ns: nanoseconds(paused),
            stopped_ns: 0,
        })
    }

    /// Writes what must be of one moment, while the machine is paused. Returns the bytes of memory written, 0 if that happens while it runs.
    async fn write_files(&self, draft: &Draft, way: Way, pagemap: &OwnedFd) -> Result<u64, Error> {
        let control = self.resources.control()?;
        let memory_bytes = match way {
            Way::Running => {
                let fds = [draft.state().as_fd()];
                control.call(Command::BeginFreeze, &fds).await.map(|_| 0)?
            }
            Way::Stopped(kind) => {
                let fds = [draft.state().as_fd(), draft.memory().as_fd(), pagemap.as_fd()];
                let written = control.call(Command::Freeze { kind }, &fds).await?;
                reach(Failpoint::FreezeMemoryWritten);
                memory_bytes(&written)?
            }
        };
        let disk = self.disk()?.try_clone().map_err(not_copied)?;
        let draft = draft.disk(DISK_ID)?;
        let to: OwnedFd = draft.file.try_clone().map_err(not_copied)?.into();
        let is_layer = draft.is_layer;
        let copy = move || match is_layer {
            true => super::disk::copy_layer(&disk, &to),
            false => super::disk::copy_rest(&disk, &to),
        };
        blocking(move || copy().map_err(not_copied)).await?;
        reach(Failpoint::FreezeDiskCopied);
        Ok(memory_bytes)
    }

    /// The subject of the snapshot's manifest. Fails before anything is stopped if the sandbox cannot be frozen.
    fn subject(&self, node: &Node, below: Option<&Below>) -> Result<Subject, Error> {
        let record = self.record();
        let refuse = |why: &str| {
            let what = format!("sandbox {} cannot be frozen: {why}", record.id);
            Err(Error::new(ErrorKind::Runtime, what))
        };
        if !record.volumes.is_empty() || self.resources.share.locked().is_some() {
            let what = format!(
                "sandbox {} cannot be frozen: it shares files with this host",
                record.id
            );
            return Err(Error::new(ErrorKind::Shared, what));
        }
        if !self.resources.host_disks.locked().is_empty() {
            let what = format!(
                "sandbox {} cannot be frozen: it has a block device of this host",
                record.id
            );
            return Err(Error::new(ErrorKind::Shared, what));
        }
        let Some(origin) = &self.origin else {
            return match record.provenance {
                Some(_) => refuse("an earlier thawd made it, and what it was thawed from could not be had"),
                None => {
                    refuse("it was booted with --cold, so there is no template to describe its machine by")
                        .map_err(|f| f.remedy("run it without --cold"))
                }
            };
        };
        self.disk()?;
        let text = std::fs::read(self.directory().join(RUNNING_FILE));
        let containers = match text.ok().and_then(|t| thaw_records::decode::<Running>(&t).ok()) {
            Some(container) => vec![container],
            // The shim knows a pod's containers.
            None if !node.has_agents() || record.image.is_empty() => Vec::new(),
            None => return refuse("it has no running container yet"),
        };
        let images = self.image_records(node)?;
        let workload = Workload {
            image: record.image.clone(),
            command: record.command.clone(),
            cpus: record.vcpus,
            memory_mib: record.memory_mib,
            network: record.provenance.as_ref().is_some_and(|p| p.network),
            network_policy: self.network().map(|network| network.policy),
            rate_limits: self.rate_limits(),
            containers,
            cpu_limit_millis: record.cpu_limit_millis,
        };
        let workload =
            serde_json::to_value(workload).map_err(|e| Error::new(ErrorKind::Runtime, e.to_string()))?;
        Ok(Subject {
            kind: Kind::Sandbox,
            images,
            workload: Some(workload),
            base: below.map(|below| below.base.clone()),
            ..origin.subject.clone()
        })
    }

    /// The images that it sees.
    fn image_records(&self, node: &Node) -> Result<Vec<ImageRecord>, SnapshotError> {
        let stamps = node.templates.registry().stamps();
        let shown = self.resources.images.locked().clone();
        let images = shown.iter().map(|shown| {
            Ok(ImageRecord {
                slot: shown.slot,
                name: shown.name.clone(),
                digest: shown.image.digest.to_string(),
                metadata: stamps.hash_file(&shown.image.metadata)?,
            })
        });
        images.collect()
    }
}

fn not_copied(e: std::io::Error) -> Error {
    Error::system("cannot copy the sandbox's disk", &e)
}

fn nanoseconds(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX)
}
