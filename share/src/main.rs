//! thaw-share: serves host directories to one guest, over the relay socket that it receives.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::ExitCode;

use rustix::net::SocketType;
use thaw_protocol::packet;
use thaw_protocol::share::{SETUP_FD, Serve};
use thaw_share::arrivals::Arrivals;
use thaw_share::end::End;
use thaw_share::stable_ids::StableIds;
use thaw_share::{file_system, jail, relay, tree};
use thaw_sys::child;

const ABOUT: &str = "\
thaw-share serves directories of this host to one guest. It is started by thawd (or by the thaw command itself), not by
hand: it takes no arguments. It expects a SEQPACKET unix socket as descriptor 3, over which it is told what to serve, jails
itself, and ends with the guest. To share a directory with a container, use: thaw run -v HOST:GUEST IMAGE
";

/// Exit codes: 0 if the guest has ended, 1 on failure, 2 if started incorrectly.
fn main() -> ExitCode {
    if let Some(code) = child::answer_arguments("thaw-share", env!("CARGO_PKG_VERSION"), ABOUT, "") {
        return code;
    }
    // SAFETY: this process has opened nothing yet, so nothing else owns the descriptor.
    let Some(setup) = (unsafe { child::inherited_socket(SETUP_FD, false) }) else {
        eprintln!("thaw-share: descriptor {SETUP_FD} is not a SEQPACKET unix socket (see thaw-share --help)");
        return ExitCode::from(child::STARTED_INCORRECTLY);
    };
    // Closes all other inherited descriptors, because the guest must not reach them.
    // SAFETY: only inherited descriptors are open yet, and nothing in this process refers to them by number.
    unsafe { libc::close_range(SETUP_FD as u32 + 1, u32::MAX, 0) };
    thaw_log::to_stderr();
    thaw_log::end_on_panic();
    let ends = match begin(&setup) {
        Ok(ends) => ends,
        Err(why) => {
            tracing::error!("{why}");
            // The caller may be gone.
            let _ = packet::send(&setup, &Err::<(), _>(why), &[]);
            return ExitCode::FAILURE;
        }
    };
    let told = packet::send(&setup, &Ok::<(), String>(()), &[]);
    drop(setup);
    if told.is_err() {
        return ExitCode::FAILURE;
    }
    let code = match ends.recv() {
        Ok(End::Closed) => 0,
        Ok(why) => {
            tracing::error!("{why}; ending");
            1
        }
        Err(_) => 1,
    };
    // Does not return from main, because a thread may wait for a file system that does not answer.
    std::process::exit(code)
}

/// Receives what to serve, enters the jail and starts serving. The error is a sentence.
fn begin(setup: &OwnedFd) -> Result<std::sync::mpsc::Receiver<End>, String> {
    let failed = |what: &'static str| move |e: &dyn std::fmt::Display| format!("{what}: {e}");
    let (serve, mut files) =
        packet::receive::<Serve>(setup).map_err(|e| failed("cannot receive the request")(&e))?;
    if files.is_empty() {
        return Err("the request has no relay".into());
    }
    let relay = files.remove(0);
    if rustix::net::sockopt::socket_type(&relay) != Ok(SocketType::STREAM) {
        return Err("a relay must be of type STREAM".into());
    }
    let mut behind = files.split_off(files.len().min(serve.shares.len())).into_iter();
    let (ledger, mounts) = (behind.next().map(File::from), behind.next());
    if behind.next().is_some() {
        return Err("the request has more descriptors than shares, a ledger and mounts".into());
    }
    let shares = tree::Shares::take(&serve, files).map_err(|e| e.to_string())?;
    let descriptors = jail::limit_resources().map_err(|e| failed("cannot close the jail")(&e))?;
    thaw_sys::jail::leave_namespaces().map_err(|e| failed("cannot close the jail")(&e))?;
    let proc_self_fd = tree::proc_self_fd().map_err(|e| e.to_string())?;
    match mounts {
        // The tree exists already; a process that ended made it.
        Some(mounts) => jail::join_mounts(&mounts).map_err(|e| failed("cannot enter the mounts")(&e))?,
        None => shares.enter().map_err(|e| e.to_string())?,
    }
    let file_system =
        file_system("/", proc_self_fd, descriptors).map_err(|e| failed("cannot open the file system")(&e))?;
    let file_system =
        StableIds::new(file_system, ledger).map_err(|e| failed("cannot open the ledger of nodes")(&e))?;
    let relay = UnixStream::from(relay);
    let arrivals = Arrivals::of(&relay).map_err(|e| failed("cannot wait for the relay")(&e))?;
    jail::close(serve.devices).map_err(|e| failed("cannot close the jail")(&e))?;
    tracing::info!(shares = serve.shares.len(), "jailed");
    relay::start(relay, arrivals, file_system).map_err(|e| failed("cannot start serving")(&e))
}
