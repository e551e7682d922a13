//! Creates a sandbox: the steps that a booted and a thawed machine share. Image, disk and network are got while the machine is made.
//!
//! Nothing here polls. Only the guest has a deadline, because it may never answer. A failure before its acknowledgement destroys
//! the machine, because [`Making`] owns all resources.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

use rustix::net::SocketType;
use thaw_failpoint::{Failpoint, reach};
use thaw_images::prefetch::Prefetch;
use thaw_images::progress::Progress;
use thaw_images::store::Image;
use thaw_pools::disk::Disks;
use thaw_pools::share::Serving;
use thaw_pools::vmm;
use thaw_protocol::control::{Backend, Command, DeviceId};

use super::backends::{Backends, Devices, Ends, Sent, has_image_disk};
use super::files::MachineFiles;
use super::fitted::{AttachedEnds, Fitted, FittedParts};
use super::machine::explain;
use super::network::Attached;
use super::pools::{Claimed, claim, made_size};
use super::retry::{retry_once, with_end_reason};
use super::share::Served;
use super::spare::Id;
use super::spec::{check_shape, record};
use super::wanted_machine::WantedMachine;
use super::{Node, Origin, READY_LIMIT, Resources, Sandbox, SandboxSpec, Shown, host_limits, network, share};
use crate::admission::Place;
use crate::container::{IMAGE_DISK, IMAGE_DISK_SLOT, IMAGE_SLOT, RootServing, image_name};
use crate::control_client::{ControlClient, Pending};
use crate::error::{Error, ErrorKind};
use crate::handshake::{self, Performed, Wanted};
use crate::image::account::Counting;
use crate::images::{self, Exported, Images};
use crate::slow::Slow;
use crate::state::{Provenance, Record, RunDirectory};
use crate::template::Progress as TemplateProgress;
use crate::trace::Trace;
use thaw_sys::lock::Lock;

/// A sandbox in creation. Dropping it removes all of it.
pub(super) struct Making<'a> {
    pub node: &'a Node,
    pub trace: &'a Trace,
    /// `None` for a machine that has them attached.
    pub files: Option<MachineFiles>,
    pub record: Record,
    pub resources: Resources,
    /// `None` until the machine has a template or a snapshot in it.
    pub origin: Option<Origin>,
    /// What the machine was parked with.
    pub fitted: Option<Fitted>,
    /// The trace of its start, if its machine is asked about that later.
    pub unasked: Option<Trace>,
}

impl<'a> Making<'a> {
    /// Makes the sandbox's directory in `run`, from which everything later is found.
    pub(super) fn begin(
        run: &RunDirectory,
        node: &'a Node,
        record: Record,
        trace: &'a Trace,
    ) -> Result<Making<'a>, Error> {
        let files = Some(MachineFiles::open(&node.paths)?);
        let record = Record {
            stock: node.stock.clone(),
            ..record
        };
        let resources = Resources::new(run.create(&record)?, node.require.limits);
        Ok(Making::over(node, trace, files, record, resources))
    }

    /// The files and devices that a machine is made from.
    pub(super) fn files(&self) -> Result<&MachineFiles, Error> {
        let parked = || Error::new(ErrorKind::VmmFailed, "a parked machine is not made again");
        self.files.as_ref().ok_or_else(parked)
    }

    /// Attaches the backends of the machine's devices, and thaws it with `thaw` MiB of memory if that is given. The thaw is sent with the
    /// backends, because each round trip to the VMM costs two wake-ups. If the VMM refuses a backend, this fails and the machine ends; no
    /// program of the user runs before the handshake. Returns the thaw, for [`Self::await_thaw`].
    pub(super) async fn attach(
        &mut self,
        mut parts: Parts,
        thaw: Option<u32>,
    ) -> Result<Option<Pending>, Error> {
        let _stage = self.trace.stage("attach");
        self.limit(&parts).await?;
        let exported = self.lease(&parts.images)?;
        reach(Failpoint::CreateLeased);
        let (ends, vsock, devices) = self.ends(&mut parts)?;
        reach(Failpoint::CreateVsockListening);
        let (share, relay) = parts.share.map(|s| (s.process, s.relay)).unzip();
        if let Some(process) = &share {
            // thaw-share enters the cgroup before a guest uses it: the memory it uses counts against the sandbox's limits.
            host_limits::enter(
                self.node.require.limits,
                self.resources.cgroup.as_deref(),
                process,
            )?;
        }
        let mut backends = Backends::beside(devices);
        ends.show(&exported, &mut backends);
        if let Some(vsock) = &vsock {
            backends.attach_own(&Devices {
                ends: &ends,
                vsock,
                guest_image: &self.files()?.guest_image,
            });
        }
        backends.attach_disk(&parts.disk);
        let network = parts.network.as_ref();
        if let Some((tap, config)) = network
            .and_then(Attached::tap)
            .zip(network.and_then(Attached::config))
        {
            backends.attach_tap(tap, config.mac);
        }
        if let Some(record) = &parts.record {
            let device = match has_image_disk(&parts.images) {
                true => IMAGE_DISK,
                false => DeviceId::Root,
            };
            backends.attach(device, Backend::Accesses, record);
        }
        if let Some(relay) = &relay {
            backends.attach(DeviceId::Shared, Backend::Share, relay);
        }
        if let Some(limits) = self.record.terms.rate_limits.filter(|limits| !limits.is_none()) {
            backends.limit(&limits, has_image_disk(&parts.images));
        }
        let sent = send(backends, thaw, self.resources.control()?).await;
        // Only the VMM may hold the relay: closing it ends thaw-share.
        drop(relay);
        let thawing = match sent {
            Ok((backends, thawing)) => backends.answered().await.map(|_| thawing),
            Err(e) => Err(e),
        };
        let thawing = thawing.map_err(|e| explain(e, &self.resources))?;
        reach(Failpoint::CreateAttached);
        if let (Some(process), Some(control)) = (share, &self.resources.control) {
            self.record.share = Some(process.record());
            let supervised = self.resources.supervised(&self.record, control);
            *self.resources.share.locked() = Some(Served::new(process, supervised));
        }
        self.resources.misses = ends.misses;
        self.resources.console = Some(ends.console);
        self.resources.disk = Some(parts.disk);
        self.record.network = parts.network.as_ref().and_then(Attached::describe);
        self.resources.network = parts.network;
        self.resources.prefetch = Mutex::new(parts.prefetch.into_iter().collect());
        self.resources.supply = Some(parts.supply);
        self.resources.images = Mutex::new(parts.images);
        // Written with the record once the sandbox is ready: nothing adopts it before.
        self.record.provenance = Provenance::of(&self.resources, self.origin.as_ref())
            .map_err(|e| Error::system("cannot look at the sandbox's disk", &e))?;
        Ok(thawing)
    }

    /// Leases the images, and opens the files by which the VMM serves them.
    fn lease(&self, all: &[Shown]) -> Result<Vec<(u16, Exported)>, Error> {
        let mut exported = Vec::with_capacity(all.len());
        for shown in all {
            self.resources
                .leases
                .locked()
                .push(shown.image.lease().map_err(images::failure)?);
            exported.push((shown.slot, images::export(&shown.image, shown.name.clone())?));
            self.resources.given.grant(shown.slot, &shown.image);
        }
        Ok(exported)
    }

    /// The host's ends of its devices, those a parked machine has or new ones; for new ones also the vsock, which listens. Then the devices
    /// that have their backend already.
    fn ends(&self, parts: &mut Parts) -> Result<(Ends, Option<OwnedFd>, Vec<DeviceId>), Error> {
        let (supply, given) = (parts.supply.clone(), &self.resources.given);
        let has_disk = has_image_disk(&parts.images);
        let Some(AttachedEnds {
            mut ends, devices, ..
        }) = parts.attached.take()
        else {
            let vsock = vmm::listen(&self.resources.directory.vsock_socket(), SocketType::STREAM)?;
            return Ok((Ends::make(supply, given, has_disk)?, Some(vsock), Vec::new()));
        };
        if has_disk {
            ends.add_disk(supply, given)?;
        }
        Ok((ends, None, devices))
    }

    /// Sets the limits of the sandbox on its host, unless its machine was parked with them.
    async fn limit(&self, parts: &Parts) -> Result<(), Error> {
        let (record, disk) = (&self.record, &parts.disk.file);
        let parked = parts.attached.as_ref();
        if parked.is_some_and(|parked| parked.limited_to_mib == Some(record.memory_mib))
            && record.volumes.is_empty()
            && record.cpu_limit_millis.is_none()
        {
            return Ok(());
        }
        let cgroup = self.resources.cgroup.as_deref();
        host_limits::set(self.node.require.limits, cgroup, &self.record, disk).await?;
        match &self.resources.vmm {
            Some(vmm) => host_limits::set_files(vmm, &self.record, disk),
            None => Ok(()),
        }
    }

    /// Gives the guest its identity. If that fails, no program of the user has run in it. A `rehearsal` also makes a container and removes
    /// it. `None` for a guest without an agent, which has no handshake.
    pub(super) async fn give_identity(
        &mut self,
        hostname: Option<String>,
        rehearsal: bool,
    ) -> Result<Option<Performed>, Error> {
        let _stage = self.trace.stage("handshake");
        let performed = match self.node.has_agents() {
            true => Some(self.shake_hands(hostname, rehearsal).await?),
            false => self.bare_acknowledges().await.map(|()| None)?,
        };
        reach(Failpoint::CreateAcknowledged);
        Ok(performed)
    }

    /// Records that the sandbox is ready: from now on it is adopted.
    pub(super) fn note_ready(&mut self) -> Result<(), Error> {
        self.record.ready = true;
        self.resources.directory.write(&self.record)?;
        reach(Failpoint::CreateReady);
        Ok(())
    }

    async fn shake_hands(&self, hostname: Option<String>, rehearsal: bool) -> Result<Performed, Error> {
        let wanted = Wanted {
            hostname: hostname.unwrap_or_else(|| self.record.id.clone()),
            network: self
                .resources
                .network
                .as_ref()
                .and_then(Attached::config)
                .cloned(),
            cpus: self.record.vcpus,
            memory_mib: self.record.memory_mib,
            rehearsal,
            test_hooks: self.node.test_templates,
        };
        let path = self.resources.directory.vsock_socket();
        let performed =
            tokio::task::spawn_blocking(move || handshake::perform(&path, wanted, READY_LIMIT)).await;
        let performed = performed.map_err(|e| Error::new(ErrorKind::HandshakeFailed, e.to_string()))?;
        let performed = match performed {
            Ok(performed) => performed,
            Err(e) => {
                return Err(explain(
                    with_end_reason(e, &self.resources).await,
                    &self.resources,
                ));
            }
        };
        self.report_handshake(&performed);
        Ok(performed)
    }

    /// Logs and traces what the handshake showed: where its time went, and whether the guest's clock is right.
    fn report_handshake(&self, performed: &Performed) {
        let (clock, said) = (&performed.clock, &performed.acknowledgement);
        let us = |ns: i64| ns / 1000;
        let (off, trip) = (us(clock.off_ns), clock.round_trip_ns / 1000);
        if clock.is_right() {
            tracing::debug!(off_us = off, round_trip_us = trip, "the guest's clock is right");
        } else {
            let id = &self.record.id;
            tracing::warn!(
                "sandbox {id}: the guest's clock is off by {off} us; the round trip took {trip} us"
            );
        }
        let identity = said.applied.saturating_sub(said.received);
        self.trace.add_monotonic(
            "identity",
            performed.acknowledged.saturating_sub(identity),
            performed.acknowledged,
        );
    }

    pub(super) fn done(self) -> Result<Sandbox, Error> {
        let config = self
            .resources
            .images
            .locked()
            .first()
            .map(|s| s.image.config.clone());
        let sandbox = Sandbox::new(self.record, config, self.origin, self.resources);
        Ok(sandbox?.asked_later(self.unasked))
    }
}

/// Sends the backends, and the thaw if there is one.
async fn send(
    backends: Backends<'_>,
    thaw: Option<u32>,
    control: &ControlClient,
) -> Result<(Sent, Option<Pending>), Error> {
    let sent = backends.begin(control).await?;
    let Some(memory_mib) = thaw else {
        return Ok((sent, None));
    };
    let empty = sent.empty.clone();
    let thawing = control.request(Command::Thaw { memory_mib, empty }, &[]).await?;
    Ok((sent, Some(thawing)))
}

/// The parts that are made beside the machine, or that it was parked with.
pub(super) struct Parts {
    pub images: Vec<Shown>,
    /// What is attached already.
    pub attached: Option<AttachedEnds>,
    pub disk: Claimed<Disks>,
    pub network: Option<Attached>,
    pub prefetch: Option<Prefetch>,
    /// Fetches the image's bytes.
    pub supply: Images,
    /// The VMM reports over this socket which bytes of the images are read.
    pub record: Option<Arc<OwnedFd>>,
    /// Serves the sandbox files of the host.
    pub share: Option<Serving>,
}

pub(super) async fn create(
    node: &Node,
    spec: SandboxSpec,
    trace: &Trace,
    progress: Arc<dyn Progress>,
    building: TemplateProgress,
) -> Result<Sandbox, Error> {
    check_shape(&spec)?;
    if spec.cold && !node.has_agents() {
        let what = "a bare guest has no agent: it becomes a sandbox by a thaw only";
        return Err(Error::new(ErrorKind::Runtime, what));
    }
    let place = Arc::new(node.admit(&spec)?);
    let told = |text: &str| trace.reason(Slow::MadeAgain, text);
    let make = || make(node, &spec, &place, trace, progress.clone(), building.clone());
    let sandbox = retry_once(told, make).await?;
    // Not awaited.
    drop(node.images.collect_in_background());
    Ok(sandbox)
}

/// Makes the sandbox. A failure leaves nothing behind.
async fn make(
    node: &Node,
    spec: &SandboxSpec,
    place: &Arc<Place>,
    trace: &Trace,
    progress: Arc<dyn Progress>,
    building: TemplateProgress,
) -> Result<Sandbox, Error> {
    let share_of_disk = node.budget.sandbox(u64::from(spec.disk_mib) << 20).await?;
    let wanted = WantedMachine::of(node, spec).await?;
    if let Some(known) = &wanted.template {
        node.note_template(spec, known.shape);
    }
    let parked = wanted.parked(spec);
    let WantedMachine { machine, template } = wanted;
    let mut making = Making::claim(node, (record(spec)?, Id::OfSpare), &machine, parked, trace)?;
    making.resources.share_of_disk = Some(share_of_disk);
    making.resources.place = Some(place.clone());
    let (fitted, directory) = (making.fitted.take(), making.resources.directory.path().to_owned());
    let parts = parts(node, spec, fitted, &directory, progress, trace);
    let machine = async {
        match template {
            None => making.spawn(machine).await,
            Some(known) => {
                making
                    .restore_template(known, machine, spec.memory_mode, building)
                    .await
            }
        }
    };
    let (parts, ()) = tokio::try_join!(parts, machine)?;
    if let Some(shown) = parts.images.first() {
        making.record.image_digest = Some(shown.image.digest.to_string());
    }
    match making
        .attach(parts, (!spec.cold).then_some(spec.memory_mib))
        .await?
    {
        Some(thawing) => making.await_thaw(thawing).await?,
        None => {
            making.boot().await?;
        }
    }
    let performed = making.give_identity(spec.hostname.clone(), false).await?;
    match performed.filter(|_| spec.cold) {
        Some(performed) => {
            making.note_ready()?;
            making.trace_boot(&performed).await?;
        }
        None => making.note_thawed().await?,
    }
    making.done()
}

/// Collects the parts that are made beside the machine.
async fn parts(
    node: &Node,
    spec: &SandboxSpec,
    fitted: Option<Fitted>,
    directory: &std::path::Path,
    progress: Arc<dyn Progress>,
    trace: &Trace,
) -> Result<Parts, Error> {
    let FittedParts {
        supply,
        attached,
        disk,
        network: slot,
    } = FittedParts::of(fitted, &node.images);
    let (pulled, disk, network, share) = tokio::try_join!(
        image(&supply, spec, trace, progress),
        new_disk(node, disk, spec.disk_mib, trace),
        network::claim(node, slot, (&spec.network, &spec.network_terms), directory, trace),
        new_share(spec, directory, trace),
    )?;
    let (image, prefetch) = pulled.unzip();
    let show = |image| Shown {
        slot: match spec.root {
            RootServing::Virtiofs => IMAGE_SLOT,
            RootServing::Erofs => IMAGE_DISK_SLOT,
        },
        name: image_name(IMAGE_SLOT),
        image,
    };
    let images = image.map(show).into_iter().collect();
    Ok(Parts {
        images,
        attached,
        disk,
        network,
        prefetch: prefetch.flatten(),
        supply,
        record: spec.record.clone(),
        share,
    })
}

async fn image(
    images: &Images,
    spec: &SandboxSpec,
    trace: &Trace,
    progress: Arc<dyn Progress>,
) -> Result<Option<(Image, Option<Prefetch>)>, Error> {
    let Some(reference) = &spec.image else {
        return Ok(None);
    };
    let _stage = trace.stage("image");
    let counting = Counting::new(progress.clone());
    let image = images
        .pull(reference, spec.pull, spec.plain_http, counting.clone())
        .await?;
    reach(Failpoint::CreateImageThere);
    trace.note("image", &counting.summary());
    trace.count("image_bytes", counting.fetched());
    let prefetch = spec.prefetch.then(|| images.prefetch(&image, progress));
    Ok(Some((image, prefetch.flatten())))
}

/// Starts a thaw-share. `None` if there are no volumes.
async fn new_share(
    spec: &SandboxSpec,
    directory: &std::path::Path,
    trace: &Trace,
) -> Result<Option<Serving>, Error> {
    let _stage = (!spec.volumes.is_empty()).then(|| trace.stage("share"));
    share::start(&spec.volumes, directory).await
}

/// The disk that the machine was parked with, or else a claimed one of the next smaller size that is made ahead. If that is too small,
/// enlarges the file; the guest then grows the file system.
async fn new_disk(
    node: &Node,
    parked: Option<Claimed<Disks>>,
    mib: u32,
    trace: &Trace,
) -> Result<Claimed<Disks>, Error> {
    if let Some(disk) = parked {
        return Ok(disk);
    }
    let _stage = trace.stage("disk");
    let size = u64::from(mib) << 20;
    let mut disk = claim(&node.pools, |p| &p.disks, made_size(size), Error::from, trace).await?;
    disk.enlarge(size)
        .map_err(|e| Error::system("cannot enlarge a disk", &e))?;
    Ok(disk)
}
