//! bpf(2): loading and attaching programs, and the maps they share with us: hash tables and ring buffers.
//!
//! Invariant: every pointer passed to the kernel is to memory that outlives the call, and of the size stated beside it.

use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU16, Ordering};

pub mod assembler;
mod ring;

pub use ring::Ring;

// include/uapi/linux/bpf.h
const MAP_CREATE: libc::c_int = 0;
const MAP_UPDATE_ELEM: libc::c_int = 2;
const MAP_DELETE_ELEM: libc::c_int = 3;
const PROG_LOAD: libc::c_int = 5;
const LINK_CREATE: libc::c_int = 28;
const MAP_TYPE_HASH: u32 = 1;
const MAP_NO_PREALLOC: u32 = 1;
/// Flag of an update: fail with `EEXIST` if the key exists.
const NO_EXIST: u64 = 1;
const CGROUP_SOCK_OPS: u32 = 3;
const LICENCE: &[u8] = b"Apache-2.0\0";
/// Requested bytes of the verifier's log, and the number of its last bytes in an error message.
const LOG: usize = 64 << 10;
const LOG_SHOWN: usize = 200;
// include/uapi/linux/membarrier.h
const MEMBARRIER_QUERY: libc::c_int = 0;
const MEMBARRIER_GLOBAL: libc::c_int = 1;

/// `union bpf_attr` for MAP_CREATE.
#[repr(C)]
struct MapCreate {
    kind: u32,
    key_size: u32,
    value_size: u32,
    entries: u32,
    flags: u32,
}

/// For MAP_UPDATE_ELEM; MAP_DELETE_ELEM reads only the beginning.
#[repr(C)]
struct MapElement {
    map: u32,
    padding: u32,
    key: u64,
    value: u64,
    flags: u64,
}

/// For PROG_LOAD.
#[repr(C)]
struct ProgLoad {
    kind: u32,
    instructions: u32,
    first: u64,
    licence: u64,
    log_level: u32,
    log_size: u32,
    log: u64,
    kernel_version: u32,
    flags: u32,
}

/// For LINK_CREATE.
#[repr(C)]
struct LinkCreate {
    program: u32,
    target: u32,
    attach_type: u32,
    flags: u32,
}

/// Makes the system call; its result is a descriptor for the commands that make one.
fn bpf<T>(command: libc::c_int, attribute: &T) -> io::Result<libc::c_int> {
    // SAFETY: the kernel reads the stated number of bytes, which is the size of `attribute`; the addresses in it are of memory of the
    // stated sizes, which the callers below keep until this returns.
    let answer = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command,
            std::ptr::from_ref(attribute),
            size_of::<T>() as u32,
        )
    };
    match answer {
        -1 => Err(io::Error::last_os_error()),
        answer => Ok(answer as libc::c_int),
    }
}

fn descriptor(answer: libc::c_int) -> OwnedFd {
    // SAFETY: the kernel has just created this descriptor for us; nothing else owns it.
    unsafe { OwnedFd::from_raw_fd(answer) }
}

/// A hash table of `T` that programs look up for every packet, by a key of 16 bits, which is what a filter can pass to a program
/// (`tc_classid`). `T` consists of 32-bit words, so it has no padding.
#[derive(Debug)]
pub struct Table<T> {
    map: OwnedFd,
    next: AtomicU16,
    entries: PhantomData<T>,
}

impl<T: Copy> Table<T> {
    /// An empty table.
    pub fn new() -> io::Result<Table<T>> {
        let attribute = MapCreate {
            kind: MAP_TYPE_HASH,
            key_size: size_of::<u32>() as u32,
            value_size: size_of::<T>() as u32,
            entries: u16::MAX.into(),
            flags: MAP_NO_PREALLOC,
        };
        bpf(MAP_CREATE, &attribute).map(|map| Table {
            map: descriptor(map),
            next: AtomicU16::new(1),
            entries: PhantomData,
        })
    }

    /// Adds an entry under an unused key, and returns the key.
    ///
    /// # Errors
    /// `E2BIG`: the table already has 65,535 entries.
    pub fn insert(&self, value: &T) -> io::Result<u16> {
        loop {
            let key = self.next.fetch_add(1, Ordering::Relaxed);
            match bpf(MAP_UPDATE_ELEM, &self.element(&key.into(), Some(value))) {
                Err(e) if e.raw_os_error() == Some(libc::EEXIST) => {}
                added => return added.map(|_| key),
            }
        }
    }

    /// Removes an entry, if it is there: programs that begin from now on do not find it.
    pub fn remove(&self, key: u16) -> io::Result<()> {
        match bpf(MAP_DELETE_ELEM, &self.element(&key.into(), None)) {
            Err(e) if e.raw_os_error() != Some(libc::ENOENT) => Err(e),
            _ => Ok(()),
        }
    }

    /// The references must outlive the call that the result is passed to.
    fn element(&self, key: &u32, value: Option<&T>) -> MapElement {
        MapElement {
            map: self.map.as_raw_fd() as u32,
            padding: 0,
            key: std::ptr::from_ref(key) as u64,
            value: value.map_or(0, |value| std::ptr::from_ref(value) as u64),
            flags: NO_EXIST * u64::from(value.is_some()),
        }
    }

    /// The descriptor's number, for [`assembler::Assembler::look_up`].
    pub fn number(&self) -> i32 {
        self.map.as_raw_fd()
    }
}

/// Waits until every program that is running now has ended, on all CPUs: some milliseconds.
pub fn wait_for_running() -> io::Result<()> {
    membarrier(MEMBARRIER_GLOBAL).map(drop)
}

/// Checks that [`wait_for_running`] works.
///
/// # Errors
/// `Unsupported`: the kernel runs with `nohz_full`.
pub fn can_wait() -> io::Result<()> {
    match membarrier(MEMBARRIER_QUERY)? & MEMBARRIER_GLOBAL {
        0 => Err(io::ErrorKind::Unsupported.into()),
        _ => Ok(()),
    }
}

fn membarrier(command: libc::c_int) -> io::Result<libc::c_int> {
    // SAFETY: membarrier(2) takes only numbers.
    match unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) } {
        -1 => Err(io::Error::last_os_error()),
        answer => Ok(answer as libc::c_int),
    }
}

/// The type of a program: `BPF_PROG_TYPE_*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum ProgramType {
    /// Frames that arrive at an interface.
    SchedCls = 3,
    /// Events of a cgroup's sockets.
    SockOps = 13,
}

/// Loads a program for frames that arrive at an interface ([`crate::tc::run`]).
///
/// # Errors
/// Those of [`load_as`].
pub fn load(instructions: &[u64]) -> io::Result<OwnedFd> {
    load_as(ProgramType::SchedCls, instructions)
}

/// Loads a program: the kernel verifies it.
///
/// # Errors
/// The kernel lacks something, or rejects the program: then the error ends with the last lines of the verifier's log.
pub fn load_as(kind: ProgramType, instructions: &[u64]) -> io::Result<OwnedFd> {
    match load_with(kind, instructions, &mut []) {
        Err(e) if matches!(e.raw_os_error(), Some(libc::EINVAL | libc::EACCES)) => {
            let mut log = vec![0; LOG];
            let loaded = load_with(kind, instructions, &mut log);
            loaded.map_err(|e| {
                let said = log.split(|byte| *byte == 0).next().unwrap_or_default();
                let said = String::from_utf8_lossy(&said[said.len().saturating_sub(LOG_SHOWN)..]);
                io::Error::new(e.kind(), format!("{e}: {}", said.trim().replace('\n', "; ")))
            })
        }
        loaded => loaded,
    }
}

fn load_with(kind: ProgramType, instructions: &[u64], log: &mut [u8]) -> io::Result<OwnedFd> {
    let attribute = ProgLoad {
        kind: kind as u32,
        instructions: instructions.len() as u32,
        first: instructions.as_ptr() as u64,
        licence: LICENCE.as_ptr() as u64,
        log_level: u32::from(!log.is_empty()),
        log_size: log.len() as u32,
        log: match log.is_empty() {
            true => 0,
            false => log.as_mut_ptr() as u64,
        },
        kernel_version: 0,
        flags: 0,
    };
    bpf(PROG_LOAD, &attribute).map(descriptor)
}

/// Runs a program for the sockets of a cgroup's processes, and of those below it, while the returned descriptor is open.
pub fn attach_sock_ops(program: BorrowedFd<'_>, cgroup: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let attribute = LinkCreate {
        program: program.as_raw_fd() as u32,
        target: cgroup.as_raw_fd() as u32,
        attach_type: CGROUP_SOCK_OPS,
        flags: 0,
    };
    bpf(LINK_CREATE, &attribute).map(descriptor)
}
