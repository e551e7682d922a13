//! All resources of a sandbox on its host, while it is created and while it runs.
//!
//! Invariant: [`Resources`] owns all of them, and dropping it removes them in the right order.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex};

use thaw_failpoint::{Failpoint, reach};
use thaw_images::prefetch::Prefetch;
use thaw_images::store::Lease;
use thaw_pools::cgroup::Cgroups;
use thaw_pools::disk::Disks;
use thaw_pools::vmm::VmmProcess;
use thaw_protocol::control::{DeviceId, FORBIDDEN_CODE};
use tokio::sync::watch;

use super::network::Attached;
use super::pools::Claimed;
use super::share::{Served, Shared, Supervised};
use super::vmm_log::{LOG, log_tail};
use super::{Shown, budget};
use crate::admission::Place;
use crate::console::Console;
use crate::control_client::ControlClient;
use crate::error::{Error, ErrorKind};
use crate::images::Images;
use crate::misses::{Given, MissServer};
use crate::page_server::PageServer;
use crate::state::{HostDisk, Record, SandboxDirectory};
use thaw_sys::lock::Lock;

/// All resources of a sandbox on the host. Dropping them removes them.
#[derive(Debug)]
pub(super) struct Resources {
    // Fields drop in this order: the VMM holds descriptors of the others, and needs its pages until it has ended.
    pub(super) control: Option<Arc<ControlClient>>,
    pub(super) vmm: Option<VmmProcess>,
    /// The thaw-share that serves it files of the host. It ends with the VMM.
    pub(super) share: Mutex<Option<Served>>,
    /// Block devices of the host that its VMM has, by slot.
    pub(super) host_disks: Mutex<BTreeMap<DeviceId, HostDisk>>,
    pub(super) pages: Option<PageServer>,
    pub(super) misses: Vec<MissServer>,
    /// The images that the miss servers may serve.
    pub(super) given: Given,
    pub(super) console: Option<Console>,
    pub(super) cgroup: Option<Claimed<Cgroups>>,
    /// Whether all its processes must be in that cgroup.
    pub(super) limits_required: bool,
    pub(super) leases: Mutex<Vec<Lease>>,
    /// Reads its images ahead; stops when dropped.
    pub(super) prefetch: Mutex<Vec<Prefetch>>,
    /// Fetches its images and counts the bytes. `None` for an adopted sandbox.
    pub(super) supply: Option<Images>,
    pub(super) images: Mutex<Vec<Shown>>,
    /// The highest slot in which the VMM was asked to show an image since, whether it succeeded or not.
    pub(super) used_slots: AtomicU16,
    /// The writable layer.
    pub(super) disk: Option<Claimed<Disks>>,
    /// Its part of the disk budget.
    pub(super) share_of_disk: Option<budget::Share>,
    /// What it counts with against the limits of its tenant and of the node.
    pub(super) place: Option<Arc<Place>>,
    pub(super) network: Option<Attached>,
    pub(super) directory: SandboxDirectory,
    /// Set when its shared files answer errors for good: the reason.
    pub(super) volumes_lost: watch::Sender<Option<String>>,
    /// Held while resources and the record are changed.
    pub(super) changing: Arc<tokio::sync::Mutex<()>>,
    keep: bool,
    /// Closed when all of the above has been removed.
    pub(super) gone: watch::Sender<()>,
}

impl Resources {
    pub(super) fn new(directory: SandboxDirectory, limits_required: bool) -> Resources {
        Resources {
            control: None,
            vmm: None,
            share: Mutex::default(),
            host_disks: Mutex::default(),
            pages: None,
            misses: Vec::new(),
            given: Given::default(),
            console: None,
            cgroup: None,
            limits_required,
            leases: Mutex::default(),
            prefetch: Mutex::default(),
            supply: None,
            images: Mutex::default(),
            used_slots: AtomicU16::default(),
            disk: None,
            share_of_disk: None,
            place: None,
            network: None,
            directory,
            volumes_lost: watch::Sender::default(),
            changing: Arc::default(),
            keep: false,
            gone: watch::Sender::new(()),
        }
    }

    /// The highest slot in which an image was shown or requested; 0 if there was none.
    pub(super) fn last_slot(&self) -> u16 {
        let shown = self.images.locked().iter().map(|shown| shown.slot).max();
        shown.unwrap_or(0).max(self.used_slots.load(Ordering::Relaxed))
    }

    /// Makes a drop keep the resources, for another owner.
    pub(super) fn keep(&mut self) {
        self.keep = true;
        self.directory.keep();
        if let Some(vmm) = &mut self.vmm {
            vmm.release();
        }
    }

    /// What is needed to restart this sandbox's thaw-share when it dies.
    pub(super) fn supervised(&self, record: &Record, control: &Arc<ControlClient>) -> Supervised {
        let is_a_pod = record.client.is_some();
        Supervised {
            id: record.id.clone(),
            is_a_pod,
            shared: match is_a_pod {
                true => Shared::Added(None),
                false => Shared::Volumes(record.volumes.clone()),
            },
            directory: self.directory.handle().ok(),
            control: control.clone(),
            lost: self.volumes_lost.clone(),
            changing: self.changing.clone(),
            limits_required: self.limits_required,
        }
    }

    pub(super) fn control(&self) -> Result<&Arc<ControlClient>, Error> {
        self.control
            .as_ref()
            .ok_or_else(|| Error::new(ErrorKind::VmmFailed, "no connection to thaw-vmm"))
    }
}

impl Drop for Resources {
    fn drop(&mut self) {
        let mut share = self.share.locked().take();
        share.iter_mut().for_each(Served::expect_end);
        if self.keep {
            share.into_iter().for_each(Served::release);
            self.network.take().into_iter().for_each(Attached::keep);
            self.cgroup.take().into_iter().for_each(Claimed::keep);
            self.disk.take().into_iter().for_each(Claimed::keep);
            return;
        }
        self.control = None;
        // If this process is killed now, the next start finds the rest, and must not count it as a failure.
        self.directory.note_end();
        if let Some(mut vmm) = self.vmm.take() {
            vmm.kill();
            reach(Failpoint::DeleteKilled);
            match vmm.wait() {
                // A fault of thaw or an attack: its filters lack a call that it needs, or a guest took it over.
                Ok(Some(status)) if status.code() == Some(FORBIDDEN_CODE) => {
                    let said = log_tail(&self.directory.path().join(LOG));
                    tracing::error!("thaw-vmm ended itself: {}", said.join("; "));
                }
                Ok(_) => {}
                Err(e) => tracing::warn!("cannot reap thaw-vmm: {e}"),
            }
            reach(Failpoint::DeleteReaped);
        }
        // Kills and reaps it before its cgroup is removed.
        drop(share);
        self.pages = None;
        if self.cgroup.take().is_some() {
            reach(Failpoint::DeleteCgroupReleased);
        }
        if let Some(mut network) = self.network.take() {
            network.unpublish();
            drop(network);
            reach(Failpoint::DeleteNetworkReleased);
        }
        if self.disk.take().is_some() {
            reach(Failpoint::DeleteDiskReleased);
        }
        drop(self.share_of_disk.take());
        drop(self.place.take());
    }
}
