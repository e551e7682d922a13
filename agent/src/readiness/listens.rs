//! Watches on which addresses a container listens on one TCP port. The kernel reports each when it begins.
//!
//! A BPF program on the container's cgroup runs for each socket that has just begun to listen, however it did so (any process, 32-bit
//! calls, io_uring), and writes its address to a ring. Invariants: nothing in the container waits for the agent, even if the agent is slow,
//! stopped or gone. A reported socket already accepts connections. A flood of sockets costs 16 KiB: addresses that do not fit are dropped,
//! and later ones are reported once there is room. The program is removed when the watch is dropped.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{Mode, OFlags, open};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use thaw_sys::bpf::Ring;

use super::bpf::{self, WORDS};
use crate::error::{Result, WithContext};
use crate::stdio::watch;

/// Watches a cgroup's sockets.
#[derive(Debug)]
pub struct ListenWatch {
    ring: Ring<WORDS>,
    readable: AsyncFd<OwnedFd>,
    /// The program runs as long as this is open.
    _link: OwnedFd,
}

impl ListenWatch {
    /// Watches the cgroup at this path from now on. Must be called within the runtime.
    pub fn watch(cgroup: &Path, port: u16) -> Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory =
            open(cgroup, flags, Mode::empty()).with_context(|| format!("open {}", cgroup.display()))?;
        let what = || "watch for listening sockets (CONFIG_BPF_SYSCALL, CONFIG_CGROUP_BPF)".into();
        let (map, ring) = Ring::new().with_context(what)?;
        let link = bpf::report_listening(directory.as_fd(), port, map.as_fd()).with_context(what)?;
        Ok(ListenWatch {
            ring,
            readable: watch(map, Interest::READABLE)?,
            _link: link,
        })
    }

    /// Waits for reports, and returns the addresses of all of them, oldest first.
    pub async fn next(&mut self) -> Result<Vec<IpAddr>> {
        loop {
            let ready = self.readable.readable().await;
            let mut ready = ready.with_context(|| "wait for listening sockets".into())?;
            let told: Vec<IpAddr> = std::iter::from_fn(|| self.ring.take())
                .filter_map(address)
                .collect();
            if !told.is_empty() {
                return Ok(told);
            }
            ready.clear_ready();
        }
    }
}

fn address([family, four, six @ ..]: [u32; WORDS]) -> Option<IpAddr> {
    match family as i32 {
        libc::AF_INET => Some(Ipv4Addr::from(four.to_ne_bytes()).into()),
        libc::AF_INET6 => {
            let mut bytes = [0; 16];
            for (to, word) in bytes.chunks_exact_mut(4).zip(six) {
                to.copy_from_slice(&word.to_ne_bytes());
            }
            Some(Ipv6Addr::from(bytes).into())
        }
        _ => None,
    }
}

#[cfg(test)]
#[path = "listens_test.rs"]
mod tests;
