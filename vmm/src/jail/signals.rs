//! Handlers of the signals that end this process.
//!
//! - SIGSYS comes for a forbidden system call: the log names it, and the process ends.
//! - SIGTERM ends the process. The first process of a PID namespace needs a handler for that.
//! - SIGXFSZ comes for a write beyond the limit on file sizes. It is ignored, so the write fails.
//! - SIGSEGV in the region of virtio-mem: a guest made a device write to memory that is not plugged. The log says so, and the process ends
//!   as for any other SIGSEGV.
//!
//! Invariant: handlers only make system calls on data on their stack. They take no lock and allocate nothing.

use std::io;
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use thaw_protocol::control::{FORBIDDEN_CALL, FORBIDDEN_CODE};

use super::names;
use super::threads::{self, Thread};
use crate::layout::VIRTIO_MEM;

/// `si_code` of a signal that seccomp sent.
const SYS_SECCOMP: i32 = 1;

/// Host addresses of the region of virtio-mem: the first, and the one after the last; both 0 if there is no region.
static REGION: [AtomicUsize; 2] = [AtomicUsize::new(0), AtomicUsize::new(0)];
/// The action for SIGSEGV before [`install`]: the Rust runtime's, which reports a stack overflow.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

/// Installs the handlers for this process.
pub(super) fn install() -> io::Result<()> {
    handle(libc::SIGSYS, forbidden as *const () as usize)?;
    handle(libc::SIGTERM, terminated as *const () as usize)?;
    handle(libc::SIGXFSZ, libc::SIG_IGN)?;
    let before = handle(libc::SIGSEGV, no_access as *const () as usize)?;
    BEFORE.get_or_init(|| before);
    Ok(())
}

/// Sets the host addresses of the region of virtio-mem.
pub fn set_hotplug_region(host: Range<usize>) {
    REGION[0].store(host.start, Ordering::Relaxed);
    REGION[1].store(host.end, Ordering::Relaxed);
}

/// Installs a handler and returns the earlier action.
fn handle(signal: i32, handler: usize) -> io::Result<libc::sigaction> {
    // SAFETY: an all-zero sigaction is valid, and its fields are set below; the handlers only do what a signal handler may.
    let (done, before) = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        let mut before: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler;
        // After a stack overflow the handler has no room on the thread's own stack.
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        (libc::sigaction(signal, &action, &mut before), before)
    };
    match done {
        0 => Ok(before),
        _ => Err(io::Error::last_os_error()),
    }
}

extern "C" fn no_access(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid siginfo; for SIGSEGV it holds an address, which is only compared.
    let address = unsafe { (*info).si_addr() as usize };
    let [start, end] = [&REGION[0], &REGION[1]].map(|at| at.load(Ordering::Relaxed));
    if (start..end).contains(&address) {
        let mut line = Line::new();
        line.text("thaw-vmm ends: the guest had a ");
        line.text(threads::this_thread().map_or("", Thread::name));
        line.text(" thread write to memory at 0x");
        line.number(VIRTIO_MEM.start + (address - start) as u64, 16);
        line.text(", which it has not plugged\n");
        // SAFETY: writes the initialized bytes of the line.
        unsafe { libc::write(2, line.bytes.as_ptr().cast(), line.length) };
    }
    // The access is repeated, and ends the process as without this handler.
    // SAFETY: the action is one that the kernel returned, or the default one, which is all zeros.
    unsafe {
        let default = std::mem::zeroed();
        libc::sigaction(
            libc::SIGSEGV,
            BEFORE.get().unwrap_or(&default),
            std::ptr::null_mut(),
        );
    }
}

extern "C" fn terminated(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: _exit ends the process without running any destructor or exit handler.
    unsafe { libc::_exit(128 + libc::SIGTERM) }
}

/// The head of a siginfo_t of SIGSYS (asm-generic/siginfo.h, `_sigsys`).
#[repr(C)]
struct SigsysInfo {
    signal: i32,
    errno: i32,
    code: i32,
    _padding: i32,
    _address: usize,
    number: i32,
    _architecture: u32,
}

extern "C" fn forbidden(_: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid siginfo and context; for SIGSYS the siginfo begins with these fields.
    let (info, registers) = unsafe {
        let context = context.cast::<libc::ucontext_t>();
        (&*info.cast::<SigsysInfo>(), &(*context).uc_mcontext.gregs)
    };
    let mut line = Line::new();
    if info.code == SYS_SECCOMP {
        line.text(FORBIDDEN_CALL);
        line.text(" ");
        line.text(names::of(info.number.into()).unwrap_or("unknown"));
        line.text(" (");
        line.number(info.number as u32 as u64, 10);
        line.text(") of a ");
        line.text(threads::this_thread().map_or("", Thread::name));
        line.text(" thread, arguments");
        for register in [libc::REG_RDI, libc::REG_RSI, libc::REG_RDX] {
            line.text(" 0x");
            line.number(registers[register as usize] as u64, 16);
        }
        line.text(": thaw-vmm ends\n");
    } else {
        line.text("thaw-vmm ends: somebody sent it SIGSYS\n");
    }
    // SAFETY: writes the initialized bytes of the line, and ends the process without running any destructor or exit handler.
    unsafe {
        libc::write(2, line.bytes.as_ptr().cast(), line.length);
        libc::_exit(FORBIDDEN_CODE)
    }
}

/// A line of text built without the heap. Text that does not fit is cut off.
struct Line {
    bytes: [u8; 256],
    length: usize,
}

impl Line {
    fn new() -> Line {
        Line {
            bytes: [0; 256],
            length: 0,
        }
    }

    fn text(&mut self, text: &str) {
        for byte in text.bytes() {
            if let Some(place) = self.bytes.get_mut(self.length) {
                *place = byte;
                self.length += 1;
            }
        }
    }

    fn number(&mut self, mut number: u64, base: u64) {
        let mut digits = [0u8; 20];
        let mut first = digits.len();
        loop {
            first -= 1;
            digits[first] = b"0123456789abcdef"[(number % base) as usize];
            number /= base;
            if number == 0 {
                break;
            }
        }
        self.text(str::from_utf8(&digits[first..]).unwrap_or_default());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_hold_numbers_and_are_cut_where_they_end() {
        let mut line = Line::new();
        line.text("call ");
        line.number(u64::MAX, 10);
        line.text(" 0x");
        line.number(u64::MAX, 16);
        line.number(0, 10);
        assert_eq!(
            &line.bytes[..line.length],
            b"call 18446744073709551615 0xffffffffffffffff0"
        );
        (0..100).for_each(|_| line.text("abcdef"));
        assert_eq!(line.length, line.bytes.len());
    }
}
