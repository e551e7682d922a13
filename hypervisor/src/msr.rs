//! Model-specific registers: which ones are saved, reading many at once, and setting all or naming the one
//! that KVM refused.

use std::sync::OnceLock;

use kvm_bindings::{KVM_MAX_MSR_ENTRIES, Msrs, kvm_msr_entry};
use kvm_ioctls::VcpuFd;

use crate::{Error, Result};

/// IA32_TIME_STAMP_COUNTER.
pub(crate) const TSC: u32 = 0x10;
/// IA32_TSC_DEADLINE: the TSC value at which the local APIC's timer fires; 0 if it is not armed.
pub(crate) const TSC_DEADLINE: u32 = 0x6e0;
/// Hyper-V's registers (asm/hyperv-tlfs.h). KVM always lists them, but this machine's CPUID does not announce
/// Hyper-V, so no guest uses them, and reading one makes KVM allocate memory.
const HYPER_V: std::ops::Range<u32> = 0x4000_0000..0x4000_1000;

/// The MSRs that KVM lists as a vCPU's state, and those of them that can be read.
#[derive(Debug)]
pub(crate) struct SavedMsrs {
    listed: Vec<u32>,
    /// The same, sorted by number.
    sorted: Vec<u32>,
    /// Determined by the first save.
    readable: OnceLock<Vec<u32>>,
}

impl SavedMsrs {
    /// `listed` is the result of KVM_GET_MSR_INDEX_LIST.
    pub fn new(listed: &[u32]) -> SavedMsrs {
        let listed: Vec<u32> = listed.iter().copied().filter(|i| !HYPER_V.contains(i)).collect();
        let mut sorted = listed.clone();
        sorted.sort_unstable();
        SavedMsrs {
            listed,
            sorted,
            readable: OnceLock::new(),
        }
    }

    /// Reads all that can be read.
    pub fn read(&self, vcpu: &VcpuFd) -> Result<Vec<kvm_msr_entry>> {
        let indices = self.readable.get().unwrap_or(&self.listed);
        let entries = read_readable(vcpu, indices)?;
        self.readable
            .get_or_init(|| entries.iter().map(|e| e.index).collect());
        Ok(entries)
    }
}

impl SavedMsrs {
    /// Sets `entries` in their order. KVM accepts values from the VMM that it refuses from a guest, and a
    /// saved state may be forged. An MSR that is not part of a vCPU's state (a Hyper-V register, EFER) is
    /// therefore never set, and must have its value already.
    ///
    /// # Errors
    /// [`Error::Msr`] with the first entry that must not or cannot be set and does not have its value
    /// already.
    pub fn set(&self, vcpu: &VcpuFd, entries: &[kvm_msr_entry]) -> Result<()> {
        let is_state = |entry: &kvm_msr_entry| self.sorted.binary_search(&entry.index).is_ok();
        let (state, others): (Vec<_>, Vec<_>) = entries.iter().copied().partition(is_state);
        for other in others {
            // Reading a Hyper-V register makes KVM allocate memory.
            if HYPER_V.contains(&other.index) || !has(vcpu, &other)? {
                return Err(refused(&other));
            }
        }
        set_or_equal(vcpu, &state)
    }
}

/// Reads those of `indices` that KVM permits, in as few calls as possible.
fn read_readable(vcpu: &VcpuFd, mut indices: &[u32]) -> Result<Vec<kvm_msr_entry>> {
    let mut values = Vec::with_capacity(indices.len());
    while !indices.is_empty() {
        let batch = &indices[..indices.len().min(KVM_MAX_MSR_ENTRIES)];
        let read = read_until_refused(vcpu, batch)?;
        let done = read.len();
        values.extend(read);
        // The first that was not read is the refused one.
        indices = &indices[done + usize::from(done < batch.len())..];
    }
    Ok(values)
}

/// Reads `indices` up to the first that KVM refuses.
fn read_until_refused(vcpu: &VcpuFd, indices: &[u32]) -> Result<Vec<kvm_msr_entry>> {
    let asked: Vec<_> = indices.iter().map(|&index| entry(index, 0)).collect();
    let mut list = list(&asked)?;
    let read = vcpu.get_msrs(&mut list).map_err(Error::ioctl("KVM_GET_MSRS"))?;
    Ok(list.as_slice()[..read.min(indices.len())].to_vec())
}

/// Sets `entries` in their order. Skips those that KVM refuses if they have their value already.
fn set_or_equal(vcpu: &VcpuFd, mut entries: &[kvm_msr_entry]) -> Result<()> {
    while !entries.is_empty() {
        let batch = &entries[..entries.len().min(KVM_MAX_MSR_ENTRIES)];
        let set = vcpu
            .set_msrs(&list(batch)?)
            .map_err(Error::ioctl("KVM_SET_MSRS"))?;
        if let Some(entry) = batch.get(set)
            && !has(vcpu, entry)?
        {
            return Err(refused(entry));
        }
        entries = &entries[(set + 1).min(batch.len())..];
    }
    Ok(())
}

/// Whether an MSR can be read and has this value.
fn has(vcpu: &VcpuFd, entry: &kvm_msr_entry) -> Result<bool> {
    let read = read_until_refused(vcpu, &[entry.index])?;
    Ok(read.first().is_some_and(|there| there.data == entry.data))
}

fn refused(entry: &kvm_msr_entry) -> Error {
    Error::Msr {
        index: entry.index,
        value: entry.data,
    }
}

/// Sets `entries` in their order.
///
/// # Errors
/// [`Error::Msr`] with the first entry whose MSR is unknown to KVM or whose value it refuses.
pub(crate) fn set(vcpu: &VcpuFd, entries: &[kvm_msr_entry]) -> Result<()> {
    let set = vcpu
        .set_msrs(&list(entries)?)
        .map_err(Error::ioctl("KVM_SET_MSRS"))?;
    match entries.get(set) {
        None => Ok(()),
        Some(entry) => Err(refused(entry)),
    }
}

pub(crate) fn entry(index: u32, data: u64) -> kvm_msr_entry {
    kvm_msr_entry {
        index,
        data,
        ..Default::default()
    }
}

fn list(entries: &[kvm_msr_entry]) -> Result<Msrs> {
    Msrs::from_entries(entries).map_err(|_| Error::Missing("room for that many MSRs"))
}
