//! Writes a paused machine to files.
//!
//! The order loses nothing. The vCPUs have stopped; then device threads are kept from guest memory; only then is anything read. Devices are
//! saved first, because saving may change guest memory and raise interrupts; then KVM's state; then memory. The state file is written last:
//! until it is whole there is no snapshot.

use std::fs::File;
use std::ops::Range;
use std::os::fd::OwnedFd;

use thaw_hypervisor::{ClockState, InterruptState, Vcpu, VcpuState};
use thaw_protocol::control::{DeviceId, ErrorCode, FreezeKind};

use super::refusal::{file_error, freeze_error, invalid, kvm_error, refused, system};
use super::{Body, Outcome, Started, descriptors};
use crate::bus::Quiesced;
use crate::layout::{self, Window};
use crate::snapshot::{Frozen, Shape, Snapshot, freeze_memory, working_set};
use crate::virtio::BusRecords;

/// Writes state and memory. Returns the bytes of memory data written. `fds`: state file, memory file, pagemap.
pub fn freeze(started: &Started, kind: FreezeKind, fds: Vec<OwnedFd>) -> Outcome<u64> {
    let [state, memory, pagemap] =
        descriptors(fds, "the state file, the memory file, this process's pagemap")?.map(File::from);
    require_empty(&state, "state")?;
    require_empty(&memory, "memory")?;
    refuse_devices_of_the_host(&started.body)?;
    let devices = started.body.bus.quiesce();
    let saved = Saved::of(started, &devices)?;
    let frozen = freeze_memory(
        kind,
        started.body.bus.inventory.memory(),
        &live_memory(&started.body),
        started.base.as_ref().map(|base| &base.map),
        &pagemap,
        &memory,
    )
    .map_err(freeze_error)?;
    drop(devices);
    saved.write(frozen, &state)
}

/// A machine's state, without its memory.
pub(super) struct Saved {
    shape: Shape,
    vcpus: Vec<VcpuState>,
    interrupts: InterruptState,
    clock: ClockState,
    bus: BusRecords,
}

impl Saved {
    /// Saves devices first, then KVM's state.
    pub fn of(started: &Started, devices: &Quiesced<'_>) -> Outcome<Saved> {
        let Started { body, vcpus, .. } = started;
        Ok(Saved {
            shape: shape(body),
            bus: devices.save(),
            vcpus: vcpus.each(Vcpu::save).map_err(kvm_error)?,
            interrupts: body.vm.save_interrupts().map_err(kvm_error)?,
            clock: body.vm.clock().map_err(kvm_error)?,
        })
    }

    /// Writes the state file of this state and this memory. Returns the bytes of memory data.
    pub fn write(self, memory: Frozen, state: &File) -> Outcome<u64> {
        let Saved {
            shape,
            vcpus,
            interrupts,
            clock,
            bus,
        } = self;
        let snapshot = Snapshot {
            shape,
            vcpus,
            interrupts,
            clock,
            bus,
            memory: memory.map,
        };
        snapshot.write(state).map_err(file_error)?;
        Ok(memory.bytes)
    }
}

/// Fails if the machine has a device that no snapshot can contain.
pub(super) fn refuse_devices_of_the_host(body: &Body) -> Outcome<()> {
    let what = match body.bus.inventory.of_the_host() {
        None => return Ok(()),
        Some(DeviceId::Shared) => "a share: what its guest has open there no snapshot can hold",
        Some(_) => "a block device of the host: what is on it no snapshot can hold",
    };
    Err(refused(ErrorCode::Shared, format!("the machine has {what}")))
}

/// Writes the set of pages touched since the restore. `fds`: the file, pagemap.
pub fn working_set(started: &Started, fds: Vec<OwnedFd>) -> Outcome<()> {
    let [file, pagemap] = descriptors(fds, "the working-set file, this process's pagemap")?.map(File::from);
    require_empty(&file, "working-set")?;
    let Some(base) = &started.base else {
        return Err(invalid(
            "this machine was booted, not restored: it has no working set".into(),
        ));
    };
    working_set::record(started.body.bus.inventory.memory(), &base.map, &pagemap)
        .map_err(freeze_error)?
        .write(&file)
        .map_err(file_error)
}

/// The shape that a machine must have to thaw a snapshot of this one.
pub fn shape(body: &Body) -> Shape {
    Shape {
        vcpus: body.spec.vcpus,
        memory_mib: body.spec.memory_mib,
        address_map: layout::VERSION,
    }
}

/// Guest addresses that are memory now: boot memory, and the plugged part of virtio-mem's region.
pub(super) fn live_memory(body: &Body) -> Vec<Range<u64>> {
    let range = |window: Window| window.start..window.start + window.size;
    let boot = crate::memory::boot_windows(body.spec.memory_mib);
    let plugged = body.bus.inventory.plugged();
    boot.into_iter().chain(plugged).map(range).collect()
}

/// Refuses a file that is not empty. Snapshots are written only to new files: a half overwritten old one would be worse than none.
pub(super) fn require_empty(file: &File, name: &str) -> Outcome<()> {
    let length = file
        .metadata()
        .map_err(system("looking at a snapshot file"))?
        .len();
    match length {
        0 => Ok(()),
        bytes => Err(invalid(format!(
            "the {name} file is not empty ({bytes} bytes): it is to be written"
        ))),
    }
}
