//! Thaws a sandbox from a snapshot in a registry before its memory is here, and serves that memory for as long as the sandbox runs, also
//! after this process: the next thawd finds the userfaultfd in the VMM, and the snapshot in the store or the registry.
//!
//! Invariants: a machine that waits for memory which cannot be had ends, and its failure says why. Until the next thawd serves it, a
//! machine whose thawd is gone waits.

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, OnceLock, Weak};

use rustix::process::{PidfdGetfdFlags, pidfd_getfd};
use thaw_failpoint::{Failpoint, reach};
use thaw_images::progress::{Progress, Silent};
use thaw_pools::process::ProcessRecord;
use thaw_protocol::control::{MappedRegion, MemoryMode};

use super::create::Making;
use super::machine::explain;
use super::provenance::write_manifest;
use super::remote_memory::{MemorySource, RemoteMemory};
use super::remote_snapshot::{RemoteSnapshot, Thawable};
use super::resources::Resources;
use super::snapshot_pull::{Asked, pull};
use super::thaw::load;
use super::{Node, Origin, Tenants, host_cpu, userfaultfd};
use crate::admission::Shape;
use crate::control_client::ControlClient;
use crate::error::{Error, ErrorKind};
use crate::image::destination;
use crate::page_server::{PageServer, USERFAULTFD};
use crate::snapshot::manifest::ChunkedFile;
use crate::snapshot::store::{NewSnapshot, Viewer};
use crate::state::{self, Record};

/// The size of a machine whose snapshot was not read yet.
const NOT_KNOWN: Shape = Shape {
    vcpus: 0,
    memory_mib: 0,
};

/// Ends a machine whose memory cannot be had.
#[derive(Clone)]
pub(super) struct Ender {
    vmm: Option<ProcessRecord>,
    control: Arc<OnceLock<Weak<ControlClient>>>,
}

impl Ender {
    fn new(vmm: Option<ProcessRecord>) -> Ender {
        Ender {
            vmm,
            control: Arc::default(),
        }
    }

    /// From now on, the machine's owner learns the reason over this connection.
    pub(super) fn over(&self, control: &Arc<ControlClient>) {
        let _ = self.control.set(Arc::downgrade(control));
    }

    fn end(&self, reason: String) {
        if let Some(control) = self.control.get().and_then(Weak::upgrade) {
            control.lose_memory(reason);
        }
        // It waits for a page, so it can do nothing that it is asked to.
        self.vmm.map(|vmm| vmm.kill());
    }
}

impl Tenants {
    /// Finds a snapshot in a registry for a viewer, to thaw it. Returns the node to thaw it with. Where this process may not serve page
    /// faults, the snapshot is pulled whole, and stored, first.
    ///
    /// # Errors
    /// Those of a pull, and of the quota of the viewer's tenant.
    pub async fn remote_to_thaw(&self, reference: &str, viewer: &Viewer) -> Result<(Node, Thawable), Error> {
        let node = self.for_new(viewer.tenant.as_ref()).await?;
        // Of what is known before anything is fetched for nothing: that there is one machine more.
        node.admission.check(viewer.tenant.as_ref(), NOT_KNOWN, 1)?;
        let asked = Asked {
            from: destination::parse(reference)?,
            plain_http: false,
            new: NewSnapshot {
                tenant: viewer.tenant.clone(),
                ..NewSnapshot::default()
            },
            may_loopback: viewer.is_node,
            is_adopted: false,
        };
        let silent: Arc<dyn Progress> = Arc::new(Silent);
        let found = match userfaultfd::open() {
            Ok(_) => {
                let remote = node.remote.open(&node, &asked, host_cpu::lacks, &silent).await?;
                if let Thawable::Remote(remote) = &remote {
                    remote.fetch_disks().await?;
                    reach(Failpoint::RemoteDisksFetched);
                }
                remote
            }
            Err(e) => {
                tracing::warn!("{reference} is fetched whole before its thaw: {e}");
                let _transfer = self.transfer(viewer.tenant.as_ref()).await?;
                let stored = pull(&node, asked, host_cpu::lacks, silent).await?;
                Thawable::Stored(stored.directory.clone())
            }
        };
        Ok((node, found))
    }
}

impl Making<'_> {
    /// Loads a snapshot into the machine whose memory is fetched as it is touched.
    pub(super) async fn restore_remote(&mut self, remote: &RemoteSnapshot) -> Result<(), Error> {
        let _stage = self.trace.stage("restore");
        let _demands = remote.files.expect_demands();
        let device = userfaultfd::open()?;
        let control = self.resources.control()?.clone();
        let loaded = load(
            &control,
            &remote.registered,
            MemoryMode::Uffd,
            Some(device.as_fd()),
            self.trace,
        );
        let (regions, userfaultfd) = loaded.await.map_err(|e| explain(e, &self.resources))?;
        let userfaultfd =
            userfaultfd.ok_or_else(|| Error::new(ErrorKind::VmmFailed, "thaw-vmm made no userfaultfd"))?;
        reach(Failpoint::RemoteLoaded);
        let ender = Ender::new(self.record.vmm);
        ender.over(&control);
        let source = MemorySource::of(remote.files.clone());
        let expected = &remote.registered.manifest.files.memory;
        self.resources.pages = Some(serve(userfaultfd, &regions, source, expected, ender)?);
        reach(Failpoint::RemoteServed);
        write_manifest(&remote.manifest, self.resources.directory.path())?;
        reach(Failpoint::RemoteDescribed);
        self.record.remote = Some(state::RemoteMemory {
            place: remote.place.clone(),
            regions,
        });
        self.origin = Some(Origin::of(remote.registered.clone()));
        Ok(())
    }
}

fn serve(
    userfaultfd: OwnedFd,
    regions: &[MappedRegion],
    source: Arc<MemorySource>,
    expected: &ChunkedFile,
    ender: Ender,
) -> Result<PageServer, Error> {
    let memory = RemoteMemory::new(source, expected);
    let served = memory.and_then(|memory| {
        let broken = move |reason| ender.end(reason);
        PageServer::start(userfaultfd, regions, memory, broken)
    });
    served.map_err(|e| Error::system("cannot serve the machine's memory", &e))
}

/// Serves the memory of an adopted machine, if it is served. Comes before the VMM is asked anything: it may wait for a page, and then it
/// answers nothing. Returns what ends the machine if its memory cannot be had.
///
/// # Errors
/// The userfaultfd or the manifest is not found.
pub(super) fn serve_again(
    node: &Node,
    record: &Record,
    resources: &mut Resources,
) -> Result<Option<Ender>, Error> {
    let (Some(remote), Some(vmm)) = (&record.remote, &resources.vmm) else {
        return Ok(None);
    };
    let directory = resources.directory.path();
    let manifest = record.provenance.as_ref();
    let manifest = manifest.and_then(|provenance| provenance.kept_manifest(directory));
    let no_manifest = || {
        let what = format!("{} has no manifest of the snapshot", directory.display());
        Error::new(ErrorKind::SnapshotNotFound, what)
    };
    let manifest = manifest.ok_or_else(no_manifest)?;
    let userfaultfd = find_userfaultfd(vmm.record().pid, vmm.pidfd())
        .map_err(|e| Error::system("cannot take the userfaultfd of thaw-vmm", &e))?;
    let ender = Ender::new(record.vmm);
    let source = MemorySource::at(node.clone(), remote.place.clone());
    let expected = &manifest.files.memory;
    resources.pages = Some(serve(
        userfaultfd,
        &remote.regions,
        source,
        expected,
        ender.clone(),
    )?);
    reach(Failpoint::RemoteServedAgain);
    Ok(Some(ender))
}

/// A duplicate of the userfaultfd that a VMM has.
fn find_userfaultfd(pid: i32, pidfd: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        let path = entry?.path();
        if !fs::read_link(&path).is_ok_and(|target| target == Path::new(USERFAULTFD)) {
            continue;
        }
        let number = path.file_name().and_then(|name| name.to_str()?.parse().ok());
        if let Some(number) = number {
            return Ok(pidfd_getfd(pidfd, number, PidfdGetfdFlags::empty())?);
        }
    }
    Err(io::Error::new(io::ErrorKind::NotFound, "it has none"))
}
