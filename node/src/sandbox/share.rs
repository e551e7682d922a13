//! A sandbox's thaw-share: started beside the machine and handed over with its backends where it has volumes; else when the
//! first share is added to it. Ended after it.
//!
//! It ends with the VMM, whatever becomes of us; the record names it only so that who takes the sandbox over can watch it and end it, and
//! add shares. What is shared is in its mount namespace and nowhere else: nobody here need remember it.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{Mode, OFlags};
use thaw_pools::share::{self, PlaceError, Serving, Source};
use thaw_pools::vmm::VmmProcess;
use thaw_protocol::api::Volume;
use thaw_protocol::control::{Backend, Command, DeviceId};
use thaw_protocol::share::{SLOTS, Serve, Share};
use tokio::io::Interest;

use super::backends::Backends;
use super::create::blocking;
use super::machine::log_tail;
use super::{Record, Sandbox, limits, locked};
use crate::container::volume_name;
use crate::control_client::ControlClient;
use crate::exit::{ExitCode, Failure};
use crate::readiness::register;

/// What thaw-share writes, in the sandbox's directory.
const LOG: &str = "share.log";

/// One that serves a sandbox.
#[derive(Debug)]
pub(super) struct Served {
    pub process: VmmProcess,
    /// Tells of its end.
    watch: Option<tokio::task::JoinHandle<()>>,
}

impl Served {
    /// Watched over from now on.
    pub(super) fn new(record: &Record, process: VmmProcess, control: &Arc<ControlClient>) -> Served {
        let watch = watch(record, &process, control.clone());
        Served { process, watch }
    }

    /// Its end is no news any more.
    pub(super) fn expect_end(&mut self) {
        if let Some(watch) = self.watch.take() {
            watch.abort();
        }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.expect_end();
    }
}

/// Starts one for the volumes of a sandbox with this directory. None where there are no volumes.
///
/// # Errors
/// [`ExitCode::VolumeUnavailable`] for a path that cannot be shared; what is wrong with thaw-share itself.
pub(super) async fn start(volumes: &[Volume], directory: &Path) -> Result<Option<Serving>, Failure> {
    if volumes.is_empty() {
        return Ok(None);
    }
    let (volumes, log) = (volumes.to_vec(), directory.join(LOG));
    let serving = blocking(move || {
        let files = volumes
            .iter()
            .map(open)
            .collect::<Result<Vec<OwnedFd>, Failure>>()?;
        let shares = volumes.iter().enumerate().map(|(position, volume)| Share {
            name: volume_name(position),
            read_only: volume.read_only,
        });
        let serve = Serve {
            shares: shares.collect(),
            slots: 0,
            devices: false,
        };
        run(&serve, &files, &log)
    });
    serving.await.map(Some)
}

fn run(serve: &Serve, files: &[OwnedFd], log: &Path) -> Result<Serving, Failure> {
    let program = share::find()?;
    let file = File::options().create(true).read(true).append(true).open(log);
    let file = file.map_err(|e| Failure::system(format!("cannot open {}", log.display()), &e))?;
    let files: Vec<_> = files.iter().map(|file| file.as_fd()).collect();
    share::start(&program, &file.into(), serve, &files).map_err(|e| Failure {
        context: log_tail(log),
        ..Failure::from(e)
    })
}

impl Sandbox {
    /// Shares files of the host with it, as the entry `name` of its shared device: of `source` as its client sees it. The first
    /// time that starts its thaw-share.
    ///
    /// # Errors
    /// [`ExitCode::VolumeUnavailable`] for what cannot be shared; what is wrong with thaw-share itself.
    pub async fn add_share(&self, name: String, source: Source) -> Result<(), Failure> {
        let client = self.record.client.and_then(|client| client.open());
        let client = client.ok_or_else(|| {
            let what = format!(
                "sandbox {} has no client that asks for its shares",
                self.record.id
            );
            Failure::new(ExitCode::VolumeUnavailable, what)
        })?;
        let serving = self.serving().await?;
        blocking(move || share::place(serving.as_fd(), client.as_fd(), &name, &source).map_err(not_placed))
            .await
    }

    /// Takes a share away. What its guest has open of it stays for as long as it has.
    ///
    /// # Errors
    /// Those of the host's kernel.
    pub async fn remove_share(&self, name: String) -> Result<(), Failure> {
        let Some(serving) = self.share()? else {
            return Ok(());
        };
        blocking(move || share::take_away(serving.as_fd(), &name).map_err(not_placed)).await
    }

    /// A pidfd of its thaw-share, if it has one.
    fn share(&self) -> Result<Option<OwnedFd>, Failure> {
        let share = locked(&self.resources.share);
        let pidfd = share.as_ref().map(|s| s.process.pidfd().try_clone_to_owned());
        pidfd
            .transpose()
            .map_err(|e| Failure::system("cannot copy a descriptor", &e))
    }

    /// The same of the one that is started now, if it has none.
    async fn serving(&self) -> Result<OwnedFd, Failure> {
        // What a freeze looks at must stay so.
        let _one = self.freezing.lock().await;
        if let Some(there) = self.share()? {
            return Ok(there);
        }
        let control = self.resources.control()?;
        let log: PathBuf = self.resources.directory.path().join(LOG);
        let serve = Serve {
            shares: Vec::new(),
            slots: SLOTS,
            devices: false,
        };
        let Serving { process, relay } = blocking(move || run(&serve, &[], &log)).await?;
        // Its VMM is in there already, so it can be.
        limits::enter(true, self.resources.cgroup.as_deref(), &process)?;
        *locked(&self.resources.share) = Some(Served::new(&self.record, process, control));
        // Recorded first: one that nobody was given ends with us, and who comes next starts another.
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
            *locked(&self.resources.share) = None;
            return Err(e);
        }
        // The relay is the VMM's alone: with it, thaw-share ends.
        drop(relay);
        self.share()?
            .ok_or_else(|| Failure::new(ExitCode::ShareFailed, "thaw-share was ended while it was started"))
    }
}

fn not_placed(error: PlaceError) -> Failure {
    let code = match &error {
        PlaceError::Source { .. } | PlaceError::Kind { .. } | PlaceError::Name(_) | PlaceError::Full => {
            ExitCode::VolumeUnavailable
        }
        PlaceError::Ended | PlaceError::Step { .. } => ExitCode::ShareFailed,
    };
    Failure::new(code, error.to_string())
}

/// A path of the host, to be shared: it is not read here, and may be a directory or a file.
fn open(volume: &Volume) -> Result<OwnedFd, Failure> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    rustix::fs::open(&volume.host, flags, Mode::empty()).map_err(|e| {
        let what = format!("{} cannot be shared: {e}", volume.host.display());
        Failure::new(ExitCode::VolumeUnavailable, what)
    })
}

/// When it ends before its machine, the guest's files answer errors. A pod's are what its containers run from: it is ended too, so
/// that whoever wants it makes another. A sandbox that has volumes goes on without them, and that is said. Ends with the sandbox.
fn watch(
    record: &Record,
    process: &VmmProcess,
    control: Arc<ControlClient>,
) -> Option<tokio::task::JoinHandle<()>> {
    let pidfd = process.pidfd().try_clone_to_owned().ok()?;
    let pidfd = register(pidfd, Interest::READABLE).ok()?;
    let (id, is_a_pod) = (record.id.clone(), record.client.is_some());
    Some(tokio::spawn(async move {
        // Readable once it has ended. It ends with its VMM too, and that is no news.
        let _ = pidfd.readable().await;
        if control.call(Command::Status, &[]).await.is_err() {
            return;
        }
        if is_a_pod {
            tracing::error!("sandbox {id}: thaw-share has ended: the sandbox is ended with it");
            // Its end is seen by who attends it.
            let _ = control.call(Command::Shutdown, &[]).await;
            return;
        }
        tracing::error!(
            "sandbox {id}: thaw-share has ended: what it shares with the host answers EIO in the guest from now on; \
             start the sandbox again"
        );
    }))
}
