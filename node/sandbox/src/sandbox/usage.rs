//! Resource usage of a sandbox on the host, found from its record.

use thaw_pools::cgroup::Hierarchy;
use thaw_protocol::api::Usage;

use crate::state::Record;
use crate::trace::monotonic_ns;

/// Reads the kernel's files of the VMM and its cgroup. Involves neither guest nor VMM.
pub fn usage(record: &Record, cgroups: &Hierarchy) -> Usage {
    let cgroup = record.cgroup.as_deref().map(|name| cgroups.adopt(name));
    let directories = cgroup.as_ref().map_or(&[][..], |c| c.directories());
    let taken = thaw_pools::usage::Usage::of(record.vmm, directories);
    Usage {
        at_ns: monotonic_ns(),
        cpu_ns: taken.cpu_ns,
        memory_bytes: taken.memory_bytes,
        read_bytes: taken.read_bytes,
        written_bytes: taken.written_bytes,
        major_faults: taken.major_faults,
        ..Usage::default()
    }
}
