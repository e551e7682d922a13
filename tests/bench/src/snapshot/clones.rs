//! What clones of one snapshot have of their host's memory.

use std::collections::BTreeSet;

use super::server::Host;
use crate::Report;
use crate::clock::monotonic_ns;
use crate::report::mib;
use crate::tenants::memory::Memory;

/// The series of so many clones.
pub fn name(count: usize) -> String {
    format!("{count} clones: memory of all, the snapshot's included")
}

/// Bytes that machines have on a node where no server runs, for [`measure`].
pub fn before(host: &Host) -> Result<u64, String> {
    machines(host, &BTreeSet::new())
}

/// Thaws so many clones, each of which shows its page, and measures what machines have beyond `before`.
pub async fn measure(
    host: &Host,
    snapshot: &str,
    count: usize,
    before: u64,
    report: &mut Report,
) -> Result<(), String> {
    let mut clones = Vec::with_capacity(count);
    for _ in 0..count {
        clones.push(host.thaw(snapshot, monotonic_ns()).await?);
    }
    host.node.settle().await?;
    let vmms: BTreeSet<i64> = clones.iter().map(|clone| clone.vmm).collect();
    let taken = machines(host, &vmms)?.saturating_sub(before);
    report.sample(&host.series(&name(count)), "MiB", mib(taken));
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
