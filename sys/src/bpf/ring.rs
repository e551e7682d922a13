//! A ring buffer (`BPF_MAP_TYPE_RINGBUF`) that programs write events to and this process reads.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::{MAP_CREATE, MapCreate, bpf, descriptor};

const MAP_TYPE_RINGBUF: u32 = 27;
const PAGE: usize = 4096;
/// Bytes of the ring.
const RING: usize = 4 * PAGE;
/// Bytes before each event: its length in four bytes, and four more.
const HEAD: usize = 8;
/// Flag in the length: the event is being written.
const BUSY: u32 = 1 << 31;

/// A ring of 16 KiB. Every event is `WORDS` words of 32 bits; programs drop events that do not fit.
#[derive(Debug)]
pub struct Ring<const WORDS: usize> {
    /// A page that begins with how far we have read, bytes.
    read: *mut std::ffi::c_void,
    /// A page that begins with how far the ring is written; then the ring, twice, so that every event is contiguous.
    written: *mut std::ffi::c_void,
}

// SAFETY: the pages belong to this value, whichever thread has it.
unsafe impl<const WORDS: usize> Send for Ring<WORDS> {}

impl<const WORDS: usize> Ring<WORDS> {
    /// Bytes of an event: with its head a multiple of eight, as the kernel aligns heads.
    const EVENT: usize = {
        assert!(WORDS.is_multiple_of(2));
        WORDS * 4
    };

    /// Creates a ring and its descriptor, which is readable while the ring has an event, and to which programs write
    /// ([`super::assembler::Assembler::load_map`]).
    pub fn new() -> io::Result<(OwnedFd, Self)> {
        let map = MapCreate {
            kind: MAP_TYPE_RINGBUF,
            key_size: 0,
            value_size: 0,
            entries: RING as u32,
            flags: 0,
        };
        let map = bpf(MAP_CREATE, &map).map(descriptor)?;
        let both = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses; only the kernel shares the page.
        let read = unsafe { mmap(std::ptr::null_mut(), PAGE, both, MapFlags::SHARED, &map, 0) }?;
        let (size, at) = (PAGE + 2 * RING, PAGE as u64);
        // SAFETY: likewise.
        let written = unsafe {
            mmap(
                std::ptr::null_mut(),
                size,
                ProtFlags::READ,
                MapFlags::SHARED,
                &map,
                at,
            )
        };
        let written = written.inspect_err(|_| {
            // SAFETY: it was mapped above, and nothing refers to it.
            let _ = unsafe { munmap(read, PAGE) };
        })?;
        Ok((map, Ring { read, written }))
    }

    /// Takes the oldest event.
    pub fn take(&mut self) -> Option<[u32; WORDS]> {
        // SAFETY: both pages begin with eight aligned bytes that are read and written whole; they live as long as `self`.
        let (read, written) = unsafe {
            (
                AtomicU64::from_ptr(self.read.cast()),
                AtomicU64::from_ptr(self.written.cast()),
            )
        };
        let at = read.load(Ordering::Relaxed);
        if at >= written.load(Ordering::Acquire) {
            return None;
        }
        // SAFETY: a head is below the ring's end, and the ring is mapped behind itself: all of an event is mapped.
        let head = unsafe { self.written.byte_add(PAGE + at as usize % RING) };
        // SAFETY: heads are aligned to eight bytes; the kernel may be writing this one.
        let length = unsafe { AtomicU32::from_ptr(head.cast()) }.load(Ordering::Acquire);
        if length & BUSY != 0 {
            // Its writer wakes us when it is whole.
            return None;
        }
        // SAFETY: programs write events of this length, and an event is not overwritten before it is taken.
        let event = unsafe { head.byte_add(HEAD).cast::<[u32; WORDS]>().read() };
        read.store(at + (HEAD + Self::EVENT) as u64, Ordering::Release);
        Some(event)
    }
}

impl<const WORDS: usize> Drop for Ring<WORDS> {
    fn drop(&mut self) {
        // SAFETY: they were mapped with these lengths, and nothing borrows them.
        unsafe {
            let _ = munmap(self.read, PAGE);
            let _ = munmap(self.written, PAGE + 2 * RING);
        }
    }
}
