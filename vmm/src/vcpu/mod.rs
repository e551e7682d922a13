//! The vCPU threads: one for each vCPU, started and stopped together ([`run_control`]).
//!
//! Invariant: a vCPU is in guest code only while the machine runs. [`VcpuThreads::pause`] kicks every vCPU and returns when all have
//! stopped; nothing polls. The vCPUs can be accessed ([`VcpuThreads::each`]) only while they are stopped.

mod faults;
mod run_control;
mod worker;

use std::io;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use thaw_hypervisor::{GuestTime, Vcpu};

use crate::bus::Bus;
use crate::events::EventSink;
use crate::jail;
pub use run_control::Prepare;
use run_control::{RunControl, Wanted};
use thaw_sys::lock::Lock;
use worker::Worker;

/// How long a census waits for a vCPU. A vCPU answers at once, unless it waits for something itself, such as a page from a userfault
/// server.
const PATIENCE: Duration = Duration::from_millis(20);
/// How long [`VcpuThreads::last_seen`] waits for the vCPUs of a failed guest to leave it. Long, because an overloaded host may be why the
/// guest failed.
const LAST_PATIENCE: Duration = Duration::from_millis(500);
/// Stack of a vCPU's thread, in bytes.
const STACK: usize = 256 * 1024;

/// The vCPUs of a machine. Their threads end when this is dropped.
pub struct VcpuThreads {
    control: Arc<RunControl>,
    vcpus: Vec<Arc<Mutex<Vcpu>>>,
    threads: Vec<JoinHandle<()>>,
}

impl VcpuThreads {
    /// Starts a thread for each vCPU. The threads wait.
    pub fn spawn(vcpus: Vec<Vcpu>, bus: &Arc<Bus>, events: &EventSink) -> io::Result<VcpuThreads> {
        let kickers = vcpus.iter().map(Vcpu::kicker).collect();
        let mut threads = VcpuThreads {
            control: Arc::new(RunControl::new(kickers)),
            vcpus: Vec::with_capacity(vcpus.len()),
            threads: Vec::with_capacity(vcpus.len()),
        };
        for (index, vcpu) in vcpus.into_iter().enumerate() {
            let kicker = vcpu.kicker();
            let vcpu = Arc::new(Mutex::new(vcpu));
            let worker = Worker {
                control: threads.control.clone(),
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

    /// Prepares each vCPU on its own thread, all at once, so that no processor fetches another's state. Preparations are in vCPU order.
    /// Must be called before the vCPUs first run.
    pub fn prepare(&self, preparations: impl IntoIterator<Item = Prepare>) {
        self.control.prepare(preparations);
    }

    /// The vCPU that starts a cold boot. Only before it first runs.
    pub fn boot_vcpu(&self) -> Option<MutexGuard<'_, Vcpu>> {
        let vcpu = self.vcpus.first()?;
        Some(vcpu.locked())
    }

    /// Returns when every vCPU is ready.
    ///
    /// # Errors
    /// The error of the first preparation that failed. Reported once.
    pub fn ready(&self) -> thaw_hypervisor::Result<()> {
        self.control.await_prepared()
    }

    /// Lets the vCPUs run.
    pub fn resume(&self) {
        self.control.start(0..self.vcpus.len());
    }

    /// Lets the vCPUs run for the first time, with guest time `time`. Those in `first` start at once, the others at the latest in
    /// [`Self::wake_rest`].
    pub fn thaw(&self, time: GuestTime, first: impl IntoIterator<Item = usize>) {
        self.control.set_time(time);
        self.control.start(first);
    }

    /// Wakes the vCPUs that [`Self::thaw`] did not start at once.
    pub fn wake_rest(&self) {
        self.control.wake(0..self.vcpus.len());
    }

    /// Stops the vCPUs and returns when none is in guest code or in a device.
    pub fn pause(&self) {
        self.control.stop(Wanted::Hold);
        self.control.await_stopped();
    }

    /// Calls `look` for each vCPU, in order, and returns the results. The vCPUs must be paused.
    pub fn each<T, E>(&self, look: impl Fn(&Vcpu) -> Result<T, E>) -> Result<Vec<T>, E> {
        self.vcpus.iter().map(|vcpu| look(&vcpu.locked())).collect()
    }

    /// Stops the vCPUs for good and describes where each was: instruction pointer, flags, what it waits for. For the log of a guest that
    /// never became ready.
    pub fn last_seen(&self) -> Vec<String> {
        self.control.stop(Wanted::Hold);
        let out = self.control.await_stopped_for(LAST_PATIENCE);
        let describe = |(index, (vcpu, out)): (usize, (&Arc<Mutex<Vcpu>>, bool))| match out {
            true => describe(index, &vcpu.locked()),
            false => format!("vCPU {index} does not stop: it is in a device, or waits for a page"),
        };
        self.vcpus.iter().zip(out).enumerate().map(describe).collect()
    }

    /// When the first vCPU entered the guest, CLOCK_MONOTONIC nanoseconds; 0 if none has.
    pub fn entered(&self) -> u64 {
        self.control.entered()
    }

    /// Page faults of the vCPU threads since their vCPUs were ready ([`faults`]). Each thread counts its own, so a vCPU in guest code is
    /// made to leave it for a moment. A vCPU that cannot answer in time is counted as of its last pause.
    pub fn faults(&self) -> u64 {
        self.control.faults(PATIENCE)
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
        self.control.stop(Wanted::Quit);
        for thread in self.threads.drain(..) {
            // A thread that panicked has ended, too.
            let _ = thread.join();
        }
    }
}
