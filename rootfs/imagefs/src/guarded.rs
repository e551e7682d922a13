//! Mapped files whose pages may be lost: truncated by another process, or on a failing medium.
//!
//! Reading a lost page raises SIGBUS, which would end the process and all its guests. A *guarded* mapping gets a page
//! of zeros instead. For ready bits that means "not ready", which is always right. For metadata, zeros could be taken
//! for content, so the loss is recorded ([`metadata_lost`]) and the server answers with an error from then on. A SIGBUS
//! elsewhere ends the process as usual: guest memory is never made up.
#![allow(unsafe_code)]

use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Mappings guarded at once; more go unguarded.
const SLOTS: usize = 1024;
const PAGE: usize = 4096;

/// What zeros in a mapping mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Bits of which an unset one is never wrong.
    Bits,
    Metadata,
}

/// A guarded range: free while `end` is 0, being set up or torn down while `start` is.
struct Slot {
    start: AtomicUsize,
    end: AtomicUsize,
    metadata: AtomicBool,
}

static GUARDED: [Slot; SLOTS] = [const {
    Slot {
        start: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
        metadata: AtomicBool::new(false),
    }
}; SLOTS];

static METADATA_LOST: AtomicBool = AtomicBool::new(false);

/// Whether a page of mapped metadata was ever lost to this process: what was read from it since may be wrong.
pub fn metadata_lost() -> bool {
    METADATA_LOST.load(Ordering::Acquire)
}

/// A mapping's guard; dropped before the mapping is unmapped, it ends.
#[derive(Debug)]
pub struct Guard(Option<usize>);

impl Guard {
    /// Guards `length` bytes from `start`, a whole mapping that is only read.
    pub fn new(start: NonNull<u8>, length: usize, content: Content) -> Guard {
        let (start, end) = (start.as_ptr() as usize, start.as_ptr() as usize + length);
        let claimed = GUARDED.iter().position(|slot| {
            slot.end
                .compare_exchange(0, end, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
        });
        if let Some(slot) = claimed.map(|index| &GUARDED[index]) {
            slot.metadata
                .store(content == Content::Metadata, Ordering::Release);
            slot.start.store(start, Ordering::Release);
        }
        Guard(claimed)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some(slot) = self.0.map(|index| &GUARDED[index]) {
            slot.start.store(0, Ordering::Release);
            slot.end.store(0, Ordering::Release);
        }
    }
}

/// Has guarded mappings survive the loss of their pages, in this process from now on.
pub fn install() -> io::Result<()> {
    // SAFETY: an all-zero sigaction is a valid one, whose fields are then set; `lost` keeps to what a handler may do.
    let done = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = lost as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut())
    };
    match done {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The handler: only atomics and system calls.
extern "C" fn lost(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid siginfo; of a SIGBUS it has an address, which is only compared.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    let slot = GUARDED.iter().find(|slot| {
        let start = slot.start.load(Ordering::Acquire);
        start != 0 && (start..slot.end.load(Ordering::Acquire)).contains(&address)
    });
    let Some(slot) = slot.filter(|_| code == libc::BUS_ADRERR) else {
        // Not ours: the access is made again, and ends the process as it would have.
        // SAFETY: SIG_DFL is a valid disposition.
        unsafe { libc::signal(libc::SIGBUS, libc::SIG_DFL) };
        return;
    };
    if slot.metadata.load(Ordering::Acquire) {
        METADATA_LOST.store(true, Ordering::Release);
    }
    let page = address & !(PAGE - 1);
    // SAFETY: the page lies in a guarded mapping, which is only read and is unmapped after its guard has ended; zeros take
    // the place of what cannot be read. errno is put back for the code that was interrupted.
    unsafe {
        let errno = *libc::__errno_location();
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        let mapped = libc::mmap(page as *mut libc::c_void, PAGE, libc::PROT_READ, flags, -1, 0);
        let what = b"a page of an image's mapped file is gone: it was cut, or cannot be read\n";
        libc::write(2, what.as_ptr().cast(), what.len());
        if mapped == libc::MAP_FAILED {
            libc::signal(libc::SIGBUS, libc::SIG_DFL);
        }
        *libc::__errno_location() = errno;
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write;

    use rustix::mm::{MapFlags, ProtFlags, mmap};

    use super::*;

    fn mapped(file: &File, length: usize) -> NonNull<u8> {
        // SAFETY: a new mapping at an address the kernel chooses.
        let start = unsafe {
            mmap(
                std::ptr::null_mut(),
                length,
                ProtFlags::READ,
                MapFlags::SHARED,
                file,
                0,
            )
        };
        NonNull::new(start.unwrap().cast()).unwrap()
    }

    fn byte(start: NonNull<u8>, at: usize) -> u8 {
        // SAFETY: within the mapping of the test, which is never unmapped.
        unsafe { start.as_ptr().add(at).read_volatile() }
    }

    #[test]
    fn lost_pages_are_zeros_and_metadata_is_known_to_be_lost() {
        install().unwrap();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[7; 3 * PAGE]).unwrap();
        let bits = mapped(&file, 3 * PAGE);
        let _bits = Guard::new(bits, 3 * PAGE, Content::Bits);
        let metadata = mapped(&file, 3 * PAGE);
        let guard = Guard::new(metadata, 3 * PAGE, Content::Metadata);
        file.set_len(PAGE as u64).unwrap();
        assert_eq!((byte(bits, 0), byte(bits, PAGE + 1)), (7, 0));
        assert!(!metadata_lost());
        assert_eq!((byte(metadata, 0), byte(metadata, 2 * PAGE)), (7, 0));
        assert!(metadata_lost());
        drop(guard);
        assert!(
            GUARDED
                .iter()
                .all(|slot| slot.start.load(Ordering::Relaxed) != metadata.as_ptr() as usize)
        );
    }
}
