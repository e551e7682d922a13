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

/// What a vCPU's thread works with.
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
    /// The thread's whole life.
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

    /// Runs the vCPU until it shall stop.
    fn run(&self, taken: &impl Fn() -> u64) {
        let mut vcpu = self.vcpu();
        // Of a thawed machine, time stands still until here; ever after this does nothing.
        let time = self.control.time().map_or(Ok(()), |time| vcpu.start_time(time));
        let ended = match time {
            Err(e) => Some(ExitReason::Fault(describe(&vcpu, &e.to_string()))),
            Ok(()) => self.run_until_wanted(&mut vcpu, taken),
        };
        // Its soft-lockup watchdog shall not hold the pause against the guest.
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

    /// Runs the vCPU until it shall stop (none) or the machine ends (why).
    fn run_until_wanted(&self, vcpu: &mut Vcpu, faults: &impl Fn() -> u64) -> Option<ExitReason> {
        self.control.entering();
        loop {
            let fault = match vcpu.run() {
                // KVM emulated an instruction of the guest, or there is no memslot.
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

    /// Linux before 6.10 does not say where ([`describe_error`]).
    fn describe_memory_fault(&self, address: u64) -> String {
        match self.bus.inventory.is_unplugged(address) {
            true => format!("the guest wrote to memory at {address:#x}, which it has not plugged"),
            false => format!("memory at {address:#x}: {NO_PAGE}"),
        }
    }

    /// A guest that ends before its first doorbell gave no reason, so the log says where it was.
    fn note_early_end(&self, vcpu: &Vcpu, reason: &ExitReason) {
        if !self.events.rang() {
            tracing::info!("{}", describe(vcpu, &format!("{reason:?} before it was ready")));
        }
    }
}

const NO_PAGE: &str = "a page behind the guest's memory cannot be had; if a snapshot or an image in the store was cut or its \
                       disk fails, `thaw image verify` says so";

/// KVM returns EFAULT if a page of guest memory is missing: no memory is left, or the file it is mapped from was cut or cannot
/// be read.
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
        // KVM on AMD resets the vCPU, because the processor leaves its state undefined: only the kind is known.
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

/// `fault`, and where the vCPU was.
fn describe(vcpu: &Vcpu, fault: &str) -> String {
    let index = vcpu.index();
    match vcpu.regs() {
        Ok(regs) => format!("vCPU {index} at {:#x}: {fault}", regs.rip),
        Err(_) => format!("vCPU {index}: {fault}"),
    }
}
