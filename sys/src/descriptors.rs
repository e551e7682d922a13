//! The table of this process's descriptors.
//!
//! It grows by doubling. In a process of several threads, whoever opens the descriptor for which it grows waits for a grace period of RCU, 10 ms
//! or more (`expand_fdtable` in the kernel's fs/file.c). So a process makes room before it has threads.

use std::io;
use std::os::fd::RawFd;

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::fcntl_dupfd_cloexec;
use rustix::process::{Resource, getrlimit};

/// Makes room for this many descriptors, or for as many as the process may have if these are fewer. Each takes 8 bytes. To be called while there
/// is one thread.
///
/// # Errors
/// The process has as many descriptors as it may have.
pub fn make_room(descriptors: u32) -> io::Result<()> {
    let any = eventfd(0, EventfdFlags::CLOEXEC)?;
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let last = u64::from(descriptors).min(limit).saturating_sub(1);
    fcntl_dupfd_cloexec(&any, RawFd::try_from(last).unwrap_or(RawFd::MAX))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_has_room_for_what_was_asked() {
        let size = || {
            let status = std::fs::read_to_string("/proc/self/status").unwrap();
            let size = status.lines().find_map(|line| line.strip_prefix("FDSize:"));
            size.unwrap().trim().parse::<u32>().unwrap()
        };
        make_room(600).unwrap();
        assert!(size() >= 600);
        assert!(
            !std::fs::exists("/proc/self/fd/599").unwrap(),
            "a descriptor is left"
        );
    }
}
