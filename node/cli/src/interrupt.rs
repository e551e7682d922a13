//! Signals that end a command, and what is finished before it ends.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use thaw_sandbox::error::Error;
use tokio::signal::unix::{SignalKind, signal};

/// How long an interrupted command waits for its threads, which remove what they were writing.
const REMOVAL_LIMIT: Duration = Duration::from_secs(5);

/// Whether a signal ended the work.
static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Runs a command's work to its end.
pub(super) fn in_runtime(work: impl Future<Output = Result<u8, Error>>) -> Result<u8, Error> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(|e| Error::system("cannot start the runtime", &e))?;
    let result = runtime.block_on(work);
    match INTERRUPTED.load(Ordering::Relaxed) {
        true => runtime.shutdown_timeout(REMOVAL_LIMIT),
        // A thread may wait for stdin without end.
        false => runtime.shutdown_background(),
    }
    result
}

/// Waits for a signal that ends this process, and returns its exit status. From this call on, not from the first poll, such a signal no
/// longer kills the process, so that resources being made at that time are removed.
pub(super) fn interrupted() -> impl Future<Output = u8> {
    let mut waiting = Vec::new();
    for number in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT] {
        if let Ok(mut caught) = signal(SignalKind::from_raw(number)) {
            waiting.push(Box::pin(async move {
                match caught.recv().await {
                    Some(()) => {
                        INTERRUPTED.store(true, Ordering::Relaxed);
                        128 + number as u8
                    }
                    None => std::future::pending().await,
                }
            }));
        }
    }
    std::future::poll_fn(move |context| {
        let ended = waiting.iter_mut().find_map(|w| match w.as_mut().poll(context) {
            std::task::Poll::Ready(status) => Some(status),
            std::task::Poll::Pending => None,
        });
        ended.map_or(std::task::Poll::Pending, std::task::Poll::Ready)
    })
}
