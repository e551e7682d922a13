//! Makes a running vCPU leave the guest.
//!
//! Invariant: no kick is lost. [`Kicker::kick`] sets `immediate_exit` before it signals the vCPU's thread. If
//! the thread is in KVM_RUN, the signal interrupts it; if it is about to enter, `immediate_exit` makes
//! KVM_RUN return at once. The caller publishes the reason before it kicks (in its own lock or atomic), and
//! the vCPU's thread looks for it after each [`crate::Exit::Interrupted`].

use std::mem::offset_of;
use std::os::fd::AsRawFd;
use std::ptr::{NonNull, null_mut};
use std::sync::Once;
use std::sync::atomic::{AtomicI32, AtomicU8, Ordering};

use kvm_bindings::kvm_run;
use kvm_ioctls::VcpuFd;

use crate::{Error, Result};

static HANDLER: Once = Once::new();

/// Interrupts one vCPU from any thread. Shared with the [`crate::Vcpu`] it belongs to.
#[derive(Debug)]
pub struct Kicker {
    /// A separate mapping of the vCPU's `kvm_run`, so that it may outlive the vCPU.
    run: NonNull<u8>,
    size: usize,
    /// Kernel id of the thread that runs the vCPU, or 0.
    thread: AtomicI32,
}

// SAFETY: `run` is a shared mapping owned by this value alone and only ever accessed as one atomic byte.
unsafe impl Send for Kicker {}
// SAFETY: as above.
unsafe impl Sync for Kicker {}

impl Kicker {
    pub(crate) fn new(vcpu: &VcpuFd, size: usize) -> Result<Kicker> {
        // SAFETY: a fresh shared mapping of an open vCPU descriptor, of the size KVM says it has.
        let run = unsafe {
            libc::mmap(
                null_mut(),
                size,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                vcpu.as_raw_fd(),
                0,
            )
        };
        if run == libc::MAP_FAILED {
            return Err(Error::Ioctl {
                call: "mmap of kvm_run",
                source: std::io::Error::last_os_error(),
            });
        }
        let run = NonNull::new(run.cast()).ok_or(Error::Missing("a mapping of kvm_run"))?;
        Ok(Kicker {
            run,
            size,
            thread: AtomicI32::new(0),
        })
    }

    fn immediate_exit(&self) -> &AtomicU8 {
        // SAFETY: the byte lies in this value's mapping (KVM's run size is at least that of kvm_run), which lives as long as `self`; both
        // KVM and this process access it as a byte.
        unsafe { AtomicU8::from_ptr(self.run.as_ptr().add(offset_of!(kvm_run, immediate_exit))) }
    }

    /// Declares that the calling thread runs the vCPU.
    pub fn bind_current_thread(&self) {
        HANDLER.call_once(install_handler);
        // SAFETY: gettid has no preconditions.
        self.thread.store(unsafe { libc::gettid() }, Ordering::SeqCst);
    }

    /// Declares that no thread runs the vCPU any more. Must be called before the thread ends.
    pub fn unbind(&self) {
        self.thread.store(0, Ordering::SeqCst);
    }

    /// Makes the vCPU leave the guest, or not enter it, with [`crate::Exit::Interrupted`].
    pub fn kick(&self) {
        self.immediate_exit().store(1, Ordering::SeqCst);
        let thread = self.thread.load(Ordering::SeqCst);
        if thread != 0 {
            // SAFETY: tgkill with this process's own ID; the signal's handler does nothing. If the thread ends at this moment and another
            // thread of this process gets its ID, that thread sees one spurious EINTR.
            unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, libc::SIGRTMIN()) };
        }
    }

    /// Clears the kick once it was seen.
    pub(crate) fn clear(&self) {
        self.immediate_exit().store(0, Ordering::SeqCst);
    }
}

impl Drop for Kicker {
    fn drop(&mut self) {
        // SAFETY: unmaps exactly what `new` mapped; nothing else refers to it.
        unsafe { libc::munmap(self.run.as_ptr().cast(), self.size) };
    }
}

/// The signal only interrupts the system call.
extern "C" fn interrupted(_: libc::c_int) {}

fn install_handler() {
    // SAFETY: an all-zero sigaction is a valid one (no flags: calls are interrupted, not restarted), and the handler is
    // async-signal-safe because it is empty. SIGRTMIN is libc's first real-time signal for applications.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = interrupted as extern "C" fn(libc::c_int) as usize;
        libc::sigaction(libc::SIGRTMIN(), &action, null_mut());
    }
}
