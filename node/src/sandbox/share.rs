//! A sandbox's thaw-share: started beside the machine, handed over with its backends, ended after it.
//!
//! It ends with the VMM, whatever becomes of us; the record names it only so that who takes the sandbox over can watch it and end it.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{Mode, OFlags};
use thaw_pools::share::{self, Serving};
use thaw_pools::vmm::VmmProcess;
use thaw_protocol::api::Volume;
use thaw_protocol::control::Command;
use thaw_protocol::share::{Serve, Share};
use tokio::io::Interest;

use super::create::blocking;
use super::machine::log_tail;
use crate::container::volume_name;
use crate::control_client::ControlClient;
use crate::exit::{ExitCode, Failure};
use crate::readiness::register;

/// What thaw-share writes, in the sandbox's directory.
const LOG: &str = "share.log";

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
        let serve = Serve {
            shares: volumes
                .iter()
                .enumerate()
                .map(|(position, volume)| Share {
                    name: volume_name(position),
                    read_only: volume.read_only,
                })
                .collect(),
            devices: false,
        };
        let program = share::find()?;
        let file = File::options().create(true).append(true).open(&log);
        let file = file.map_err(|e| Failure::system(format!("cannot open {}", log.display()), &e))?;
        let files: Vec<_> = files.iter().map(|file| file.as_fd()).collect();
        share::start(&program, &file.into(), &serve, &files).map_err(|e| Failure {
            context: log_tail(&log),
            ..Failure::from(e)
        })
    });
    serving.await.map(Some)
}

/// A path of the host, to be shared: it is not read here, and may be a directory or a file.
fn open(volume: &Volume) -> Result<OwnedFd, Failure> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    rustix::fs::open(&volume.host, flags, Mode::empty()).map_err(|e| {
        let what = format!("{} cannot be shared: {e}", volume.host.display());
        Failure::new(ExitCode::VolumeUnavailable, what)
    })
}

/// Says so when it ends before its machine: the guest's files answer errors then. Ends with the sandbox.
pub(super) fn watch(
    id: &str,
    process: &VmmProcess,
    control: Arc<ControlClient>,
) -> Option<tokio::task::JoinHandle<()>> {
    let pidfd = process.pidfd().try_clone_to_owned().ok()?;
    let pidfd = register(pidfd, Interest::READABLE).ok()?;
    let id = id.to_owned();
    Some(tokio::spawn(async move {
        // Readable once it has ended. It ends with its VMM too, and that is no news.
        let _ = pidfd.readable().await;
        if control.call(Command::Status, &[]).await.is_ok() {
            tracing::error!(
                "sandbox {id}: thaw-share has ended: what it shares with the host answers EIO in the guest from now on; \
                 start the sandbox again"
            );
        }
    }))
}
