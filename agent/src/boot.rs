//! Starts the agent: mounts, then the handshake, and only then the runtime that serves the API.

use std::sync::Arc;

use thaw_protocol::handshake::{AGENT_PORT, FORWARD_PORT, HANDSHAKE_PORT, Identity, WARM};

use crate::error::Result;
use crate::guest::Guest;
use crate::handshake::Handshake;
use crate::listener::{Listener, Transport, ring_doorbell};
use crate::sandbox::Sandbox;
use crate::{
    clock, error, forward, handshake, info, init, kernel_command_line, kernel_limits, log, rpc, warm, warning,
};

/// Never returns, because the end of PID 1 is a kernel panic.
pub fn run(started: u64, transport: Transport) -> ! {
    match transport {
        // A test brings its own /run, /tmp and cgroups, and reads the log from stderr.
        Transport::Unix(_) => init::namespaced(),
        Transport::Vsock => {
            for failure in init::mount_all() {
                error!("{failure}");
            }
            log::to_kernel();
            init::settings();
            kernel_limits::of_boot();
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
    let runtime = match tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(16)
        .build()
    {
        Ok(runtime) => runtime,
        Err(e) => stay(&format!("no async runtime: {e}")),
    };
    let sandbox = Arc::new(Sandbox::default());
    let mut guest = Guest::new(sandbox.clone(), runtime.handle().clone());
    if transport == Transport::Vsock && kernel_command_line::has(WARM) {
        warm::up(&sandbox, &runtime);
    }
    guest.prepare();
    let ready = clock::boottime_ns();
    ring_doorbell(&transport);
    info!("listening for the handshake on port {HANDSHAKE_PORT}");
    let times = Handshake { started, ready };
    let (api, forwards) = wait_for_identity(&listener, &times, &mut guest, |identity| {
        if identity.rehearsal {
            warm::up(&sandbox, &runtime);
        }
        let api = Listener::bind(&transport, AGENT_PORT)?;
        Ok((api, Listener::bind(&transport, FORWARD_PORT)?))
    });
    // The API runs on this thread. Later greetings, which freeze or clone the sandbox, must be answered while
    // it is busy.
    let later = std::thread::Builder::new()
        .name("handshake".into())
        .spawn(move || listen_on(&listener, &times, &mut guest));
    if let Err(e) = later {
        error!("no thread for later greetings: this sandbox cannot be frozen: {e}");
    }
    let failure = runtime.block_on(async {
        match forwards.into_async() {
            Ok(listener) => drop(tokio::spawn(forward::serve(listener))),
            Err(e) => error!("nothing is forwarded to this guest: {e}"),
        }
        rpc::serve(api, sandbox).await
    });
    stay(&format!("the API stopped: {failure}"))
}

/// Answers greetings for the life of the guest.
fn listen_on(listener: &Listener, times: &Handshake, guest: &mut Guest) -> ! {
    loop {
        greet(listener, times, guest, |_| Ok(()));
    }
}

/// Answers one greeting. Returns the result of `open` if the greeting brought an identity.
fn greet<T>(
    listener: &Listener,
    times: &Handshake,
    guest: &mut Guest,
    open: impl FnOnce(&Identity) -> Result<T>,
) -> Option<T> {
    let stream = match listener.accept() {
        Ok(stream) => stream,
        Err(e) => {
            warning!("handshake: accept: {e}");
            // Descriptors or memory are short; others may release some.
            std::thread::sleep(std::time::Duration::from_millis(100));
            return None;
        }
    };
    handshake::answer(stream, times, guest, open).unwrap_or_else(|e| {
        warning!("handshake: {e}; waiting for another");
        None
    })
}

/// Answers greetings until an identity is in force. Returns the result of `open`: listeners, which listen before the acknowledgement is
/// sent.
fn wait_for_identity<T>(
    listener: &Listener,
    times: &Handshake,
    guest: &mut Guest,
    open: impl Fn(&Identity) -> Result<T>,
) -> T {
    loop {
        if let Some(opened) = greet(listener, times, guest, &open) {
            return opened;
        }
    }
}

/// Logs the reason and reaps orphans forever.
fn stay(reason: &str) -> ! {
    error!("{reason}");
    loop {
        // Without any child this fails at once; then wait for one.
        if rustix::process::wait(rustix::process::WaitOptions::empty()).is_err() {
            std::thread::park_timeout(std::time::Duration::from_secs(1));
        }
    }
}
