//! A range of this process's address space behind a read-only memslot: pmem windows, the virtio-fs DAX window.
//!
//! The whole range is always mapped: private pages of files where something was mapped, zero pages elsewhere. So a
//! guest that reads where nothing is mapped sees zeros, and its memslot never has to change.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;

use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

use crate::layout::Window;

const PAGE: u64 = 4096;

/// A reserved range, and the guest addresses it is for. Unmapped when dropped: whoever drops it has seen to it that
/// no vCPU runs any more.
#[derive(Debug)]
pub struct HostWindow {
    window: Window,
    base: NonNull<u8>,
}

// SAFETY: the pointer is only an address; the memory behind it is changed by mmap calls alone, which are atomic to
// other threads, and is never borrowed as a Rust reference.
unsafe impl Send for HostWindow {}
// SAFETY: as above.
unsafe impl Sync for HostWindow {}

/// Why a range could not be mapped.
#[derive(Debug, thiserror::Error)]
pub enum WindowError {
    /// The range is not whole pages inside the window.
    #[error("range {offset:#x}+{length:#x} is not whole pages inside the window of {size:#x} bytes")]
    Range { offset: u64, length: u64, size: u64 },
    /// mmap failed.
    #[error("mmap: {0}")]
    Map(#[from] io::Error),
}

impl HostWindow {
    /// Reserves the range, all zero pages. Costs address space only.
    pub fn reserve(window: Window) -> Result<HostWindow, WindowError> {
        check(window.size, 0, window.size)?;
        // SAFETY: no address is asked for, so no existing mapping is touched.
        let base = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                window.size as usize,
                ProtFlags::READ,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }
        .map_err(io::Error::from)?;
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mapped at address zero"))?;
        Ok(HostWindow { window, base })
    }

    /// The guest addresses of the window.
    pub fn window(&self) -> Window {
        self.window
    }

    /// Where the window is in this process, for its memslot.
    pub fn host_address(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Maps `length` bytes of `file` from `file_offset` at `offset` of the window, private and read-only, over what was
    /// there. All three are multiples of 4096. Reading past the file's end is a bus error: map whole pages of it only.
    pub fn map(&self, offset: u64, length: u64, file: BorrowedFd<'_>, file_offset: u64) -> Result<(), WindowError> {
        check(self.window.size, offset, length)?;
        if !file_offset.is_multiple_of(PAGE) {
            return Err(WindowError::Range { offset: file_offset, length, size: self.window.size });
        }
        // SAFETY: the range lies inside the mapping this object owns (checked), and nothing borrows from it.
        unsafe {
            mmap(
                self.base.as_ptr().add(offset as usize).cast(),
                length as usize,
                ProtFlags::READ,
                MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE,
                file.as_fd(),
                file_offset,
            )
        }
        .map_err(io::Error::from)?;
        Ok(())
    }

    /// Makes `length` bytes at `offset` zero pages again.
    pub fn clear(&self, offset: u64, length: u64) -> Result<(), WindowError> {
        check(self.window.size, offset, length)?;
        // SAFETY: as in `map`.
        unsafe {
            mmap_anonymous(
                self.base.as_ptr().add(offset as usize).cast(),
                length as usize,
                ProtFlags::READ,
                MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE,
            )
        }
        .map_err(io::Error::from)?;
        Ok(())
    }

    /// Copies bytes out, for tests and checks.
    #[cfg(test)]
    pub fn read(&self, offset: u64, length: usize) -> Vec<u8> {
        check(self.window.size, offset & !(PAGE - 1), PAGE).unwrap();
        assert!(offset + length as u64 <= self.window.size);
        let mut bytes = vec![0u8; length];
        // SAFETY: the range lies inside the mapping (asserted), which is always readable.
        unsafe { std::ptr::copy_nonoverlapping(self.base.as_ptr().add(offset as usize), bytes.as_mut_ptr(), length) };
        bytes
    }
}

impl Drop for HostWindow {
    fn drop(&mut self) {
        // SAFETY: the mapping is this object's own and nothing borrows from it.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.window.size as usize) };
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

    use super::*;

    const WINDOW: Window = Window { start: 1 << 30, size: 4 * PAGE };

    #[test]
    fn a_window_is_zero_until_mapped_and_zero_again_when_cleared() {
        let window = HostWindow::reserve(WINDOW).unwrap();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[7; 2 * PAGE as usize]).unwrap();
        assert_eq!(window.read(PAGE, 16), [0; 16]);
        window.map(PAGE, PAGE, file.as_fd(), PAGE).unwrap();
        assert_eq!(window.read(PAGE, 16), [7; 16]);
        assert_eq!(window.read(0, 16), [0; 16]);
        assert_eq!(window.read(2 * PAGE, 16), [0; 16]);
        window.clear(PAGE, PAGE).unwrap();
        assert_eq!(window.read(PAGE, 16), [0; 16]);
    }

    #[test]
    fn ranges_outside_or_across_page_bounds_are_refused() {
        let window = HostWindow::reserve(WINDOW).unwrap();
        let file = tempfile::tempfile().unwrap();
        for (offset, length) in
            [(0, 0), (0, 5 * PAGE), (4 * PAGE, PAGE), (1, PAGE), (0, 1), (u64::MAX - PAGE + 1, PAGE)]
        {
            assert!(matches!(window.map(offset, length, file.as_fd(), 0), Err(WindowError::Range { .. })));
            assert!(matches!(window.clear(offset, length), Err(WindowError::Range { .. })));
        }
        assert!(matches!(window.map(0, PAGE, file.as_fd(), 1), Err(WindowError::Range { .. })));
    }
}
