//! The vCPU threads: one each, let in and out of the guest by one gate.
//!
//! Invariant: a vCPU is in guest code only while the gate is open. [`VcpuThreads::pause`] closes it, kicks every vCPU and
//! returns when all stand before it. Why a vCPU was kicked is in the gate before it is kicked, so no kick is lost
//! ([`thaw_hypervisor::kick`]); nothing polls.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use thaw_hypervisor::{Exit, Kicker, Vcpu};
use thaw_protocol::control::{Event, ExitReason};

use crate::bus::Bus;
use crate::clock::monotonic_ns;
use crate::events::EventSink;

/// What the vCPUs shall do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    /// Stand before the gate.
    Hold,
    Run,
    /// End their threads.
    Quit,
}

#[derive(Debug)]
struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
    kickers: Vec<Arc<Kicker>>,
    /// When the first vCPU entered the guest, CLOCK_MONOTONIC nanoseconds; 0 before.
    entered: AtomicU64,
}

#[derive(Debug)]
struct GateState {
    wanted: Wanted,
    /// vCPUs past the gate.
    inside: usize,
}

impl Gate {
    fn state(&self) -> MutexGuard<'_, GateState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, GateState>) -> MutexGuard<'a, GateState> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits before the gate; false: end.
    fn pass(&self) -> bool {
        let mut state = self.state();
        while state.wanted == Wanted::Hold {
            state = self.wait(state);
        }
        state.inside += usize::from(state.wanted == Wanted::Run);
        state.wanted == Wanted::Run
    }

    /// Comes back out.
    fn leave(&self) {
        self.state().inside -= 1;
        self.changed.notify_all();
    }

    fn open(&self) -> bool {
        self.state().wanted == Wanted::Run
    }

    /// Wants something else than running. Once quitting, always quitting.
    fn close(&self, wanted: Wanted) {
        let mut state = self.state();
        if state.wanted != Wanted::Quit {
            state.wanted = wanted;
        }
        drop(state);
        self.changed.notify_all();
        self.kickers.iter().for_each(|kicker| kicker.kick());
    }
}

/// The vCPUs of a machine that was started. Dropped, their threads end.
#[derive(Debug)]
pub struct VcpuThreads {
    gate: Arc<Gate>,
    threads: Vec<JoinHandle<()>>,
}

impl VcpuThreads {
    /// Starts a thread for each vCPU, before a closed gate.
    pub fn spawn(vcpus: Vec<Vcpu>, bus: &Arc<Bus>, events: &EventSink) -> io::Result<VcpuThreads> {
        let gate = Arc::new(Gate {
            state: Mutex::new(GateState {
                wanted: Wanted::Hold,
                inside: 0,
            }),
            changed: Condvar::new(),
            kickers: vcpus.iter().map(Vcpu::kicker).collect(),
            entered: AtomicU64::new(0),
        });
        let mut threads = VcpuThreads {
            gate,
            threads: Vec::with_capacity(vcpus.len()),
        };
        for vcpu in vcpus {
            let name = format!("vcpu{}", vcpu.index());
            let worker = Worker {
                gate: threads.gate.clone(),
                bus: bus.clone(),
                events: events.clone(),
                vcpu,
            };
            threads
                .threads
                .push(std::thread::Builder::new().name(name).spawn(|| worker.work())?);
        }
        Ok(threads)
    }

    /// Lets the vCPUs run.
    pub fn resume(&self) {
        let mut state = self.gate.state();
        if state.wanted == Wanted::Hold {
            state.wanted = Wanted::Run;
        }
        drop(state);
        self.gate.changed.notify_all();
    }

    /// Stops the vCPUs and returns when none is in guest code or in a device.
    pub fn pause(&self) {
        self.gate.close(Wanted::Hold);
        let mut state = self.gate.state();
        while state.inside > 0 {
            state = self.gate.wait(state);
        }
    }

    /// When the first vCPU entered the guest, CLOCK_MONOTONIC nanoseconds; 0 if none has.
    pub fn entered(&self) -> u64 {
        self.gate.entered.load(Ordering::Relaxed)
    }
}

impl Drop for VcpuThreads {
    fn drop(&mut self) {
        self.gate.close(Wanted::Quit);
        for thread in self.threads.drain(..) {
            // A thread that panicked has ended, too.
            let _ = thread.join();
        }
    }
}

/// What a vCPU's thread works with.
struct Worker {
    gate: Arc<Gate>,
    bus: Arc<Bus>,
    events: EventSink,
    vcpu: Vcpu,
}

impl Worker {
    fn work(mut self) {
        let kicker = self.vcpu.kicker();
        kicker.bind_current_thread();
        while self.gate.pass() {
            let ended = self.run_until_wanted();
            // Its soft-lockup watchdog shall not hold the pause against the guest.
            self.vcpu.notify_paused();
            if let Some(reason) = ended {
                self.bus.console.flush();
                self.events.send(Event::Exited(reason));
                self.gate.close(Wanted::Quit);
            }
            self.gate.leave();
        }
        kicker.unbind();
    }

    /// Runs the vCPU until the gate closes (none) or the machine ends (why).
    fn run_until_wanted(&mut self) -> Option<ExitReason> {
        if self.gate.entered.load(Ordering::Relaxed) == 0 {
            let _ =
                self.gate
                    .entered
                    .compare_exchange(0, monotonic_ns(), Ordering::Relaxed, Ordering::Relaxed);
        }
        loop {
            let fault = match self.vcpu.run() {
                Ok(Exit::MmioWrite { address, data }) => {
                    self.bus.mmio_write(address, data);
                    continue;
                }
                Ok(Exit::MmioRead { address, data }) => {
                    self.bus.mmio_read(address, data);
                    continue;
                }
                Ok(Exit::PortWrite { port, data }) => match self.bus.port_write(port, data) {
                    Some(reason) => return Some(reason),
                    None => continue,
                },
                Ok(Exit::PortRead { port, data }) => {
                    self.bus.port_read(port, data);
                    continue;
                }
                Ok(Exit::Interrupted) => match self.gate.open() {
                    true => continue,
                    false => return None,
                },
                Ok(Exit::Shutdown) => return Some(ExitReason::Reset),
                Ok(Exit::InternalError) => self.describe_internal_error(),
                Ok(other) => format!("{other:?}"),
                Err(e) => e.to_string(),
            };
            return Some(ExitReason::Fault(self.describe(&fault)));
        }
    }

    fn describe_internal_error(&mut self) -> String {
        let (suberror, bytes) = self.vcpu.internal_error();
        match (suberror, bytes.as_slice()) {
            (1, []) => "KVM cannot emulate an instruction".to_string(),
            (1, bytes) => format!("KVM cannot emulate an instruction, bytes {bytes:02x?}"),
            (other, _) => format!("KVM internal error {other}"),
        }
    }

    fn describe(&self, fault: &str) -> String {
        let index = self.vcpu.index();
        match self.vcpu.regs() {
            Ok(regs) => format!("vCPU {index} at {:#x}: {fault}", regs.rip),
            Err(_) => format!("vCPU {index}: {fault}"),
        }
    }
}
