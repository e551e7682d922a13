//! The vCPU threads: one each, let in and out of the guest by one gate.
//!
//! Invariant: a vCPU is in guest code only while the gate is open. [`VcpuThreads::pause`] closes it, kicks every vCPU and
//! returns when all stand before it; nothing polls. While they do, and only then, [`VcpuThreads::each`] reaches the vCPUs.

mod faults;
mod gate;
mod worker;

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use thaw_hypervisor::{GuestTime, Vcpu};

use crate::bus::Bus;
use crate::events::EventSink;
use crate::jail;
pub use gate::Prepare;
use gate::{Gate, Wanted};
use worker::Worker;

/// How long somebody who only wants to know something waits for a vCPU that does not answer: it answers at once, but
/// where it waits itself, for a page that a userfault server owes for one.
const PATIENCE: Duration = Duration::from_millis(20);
/// How long a vCPU of a guest that has failed may take to leave it, on a host that may be why.
const LAST_PATIENCE: Duration = Duration::from_millis(500);
/// Stack of a vCPU's thread, in bytes.
const STACK: usize = 256 * 1024;

/// The vCPUs of a machine. Dropped, their threads end.
pub struct VcpuThreads {
    gate: Arc<Gate>,
    vcpus: Vec<Arc<Mutex<Vcpu>>>,
    threads: Vec<JoinHandle<()>>,
}

impl VcpuThreads {
    /// Starts a thread for each vCPU, which stands before the closed gate.
    pub fn spawn(vcpus: Vec<Vcpu>, bus: &Arc<Bus>, events: &EventSink) -> io::Result<VcpuThreads> {
        let kickers = vcpus.iter().map(Vcpu::kicker).collect();
        let mut threads = VcpuThreads {
            gate: Arc::new(Gate::new(kickers)),
            vcpus: Vec::with_capacity(vcpus.len()),
            threads: Vec::with_capacity(vcpus.len()),
        };
        for (index, vcpu) in vcpus.into_iter().enumerate() {
            let kicker = vcpu.kicker();
            let vcpu = Arc::new(Mutex::new(vcpu));
            let worker = Worker {
                gate: threads.gate.clone(),
                bus: bus.clone(),
                events: events.clone(),
                vcpu: vcpu.clone(),
                kicker,
                index,
            };
            threads.vcpus.push(vcpu);
            let expected = jail::threads::expect();
            let thread = std::thread::Builder::new()
                .name(format!("vcpu{index}"))
                .stack_size(STACK)
                .spawn(|| worker.work(expected))?;
            threads.threads.push(thread);
        }
        Ok(threads)
    }

    /// Has each vCPU made ready, by vCPU: by its own thread, all at once, and no processor has to fetch another's. Before
    /// they first run.
    pub fn prepare(&self, preparations: impl IntoIterator<Item = Prepare>) {
        self.gate.prepare(preparations);
    }

    /// The vCPU that starts a cold boot. Before it first runs.
    pub fn boot_vcpu(&self) -> Option<MutexGuard<'_, Vcpu>> {
        let vcpu = self.vcpus.first()?;
        Some(vcpu.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns when every vCPU is ready.
    ///
    /// # Errors
    /// What the first of the failed preparations said; once.
    pub fn ready(&self) -> thaw_hypervisor::Result<()> {
        self.gate.await_all()
    }

    /// Lets the vCPUs run.
    pub fn resume(&self) {
        self.gate.open(0..self.vcpus.len());
    }

    /// Lets the vCPUs run for the first time, with this time; those that are `first` at once, the others no later than
    /// [`Self::wake_rest`].
    pub fn thaw(&self, time: GuestTime, first: impl IntoIterator<Item = usize>) {
        self.gate.set_time(time);
        self.gate.open(first);
    }

    /// Lets those run that [`Self::thaw`] has put off.
    pub fn wake_rest(&self) {
        self.gate.wake(0..self.vcpus.len());
    }

    /// Stops the vCPUs and returns when none is in guest code or in a device.
    pub fn pause(&self) {
        self.gate.close(Wanted::Hold);
        self.gate.await_outside();
    }

    /// What `look` says of each vCPU, in order. They are paused.
    pub fn each<T, E>(&self, look: impl Fn(&Vcpu) -> Result<T, E>) -> Result<Vec<T>, E> {
        self.vcpus
            .iter()
            .map(|vcpu| look(&vcpu.lock().unwrap_or_else(PoisonError::into_inner)))
            .collect()
    }

    /// Stops the vCPUs for good and says where each was: instruction pointer, flags, what it waits for. For the log of a
    /// guest that never got to where it should.
    pub fn last_seen(&self) -> Vec<String> {
        self.gate.close(Wanted::Hold);
        let out = self.gate.await_outside_for(LAST_PATIENCE);
        let describe = |(index, (vcpu, out)): (usize, (&Arc<Mutex<Vcpu>>, bool))| match out {
            true => describe(index, &vcpu.lock().unwrap_or_else(PoisonError::into_inner)),
            false => format!("vCPU {index} does not stop: it is in a device, or waits for a page"),
        };
        self.vcpus.iter().zip(out).enumerate().map(describe).collect()
    }

    /// When the first vCPU entered the guest, CLOCK_MONOTONIC nanoseconds; 0 if none has.
    pub fn entered(&self) -> u64 {
        self.gate.entered()
    }

    /// Page faults of the vCPU threads since their vCPUs were ready. Each counts its own
    /// ([`faults`]): those in guest code are made to leave it for a moment, and one that cannot is counted as of its last
    /// pause.
    pub fn faults(&self) -> u64 {
        self.gate.faults(PATIENCE)
    }
}

fn describe(index: usize, vcpu: &Vcpu) -> String {
    match (vcpu.regs(), vcpu.sregs()) {
        (Ok(regs), Ok(sregs)) => format!(
            "vCPU {index} at {:#x}, rflags {:#x}, cr0 {:#x} cr2 {:#x} cr3 {:#x}",
            regs.rip, regs.rflags, sregs.cr0, sregs.cr2, sregs.cr3
        ),
        (Err(e), _) | (_, Err(e)) => format!("vCPU {index}: {e}"),
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
