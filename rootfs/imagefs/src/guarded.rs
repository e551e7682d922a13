//! Mapped files whose pages may be lost: truncated by another process, or on a failing medium.
//!
//! Reading a lost page raises SIGBUS, which would end the process and all its guests. In a *guarded* mapping the page is replaced by zeros
//! instead. For ready bits that means "not ready", which is always safe. For metadata, zeros could be taken for content; so the loss is
//! recorded ([`metadata_lost`]) and the server answers with an error from then on. A SIGBUS elsewhere ends the process as usual, because
//! guest memory must never be made up.
#![allow(unsafe_code)]

use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Most mappings guarded at once. Further ones are not guarded.
const SLOTS: usize = 1024;
const PAGE: usize = 4096;

/// The meaning of zeros in a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Bits. An unset bit is always safe.
    Bits,
    Metadata,
}

/// A guarded range. It is free while `end` is 0. While only `start` is 0, it is being set up or removed.
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

/// Whether a page of mapped metadata was ever lost in this process. Metadata read since then may be wrong.
pub fn metadata_lost() -> bool {
    METADATA_LOST.load(Ordering::Acquire)
}

/// The guard of a mapping. It must be dropped before the mapping is unmapped.
#[derive(Debug)]
pub struct Guard(Option<usize>);

impl Guard {
    /// Guards `length` bytes from `start`: a whole mapping that is only read.
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

/// Installs the handler: from now on this process survives lost pages in guarded mappings.
pub fn install() -> io::Result<()> {
    // SAFETY: an all-zero sigaction is valid, and its fields are set below; `lost` only does what a signal handler may.
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

/// The handler. It uses only atomics and system calls.
extern "C" fn lost(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid siginfo; for SIGBUS it has an address, which is only compared.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    let slot = GUARDED.iter().find(|slot| {
        let start = slot.start.load(Ordering::Acquire);
        start != 0 && (start..slot.end.load(Ordering::Acquire)).contains(&address)
    });
    let Some(slot) = slot.filter(|_| code == libc::BUS_ADRERR) else {
        // The page is in no guarded mapping: the access is repeated, and ends the process as without this handler.
        // SAFETY: SIG_DFL is a valid disposition.
        unsafe { libc::signal(libc::SIGBUS, libc::SIG_DFL) };
        return;
    };
    if slot.metadata.load(Ordering::Acquire) {
        METADATA_LOST.store(true, Ordering::Release);
    }
    let page = address & !(PAGE - 1);
    // SAFETY: the page lies in a guarded mapping, which is only read and is unmapped after its guard has ended; zeros replace bytes that
    // cannot be read. errno is restored for the interrupted code.
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
