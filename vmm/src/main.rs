//! thaw-vmm: one microVM in one jailed process, driven over the listening control socket it inherits.

use std::process::ExitCode;

use thaw_protocol::control::{
    CONTROL_FD, JAIL_LACKS_CODE, JAIL_VARIABLE, JAIL_WHOLE, NAMESPACES_VARIABLE, StartTimes,
};
use thaw_sys::child;
use thaw_vmm::clock::monotonic_ns;
use thaw_vmm::control::{self, End};
use thaw_vmm::events::EventSink;
use thaw_vmm::jail::{self, JailError};
use thaw_vmm::machine::Machine;
use thaw_vmm::multihit::Multihit;

const ABOUT: &str = "\
thaw-vmm runs one microVM. It is started by thawd (or by the thaw command itself), not by hand: it takes no
arguments and opens no file. It expects a listening SEQPACKET unix socket as descriptor 3, jails itself, and is then
told over that socket what to run. To run a container, use: thaw run IMAGE
";

/// The environment variables that only this program reads.
const VARIABLES: &str = "  THAW_JAIL  whole: end, with code 3, where the host lacks namespaces or Landlock, instead of logging that
  THAW_NAMESPACES  the number of the first of five descriptors: the network, IPC, UTS, cgroup and mount namespace to enter\n";

/// Exit codes: 0 after a shutdown request or when no longer needed, 1 on failure, 2 if started incorrectly, 3 if the jail must be whole but
/// this host cannot provide it.
fn main() -> ExitCode {
    let process = monotonic_ns();
    if let Some(code) = child::answer_arguments("thaw-vmm", env!("CARGO_PKG_VERSION"), ABOUT, VARIABLES) {
        return code;
    }
    // SAFETY: this process has opened nothing yet, so nothing else owns the descriptor.
    let Some(listener) = (unsafe { child::inherited_socket(CONTROL_FD, true) }) else {
        eprintln!(
            "thaw-vmm: descriptor {CONTROL_FD} is not a listening SEQPACKET unix socket (see thaw-vmm --help)"
        );
        return ExitCode::from(child::STARTED_INCORRECTLY);
    };
    thaw_log::to_stderr();
    thaw_log::end_on_panic();
    if let Err(e) = thaw_imagefs::guarded::install() {
        tracing::warn!("a store file that is cut would end this process: {e}");
    }
    let multihit = Multihit::of_host();
    let whole = std::env::var_os(JAIL_VARIABLE).is_some_and(|value| value == JAIL_WHOLE);
    let shared = std::env::var(NAMESPACES_VARIABLE).ok();
    let shared = shared.and_then(|first| first.parse().ok());
    if let Err(e) = jail::enter(whole, shared) {
        tracing::error!("cannot close the jail: {e}");
        return match e {
            JailError::Lacks(_) => ExitCode::from(JAIL_LACKS_CODE as u8),
            _ => ExitCode::FAILURE,
        };
    }
    let jailed = monotonic_ns();
    let events = match EventSink::new() {
        Ok(events) => events,
        Err(e) => {
            tracing::error!("no eventfd: {e}");
            return ExitCode::FAILURE;
        }
    };
    let times = StartTimes {
        process,
        jailed,
        ..StartTimes::default()
    };
    let mut machine = Machine::new(events.clone(), times, multihit);
    let code = match control::serve(listener, &mut machine, &events) {
        Ok(End::Shutdown | End::Disconnected) => 0,
        Ok(End::Abandoned) => {
            tracing::warn!("nobody connected to the control socket; ending");
            1
        }
        Err(e) => {
            tracing::error!("control socket: {e}");
            1
        }
    };
    // Exits without returning: the kernel destroys threads, memory and VM faster than `machine`'s destructors would.
    std::process::exit(code)
}
