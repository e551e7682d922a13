//! The vCPU threads: one each, started and stopped together ([`run_control`]).
//!
//! Invariant: a vCPU is in guest code only while the machine runs. [`VcpuThreads::pause`] kicks every vCPU and returns when all
//! have stopped; nothing polls. While they are, and only then, [`VcpuThreads::each`] reaches the vCPUs.

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

/// How long a census waits for a vCPU. It answers at once, unless it waits for something itself, such as a page from a
/// userfault server.
const PATIENCE: Duration = Duration::from_millis(20);
/// How long a vCPU of a guest that has failed may take to leave it, on a host that may be why.
const LAST_PATIENCE: Duration = Duration::from_millis(500);
/// Stack of a vCPU's thread, in bytes.
const STACK: usize = 256 * 1024;

/// The vCPUs of a machine. Dropped, their threads end.
pub struct VcpuThreads {
    control: Arc<RunControl>,
    vcpus: Vec<Arc<Mutex<Vcpu>>>,
    threads: Vec<JoinHandle<()>>,
}

impl VcpuThreads {
    /// Starts a thread for each vCPU, which waits.
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

    /// Has each vCPU made ready, by vCPU: by its own thread, all at once, and no processor has to fetch another's. Before
    /// they first run.
    pub fn prepare(&self, preparations: impl IntoIterator<Item = Prepare>) {
        self.control.prepare(preparations);
    }

    /// The vCPU that starts a cold boot. Before it first runs.
    pub fn boot_vcpu(&self) -> Option<MutexGuard<'_, Vcpu>> {
        let vcpu = self.vcpus.first()?;
        Some(vcpu.locked())
    }

    /// Returns when every vCPU is ready.
    ///
    /// # Errors
    /// What the first of the failed preparations said; once.
    pub fn ready(&self) -> thaw_hypervisor::Result<()> {
        self.control.await_prepared()
    }

    /// Lets the vCPUs run.
    pub fn resume(&self) {
        self.control.start(0..self.vcpus.len());
    }

    /// Lets the vCPUs run for the first time, with this time; those that are `first` at once, the others no later than
    /// [`Self::wake_rest`].
    pub fn thaw(&self, time: GuestTime, first: impl IntoIterator<Item = usize>) {
        self.control.set_time(time);
        self.control.start(first);
    }

    /// Lets those run that [`Self::thaw`] has put off.
    pub fn wake_rest(&self) {
        self.control.wake(0..self.vcpus.len());
    }

    /// Stops the vCPUs and returns when none is in guest code or in a device.
    pub fn pause(&self) {
        self.control.stop(Wanted::Hold);
        self.control.await_stopped();
    }

    /// What `look` says of each vCPU, in order. They are paused.
    pub fn each<T, E>(&self, look: impl Fn(&Vcpu) -> Result<T, E>) -> Result<Vec<T>, E> {
        self.vcpus.iter().map(|vcpu| look(&vcpu.locked())).collect()
    }

    /// Stops the vCPUs for good and says where each was: instruction pointer, flags, what it waits for. For the log of a
    /// guest that never got to where it should.
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

    /// Page faults of the vCPU threads since their vCPUs were ready. Each counts its own
    /// ([`faults`]): those in guest code are made to leave it for a moment, and one that cannot is counted as of its last
    /// pause.
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
