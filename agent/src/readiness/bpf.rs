//! The BPF program of a container's cgroup that reports sockets which listen on a port.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use Register::{R0, R1, R2, R3, R4, R6, R10};
use thaw_sys::bpf::assembler::{Assembler, Helper, Operation, Register, Size, When};
use thaw_sys::bpf::{ProgramType, attach_sock_ops, load_as};

/// The operation when a socket has just begun to listen: `BPF_SOCK_OPS_TCP_LISTEN_CB`.
const TCP_LISTEN_CB: u32 = 11;
/// `BPF_RB_FORCE_WAKEUP`: wakes pollers even if earlier events are unread.
const FORCE_WAKEUP: u32 = 2;
/// Words of an event: the socket's family, IPv4 address and IPv6 address, in network byte order.
pub const WORDS: usize = 6;
const EVENT: i32 = WORDS as i32 * 4;

// Offsets in `struct bpf_sock_ops`.
const OP: i16 = 0;
const FAMILY: i16 = 20;
const LOCAL_IP4: i16 = 28;
const LOCAL_IP6: i16 = 48;
const LOCAL_PORT: i16 = 68;

/// The program. When a socket begins to listen on `port`, it writes the address to the ring. It changes
/// nothing.
fn program(port: u16, ring: BorrowedFd<'_>) -> Vec<u64> {
    let mut a = Assembler::default();
    a.copy(R6, R1);
    a.load(Size::Four, R2, R6, OP);
    a.jump_when(R2, When::NotEqual, TCP_LISTEN_CB, "end");
    a.load(Size::Four, R2, R6, LOCAL_PORT);
    a.jump_when(R2, When::NotEqual, port.into(), "end");
    let words = [
        (FAMILY, -24),
        (LOCAL_IP4, -20),
        (LOCAL_IP6, -16),
        (LOCAL_IP6 + 4, -12),
        (LOCAL_IP6 + 8, -8),
        (LOCAL_IP6 + 12, -4),
    ];
    for (from, to) in words {
        a.load(Size::Four, R2, R6, from);
        a.store(Size::Four, R10, to, R2);
    }
    a.load_map(R1, ring.as_raw_fd());
    a.copy(R2, R10);
    a.operate(Operation::Add, R2, -EVENT);
    a.set(R3, EVENT as u32);
    a.set(R4, FORCE_WAKEUP);
    a.call(Helper::RingbufOutput);
    a.label("end");
    a.set(R0, 1);
    a.end();
    a.finish()
}

/// Runs the program for the sockets of processes in and below a cgroup, while the returned descriptor is open.
pub fn report_listening(cgroup: BorrowedFd<'_>, port: u16, ring: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let program = load_as(ProgramType::SockOps, &program(port, ring))?;
    attach_sock_ops(program.as_fd(), cgroup)
}
