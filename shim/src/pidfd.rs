//! Waits for the end of a process that is not a child.

use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Waits until process `pid` ends, or forever if the kernel provides no pidfd.
pub async fn wait_exit(pid: i32) {
    let Some(number) = Pid::from_raw(pid) else {
        return std::future::pending().await;
    };
    match pidfd_open(number, PidfdFlags::NONBLOCK) {
        Ok(pidfd) => {
            // SAFETY: the registration owns the descriptor, which is closed with it and not before.
            match unsafe { AsyncFd::register_with_interest(pidfd, Interest::READABLE) } {
                Ok(pidfd) => drop(pidfd.readable().await),
                Err(_) => std::future::pending().await,
            }
        }
        Err(rustix::io::Errno::SRCH) => {}
        Err(_) => std::future::pending().await,
    }
}
