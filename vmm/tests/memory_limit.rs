//! A VMM in a cgroup with the limits a sandbox gets: what it needs of them, and what becomes of one that needs more.
//!
//! The numbers in "Limits of a sandbox" of docs/operations.md are what `--nocapture` prints here.

#![allow(clippy::unwrap_used)]

mod support;

use std::fs;
use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::time::{Duration, Instant};

use support::{PATIENCE, Vmm, readable, spec};
use thaw_pools::cgroup::{Cgroup, Cgroups, Hierarchy};
use thaw_pools::cgroup_limits::{CgroupLimits, MEASURED_OVERHEAD, Needs};
use thaw_pools::resource::Kind;
use thaw_protocol::control::MachineState;
use thaw_tiny_guest::bare::{READY, bare};

const MIB: u64 = 1 << 20;
/// What a pod's cgroup has beside its guest's memory: the overhead of the RuntimeClass without the guest's own 128 MiB, and the
/// largest guest that docs/kubernetes.md says it is enough for.
const OVERHEAD_OF_A_POD: u64 = 32 * MIB;
const LARGEST_POD_MIB: u32 = 3072;

/// A cgroup with these limits; none, having said why, where this host has none to give.
fn limited(limits: CgroupLimits) -> Option<Cgroup> {
    let cgroup = match Cgroups::new(Hierarchy::detect()).make(&()) {
        Ok(cgroup) => cgroup,
        Err(reason) => {
            thaw_test_skip::skip(reason);
            return None;
        }
    };
    if let Err(reason) = cgroup.limit(&limits) {
        thaw_test_skip::skip(reason);
        cgroup.destroy();
        return None;
    }
    Some(cgroup)
}

/// The most memory its processes had; of a kernel that does not tell, what they have.
fn peak(cgroup: &Cgroup) -> u64 {
    let names = ["memory.peak", "memory.max_usage_in_bytes", "memory.current"];
    let mut files = names
        .iter()
        .flat_map(|name| cgroup.directories().iter().map(move |d| d.join(name)));
    let text = files.find_map(|file| fs::read_to_string(file).ok()).unwrap();
    text.trim().parse().unwrap()
}

#[test]
fn a_guest_that_touches_all_its_memory_stays_within_its_limit() {
    for (vcpus, memory_mib) in [(1, 64), (4, 64), (1, 512), (16, 1024)] {
        let limits = CgroupLimits::of(Needs {
            memory_mib,
            ..Needs::default()
        });
        let Some(overhead) = overhead_of(vcpus, memory_mib, limits) else {
            return;
        };
        assert!(
            overhead <= MEASURED_OVERHEAD + u64::from(memory_mib) * MIB / 32,
            "{vcpus} vCPUs, {memory_mib} MiB: {overhead} bytes"
        );
    }
}

#[test]
fn pod_overhead_holds_a_vmm_whose_guest_touches_everything() {
    for (vcpus, memory_mib) in [(1, 192), (2, 640), (16, LARGEST_POD_MIB)] {
        let limits = CgroupLimits {
            memory: u64::from(memory_mib) * MIB + OVERHEAD_OF_A_POD,
        };
        if overhead_of(vcpus, memory_mib, limits).is_none() {
            return;
        }
    }
}

/// What a VMM in a cgroup with these limits takes beside its guest's memory, bytes, while the guest touches all of it. None, having
/// said why, where this host has no limits to give.
fn overhead_of(vcpus: u8, memory_mib: u32, limits: CgroupLimits) -> Option<u64> {
    let cgroup = limited(limits)?;
    let vmm = Vmm::spawn();
    cgroup.add(vmm.pid() as i32).unwrap();
    let mut control = vmm.connect();
    control.create(spec(vcpus, memory_mib)).unwrap();
    let mut console = control.console();
    control.boot(&bare(memory_mib).kernel()).unwrap();
    let mut printed = vec![0; READY.len()];
    assert!(readable(&console, PATIENCE), "the console is silent");
    console.read_exact(&mut printed).unwrap();
    let (peak, state, kills) = (peak(&cgroup), control.state(), cgroup.oom_kills());
    drop(vmm);
    cgroup.destroy();
    assert_eq!((state, kills), (MachineState::Running, 0));
    // Its first 2 MiB are touched in part.
    let guest = u64::from(memory_mib) * MIB;
    assert!(
        peak > guest - 2 * MIB,
        "the guest touched {} KiB only",
        peak >> 10
    );
    let overhead = (peak + 2 * MIB).saturating_sub(guest);
    println!(
        "{vcpus} vCPUs, {memory_mib} MiB: {} KiB beside the guest's",
        overhead >> 10
    );
    Some(overhead)
}

#[test]
fn a_guest_beyond_its_limit_ends_its_vmm_and_nothing_else() {
    let Some(cgroup) = limited(CgroupLimits { memory: 48 * MIB }) else {
        return;
    };
    let (mut vmm, neighbour) = (Vmm::spawn(), Vmm::spawn());
    cgroup.add(vmm.pid() as i32).unwrap();
    let (mut control, mut other) = (vmm.connect(), neighbour.connect());
    control.create(spec(1, 64)).unwrap();
    other.create(spec(1, 64)).unwrap();
    let _console = control.console();
    control.boot(&bare(64).kernel()).unwrap();
    let began = Instant::now();
    let status = loop {
        if let Some(status) = vmm.child.try_wait().unwrap() {
            break status;
        }
        assert!(began.elapsed() < PATIENCE, "nothing ended it");
        std::thread::sleep(Duration::from_millis(5));
    };
    cgroup.destroy();
    assert_eq!(status.signal(), Some(libc::SIGKILL));
    assert_eq!(other.state(), MachineState::Created);
}
