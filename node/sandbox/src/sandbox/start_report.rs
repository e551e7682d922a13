//! What only a thawed machine knows of its start: when its guest ran, and for how many pages it waited.
//!
//! To ask costs a round trip to the VMM, which interrupts the guest's CPUs. So a start waits for it only if the [`Trace`] of the
//! start needs it ([`Trace::is_detailed`]). Otherwise the owner asks after it has answered its caller.

use thaw_pools::process::{ProcessRecord, Stat};
use thaw_protocol::control::{Command, Response};
use thaw_sys::lock::Lock;

use super::Sandbox;
use crate::control_client::ControlClient;
use crate::slow::Slow;
use crate::trace::{Account, Trace};

impl Sandbox {
    /// The same sandbox, whose owner asks with this trace, if there is one.
    pub(super) fn asked_later(self, unasked: Option<Trace>) -> Sandbox {
        *self.unasked.locked() = unasked;
        self
    }

    /// What only its machine knows of its start, if its creation has not waited for that. `None` if it has, and after the first call. The
    /// future does not borrow the sandbox.
    pub fn start_report(&self) -> Option<impl Future<Output = Account> + Send + use<>> {
        let trace = self.unasked.locked().take()?;
        let (control, vmm) = (self.resources.control().ok()?.clone(), self.record.vmm);
        Some(async move {
            ask(&control, vmm, &trace).await;
            trace.account()
        })
    }
}

/// Asks, and adds the answers to the trace. If the machine has ended meanwhile, the task that monitors it reports that.
pub(super) async fn ask(control: &ControlClient, vmm: Option<ProcessRecord>, trace: &Trace) {
    if let Ok(Response::Status { times, faults, .. }) = control.call(Command::Status, &[]).await {
        tracing::debug!(faults, "page faults of the vCPUs so far");
        trace.add_monotonic("entry", times.thawed, times.entered);
        trace.count("faults", faults);
    }
    let vmm = vmm.filter(ProcessRecord::lives);
    let pages = vmm
        .and_then(|vmm| Stat::of(vmm.pid))
        .map_or(0, |vmm| vmm.major_faults);
    if pages > 0 {
        let text = format!("{pages} page faults waited for the disk: the snapshot was not in the page cache");
        trace.reason(Slow::PagesNotResident, &text);
    }
}
