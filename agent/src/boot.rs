//! From the first instruction to a listening API: mounts, handshake, then and only then the runtime that serves.

use std::path::PathBuf;

use thaw_protocol::handshake::{AGENT_PORT, HANDSHAKE_PORT};

use crate::handshake::Handshake;
use crate::listener::{Listener, ring_doorbell};
use crate::{clock, error, handshake, info, init, log, rpc, warning};

/// What carries the handshake and the API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Transport {
    /// In a guest.
    Vsock,
    /// Sockets named by port in this directory.
    Unix(PathBuf),
}

/// Never returns: the death of PID 1 is a kernel panic.
pub fn run(started: u64, transport: Transport) -> ! {
    match transport {
        // A test's /run, /tmp and cgroups are its own affair, and its log is its stderr.
        Transport::Unix(_) => init::namespaced(),
        Transport::Vsock => {
            for failure in init::mount_all() {
                error!("{failure}");
            }
            log::to_kernel();
            init::settings();
        }
    }
    info!(
        "{} started, PID 1, {} ms after the kernel's clock",
        env!("CARGO_PKG_VERSION"),
        started / 1_000_000
    );
    let listener = match Listener::bind(&transport, HANDSHAKE_PORT) {
        Ok(listener) => listener,
        Err(e) => stay(&format!(
            "no handshake is possible, waiting for the host to end this machine: {e}"
        )),
    };
    let ready = clock::boottime_ns();
    ring_doorbell(&transport);
    info!("listening for the handshake on port {HANDSHAKE_PORT}");
    let api = wait_for_identity(&listener, &transport, Handshake { started, ready });
    drop(listener);
    serve(api)
}

/// Answers handshakes until one is in force; returns the API's listener, which listens before the acknowledgement.
fn wait_for_identity(listener: &Listener, transport: &Transport, times: Handshake) -> Listener {
    loop {
        let stream = match listener.accept() {
            Ok(stream) => stream,
            Err(e) => {
                warning!("handshake: accept: {e}");
                continue;
            }
        };
        match handshake::answer(stream, &times, &mut handshake::Guest, || {
            Listener::bind(transport, AGENT_PORT)
        }) {
            Ok(api) => return api,
            Err(e) => warning!("handshake: {e}; waiting for another"),
        }
    }
}

fn serve(api: Listener) -> ! {
    let runtime = match tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(16)
        .build()
    {
        Ok(runtime) => runtime,
        Err(e) => stay(&format!("no async runtime: {e}")),
    };
    let failure = runtime.block_on(rpc::serve(api));
    stay(&format!("the API stopped: {failure}"))
}

/// Says why and reaps for ever.
fn stay(reason: &str) -> ! {
    error!("{reason}");
    loop {
        // Orphans are still reaped; without any child, wait for one.
        if rustix::process::wait(rustix::process::WaitOptions::empty()).is_err() {
            std::thread::park_timeout(std::time::Duration::from_secs(1));
        }
    }
}
