//! The table of this process's descriptors.
//!
//! It grows by doubling. In a process of several threads, whoever opens the descriptor for which it grows waits for a grace period of RCU, 10 ms
//! or more (`expand_fdtable` in the kernel's fs/file.c). So a process makes room before it has threads.

use std::io;
use std::os::fd::RawFd;

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::fcntl_dupfd_cloexec;

/// Makes room for this many descriptors, 8 bytes each. To be called while there is one thread.
///
/// # Errors
/// The process may not have as many.
pub fn make_room(descriptors: RawFd) -> io::Result<()> {
    let any = eventfd(0, EventfdFlags::CLOEXEC)?;
    fcntl_dupfd_cloexec(&any, descriptors - 1)?;
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
            size.unwrap().trim().parse::<RawFd>().unwrap()
        };
        make_room(600).unwrap();
        assert!(size() >= 600);
        let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        let before = open();
        make_room(500).unwrap();
        assert_eq!(open(), before);
        assert!(make_room(RawFd::MAX).is_err());
    }
}
