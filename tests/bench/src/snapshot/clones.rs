//! What clones of one snapshot have of their host's memory.

use std::collections::BTreeSet;
use std::io;

use super::server::{Host, NAME, dirtied};
use crate::Report;
use crate::clock::{monotonic_ns, progress};
use crate::report::mib;
use crate::tenants::memory::Memory;
use crate::thaw::cost::{available, meminfo};

/// The series of what so many clones take of their host: what it could give less (`MemAvailable`) than without them, and the snapshot's memory.
pub fn taken(count: usize) -> String {
    format!("{count} clones: memory that the host has less, the snapshot's included")
}

/// What they have of it on purpose: what they wrote, and the snapshot's memory.
pub fn written(count: usize) -> String {
    format!("{count} clones: memory that they dirtied, and the snapshot's")
}

/// Anonymous memory of their machines, and memory files of thawd.
pub fn machines_of(count: usize) -> String {
    format!("{count} clones: memory of all machines, the snapshot's included")
}

/// Kernel memory that grows with clones, as `/proc/meminfo` has it: page tables of processes, the stacks of threads, what the kernel allocates
/// in parts of pages and cannot give back, and what it has for each processor. KVM's tables of guests' pages are not among them.
const KERNEL: [&str; 4] = ["PageTables", "KernelStack", "SUnreclaim", "Percpu"];

/// The series of one of these.
fn of_kernel(count: usize, what: &str) -> String {
    format!("{count} clones: the kernel's {what}")
}

/// Bytes that machines have on a node where no server runs, for [`measure`].
pub fn before(host: &Host) -> Result<u64, String> {
    machines(host, &BTreeSet::new())
}

/// Thaws so many clones, each of which shows its page, and measures what they take, and what machines have beyond `before`. The snapshot has
/// `held` bytes of memory, which thawd has already. Each is paused after its page, its memory kept, so that the timers of those that are there
/// do not take the processor from the next one.
pub async fn measure(
    host: &Host,
    (snapshot, held): (&str, u64),
    count: usize,
    before: u64,
    report: &mut Report,
) -> Result<(), String> {
    let available = || available().map_err(|e| e.to_string());
    let kernel = || {
        let lines = KERNEL.iter().map(|what| meminfo(what));
        lines.collect::<io::Result<Vec<f64>>>().map_err(|e| e.to_string())
    };
    host.node.settle().await?;
    let (without, kernel_without) = (available()?, kernel()?);
    let mut clones = Vec::with_capacity(count);
    for _ in 0..count {
        let clone = host.thaw(snapshot, monotonic_ns()).await?;
        host.hold(&clone).await?;
        clones.push(clone);
        if clones.len() % 10 == 0 {
            progress(NAME, format!("{} clones", clones.len()));
        }
    }
    host.node.settle().await?;
    let vmms: BTreeSet<i64> = clones.iter().map(|clone| clone.vmm).collect();
    let (less, kernel_with) = (without - available()?, kernel()?);
    let of_machines = machines(host, &vmms)?.saturating_sub(before);
    let mut own = 0;
    for vmm in vmms {
        own += dirtied(vmm)?;
    }
    for (series, mib) in [
        (taken(count), less / 1024.0 + mib(held)),
        (written(count), mib(own + held)),
        (machines_of(count), mib(of_machines)),
    ] {
        report.sample(&host.series(&series), "MiB", mib);
    }
    for ((what, now), before) in KERNEL.iter().zip(kernel_with).zip(kernel_without) {
        report.sample(
            &host.series(&of_kernel(count, what)),
            "MiB",
            (now - before) / 1024.0,
        );
    }
    for clone in clones {
        host.delete(clone).await?;
    }
    Ok(())
}

fn machines(host: &Host, vmms: &BTreeSet<i64>) -> Result<u64, String> {
    let node = &host.node;
    let memory = Memory::of(vmms, node.thawd.record().pid, &node.place.path("data"))?;
    Ok(memory.of_machines())
}
