//! Loads a snapshot into a created machine: the slow part of a thaw.
//!
//! Invariant: the machine is not changed before everything in the files is read, checked against its hashes, and found to fit this machine
//! and this host. Mapping memory comes next; it may fail, and is then undone.

use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use thaw_hypervisor::{Vcpu, VcpuState, cpuid};
use thaw_protocol::control::{ErrorCode, MappedRegion, MemoryMode};

use super::freeze::shape;
use super::refusal::{
    device_restore_error, file_error, invalid, kvm_error, memory_restore_error, refused, system, uffd_error,
};
use super::{Base, Body, Created, Outcome, Parked};
use crate::layout;
use crate::snapshot::Snapshot;
use crate::snapshot::restore::{check_memory, check_plugged, map_memory, populate_all};
use crate::snapshot::uffd::{Watch, watch};
use crate::snapshot::working_set::{Populated, WorkingSet, populate};
use crate::vcpu::Prepare;
use crate::virtio::{BusRecords, mem};
use crate::vmgenid;

/// The descriptors of a restore, sorted by purpose.
pub struct Files {
    state: File,
    memory: Memory,
    working_set: Option<File>,
    layers: u8,
}

/// The source of memory's contents.
enum Memory {
    /// The memory files, from the bottom up.
    Files { layers: Vec<File>, populate: bool },
    /// /dev/userfaultfd: another process fills each page.
    Uffd(OwnedFd),
}

impl Files {
    /// Sorts the descriptors, which come in the order that `Command::Restore` describes.
    pub fn sort(layers: u8, working_set: bool, mode: MemoryMode, fds: Vec<OwnedFd>) -> Outcome<Files> {
        let memory = match mode {
            MemoryMode::Uffd => 1,
            MemoryMode::Cow | MemoryMode::Populate => usize::from(layers),
        };
        let wanted = 1 + memory + usize::from(working_set);
        let count = fds.len();
        if count != wanted {
            return Err(invalid(format!(
                "{wanted} descriptors belong beside the request (state file, {memory} for memory{}), {count} came",
                if working_set { ", working set" } else { "" }
            )));
        }
        let too_few = || invalid("a descriptor is missing".into());
        let mut fds = fds.into_iter();
        let state = fds.next().map(File::from).ok_or_else(too_few)?;
        let memory = match mode {
            MemoryMode::Uffd => Memory::Uffd(fds.next().ok_or_else(too_few)?),
            MemoryMode::Cow | MemoryMode::Populate => Memory::Files {
                layers: fds.by_ref().take(memory).map(File::from).collect(),
                populate: mode == MemoryMode::Populate,
            },
        };
        Ok(Files {
            state,
            memory,
            working_set: fds.next().map(File::from),
            layers,
        })
    }
}

/// A snapshot that fits this machine and this host.
pub struct Plan {
    snapshot: Snapshot,
    /// The guest addresses that virtio-mem had plugged.
    plugged: Vec<Range<u64>>,
    memory: Memory,
    working_set: Option<WorkingSet>,
}

/// The contents of the reply.
pub struct Restored {
    /// The ranges that the userfaultfd watches; empty without one.
    pub regions: Vec<MappedRegion>,
    pub uffd: Option<OwnedFd>,
    /// The pages mapped in advance, and the nanoseconds that took.
    pub populated: Populated,
}

impl Plan {
    /// Reads and checks everything; changes nothing.
    pub fn check(created: &Created, files: Files) -> Outcome<Plan> {
        let Created { body, .. } = created;
        let snapshot = Snapshot::read(&files.state).map_err(file_error)?;
        check_shape(body, &snapshot)?;
        check_cpus(body, &snapshot.vcpus)?;
        body.bus.check(&snapshot.bus).map_err(device_restore_error)?;
        let needs = snapshot.memory.layers();
        if needs != files.layers {
            return Err(refused(
                ErrorCode::Incompatible,
                format!("the snapshot's memory has {needs} layers, {} came", files.layers),
            ));
        }
        let plugged = plugged_in(&snapshot.bus);
        check_plugged(&snapshot.memory, &plugged).map_err(memory_restore_error)?;
        if let Memory::Files { layers, .. } = &files.memory {
            check_memory(body.bus.inventory.memory(), &snapshot.memory, layers)
                .map_err(memory_restore_error)?;
        }
        let working_set = files
            .working_set
            .map(|file| WorkingSet::read(&file))
            .transpose()
            .map_err(file_error)?;
        Ok(Plan {
            snapshot,
            plugged,
            memory: files.memory,
            working_set,
        })
    }

    /// Maps memory's contents. If that fails, memory is as it was before.
    pub fn map_memory(&self, body: &Body) -> Outcome<(Option<Watch>, Restored)> {
        let (memory, map) = (body.bus.inventory.memory(), &self.snapshot.memory);
        match &self.memory {
            Memory::Uffd(device) => {
                let watch = watch(device.as_fd(), memory, map).map_err(uffd_error)?;
                let server = watch
                    .uffd
                    .try_clone()
                    .map_err(system("a second userfaultfd descriptor"))?;
                let restored = Restored {
                    regions: watch.regions.clone(),
                    uffd: Some(server),
                    populated: Populated::default(),
                };
                Ok((Some(watch), restored))
            }
            Memory::Files {
                layers,
                populate: all,
            } => {
                map_memory(memory, map, &self.plugged, layers).map_err(memory_restore_error)?;
                // The thaw writes to this page, and must not wait for a fault then.
                vmgenid::touch(memory).map_err(|e| refused(ErrorCode::System, e.to_string()))?;
                let populated = match (all, &self.working_set) {
                    (true, _) => populate_all(memory, map),
                    (false, Some(set)) => populate(memory, map, set),
                    (false, None) => Populated::default(),
                };
                let restored = Restored {
                    regions: Vec::new(),
                    uffd: None,
                    populated,
                };
                Ok((None, restored))
            }
        }
    }
}

/// Loads the rest of the snapshot into a machine whose memory is mapped: devices, vCPUs, interrupt controllers.
pub fn load(created: Created, plan: Plan, watch: Option<Watch>) -> Outcome<Parked> {
    let Created { body, vcpus } = created;
    let Snapshot {
        vcpus: frozen,
        interrupts,
        clock,
        bus,
        memory: map,
        ..
    } = plan.snapshot;
    let frozen = Arc::new(frozen);
    let preparation = |index: usize| {
        let frozen = frozen.clone();
        Box::new(move |vcpu: &mut Vcpu| vcpu.restore(&frozen[index])) as Prepare
    };
    vcpus.prepare((0..frozen.len()).map(preparation));
    // The vCPUs are prepared meanwhile. The restored devices do nothing yet.
    body.bus.restore(&bus).map_err(device_restore_error)?;
    let parked = Parked {
        body,
        vcpus,
        base: Base { map, watch },
        frozen,
        interrupts: Box::new(interrupts),
        clock,
    };
    // KVM reads guest memory when the address of the guest's clock is set. If another process fills the pages, they come only after that
    // process knows of this restore; so in that case the thaw waits for them instead.
    if parked.base.watch.is_none() {
        parked.await_vcpus()?;
    }
    Ok(parked)
}

impl Parked {
    /// Returns when the vCPUs and the interrupt controllers have their frozen state. A second call does nothing slow.
    pub fn await_vcpus(&self) -> Outcome<()> {
        self.vcpus.ready().map_err(kvm_error)?;
        // After every local APIC, because it sends pending interrupts to them.
        self.body
            .vm
            .restore_interrupts(&self.interrupts)
            .map_err(kvm_error)
    }
}

fn plugged_in(bus: &BusRecords) -> Vec<Range<u64>> {
    let windows = mem::plugged_in(&bus.devices).into_iter();
    windows
        .map(|window| window.start..window.start + window.size)
        .collect()
}

fn check_shape(body: &Body, snapshot: &Snapshot) -> Outcome<()> {
    let (here, frozen) = (shape(body), snapshot.shape);
    let differs = |what: &str, frozen: u32, here: u32| {
        let message = format!("the snapshot has {frozen} {what}, this machine was made with {here}");
        refused(ErrorCode::Incompatible, message)
    };
    if frozen.address_map != here.address_map {
        return Err(refused(
            ErrorCode::Incompatible,
            format!(
                "the snapshot has version {} of the address map, this thaw-vmm has {}: freeze again with this Thaw",
                frozen.address_map,
                layout::VERSION
            ),
        ));
    }
    if frozen.vcpus != here.vcpus || snapshot.vcpus.len() != usize::from(here.vcpus) {
        return Err(differs("vCPUs", frozen.vcpus.into(), here.vcpus.into()));
    }
    if frozen.memory_mib != here.memory_mib {
        return Err(differs("MiB of boot memory", frozen.memory_mib, here.memory_mib));
    }
    Ok(())
}

/// Checks that this host can provide the CPU features of every frozen vCPU.
fn check_cpus(body: &Body, frozen: &[VcpuState]) -> Outcome<()> {
    for (index, state) in (0u8..).zip(frozen) {
        // The features that a machine is given, not all that KVM supports, because the file may be forged.
        let offered = cpuid::for_vcpu(&body.supported, index, body.spec.vcpus).map_err(kvm_error)?;
        let missing = cpuid::missing(state.cpuid(), &offered);
        if !missing.is_empty() {
            let message = format!(
                "this host lacks what the snapshot's vCPUs have: {}; thaw where that is, or freeze a machine booted with a \
                 lower CPU baseline",
                missing.join(", ")
            );
            return Err(refused(ErrorCode::Incompatible, message));
        }
    }
    Ok(())
}
