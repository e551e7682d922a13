//! Resource limits, of a container at its creation and of an update.

use thaw_protocol::agent::{MessageField, oci};

use super::config::Resources;

/// cgroup controllers whose values mean the same in the guest. Others refer to devices, CPUs or NUMA nodes of
/// the host.
const GUEST_CONTROLLERS: [&str; 4] = ["cpu.", "hugetlb.", "memory.", "pids."];

/// Limits as the agent takes them. The devices cgroup and network classes are left out, because a guest's
/// devices and network all belong to its pod. Limits of block devices are left out, because they name devices
/// of the host.
pub fn resources(given: &Resources) -> oci::LinuxResources {
    let memory = given.memory.as_ref().map(|memory| oci::LinuxMemory {
        Limit: memory.limit.unwrap_or(0),
        Reservation: memory.reservation.unwrap_or(0),
        Swap: memory.swap.unwrap_or(0),
        ..Default::default()
    });
    let cpu = given.cpu.as_ref().map(|cpu| oci::LinuxCPU {
        Shares: cpu.shares.unwrap_or(0),
        Quota: cpu.quota.unwrap_or(0),
        Period: cpu.period.unwrap_or(0),
        ..Default::default()
    });
    let pids = given.pids.as_ref().map(|pids| oci::LinuxPids {
        Limit: pids.limit,
        ..Default::default()
    });
    let weight = given.block_io.as_ref().and_then(|io| io.weight);
    let block = weight.map(|weight| oci::LinuxBlockIO {
        Weight: weight.into(),
        ..Default::default()
    });
    let huge = given.hugepage_limits.iter().map(|limit| oci::LinuxHugepageLimit {
        Pagesize: limit.page_size.clone(),
        Limit: limit.limit,
        ..Default::default()
    });
    let is_the_same = |file: &str| {
        GUEST_CONTROLLERS
            .iter()
            .any(|controller| file.starts_with(controller))
    };
    let unified = given.unified.iter().filter(|(file, _)| is_the_same(file));
    let unified = unified.map(|(file, value)| (file.clone(), value.clone()));
    oci::LinuxResources {
        Memory: MessageField::from_option(memory),
        CPU: MessageField::from_option(cpu),
        Pids: MessageField::from_option(pids),
        BlockIO: MessageField::from_option(block),
        HugepageLimits: huge.collect(),
        Unified: unified.collect(),
        ..Default::default()
    }
}
