//! A device's interrupt line, and the reasons for its interrupts (virtio 1.2 §4.2.2 InterruptStatus, InterruptACK).
//!
//! The line is edge-triggered: each signal is one eventfd write. The driver reads the reasons, acknowledges them, then looks
//! at the queues; a device sets the reason before it signals, so no signal is lost.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use vmm_sys_util::eventfd::EventFd;

/// A buffer was used.
pub const USED_BUFFER: u32 = 1;
/// The configuration changed, or the device needs a reset.
pub const CONFIG_CHANGE: u32 = 2;

/// The interrupt of one device, shared by its transport, its queues and its handler.
#[derive(Debug)]
pub struct Interrupt {
    line: EventFd,
    reasons: AtomicU32,
    /// Whether the driver is up (`DRIVER_OK`) and may be interrupted for configuration changes.
    driver_ok: AtomicBool,
    needs_reset: AtomicBool,
    /// Set while the machine is parked: reasons accumulate, and [`Interrupt::release`] raises the line.
    held: AtomicBool,
}

impl Interrupt {
    /// `line` is the irqfd.
    pub fn new(line: EventFd) -> Interrupt {
        Interrupt {
            line,
            reasons: AtomicU32::new(0),
            driver_ok: AtomicBool::new(false),
            needs_reset: AtomicBool::new(false),
            held: AtomicBool::new(false),
        }
    }

    /// The irqfd.
    pub fn line(&self) -> &EventFd {
        &self.line
    }

    /// Reports a used buffer to a driver that wants an interrupt for it.
    pub fn used_buffer(&self) {
        self.raise(USED_BUFFER);
    }

    /// Reports a changed configuration. Silent before the driver is up, because the driver reads the configuration later anyway.
    pub fn config_changed(&self) {
        if self.driver_ok.load(Ordering::Acquire) {
            self.raise(CONFIG_CHANGE);
        }
    }

    /// The device cannot continue until the driver resets it (`DEVICE_NEEDS_RESET`, §2.1.2).
    pub fn fail(&self) {
        if !self.needs_reset.swap(true, Ordering::AcqRel) {
            self.config_changed();
        }
    }

    /// Whether the device has failed since the last reset.
    pub fn failed(&self) -> bool {
        self.needs_reset.load(Ordering::Acquire)
    }

    /// The reasons not yet acknowledged.
    pub fn reasons(&self) -> u32 {
        self.reasons.load(Ordering::Acquire)
    }

    /// The driver has seen `reasons`.
    pub fn acknowledge(&self, reasons: u32) {
        self.reasons.fetch_and(!reasons, Ordering::AcqRel);
    }

    pub(super) fn set_driver_ok(&self, up: bool) {
        self.driver_ok.store(up, Ordering::Release);
    }

    pub(super) fn reset(&self) {
        self.driver_ok.store(false, Ordering::Release);
        self.needs_reset.store(false, Ordering::Release);
        self.reasons.store(0, Ordering::Release);
    }

    /// Restores a frozen device's state. The driver gets no interrupt before [`Self::release`].
    pub(super) fn restore(&self, reasons: u32, driver_ok: bool, needs_reset: bool) {
        self.held.store(true, Ordering::SeqCst);
        self.reasons.store(reasons, Ordering::SeqCst);
        self.driver_ok.store(driver_ok, Ordering::Release);
        self.needs_reset.store(needs_reset, Ordering::Release);
    }

    /// Raises the line for all reasons that were not acknowledged at the freeze or came since, because an interrupt that was on its way to
    /// the interrupt controller at the freeze is lost. Does nothing in a device that was not restored.
    pub(super) fn release(&self) {
        if self.held.swap(false, Ordering::SeqCst) && self.reasons.load(Ordering::SeqCst) != 0 {
            self.signal();
        }
    }

    fn raise(&self, reason: u32) {
        // Sequentially consistent with `release`: at least one of the two sees the other's store and signals.
        self.reasons.fetch_or(reason, Ordering::SeqCst);
        if !self.held.load(Ordering::SeqCst) {
            self.signal();
        }
    }

    fn signal(&self) {
        // An eventfd write fails only if 2^64-2 signals are pending, and then the interrupt is pending anyway.
        let _ = self.line.write(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interrupt() -> Interrupt {
        Interrupt::new(EventFd::new(libc::EFD_NONBLOCK).unwrap())
    }

    #[test]
    fn reasons_add_up_until_acknowledged() {
        let interrupt = interrupt();
        interrupt.set_driver_ok(true);
        interrupt.used_buffer();
        interrupt.config_changed();
        assert_eq!(interrupt.reasons(), USED_BUFFER | CONFIG_CHANGE);
        assert_eq!(interrupt.line().read().unwrap(), 2);
        interrupt.acknowledge(USED_BUFFER);
        assert_eq!(interrupt.reasons(), CONFIG_CHANGE);
    }

    #[test]
    fn configuration_changes_are_silent_before_the_driver_is_up() {
        let interrupt = interrupt();
        interrupt.config_changed();
        assert_eq!(interrupt.reasons(), 0);
        assert!(interrupt.line().read().is_err());
    }

    #[test]
    fn restored_interrupt_is_raised_once_if_it_has_a_reason() {
        let interrupt = interrupt();
        interrupt.restore(USED_BUFFER, true, false);
        interrupt.config_changed();
        assert!(interrupt.line().read().is_err());
        interrupt.release();
        assert_eq!(interrupt.reasons(), USED_BUFFER | CONFIG_CHANGE);
        assert_eq!(interrupt.line().read().unwrap(), 1);
        interrupt.release();
        assert!(interrupt.line().read().is_err());
        interrupt.restore(0, true, false);
        interrupt.release();
        assert!(interrupt.line().read().is_err());
        interrupt.used_buffer();
        assert_eq!(interrupt.line().read().unwrap(), 1);
    }

    #[test]
    fn failing_twice_interrupts_once() {
        let interrupt = interrupt();
        interrupt.set_driver_ok(true);
        interrupt.fail();
        interrupt.fail();
        assert!(interrupt.failed());
        assert_eq!(interrupt.line().read().unwrap(), 1);
        interrupt.reset();
        assert!(!interrupt.failed());
        assert_eq!(interrupt.reasons(), 0);
    }
}
