//! userfaultfd(2) over guest memory: the ioctls of linux/userfaultfd.h. This module has their `unsafe` code.
//!
//! A userfaultfd is made for this process's own address space, from a descriptor of /dev/userfaultfd. Faults of the guest and of system calls
//! happen in kernel mode, so `UFFD_USER_MODE_ONLY` is not set; because of the device this needs no privilege. Every function checks that the
//! range it names lies inside one region of guest memory, so no other memory of this process is affected.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use super::mapping;
use crate::memory::GuestMemory;

/// `_IO(0xAA, 0)` of /dev/userfaultfd.
const USERFAULTFD_IOC_NEW: libc::Ioctl = 0xAA00;
/// `_IOWR(0xAA, 0x3F, struct uffdio_api)`.
const UFFDIO_API: libc::Ioctl = 0xC018_AA3F;
/// `_IOWR(0xAA, 0, struct uffdio_register)`.
const UFFDIO_REGISTER: libc::Ioctl = 0xC020_AA00;
/// `_IOR(0xAA, 1, struct uffdio_range)`.
const UFFDIO_UNREGISTER: libc::Ioctl = 0x8010_AA01;
/// `_IOWR(0xAA, 6, struct uffdio_writeprotect)`.
const UFFDIO_WRITEPROTECT: libc::Ioctl = 0xC018_AA06;
/// The version of the interface.
const UFFD_API: u64 = 0xAA;
/// `UFFD_EVENT_PAGEFAULT`.
const PAGE_FAULT: u8 = 0x12;
/// Bytes of `struct uffd_msg`. The event is at byte 0, the address of a page fault at byte 16.
const MESSAGE: usize = 32;

/// Optional parts of the interface.
pub mod features {
    /// `UFFD_FEATURE_PAGEFAULT_FLAG_WP`: write protection (Linux 5.7).
    pub const WRITE_PROTECT: u64 = 1 << 0;
    /// `UFFD_FEATURE_WP_HUGETLBFS_SHMEM`: of files in memory too (Linux 5.19).
    pub const WRITE_PROTECT_FILES: u64 = 1 << 12;
    /// `UFFD_FEATURE_WP_UNPOPULATED`: of pages that are not there yet too (Linux 6.4).
    pub const WRITE_PROTECT_ABSENT: u64 = 1 << 13;
}

/// Which faults a userfaultfd waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Any access to a page that is not there: `UFFDIO_REGISTER_MODE_MISSING`.
    Missing,
    /// Writes to pages that are write-protected: `UFFDIO_REGISTER_MODE_WP`.
    WriteProtect,
}

impl Mode {
    /// Bit of `uffdio_register.mode`.
    fn bit(self) -> u64 {
        match self {
            Mode::Missing => 1,
            Mode::WriteProtect => 1 << 1,
        }
    }

    /// The bit in `uffdio_register.ioctls` of the call that resolves a fault: UFFDIO_COPY, UFFDIO_WRITEPROTECT.
    fn resolution(self) -> u64 {
        match self {
            Mode::Missing => 1 << 3,
            Mode::WriteProtect => 1 << 6,
        }
    }
}

/// `struct uffdio_api`.
#[repr(C)]
struct UffdioApi {
    api: u64,
    features: u64,
    ioctls: u64,
}

/// `struct uffdio_range`.
#[derive(Clone, Copy)]
#[repr(C)]
struct UffdioRange {
    start: u64,
    len: u64,
}

/// `struct uffdio_register`.
#[repr(C)]
struct UffdioRegister {
    range: UffdioRange,
    mode: u64,
    ioctls: u64,
}

/// `struct uffdio_writeprotect`.
#[repr(C)]
struct UffdioWriteProtect {
    range: UffdioRange,
    mode: u64,
}

/// A call that failed before any memory was registered.
#[derive(Debug, thiserror::Error)]
#[error("{call}: {error}; is the descriptor /dev/userfaultfd, of Linux 6.1 or later?")]
pub struct OpenError {
    pub call: &'static str,
    pub error: io::Error,
}

/// A userfaultfd. Non-blocking. When its last descriptor is closed, nothing waits for it any more.
#[derive(Debug)]
pub struct Userfault(OwnedFd);

impl Userfault {
    /// Makes one from /dev/userfaultfd, with these [`features`].
    ///
    /// # Errors
    /// [`OpenError`], with `EINVAL` of `UFFDIO_API` if this kernel lacks a feature.
    pub fn new(device: BorrowedFd<'_>, features: u64) -> Result<Userfault, OpenError> {
        let failed = |call| move |error| OpenError { call, error };
        // SAFETY: USERFAULTFD_IOC_NEW takes flags, not a pointer; any other device refuses the request as unknown.
        let fd = unsafe {
            libc::ioctl(
                device.as_raw_fd(),
                USERFAULTFD_IOC_NEW,
                libc::O_CLOEXEC | libc::O_NONBLOCK,
            )
        };
        if fd < 0 {
            return Err(failed("USERFAULTFD_IOC_NEW")(io::Error::last_os_error()));
        }
        // SAFETY: the call has just made this descriptor for this process.
        let userfault = Userfault(unsafe { OwnedFd::from_raw_fd(fd) });
        let mut api = UffdioApi {
            api: UFFD_API,
            features,
            ioctls: 0,
        };
        userfault
            .call(UFFDIO_API, &mut api)
            .map_err(failed("UFFDIO_API"))?;
        Ok(userfault)
    }

    /// Registers guest memory. In [`Mode::Missing`] it must be untouched: a missing page has no contents to lose.
    pub fn register(
        &self,
        memory: &GuestMemory,
        guest_address: u64,
        size: u64,
        mode: Mode,
    ) -> io::Result<()> {
        let mut register = UffdioRegister {
            range: range(memory, guest_address, size)?,
            mode: mode.bit(),
            ioctls: 0,
        };
        self.call(UFFDIO_REGISTER, &mut register)?;
        match register.ioctls & mode.resolution() {
            0 => Err(io::Error::other(
                "the kernel cannot resolve faults of this memory",
            )),
            _ => Ok(()),
        }
    }

    /// Undoes [`Self::register`] for a part, which must no longer be write-protected.
    pub fn unregister(&self, memory: &GuestMemory, guest_address: u64, size: u64) -> io::Result<()> {
        let mut range = range(memory, guest_address, size)?;
        self.call(UFFDIO_UNREGISTER, &mut range)
    }

    /// Protects registered memory against writes, or lets the threads that wait to write it continue.
    pub fn write_protect(
        &self,
        memory: &GuestMemory,
        guest_address: u64,
        size: u64,
        protect: bool,
    ) -> io::Result<()> {
        let mut argument = UffdioWriteProtect {
            range: range(memory, guest_address, size)?,
            // UFFDIO_WRITEPROTECT_MODE_WP.
            mode: u64::from(protect),
        };
        self.call(UFFDIO_WRITEPROTECT, &mut argument)
    }

    /// The host address of the next fault that waits, if any does.
    pub fn fault(&self) -> io::Result<Option<u64>> {
        let mut message = [0; MESSAGE];
        match rustix::io::read(&self.0, &mut message) {
            Ok(MESSAGE) if message[0] == PAGE_FAULT => {
                let mut address = [0; 8];
                address.copy_from_slice(&message[16..24]);
                Ok(Some(u64::from_ne_bytes(address)))
            }
            Ok(_) => Err(io::Error::other("an event that was not asked for")),
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }

    fn call<T>(&self, request: libc::Ioctl, argument: &mut T) -> io::Result<()> {
        loop {
            // SAFETY: every caller in this module passes the structure that its request reads and writes, and it outlives the call. Ranges
            // name guest memory (checked in `range`): no Rust reference points there, and a thread that faults there waits.
            if unsafe { libc::ioctl(self.0.as_raw_fd(), request, std::ptr::from_mut(argument)) } >= 0 {
                return Ok(());
            }
            match io::Error::last_os_error() {
                // The address space was being changed.
                e if matches!(e.raw_os_error(), Some(libc::EAGAIN | libc::EINTR)) => {}
                e => return Err(e),
            }
        }
    }
}

impl AsFd for Userfault {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<Userfault> for OwnedFd {
    fn from(userfault: Userfault) -> OwnedFd {
        userfault.0
    }
}

fn range(memory: &GuestMemory, guest_address: u64, size: u64) -> io::Result<UffdioRange> {
    let start = mapping::host_address(memory, guest_address, size).ok_or(io::ErrorKind::InvalidInput)?;
    Ok(UffdioRange { start, len: size })
}
