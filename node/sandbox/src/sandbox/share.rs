//! A sandbox's thaw-share. With volumes it starts beside the machine and is attached with the other backends; otherwise it starts when the
//! first share is added. It ends after the machine, and is restarted if it dies earlier ([`supervise`]).
//!
//! It ends with the VMM, whatever happens to this process. The record names it only so that the process that adopts the sandbox
//! can watch it, end it, and add shares. Its mount namespace is the only list of shares; no other copy is kept.

mod supervise;

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{Mode, OFlags};
use thaw_pools::share::{self, AttachError, Lasting, Serving, Source};
use thaw_protocol::api::Volume;
use thaw_protocol::control::{Backend, DeviceId};
use thaw_protocol::share::{SLOTS, Serve, Share};

pub(super) use self::supervise::{Served, Supervised};
use super::backends::Backends;
use super::vmm_log::log_tail;
use super::{Sandbox, host_limits};
use crate::blocking::blocking;
use crate::container::volume_name;
use crate::error::{Error, ErrorKind};
use thaw_sys::lock::Lock;

/// thaw-share's log, in the sandbox's directory.
const LOG: &str = "share.log";
/// The ledger of files behind the guest's node ids, beside the log.
const LEDGER: &str = "share.nodes";

/// The files that a thaw-share serves.
#[derive(Clone, Debug)]
pub(super) enum Shared {
    /// The volumes that a sandbox was created with.
    Volumes(Vec<Volume>),
    /// Shares that a pod gets while it runs: none at first, otherwise the mounts of the previous thaw-share.
    Added(Option<Arc<OwnedFd>>),
}

/// Starts a thaw-share for the volumes of a sandbox with this directory. `None` if there are no volumes.
///
/// # Errors
/// [`ErrorKind::VolumeUnavailable`] for a path that cannot be shared; errors of thaw-share itself.
pub(super) async fn start(volumes: &[Volume], directory: &Path) -> Result<Option<Serving>, Error> {
    if volumes.is_empty() {
        return Ok(None);
    }
    let (shared, directory) = (Shared::Volumes(volumes.to_vec()), directory.to_owned());
    blocking(move || run(&shared, &directory)).await.map(Some)
}

/// Starts a thaw-share, which continues with the node ids of its predecessors. Blocks.
fn run(shared: &Shared, directory: &Path) -> Result<Serving, Error> {
    let (volumes, slots, mounts) = match shared {
        Shared::Volumes(volumes) => (volumes.as_slice(), 0, None),
        Shared::Added(mounts) => (&[][..], SLOTS, mounts.as_ref()),
    };
    let files = volumes
        .iter()
        .map(open)
        .collect::<Result<Vec<OwnedFd>, Error>>()?;
    let shares = volumes.iter().enumerate().map(|(position, volume)| Share {
        name: volume_name(position),
        read_only: volume.read_only,
    });
    let serve = Serve {
        shares: shares.collect(),
        slots,
        devices: false,
    };
    let program = share::find()?;
    let made = |name: &str, append: bool| {
        let path = directory.join(name);
        let mut how = File::options();
        how.create(true)
            .read(true)
            .write(true)
            .append(append)
            .truncate(false);
        how.open(&path)
            .map_err(|e| Error::system(format!("cannot open {}", path.display()), &e))
    };
    let (log, ledger) = (made(LOG, true)?, made(LEDGER, false)?);
    let files: Vec<_> = files.iter().map(|file| file.as_fd()).collect();
    let lasting = Lasting {
        ledger: ledger.as_fd(),
        mounts: mounts.map(|mounts| mounts.as_fd()),
    };
    share::start(&program, &log.into(), &serve, &files, Some(lasting)).map_err(|e| Error {
        context: log_tail(&directory.join(LOG)),
        ..Error::from(e)
    })
}

impl Sandbox {
    /// Shares files of the host with the sandbox, as the entry `name` of its shared device. `source` is resolved as its client sees it. The
    /// first share starts thaw-share.
    ///
    /// # Errors
    /// [`ErrorKind::VolumeUnavailable`] for a path that cannot be shared; errors of thaw-share itself.
    pub async fn add_share(&self, name: String, source: Source) -> Result<(), Error> {
        let client = self.record.client.and_then(|client| client.open());
        let client = client.ok_or_else(|| {
            let what = format!(
                "sandbox {} has no client that asks for its shares",
                self.record.id
            );
            Error::new(ErrorKind::VolumeUnavailable, what)
        })?;
        let serving = self.serving().await?;
        blocking(move || share::attach(serving.as_fd(), client.as_fd(), &name, &source).map_err(not_placed))
            .await
    }

    /// Waits until its shared files answer errors for good, and returns the reason. Never returns if that does not happen. The future does
    /// not borrow the sandbox.
    pub fn volumes_lost(&self) -> impl Future<Output = String> + Send + use<> {
        let mut lost = self.resources.volumes_lost.subscribe();
        async move {
            let why = lost
                .wait_for(Option::is_some)
                .await
                .ok()
                .and_then(|why| why.clone());
            match why {
                Some(why) => why,
                None => std::future::pending().await,
            }
        }
    }

    /// Removes a share. Files that the guest has open stay open.
    ///
    /// # Errors
    /// Errors of the host's kernel.
    pub async fn remove_share(&self, name: String) -> Result<(), Error> {
        let Some(serving) = self.share()? else {
            return Ok(());
        };
        blocking(move || share::detach(serving.as_fd(), &name).map_err(not_placed)).await
    }

    /// The mount namespace of its thaw-share, if it has one.
    fn share(&self) -> Result<Option<OwnedFd>, Error> {
        match self.resources.share.locked().as_ref() {
            None => Ok(None),
            Some(served) => served.place().map(Some),
        }
    }

    /// The same; starts a thaw-share if the sandbox has none.
    async fn serving(&self) -> Result<OwnedFd, Error> {
        // Nothing that a freeze reads may change during the freeze.
        let _one = self.freezing.lock().await;
        if let Some(there) = self.share()? {
            return Ok(there);
        }
        let control = self.resources.control()?;
        let directory: PathBuf = self.resources.directory.path().to_owned();
        let Serving { process, relay } = blocking(move || run(&Shared::Added(None), &directory)).await?;
        let cgroup = self.resources.cgroup.as_deref();
        host_limits::enter(self.resources.limits_required, cgroup, &process)?;
        let supervised = self.resources.supervised(&self.record, control);
        *self.resources.share.locked() = Some(Served::new(process, supervised));
        // Recorded before it is attached: if this process dies before that, thaw-share ends with it, and the next owner starts another.
        let recorded = self.resources.directory.write(&self.record_now());
        let given = match recorded {
            Ok(()) => {
                let mut backends = Backends::default();
                backends.attach(DeviceId::Shared, Backend::Share, &relay);
                backends.send(control).await.map(drop)
            }
            Err(e) => Err(e),
        };
        if let Err(e) = given {
            *self.resources.share.locked() = None;
            return Err(e);
        }
        // Only the VMM may hold the relay: closing it ends thaw-share.
        drop(relay);
        self.share()?.ok_or_else(|| {
            Error::new(
                ErrorKind::ShareFailed,
                "thaw-share was ended while it was started",
            )
        })
    }
}

fn not_placed(error: AttachError) -> Error {
    let kind = match &error {
        AttachError::Source { .. } | AttachError::Kind { .. } | AttachError::Name(_) | AttachError::Full => {
            ErrorKind::VolumeUnavailable
        }
        AttachError::Ended | AttachError::Step { .. } => ErrorKind::ShareFailed,
    };
    Error::new(kind, error.to_string())
}

/// Opens a path of the host to be shared, without reading it. It may be a directory or a file.
fn open(volume: &Volume) -> Result<OwnedFd, Error> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    rustix::fs::open(&volume.host, flags, Mode::empty()).map_err(|e| {
        let what = format!("{} cannot be shared: {e}", volume.host.display());
        Error::new(ErrorKind::VolumeUnavailable, what)
    })
}
