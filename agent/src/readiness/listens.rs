//! Where a container listens on one TCP port, told by the kernel at the moment it does.
//!
//! A BPF program on the container's cgroup is run for each socket that has just begun to listen (`listen(2)` by any way:
//! any of its processes, 32-bit calls, io_uring), and writes the address into a ring. Invariants: nothing in the container
//! waits for us, whether we are quick, stand still or are gone; a socket is told of when it takes connections already; a flood
//! of them costs 16 KiB, what does not fit is not told, and what comes once there is room again is. With the value that
//! watches goes the program.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{Mode, OFlags, open};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use thaw_sys::bpf::Ring;

use super::bpf::{self, WORDS};
use crate::error::{For, Result};
use crate::stdio::watch;

/// Watches a cgroup's sockets.
#[derive(Debug)]
pub struct Listens {
    ring: Ring<WORDS>,
    readable: AsyncFd<OwnedFd>,
    /// The program runs as long as this is open.
    _link: OwnedFd,
}

impl Listens {
    /// Those of the cgroup at this path, from now on. Within the runtime.
    pub fn watch(cgroup: &Path, port: u16) -> Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = open(cgroup, flags, Mode::empty()).for_(|| format!("open {}", cgroup.display()))?;
        let what = || "have the kernel tell what listens (CONFIG_BPF_SYSCALL, CONFIG_CGROUP_BPF)".into();
        let (map, ring) = Ring::new().for_(what)?;
        let link = bpf::report_listening(directory.as_fd(), port, map.as_fd()).for_(what)?;
        Ok(Listens {
            ring,
            readable: watch(map, Interest::READABLE)?,
            _link: link,
        })
    }

    /// Waits until something is told, and takes all of it: the addresses that were listened on, oldest first.
    pub async fn next(&mut self) -> Result<Vec<IpAddr>> {
        loop {
            let ready = self.readable.readable().await;
            let mut ready = ready.for_(|| "wait for what listens".into())?;
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
