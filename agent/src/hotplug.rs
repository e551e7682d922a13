//! Brings CPUs and memory beyond those of the template online before the identity is acknowledged.
//!
//! All CPUs are in the machine from boot, and wait (`maxcpus=1`). Memory is added by virtio-mem: its driver
//! plugs what the VMM requests, and the kernel then brings it online (`memhp_default_state=online`), memory
//! block by memory block. A uevent reports each block (Documentation/ABI/testing/sysfs-devices-memory), so
//! nothing is polled.

use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::netlink::{KOBJECT_UEVENT, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, bind, recv, socket_with};

use crate::error::{Error, Result, WithContext};
use crate::warning;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// The smallest part of a memory block that virtio-mem can plug: the largest buddy page of Linux 6.1 (2 MiB in
/// later kernels).
const PLUGGABLE: u64 = 4 * MIB;
/// Limit for the kernel to bring plugged memory online.
const TIMEOUT: Duration = Duration::from_secs(10);
/// End of a PC's MMIO hole, where memory continues.
const HOLE_END: u64 = 4 * GIB;

/// The paths at which CPUs and memory are brought online, and the limit for that.
#[derive(Debug)]
pub struct Hotplug {
    system: PathBuf,
    iomem: PathBuf,
    patience: Duration,
}

impl Default for Hotplug {
    fn default() -> Self {
        Hotplug {
            system: "/sys/devices/system".into(),
            iomem: "/proc/iomem".into(),
            patience: TIMEOUT,
        }
    }
}

impl Hotplug {
    /// Brings CPUs 0 to `count - 1` online. Others that are online stay online.
    ///
    /// One at a time: the kernel's hotplug lock admits one caller, and makes every other sleep for 5 ms.
    pub fn cpus(&self, count: u8) -> Result<()> {
        let missing: Vec<String> = (1..count)
            .filter_map(|n| {
                let path = self.system.join(format!("cpu/cpu{n}/online"));
                let outcome = match fs::read_to_string(&path) {
                    Ok(text) if text.trim() == "1" => Ok(()),
                    Ok(_) => fs::write(&path, "1"),
                    Err(e) => Err(e),
                };
                match outcome {
                    Ok(()) => None,
                    Err(e) if e.kind() == ErrorKind::NotFound => {
                        Some(format!("cpu{n} (not in this machine)"))
                    }
                    Err(e) => Some(format!("cpu{n} ({e})")),
                }
            })
            .collect();
        if missing.is_empty() {
            return Ok(());
        }
        Err(Error::State(format!(
            "could not be brought online, of {count} CPUs: {}",
            missing.join(", ")
        )))
    }

    /// Waits until `mib` MiB of memory are online, including boot memory. Does not wait for a part of a memory
    /// block that virtio-mem cannot plug, nor for growth within a block that is online already, which the
    /// kernel does not report.
    pub fn memory(&self, mib: u32) -> Result<()> {
        let boot = self.boot_memory()?;
        let wanted = u64::from(mib) * MIB;
        if wanted < boot.size {
            warning!(
                "memory: {mib} MiB were requested, but this guest was booted with {} MiB",
                boot.size / MIB
            );
        }
        let plugged = wanted.saturating_sub(boot.size) / PLUGGABLE * PLUGGABLE;
        if plugged == 0 {
            return Ok(());
        }
        let block = self.block_size()?;
        let needed = plugged.div_ceil(block) as usize;
        let first = boot.end.div_ceil(block);
        if self.online_blocks(first).len() >= needed {
            return Ok(());
        }
        // The socket is opened before the blocks are checked again, so that none comes online unnoticed in
        // between.
        let events = uevents()?;
        let mut online = self.online_blocks(first);
        let end = Instant::now() + self.patience;
        while online.len() < needed {
            if !wait_for(&events, end)? {
                return Err(Error::State(format!(
                    "memory: {} MiB of the {} MiB to be plugged came online within {} s (virtio-mem, memhp_default_state=online)",
                    (online.len() as u64 * block / MIB).min(plugged / MIB),
                    plugged / MIB,
                    self.patience.as_secs_f32()
                )));
            }
            if !follow(&events, first, &mut online)? {
                // Events were lost.
                online = self.online_blocks(first);
            }
        }
        Ok(())
    }

    fn boot_memory(&self) -> Result<BootMemory> {
        let text =
            fs::read_to_string(&self.iomem).with_context(|| format!("read {}", self.iomem.display()))?;
        boot_memory(&text).ok_or_else(|| {
            Error::State(format!(
                "{} lists no memory: is this PID 1 of a guest?",
                self.iomem.display()
            ))
        })
    }

    fn block_size(&self) -> Result<u64> {
        let path = self.system.join("memory/block_size_bytes");
        let text = fs::read_to_string(&path)
            .with_context(|| format!("read {} (CONFIG_MEMORY_HOTPLUG)", path.display()))?;
        u64::from_str_radix(text.trim(), 16)
            .ok()
            .filter(|size| *size != 0)
            .ok_or_else(|| Error::State(format!("{}: {text:?} is not a size", path.display())))
    }

    /// The memory blocks from number `first` on that are online.
    fn online_blocks(&self, first: u64) -> BTreeSet<u64> {
        let dir = self.system.join("memory");
        let entries = fs::read_dir(&dir).into_iter().flatten().flatten();
        entries
            .filter_map(|e| e.file_name().to_str()?.strip_prefix("memory")?.parse().ok())
            .filter(|n| *n >= first && is_online(&dir, *n))
            .collect()
    }
}

fn is_online(dir: &Path, block: u64) -> bool {
    fs::read_to_string(dir.join(format!("memory{block}/state"))).is_ok_and(|s| s.trim() == "online")
}

/// The memory with which the kernel was booted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct BootMemory {
    /// In bytes, including what the firmware reserves.
    size: u64,
    /// The first address above it.
    end: u64,
}

/// Reads `/proc/iomem`: the outermost `System RAM` entries. Plugged memory has another name.
fn boot_memory(iomem: &str) -> Option<BootMemory> {
    let ends = iomem.lines().filter_map(|line| {
        let range = line.strip_suffix(" : System RAM")?;
        let (_, last) = range.split_once('-')?;
        u64::from_str_radix(last, 16).ok()?.checked_add(1)
    });
    let (low, high): (Vec<u64>, Vec<u64>) = ends.partition(|end| *end <= HOLE_END);
    let low = low.into_iter().max().filter(|end| *end > 1)?;
    let high = high.into_iter().max();
    Some(BootMemory {
        size: low + high.map_or(0, |end| end - HOLE_END),
        end: high.unwrap_or(low),
    })
}

/// A socket that receives all of the kernel's uevents.
fn uevents() -> Result<OwnedFd> {
    let socket = socket_with(
        AddressFamily::NETLINK,
        SocketType::DGRAM,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        Some(KOBJECT_UEVENT),
    )
    .with_context(|| "open a socket for uevents".into())?;
    // Group 1 is the kernel's own.
    bind(&socket, &SocketAddrNetlink::new(0, 1)).with_context(|| "listen for uevents".into())?;
    Ok(socket)
}

/// Waits for an event; returns false at `end`.
fn wait_for(events: &OwnedFd, end: Instant) -> Result<bool> {
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let most = Timespec {
            tv_sec: left.as_secs() as i64,
            tv_nsec: i64::from(left.subsec_nanos()),
        };
        match poll(&mut [PollFd::new(events, PollFlags::IN)], Some(&most)) {
            Ok(0) => return Ok(false),
            Ok(_) => return Ok(true),
            Err(Errno::INTR) => {}
            Err(e) => return Err(e).with_context(|| "wait for uevents".into()),
        }
    }
}

/// Applies the pending events to `online`; returns false if the kernel dropped some.
fn follow(events: &OwnedFd, first: u64, online: &mut BTreeSet<u64>) -> Result<bool> {
    let mut buffer = [0u8; 4096];
    loop {
        match recv(events, &mut buffer[..], RecvFlags::empty()) {
            Ok((length, _)) => match memory_event(&buffer[..length]) {
                Some((block, true)) if block >= first => drop(online.insert(block)),
                Some((block, false)) => drop(online.remove(&block)),
                _ => {}
            },
            Err(Errno::AGAIN) => return Ok(true),
            Err(Errno::NOBUFS) => return Ok(false),
            Err(Errno::INTR) => {}
            Err(e) => return Err(e).with_context(|| "receive a uevent".into()),
        }
    }
}

/// The memory block that a uevent (`ACTION@DEVPATH`, then NUL and more) reports as online or offline.
fn memory_event(event: &[u8]) -> Option<(u64, bool)> {
    let header = std::str::from_utf8(event.split(|b| *b == 0).next()?).ok()?;
    let (action, path) = header.split_once('@')?;
    let block = path.strip_prefix("/devices/system/memory/memory")?.parse().ok()?;
    match action {
        "online" => Some((block, true)),
        "offline" | "remove" => Some((block, false)),
        _ => None,
    }
}

#[cfg(test)]
#[path = "hotplug_test.rs"]
mod tests;
