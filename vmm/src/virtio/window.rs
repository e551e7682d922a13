//! A range of guest addresses behind one read-only memslot: the pmem windows and the virtio-fs DAX window.
//!
//! The whole range is always mapped: private pages of files in mapped parts, zero pages elsewhere. So a guest reads zeros from unmapped
//! parts, and the memslot, whose registration is slow, never changes.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous};
use vm_memory::{GuestAddress, GuestRegionMmap, MmapRegion};

use crate::layout::Window;

const PAGE: u64 = 4096;

/// A reserved range of this process's address space, for a window of guest addresses.
#[derive(Debug)]
pub struct HostWindow {
    window: Window,
    region: Arc<GuestRegionMmap<()>>,
}

/// Why a range could not be mapped.
#[derive(Debug, thiserror::Error)]
pub enum WindowError {
    /// The range is not whole pages inside the window.
    #[error("range {offset:#x}+{length:#x} is not whole pages inside the window of {size:#x} bytes")]
    Range { offset: u64, length: u64, size: u64 },
    /// The address space could not be reserved.
    #[error("cannot reserve {size:#x} bytes of address space: {error}")]
    Reserve {
        size: u64,
        error: vm_memory::mmap::MmapRegionError,
    },
    /// mmap failed.
    #[error("mmap: {0}")]
    Map(#[from] io::Error),
}

impl HostWindow {
    /// Reserves the range and maps zero pages. Costs only address space.
    pub fn reserve(window: Window) -> Result<HostWindow, WindowError> {
        check(window.size, 0, window.size)?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let mapping =
            MmapRegion::build(None, window.size as usize, libc::PROT_READ, flags).map_err(|error| {
                WindowError::Reserve {
                    size: window.size,
                    error,
                }
            })?;
        let region = GuestRegionMmap::new(mapping, GuestAddress(window.start)).ok_or(WindowError::Range {
            offset: window.start,
            length: window.size,
            size: u64::MAX,
        })?;
        Ok(HostWindow {
            window,
            region: Arc::new(region),
        })
    }

    /// The guest addresses of the window.
    pub fn window(&self) -> Window {
        self.window
    }

    /// The mapping, for its memslot. It may only be read.
    pub fn region(&self) -> &Arc<GuestRegionMmap<()>> {
        &self.region
    }

    /// Maps `length` bytes of `file` from `file_offset` at `offset` of the window, private and read-only, replacing what was there. All
    /// three must be multiples of 4096. Reading a page that lies completely past the file's end is a bus error.
    pub fn map(
        &self,
        offset: u64,
        length: u64,
        file: BorrowedFd<'_>,
        file_offset: u64,
    ) -> Result<(), WindowError> {
        check(self.window.size, offset, length)?;
        if !file_offset.is_multiple_of(PAGE) {
            return Err(WindowError::Range {
                offset: file_offset,
                length,
                size: self.window.size,
            });
        }
        let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
        // SAFETY: the range lies inside the mapping `region` owns (checked). No Rust reference points into it: the
        // guest reads it, and this process only through volatile accesses.
        unsafe {
            mmap(
                self.at(offset),
                length as usize,
                ProtFlags::READ,
                flags,
                file,
                file_offset,
            )
        }
        .map_err(io::Error::from)?;
        Ok(())
    }

    /// Replaces `length` bytes at `offset` by zero pages.
    pub fn clear(&self, offset: u64, length: u64) -> Result<(), WindowError> {
        check(self.window.size, offset, length)?;
        let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
        // SAFETY: as in `map`.
        unsafe { mmap_anonymous(self.at(offset), length as usize, ProtFlags::READ, flags) }
            .map_err(io::Error::from)?;
        Ok(())
    }

    /// The host address of `offset`, which must be inside the window.
    fn at(&self, offset: u64) -> *mut std::ffi::c_void {
        self.region.as_ptr().wrapping_add(offset as usize).cast()
    }
}

fn check(size: u64, offset: u64, length: u64) -> Result<(), WindowError> {
    let inside = offset.checked_add(length).is_some_and(|end| end <= size);
    if length == 0 || !inside || !offset.is_multiple_of(PAGE) || !length.is_multiple_of(PAGE) {
        return Err(WindowError::Range { offset, length, size });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsFd;

    use vm_memory::{Bytes, MemoryRegionAddress};

    use super::*;

    const WINDOW: Window = Window {
        start: 1 << 30,
        size: 4 * PAGE,
    };

    fn byte(window: &HostWindow, offset: u64) -> u8 {
        window.region().read_obj(MemoryRegionAddress(offset)).unwrap()
    }

    #[test]
    fn a_window_is_zero_until_mapped_and_zero_again_when_cleared() {
        let window = HostWindow::reserve(WINDOW).unwrap();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[7; 2 * PAGE as usize]).unwrap();
        assert_eq!(byte(&window, PAGE), 0);
        window.map(PAGE, PAGE, file.as_fd(), PAGE).unwrap();
        assert_eq!(
            (byte(&window, 0), byte(&window, PAGE), byte(&window, 2 * PAGE)),
            (0, 7, 0)
        );
        window.clear(PAGE, PAGE).unwrap();
        assert_eq!(byte(&window, PAGE), 0);
    }

    #[test]
    fn ranges_outside_or_across_page_bounds_are_refused() {
        let window = HostWindow::reserve(WINDOW).unwrap();
        let file = tempfile::tempfile().unwrap();
        let bad = [
            (0, 0),
            (0, 5 * PAGE),
            (4 * PAGE, PAGE),
            (1, PAGE),
            (0, 1),
            (u64::MAX - PAGE + 1, PAGE),
        ];
        for (offset, length) in bad {
            assert!(matches!(
                window.map(offset, length, file.as_fd(), 0),
                Err(WindowError::Range { .. })
            ));
            assert!(matches!(
                window.clear(offset, length),
                Err(WindowError::Range { .. })
            ));
        }
        assert!(matches!(
            window.map(0, PAGE, file.as_fd(), 1),
            Err(WindowError::Range { .. })
        ));
    }
}
