//! Why a sandbox of this process ended without a request.

use std::os::fd::AsFd;
use std::time::Duration;

use thaw_pools::vmm::VmmProcess;
use thaw_protocol::api::SandboxFailure;
use tokio::io::Interest;

use super::Sandbox;
use crate::blocking::blocking;
use crate::failure::{Evidence, VmmEnd};
use crate::readiness::register;

/// How long a VMM may take to end after a request to end or after it broke its connection.
const END_LIMIT: Duration = Duration::from_secs(2);
/// How long the console's last bytes may take.
const CONSOLE_LIMIT: Duration = Duration::from_millis(500);
/// Number of console lines searched for a reason.
const CONSOLE_LINES: usize = 64;

impl Sandbox {
    /// Why the machine ended, and its last console lines. Ends the VMM if it still runs.
    pub async fn failure(&self) -> SandboxFailure {
        let (exited, misconduct, memory_lost) = {
            let life = self.life.borrow();
            let misconduct = life.misconduct.as_ref().map(ToString::to_string);
            (life.exited.clone(), misconduct, life.memory_lost.clone())
        };
        let vmm = match &self.resources.vmm {
            Some(vmm) => {
                if exited.is_some() || misconduct.is_some() || memory_lost.is_some() {
                    // The VMM waits for a question about its guest's end or for memory, or refuses to end.
                    vmm.kill();
                }
                end_of(vmm).await
            }
            None => VmmEnd::Unknown,
        };
        let console = match &self.resources.console {
            Some(console) => {
                console.drained(CONSOLE_LIMIT).await;
                console.tail(CONSOLE_LINES)
            }
            None => Vec::new(),
        };
        let directory = self.directory();
        let written = blocking(move || Ok(Evidence::written_in(&directory))).await;
        Evidence {
            exited,
            misconduct,
            memory_lost,
            vmm,
            oom_kills: self.resources.cgroup.as_deref().map_or(0, |c| c.oom_kills()),
            console,
            ..written.unwrap_or_default()
        }
        .failure()
    }
}

/// How a VMM's process ended. Waits for its end.
async fn end_of(vmm: &VmmProcess) -> VmmEnd {
    let pidfd = vmm.pidfd().as_fd().try_clone_to_owned();
    let registered = pidfd.and_then(|pidfd| register(pidfd, Interest::READABLE));
    if let Ok(pidfd) = registered
        && tokio::time::timeout(END_LIMIT, pidfd.readable()).await.is_err()
    {
        return VmmEnd::Lives;
    }
    vmm.ended().map_or(VmmEnd::Unknown, VmmEnd::Known)
}
