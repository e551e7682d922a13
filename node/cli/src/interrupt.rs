//! Signals that end a command.

use tokio::signal::unix::{SignalKind, signal};

/// Waits for a signal that ends this process, and returns its exit status. From this call on, not from the first poll, such a signal no
/// longer kills the process, so that resources being made at that time are removed.
pub(super) fn interrupted() -> impl Future<Output = u8> {
    let mut waiting = Vec::new();
    for number in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT] {
        if let Ok(mut caught) = signal(SignalKind::from_raw(number)) {
            waiting.push(Box::pin(async move {
                match caught.recv().await {
                    Some(()) => 128 + number as u8,
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
