//! A VMM's page tables, from which it learns which of its memory is its own (proc(5)).
//!
//! Invariant: the descriptor shows a VMM no physical addresses. The kernel shows them to readers of a descriptor whose *opener*
//! had CAP_SYS_ADMIN (Documentation/admin-guide/mm/pagemap.rst), so a thread without that capability opens it.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};
use thaw_pools::process::ProcessRecord;

use crate::error::{Error, ErrorKind};

/// Opens the pagemap of a VMM.
pub(super) fn pagemap(vmm: Option<ProcessRecord>) -> Result<OwnedFd, Error> {
    let vmm = vmm.ok_or_else(|| Error::new(ErrorKind::VmmFailed, "thaw-vmm has ended"))?;
    let path = format!("/proc/{}/pagemap", vmm.pid);
    let file = open_without_admin(Path::new(&path));
    Ok(file
        .map_err(|e| Error::system(format!("cannot open {path}"), &e))?
        .into())
}

/// Opens a file for reading on a separate thread that drops CAP_SYS_ADMIN. The thread keeps the capabilities to read another user's process
/// (CAP_SYS_PTRACE, CAP_DAC_READ_SEARCH).
fn open_without_admin(path: &Path) -> io::Result<File> {
    let open = || {
        let held = capabilities(None)?;
        let without = |set: CapabilitySet| set.difference(CapabilitySet::SYS_ADMIN);
        let kept = CapabilitySets {
            effective: without(held.effective),
            permitted: without(held.permitted),
            inheritable: without(held.inheritable),
        };
        set_capabilities(None, kept)?;
        File::open(path)
    };
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("pagemap".into());
        let opened = thread.spawn_scoped(scope, open)?.join();
        opened.unwrap_or_else(|_| Err(io::Error::other("the thread that opens it panicked")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    /// Bits 0 to 54 of a present page: its frame.
    const FRAME: u64 = (1 << 55) - 1;
    const PRESENT: u64 = 1 << 63;

    /// The entry for the page at this address.
    fn entry(pagemap: &File, address: usize) -> u64 {
        let mut entry = [0; 8];
        pagemap
            .read_exact_at(&mut entry, address as u64 / 4096 * 8)
            .unwrap();
        u64::from_ne_bytes(entry)
    }

    #[test]
    fn pagemap_shows_pages_without_their_frames() {
        let path = Path::new("/proc/self/pagemap");
        let page = vec![7u8; 8192];
        let address = page.as_ptr() as usize;
        let (ours, plain) = (open_without_admin(path).unwrap(), File::open(path).unwrap());
        let (shown, all) = (entry(&ours, address), entry(&plain, address));
        assert_eq!((shown & PRESENT, shown & FRAME), (PRESENT, 0));
        assert_eq!(shown & !FRAME, all & !FRAME, "all else is shown");
        if all & FRAME == 0 {
            thaw_test_skip::skip("nobody shows frames to this user");
        }
        let held = capabilities(None).unwrap();
        drop(open_without_admin(path).unwrap());
        assert_eq!(capabilities(None).unwrap().effective, held.effective);
    }
}
