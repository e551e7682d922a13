//! bpf(2): the few calls that let the kernel tell which of a cgroup's sockets listen, and the one fence around them.
//!
//! Structures and numbers are those of include/uapi/linux/bpf.h; a kernel that knows larger ones takes ours as they are.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

const MAP_CREATE: u32 = 0;
const PROG_LOAD: u32 = 5;
const LINK_CREATE: u32 = 28;
const MAP_TYPE_RINGBUF: u32 = 27;
const PROG_TYPE_SOCK_OPS: u32 = 13;
const CGROUP_SOCK_OPS: u32 = 3;
/// The operation of a socket that has just begun to listen.
const TCP_LISTEN_CB: i32 = 11;
/// bpf_ringbuf_output(map, data, size, flags).
const RINGBUF_OUTPUT: i32 = 130;
/// Wakes whoever polls, also one who has not read what was there.
const FORCE_WAKEUP: i32 = 2;

const PAGE: usize = 4096;
/// Room for [`WORDS`] and a head, 512 times.
const RING: usize = 4 * PAGE;
/// What is told of a socket: its family, its IPv4 address and its IPv6 address, network byte order.
const WORDS: usize = 6;
const EVENT: usize = WORDS * 4;
/// Before each event, its length in four bytes and four more.
const HEAD: usize = 8;
/// In the length: the event is being written.
const BUSY: u32 = 1 << 31;

/// One instruction: code, destination, source, offset, immediate value.
#[repr(C)]
#[derive(Clone, Copy)]
struct Instruction {
    code: u8,
    registers: u8,
    offset: i16,
    value: i32,
}

fn instruction(code: u8, to: u8, from: u8, offset: i16, value: i32) -> Instruction {
    Instruction {
        code,
        registers: from << 4 | to,
        offset,
        value,
    }
}

// include/uapi/linux/bpf_common.h: what the codes are made of.
const LOAD_WORD: u8 = 0x61;
const STORE_WORD: u8 = 0x63;
const LOAD_MAP: u8 = 0x18;
const MOVE: u8 = 0xbf;
const SET: u8 = 0xb7;
const ADD: u8 = 0x07;
const JUMP_UNLESS: u8 = 0x55;
const CALL: u8 = 0x85;
const EXIT: u8 = 0x95;

/// Where struct bpf_sock_ops has them.
const OP: i16 = 0;
const FAMILY: i16 = 20;
const LOCAL_IP4: i16 = 28;
const LOCAL_IP6: i16 = 48;
const LOCAL_PORT: i16 = 68;

/// Of a socket that begins to listen on `port`, writes its address to the ring; changes nothing, whatever it is run for.
fn program(port: u16, ring: BorrowedFd<'_>) -> Vec<Instruction> {
    let tell = [
        (FAMILY, -24),
        (LOCAL_IP4, -20),
        (LOCAL_IP6, -16),
        (LOCAL_IP6 + 4, -12),
        (LOCAL_IP6 + 8, -8),
        (LOCAL_IP6 + 12, -4),
    ];
    let mut code: Vec<Instruction> = tell
        .into_iter()
        .flat_map(|(from, to)| {
            [
                instruction(LOAD_WORD, 2, 6, from, 0),
                instruction(STORE_WORD, 10, 2, to, 0),
            ]
        })
        .collect();
    code.extend([
        // Two instructions long; source 1: the value is a descriptor.
        instruction(LOAD_MAP, 1, 1, 0, ring.as_raw_fd()),
        instruction(0, 0, 0, 0, 0),
        instruction(MOVE, 2, 10, 0, 0),
        instruction(ADD, 2, 0, 0, -(EVENT as i32)),
        instruction(SET, 3, 0, 0, EVENT as i32),
        instruction(SET, 4, 0, 0, FORCE_WAKEUP),
        instruction(CALL, 0, 0, 0, RINGBUF_OUTPUT),
    ]);
    let rest = code.len() as i16;
    let mut all = vec![
        instruction(MOVE, 6, 1, 0, 0),
        instruction(LOAD_WORD, 2, 6, OP, 0),
        instruction(JUMP_UNLESS, 2, 0, rest + 2, TCP_LISTEN_CB),
        instruction(LOAD_WORD, 2, 6, LOCAL_PORT, 0),
        instruction(JUMP_UNLESS, 2, 0, rest, i32::from(port)),
    ];
    all.extend(code);
    all.extend([instruction(SET, 0, 0, 0, 1), instruction(EXIT, 0, 0, 0, 0)]);
    all
}

#[repr(C)]
#[derive(Default)]
struct MapCreate {
    map_type: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    map_flags: u32,
}

#[repr(C)]
#[derive(Default)]
struct ProgLoad {
    prog_type: u32,
    instructions: u32,
    code: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log: u64,
    kernel_version: u32,
    flags: u32,
}

#[repr(C)]
#[derive(Default)]
struct LinkCreate {
    program: u32,
    target: u32,
    attach_type: u32,
    flags: u32,
}

/// A call that makes a descriptor, which the kernel opens close-on-exec.
///
/// # Safety
/// Addresses in `attributes` are of readable memory of the lengths it says.
unsafe fn make<T>(command: u32, attributes: &T) -> io::Result<OwnedFd> {
    // SAFETY: the kernel copies `size` bytes from `attributes`, and reads what the caller answers for.
    let made = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command,
            std::ptr::from_ref(attributes),
            size_of::<T>(),
        )
    };
    if made < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made it, for us.
    Ok(unsafe { OwnedFd::from_raw_fd(made as i32) })
}

/// Runs the program for the sockets of a cgroup's processes and of those below it, as long as what is returned is held.
pub fn tell_listening(cgroup: BorrowedFd<'_>, port: u16, ring: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let code = program(port, ring);
    let load = ProgLoad {
        prog_type: PROG_TYPE_SOCK_OPS,
        instructions: code.len() as u32,
        code: code.as_ptr() as u64,
        license: c"Apache-2.0".as_ptr() as u64,
        ..ProgLoad::default()
    };
    // SAFETY: `code` has so many instructions and outlives the call, and the license ends in NUL.
    let program = unsafe { make(PROG_LOAD, &load) }?;
    let link = LinkCreate {
        program: program.as_raw_fd() as u32,
        target: cgroup.as_raw_fd() as u32,
        attach_type: CGROUP_SOCK_OPS,
        flags: 0,
    };
    // SAFETY: there are no addresses in it.
    unsafe { make(LINK_CREATE, &link) }
}

/// A ring the kernel writes to and we read from.
#[derive(Debug)]
pub struct Ring {
    /// A page that begins with how far we have read, bytes.
    read: *mut std::ffi::c_void,
    /// A page that begins with how far there is anything to read; then the ring, twice, so that nothing in it is in two parts.
    written: *mut std::ffi::c_void,
}

// SAFETY: the pages are this value's own, wherever it is.
unsafe impl Send for Ring {}

impl Ring {
    /// A new one; its descriptor is readable while something is in it.
    pub fn new() -> io::Result<(OwnedFd, Ring)> {
        let map = MapCreate {
            map_type: MAP_TYPE_RINGBUF,
            max_entries: RING as u32,
            ..MapCreate::default()
        };
        // SAFETY: there are no addresses in it.
        let map = unsafe { make(MAP_CREATE, &map) }?;
        let both = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: new mappings, where the kernel chooses; what both pages hold is shared with the kernel alone.
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
            // SAFETY: it was mapped above, and nobody has it.
            let _ = unsafe { munmap(read, PAGE) };
        })?;
        Ok((map, Ring { read, written }))
    }

    /// The oldest event that was not taken yet.
    pub fn take(&mut self) -> Option<[u32; WORDS]> {
        // SAFETY: both begin with eight bytes, aligned, that are read and written whole; they live as long as `self`.
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
            // Whoever writes it wakes us when it is whole.
            return None;
        }
        // SAFETY: the program writes events of this length, and none is overwritten before it is taken.
        let event = unsafe { head.byte_add(HEAD).cast::<[u32; WORDS]>().read() };
        read.store(at + (HEAD + EVENT) as u64, Ordering::Release);
        Some(event)
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: they were mapped with these lengths, and nothing of them is borrowed.
        unsafe {
            let _ = munmap(self.read, PAGE);
            let _ = munmap(self.written, PAGE + 2 * RING);
        }
    }
}
