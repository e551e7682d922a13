//! The thread of a vCPU: runs it, and serves its port and device accesses.

use std::sync::{Arc, Mutex, MutexGuard};

use thaw_hypervisor::{Exit, Kicker, Vcpu};
use thaw_protocol::control::{Event, ExitReason};
use thaw_sys::lock::Lock;

use super::faults;
use super::run_control::{RunControl, Turn, Wanted};
use crate::bus::Bus;
use crate::events::EventSink;
use crate::jail::threads::{Expected, Thread};
use crate::layout::VIRTIO_MEM;

/// Everything a vCPU's thread works with.
pub struct Worker {
    pub control: Arc<RunControl>,
    pub bus: Arc<Bus>,
    pub events: EventSink,
    /// Held by this thread while it runs the vCPU.
    pub vcpu: Arc<Mutex<Vcpu>>,
    pub kicker: Arc<Kicker>,
    pub index: usize,
}

impl Worker {
    /// The body of the thread.
    pub fn work(self, expected: Expected) {
        expected.is(Thread::Vcpu);
        self.kicker.bind_current_thread();
        let mut before = faults::of_this_thread();
        loop {
            match self.control.turn(self.index) {
                Turn::Prepare(prepare) => {
                    let ready = prepare(&mut self.vcpu());
                    before = faults::of_this_thread();
                    self.control.prepared(ready);
                }
                Turn::Run => self.run(&|| faults::of_this_thread() - before),
                Turn::Quit => break,
            }
        }
        self.kicker.unbind();
    }

    /// Runs the vCPU until it must stop.
    fn run(&self, taken: &impl Fn() -> u64) {
        let mut vcpu = self.vcpu();
        // A thawed machine's time stands still until its first run. In later runs this call does nothing.
        let time = self.control.time().map_or(Ok(()), |time| vcpu.start_time(time));
        let ended = match time {
            Err(e) => Some(ExitReason::Fault(describe(&vcpu, &e.to_string()))),
            Ok(()) => self.run_until_wanted(&mut vcpu, taken),
        };
        // Otherwise the guest's soft-lockup watchdog would report the pause.
        vcpu.notify_paused();
        drop(vcpu);
        if let Some(reason) = ended {
            self.bus.console.flush();
            self.events.send(Event::Exited(reason));
            self.control.stop(Wanted::Quit);
        }
        self.control.stopped(self.index, taken());
    }

    fn vcpu(&self) -> MutexGuard<'_, Vcpu> {
        self.vcpu.locked()
    }

    /// Runs the vCPU until it must stop (`None`) or the machine ends (the reason).
    fn run_until_wanted(&self, vcpu: &mut Vcpu, faults: &impl Fn() -> u64) -> Option<ExitReason> {
        self.control.entering();
        loop {
            let fault = match vcpu.run() {
                // KVM emulated the guest's instruction, or there is no memslot.
                Ok(Exit::MmioWrite { address, .. }) if VIRTIO_MEM.contains(address) => {
                    self.describe_memory_fault(address)
                }
                Ok(Exit::MmioWrite { address, data }) => {
                    self.bus.mmio_write(address, data);
                    continue;
                }
                Ok(Exit::MmioRead { address, data }) => {
                    self.bus.mmio_read(address, data);
                    continue;
                }
                Ok(Exit::PortWrite { port, data }) => match self.bus.port_write(port, data) {
                    Some(reason) => {
                        self.note_early_end(vcpu, &reason);
                        return Some(reason);
                    }
                    None => continue,
                },
                Ok(Exit::PortRead { port, data }) => {
                    self.bus.port_read(port, data);
                    continue;
                }
                Ok(Exit::Interrupted) => match self.control.go_on(self.index, faults) {
                    true => continue,
                    false => return None,
                },
                Ok(Exit::Shutdown) => describe_triple_fault(vcpu),
                Ok(Exit::InternalError) => describe_internal_error(vcpu),
                Ok(Exit::MemoryFault { address }) => self.describe_memory_fault(address),
                Ok(other) => format!("{other:?}"),
                Err(e) => describe_error(&e),
            };
            return Some(ExitReason::Fault(describe(vcpu, &fault)));
        }
    }

    /// Describes a write to memory that is not plugged. Linux before 6.10 does not report the address ([`describe_error`]).
    fn describe_memory_fault(&self, address: u64) -> String {
        match self.bus.inventory.is_unplugged(address) {
            true => format!("the guest wrote to memory at {address:#x}, which it has not plugged"),
            false => format!("memory at {address:#x}: {NO_PAGE}"),
        }
    }

    /// Logs where the vCPU was if the guest ended before its first doorbell, because it gave no reason.
    fn note_early_end(&self, vcpu: &Vcpu, reason: &ExitReason) {
        if !self.events.rang() {
            tracing::info!("{}", describe(vcpu, &format!("{reason:?} before it was ready")));
        }
    }
}

const NO_PAGE: &str = "a page behind the guest's memory cannot be had; if a snapshot or an image in the store was cut or its \
                       disk fails, `thaw image verify` says so";

/// Explains an error of KVM_RUN. KVM returns EFAULT if a page of guest memory is missing: the host has no memory left, or the file that the
/// page is mapped from was truncated or cannot be read.
fn describe_error(error: &thaw_hypervisor::Error) -> String {
    match error {
        thaw_hypervisor::Error::Ioctl { source, .. } if source.raw_os_error() == Some(libc::EFAULT) => {
            format!("{error}: {NO_PAGE}, or the guest wrote to memory that it has not plugged")
        }
        other => other.to_string(),
    }
}

fn describe_internal_error(vcpu: &mut Vcpu) -> String {
    let (suberror, bytes) = vcpu.internal_error();
    match (suberror, bytes.as_slice()) {
        (1, []) => "KVM cannot emulate an instruction".to_string(),
        (1, bytes) => format!("KVM cannot emulate an instruction, bytes {bytes:02x?}"),
        (other, _) => format!("KVM internal error {other}"),
    }
}

fn describe_triple_fault(vcpu: &Vcpu) -> String {
    match vcpu.sregs() {
        // KVM on AMD resets the vCPU, because the processor leaves its state undefined. So only the kind of fault is known.
        Ok(sregs) if sregs.cs.base == 0xffff_0000 => {
            "triple fault; this processor does not keep where".to_string()
        }
        Ok(sregs) => format!(
            "triple fault; cr0 {:#x} cr2 {:#x} cr3 {:#x} cr4 {:#x} efer {:#x} idt {:#x}+{:#x}",
            sregs.cr0, sregs.cr2, sregs.cr3, sregs.cr4, sregs.efer, sregs.idt.base, sregs.idt.limit
        ),
        Err(_) => "triple fault".to_string(),
    }
}

/// Describes `fault`, and where the vCPU was.
fn describe(vcpu: &Vcpu, fault: &str) -> String {
    let index = vcpu.index();
    match vcpu.regs() {
        Ok(regs) => format!("vCPU {index} at {:#x}: {fault}", regs.rip),
        Err(_) => format!("vCPU {index}: {fault}"),
    }
}
