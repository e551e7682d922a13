//! bpf(2): programs for what arrives at an interface, and tables of what they must know of each.
//!
//! Invariant: every pointer the kernel is given is of memory that outlives the call, and of the size it is said to be.

use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU16, Ordering};

pub(crate) mod assembler;

// include/uapi/linux/bpf.h
const MAP_CREATE: libc::c_int = 0;
const MAP_UPDATE_ELEM: libc::c_int = 2;
const MAP_DELETE_ELEM: libc::c_int = 3;
const PROG_LOAD: libc::c_int = 5;
const MAP_TYPE_HASH: u32 = 1;
const MAP_NO_PREALLOC: u32 = 1;
/// Of an update: `EEXIST` where there is such a key.
const NO_EXIST: u64 = 1;
const PROG_TYPE_SCHED_CLS: u32 = 3;
const LICENCE: &[u8] = b"Apache-2.0\0";
/// Bytes the verifier may use to say why; it is cut to its end.
const LOG: usize = 64 << 10;
const TOLD: usize = 200;
// include/uapi/linux/membarrier.h
const MEMBARRIER_QUERY: libc::c_int = 0;
const MEMBARRIER_GLOBAL: libc::c_int = 1;

/// `union bpf_attr` of MAP_CREATE.
#[repr(C)]
struct MapCreate {
    kind: u32,
    key_size: u32,
    value_size: u32,
    entries: u32,
    flags: u32,
}

/// Of MAP_UPDATE_ELEM; MAP_DELETE_ELEM reads the beginning of it.
#[repr(C)]
struct MapElement {
    map: u32,
    padding: u32,
    key: u64,
    value: u64,
    flags: u64,
}

/// Of PROG_LOAD.
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

/// Gives the kernel an attribute; a descriptor, where that is what it answers.
fn bpf<T>(command: libc::c_int, attribute: &T) -> io::Result<libc::c_int> {
    // SAFETY: the kernel reads as many bytes as are said, which are `attribute`'s; addresses in it are of memory their
    // callers below keep until this returns, of the sizes beside them.
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
    // SAFETY: the kernel has made this descriptor for us, and nobody else knows of it.
    unsafe { OwnedFd::from_raw_fd(answer) }
}

/// A table of `T` that programs look up at every packet, by a number of 16 bits: as many as a filter can tell a program
/// (`tc_classid`). `T` is words of 32 bits, so it has no padding.
#[derive(Debug)]
pub(crate) struct Table<T> {
    map: OwnedFd,
    next: AtomicU16,
    entries: PhantomData<T>,
}

impl<T: Copy> Table<T> {
    /// Without entries.
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

    /// Adds an entry under a key that none has: the key.
    ///
    /// # Errors
    /// `E2BIG`: there are 65,535 entries.
    pub fn insert(&self, value: &T) -> io::Result<u16> {
        loop {
            let key = self.next.fetch_add(1, Ordering::Relaxed);
            match bpf(MAP_UPDATE_ELEM, &self.element(&key.into(), Some(value))) {
                Err(e) if e.raw_os_error() == Some(libc::EEXIST) => {}
                added => return added.map(|_| key),
            }
        }
    }

    /// Removes one, for programs that begin from now on.
    pub fn remove(&self, key: u16) -> io::Result<()> {
        match bpf(MAP_DELETE_ELEM, &self.element(&key.into(), None)) {
            Err(e) if e.raw_os_error() != Some(libc::ENOENT) => Err(e),
            _ => Ok(()),
        }
    }

    /// What is lent must outlive the call that is given it.
    fn element(&self, key: &u32, value: Option<&T>) -> MapElement {
        MapElement {
            map: self.map.as_raw_fd() as u32,
            padding: 0,
            key: std::ptr::from_ref(key) as u64,
            value: value.map_or(0, |value| std::ptr::from_ref(value) as u64),
            flags: NO_EXIST * u64::from(value.is_some()),
        }
    }

    /// For a program that looks entries up, [`assembler::Assembler::look_up`].
    pub fn number(&self) -> i32 {
        self.map.as_raw_fd()
    }
}

/// Waits for the programs that had begun, on every processor: some milliseconds.
pub(crate) fn wait_for_running() -> io::Result<()> {
    membarrier(MEMBARRIER_GLOBAL).map(drop)
}

/// Whether [`wait_for_running`] can be had; with `nohz_full` it cannot.
pub(crate) fn can_wait() -> io::Result<()> {
    match membarrier(MEMBARRIER_QUERY)? & MEMBARRIER_GLOBAL {
        0 => Err(io::ErrorKind::Unsupported.into()),
        _ => Ok(()),
    }
}

fn membarrier(command: libc::c_int) -> io::Result<libc::c_int> {
    // SAFETY: membarrier(2) takes numbers alone.
    match unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) } {
        -1 => Err(io::Error::last_os_error()),
        answer => Ok(answer as libc::c_int),
    }
}

/// Has the kernel verify a program for what arrives at an interface.
///
/// # Errors
/// What it lacks, or does not believe of the program, in the verifier's words.
pub(crate) fn load(instructions: &[u64]) -> io::Result<OwnedFd> {
    match load_with(instructions, &mut []) {
        Err(e) if matches!(e.raw_os_error(), Some(libc::EINVAL | libc::EACCES)) => {
            let mut log = vec![0; LOG];
            let loaded = load_with(instructions, &mut log);
            loaded.map_err(|e| {
                let said = log.split(|byte| *byte == 0).next().unwrap_or_default();
                let said = String::from_utf8_lossy(&said[said.len().saturating_sub(TOLD)..]);
                io::Error::new(e.kind(), format!("{e}: {}", said.trim().replace('\n', "; ")))
            })
        }
        loaded => loaded,
    }
}

fn load_with(instructions: &[u64], log: &mut [u8]) -> io::Result<OwnedFd> {
    let attribute = ProgLoad {
        kind: PROG_TYPE_SCHED_CLS,
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
