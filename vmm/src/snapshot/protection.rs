//! Copies pages of guest memory before they change, for a freeze that writes memory while the guest runs.
//!
//! All memory of the machine is write-protected by a userfaultfd. A thread that writes to a protected page, be it a vCPU in the guest, KVM or
//! a device in a system call, waits until this module has lifted the page's protection:
//!
//! | step | what happens at a write |
//! |---|---|
//! | [`Step::Before`] the moment of the snapshot | the page is noted, because it must be protected again at that moment |
//! | [`Step::After`] it | the page is copied first |
//! | [`Step::Over`]: memory is written | nothing |
//!
//! Invariant: after the moment, a page either is protected and has the contents of that moment, or is *settled*: it is copied, or it is in the
//! file. A page is settled before its protection is lifted, both under the lock.
//!
//! At most [`COPIES`] copies exist, whatever the guest writes: then the thread that writes waits for [`Protection::take`]. The thread that
//! takes them may have to wait for that thread in turn, to pause it for example; it calls [`Protection::hurry`] first.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use thaw_sys::lock::Lock;
use vm_memory::{Address, GuestMemory as _, GuestMemoryRegion};

use super::bits::Bits;
use super::freeze::{is_zero, slice};
use super::userfault::{Mode, OpenError, Userfault, features};
use super::{PAGE, ranges};
use crate::jail::threads::{self, Thread};
use crate::memory::GuestMemory;

/// Most pages that are copied and not written to the file yet: 16 MiB.
pub const COPIES: usize = 4096;
/// Bytes protected, or released, by one call. The kernel keeps other threads from changing the address space meanwhile, and KVM forgets
/// its tables of these pages.
pub const SLICE: u64 = 4 << 20;

const FEATURES: u64 =
    features::WRITE_PROTECT | features::WRITE_PROTECT_FILES | features::WRITE_PROTECT_ABSENT;

/// Why memory cannot be protected.
#[derive(Debug, thiserror::Error)]
pub enum ProtectionError {
    #[error("{0} (write protection of guest memory needs Linux 6.4)")]
    Open(#[from] OpenError),
    #[error(
        "memory {guest_address:#x} ({size:#x} bytes) cannot be write-protected: {error}; it may be mapped from a file on a disk"
    )]
    Register {
        guest_address: u64,
        size: u64,
        error: io::Error,
    },
    #[error("changing the write protection of memory {guest_address:#x} ({size:#x} bytes): {error}")]
    Change {
        guest_address: u64,
        size: u64,
        error: io::Error,
    },
    #[error(
        "memory {guest_address:#x} ({size:#x} bytes) cannot be write-protected in time: this host is overloaded, or the sandbox has too \
         little CPU time"
    )]
    Slow { guest_address: u64, size: u64 },
    #[error("waiting for writes to protected memory: {0}")]
    Wait(io::Error),
}

/// What happens when a protected page is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Before,
    After,
    Over,
}

/// The protection of one machine's memory during one freeze.
#[derive(Debug)]
pub struct Protection {
    userfault: Userfault,
    memory: GuestMemory,
    /// The guest addresses that are protected.
    live: Vec<Range<u64>>,
    /// For each of `live`: the number of its first page, when all pages are counted.
    first: Vec<usize>,
    state: Mutex<State>,
    /// Signalled when one more copy may exist.
    room: Condvar,
    wake: Arc<OwnedFd>,
}

#[derive(Debug)]
struct State {
    step: Step,
    /// Pages written between their protection and the moment.
    written: Bits,
    settled: Bits,
    /// Settled pages that were zero at the moment.
    zero: Bits,
    /// Pages copied before they changed, oldest first.
    copies: VecDeque<CopiedPage>,
    /// Whether more than [`COPIES`] may exist.
    is_hurried: bool,
    /// Whether all protection is lifted.
    is_released: bool,
    failed: Option<ProtectionError>,
}

/// A page as it was at the moment.
#[derive(Debug, PartialEq, Eq)]
pub struct CopiedPage {
    pub guest_address: u64,
    /// `None` if it was zero.
    pub data: Option<Box<[u8; PAGE as usize]>>,
}

impl Protection {
    /// Registers `live`, the guest addresses that are memory now. Nothing is protected yet.
    pub fn new(
        device: BorrowedFd<'_>,
        memory: &GuestMemory,
        live: &[Range<u64>],
        wake: Arc<OwnedFd>,
    ) -> Result<Protection, ProtectionError> {
        let userfault = Userfault::new(device, FEATURES)?;
        let mut first = Vec::with_capacity(live.len());
        let mut pages = 0;
        for range in live {
            let (guest_address, size) = (range.start, range.end - range.start);
            userfault
                .register(memory, guest_address, size, Mode::WriteProtect)
                .map_err(|error| ProtectionError::Register {
                    guest_address,
                    size,
                    error,
                })?;
            first.push(pages);
            pages += (size / PAGE) as usize;
        }
        let bits = || Bits::new(pages);
        Ok(Protection {
            userfault,
            memory: memory.clone(),
            live: live.to_vec(),
            first,
            state: Mutex::new(State {
                step: Step::Before,
                written: bits(),
                settled: bits(),
                zero: bits(),
                copies: VecDeque::new(),
                is_hurried: false,
                is_released: false,
                failed: None,
            }),
            room: Condvar::new(),
            wake,
        })
    }

    /// Protects these pages, while the guest may run.
    pub fn protect(&self, range: &Range<u64>) -> Result<(), ProtectionError> {
        self.change(range, true)
    }

    /// Undoes [`Self::protect`], before the moment.
    pub fn unprotect(&self, range: &Range<u64>) -> Result<(), ProtectionError> {
        self.change(range, false)
    }

    /// The moment of the snapshot. Returns the pages that were written since they were protected. Nothing may write guest memory meanwhile.
    pub fn begin(&self) -> Result<Vec<Range<u64>>, ProtectionError> {
        let mut state = self.state();
        state.failed.take().map_or(Ok(()), Err)?;
        let mut written = Vec::new();
        for (range, first) in self.live.iter().zip(&self.first) {
            let pages = *first..first + ((range.end - range.start) / PAGE) as usize;
            for run in state.written.runs(pages, true) {
                let at = |number: usize| range.start + (number - first) as u64 * PAGE;
                let run = at(run.start)..at(run.end);
                self.change(&run, true)?;
                ranges::push(&mut written, run);
            }
        }
        state.step = Step::After;
        Ok(written)
    }

    /// Corrects what was read of pages that may have been written since the moment: `zeros[i]` tells whether page `i` of `range` is zero.
    pub fn correct(&self, range: &Range<u64>, zeros: &mut [bool]) {
        let Some(first) = self.number(range.start) else {
            return;
        };
        let state = self.state();
        for (page, is_zero) in zeros.iter_mut().enumerate() {
            if state.settled.get(first + page) {
                *is_zero = state.zero.get(first + page);
            }
        }
    }

    /// The pages within `range`, which lies in one range of live memory, whose contents are still those of the moment.
    pub fn unsettled(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        let Some(first) = self.number(range.start) else {
            return Vec::new();
        };
        let at = |number: usize| range.start + (number - first) as u64 * PAGE;
        let pages = first..first + ((range.end - range.start) / PAGE) as usize;
        let state = self.state();
        let runs = state.settled.runs(pages, false);
        runs.map(|run| at(run.start)..at(run.end)).collect()
    }

    /// The pages of `range` are in the file: from now on they may be written.
    pub fn settle(&self, range: &Range<u64>) -> Result<(), ProtectionError> {
        if let Some(first) = self.number(range.start) {
            let mut state = self.state();
            for page in 0..((range.end - range.start) / PAGE) as usize {
                state.settled.set(first + page);
            }
        }
        self.change(range, false)
    }

    /// The oldest copy. It must be written after all that was read from [`Self::unsettled`] memory before.
    ///
    /// # Errors
    /// The thread that makes the copies has failed.
    pub fn take(&self) -> Result<Option<CopiedPage>, ProtectionError> {
        let mut state = self.state();
        state.failed.take().map_or(Ok(()), Err)?;
        let copy = state.copies.pop_front();
        self.room.notify_all();
        Ok(copy)
    }

    /// Whether threads that write may exceed [`COPIES`] and so wait for nothing but their copy.
    pub fn hurry(&self, is_hurried: bool) {
        self.state().is_hurried = is_hurried;
        self.room.notify_all();
    }

    /// No more copies are needed. Those that exist can still be taken.
    pub fn end(&self) {
        self.state().step = Step::Over;
        self.room.notify_all();
    }

    /// Lifts all protection, after [`Self::end`]; again, does nothing. Piece by piece: closing the userfaultfd would do so under one lock of
    /// the address space.
    pub fn release(&self) {
        if self.state().is_released {
            return;
        }
        for slice in self.live.iter().flat_map(|range| slices(range, SLICE)) {
            let (guest_address, size) = (slice.start, slice.end - slice.start);
            let lifted = self
                .userfault
                .write_protect(&self.memory, guest_address, size, false)
                .and_then(|()| self.userfault.unregister(&self.memory, guest_address, size));
            if let Err(error) = lifted {
                // Closing it lifts the rest.
                tracing::debug!(%error, guest_address, "memory stays registered until the userfaultfd is closed");
            }
        }
        self.state().is_released = true;
        // Fails only if a wake-up is pending.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Resolves faults until [`Self::release`]. That may have been called before this: all protections share one eventfd, so the thread may have
    /// read the wake-up of this protection while it served an earlier one.
    fn serve(&self) {
        while !self.state().is_released {
            let mut ready = [
                PollFd::new(&self.userfault, PollFlags::IN),
                PollFd::new(&*self.wake, PollFlags::IN),
            ];
            let waited = match poll(&mut ready, None) {
                Err(rustix::io::Errno::INTR) => continue,
                waited => waited.map(drop).map_err(io::Error::from),
            };
            if !ready[1].revents().is_empty() {
                // Fails only if nothing is there.
                let _ = rustix::io::read(&self.wake, &mut [0u8; 8]);
            }
            let served = waited
                .map_err(ProtectionError::Wait)
                .and_then(|()| self.resolve_all());
            if let Err(error) = served {
                self.fail(error);
            }
        }
    }

    /// Ends this protection, so that the guest goes on, unless it has ended.
    fn fail(&self, error: ProtectionError) {
        let mut state = self.state();
        if state.is_released {
            return;
        }
        tracing::error!(%error, "a freeze fails");
        state.failed = Some(error);
        state.step = Step::Over;
        drop(state);
        self.release();
    }

    fn resolve_all(&self) -> Result<(), ProtectionError> {
        while let Some(host) = self.userfault.fault().map_err(ProtectionError::Wait)? {
            self.resolve(host & !(PAGE - 1))?;
        }
        Ok(())
    }

    /// Lets the page at this host address be written.
    fn resolve(&self, host: u64) -> Result<(), ProtectionError> {
        let guest_address = guest_address(&self.memory, host);
        let Some((guest_address, number)) = guest_address.and_then(|at| Some((at, self.number(at)?))) else {
            let error = io::Error::other(format!("a fault at {host:#x}, which is not guest memory"));
            return Err(ProtectionError::Wait(error));
        };
        let mut state = self.state();
        while state.step == Step::After && !state.settled.get(number) {
            if state.copies.len() >= COPIES && !state.is_hurried {
                state = self.room.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let copy = copy_of(&self.memory, guest_address)?;
            if copy.data.is_none() {
                state.zero.set(number);
            }
            state.copies.push_back(copy);
            state.settled.set(number);
        }
        if state.step == Step::Before {
            state.written.set(number);
        }
        // Under the lock: a page that is protected again at the moment must not lose its protection to an earlier write.
        let lifted = self.change(&(guest_address..guest_address + PAGE), false);
        match state.step {
            // It may be lifted already.
            Step::Over => Ok(()),
            _ => lifted,
        }
    }

    fn change(&self, range: &Range<u64>, protect: bool) -> Result<(), ProtectionError> {
        let (guest_address, size) = (range.start, range.end - range.start);
        self.userfault
            .write_protect(&self.memory, guest_address, size, protect)
            .map_err(|error| ProtectionError::Change {
                guest_address,
                size,
                error,
            })
    }

    /// The number of the page at this address, if it is live.
    fn number(&self, guest_address: u64) -> Option<usize> {
        let at = self.live.partition_point(|range| range.end <= guest_address);
        let inside = guest_address.checked_sub(self.live.get(at)?.start)?;
        Some(self.first[at] + (inside / PAGE) as usize)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.locked()
    }
}

fn copy_of(memory: &GuestMemory, guest_address: u64) -> Result<CopiedPage, ProtectionError> {
    let page = guest_address..guest_address + PAGE;
    let slice = slice(memory, &page).map_err(|error| ProtectionError::Wait(io::Error::other(error)))?;
    let data = (!is_zero(&slice)).then(|| {
        let mut bytes = Box::new([0u8; PAGE as usize]);
        slice.copy_to(&mut bytes[..]);
        bytes
    });
    Ok(CopiedPage { guest_address, data })
}

/// `range` in pieces of at most `size` bytes.
pub fn slices(range: &Range<u64>, size: u64) -> impl Iterator<Item = Range<u64>> + use<> {
    let Range { start, end } = *range;
    (start..end)
        .step_by(size as usize)
        .map(move |at| at..(at + size).min(end))
}

/// The guest address of a host address.
fn guest_address(memory: &GuestMemory, host: u64) -> Option<u64> {
    memory.iter().find_map(|region| {
        let inside = host.checked_sub(region.as_ptr() as u64)?;
        (inside < region.len()).then(|| region.start_addr().raw_value() + inside)
    })
}

/// The thread that copies pages before they change. It is made with the machine, because a sealed process starts no thread, and waits until
/// a freeze needs it.
pub struct Protector {
    /// `None` at the end.
    freezes: Option<SyncSender<Arc<Protection>>>,
    wake: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Protector {
    pub fn start() -> io::Result<Protector> {
        let wake = Arc::new(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?);
        let (freezes, wanted) = sync_channel::<Arc<Protection>>(1);
        let expected = threads::expect();
        let thread = Builder::new()
            .name("protection".into())
            .stack_size(STACK)
            .spawn(move || {
                expected.is(Thread::Protection);
                wanted.iter().for_each(|protection| protection.serve());
            })?;
        Ok(Protector {
            freezes: Some(freezes),
            wake,
            thread: Some(thread),
        })
    }

    /// A protection that this thread serves until its [`Protection::release`]. The one before must be released.
    pub fn protection(
        &self,
        device: BorrowedFd<'_>,
        memory: &GuestMemory,
        live: &[Range<u64>],
    ) -> Result<Arc<Protection>, ProtectionError> {
        let protection = Protection::new(device, memory, live, self.wake.clone())?;
        let protection = Arc::new(protection);
        let sent = self
            .freezes
            .as_ref()
            .is_some_and(|freezes| freezes.send(protection.clone()).is_ok());
        match sent {
            true => Ok(protection),
            false => Err(ProtectionError::Wait(io::Error::other("its thread has ended"))),
        }
    }
}

impl Drop for Protector {
    fn drop(&mut self) {
        self.freezes = None;
        if let Some(thread) = self.thread.take() {
            // A panic in the thread was logged when it happened.
            let _ = thread.join();
        }
    }
}

/// Stack of the thread, in bytes.
const STACK: usize = 128 * 1024;

#[cfg(test)]
#[path = "protection_test.rs"]
mod tests;
