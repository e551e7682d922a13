//! Boot memory: one or two private, unreserved mappings, on both sides of the MMIO hole.
//!
//! Invariant: memory is private to this process, because a clone must never write to its template, and costs the host nothing before the
//! guest touches it.

use std::sync::Arc;

use thaw_hypervisor::{Access, Vm};
use vm_memory::{GuestAddress, GuestRegionMmap, MmapRegion};

use crate::layout::{HIGH_MEMORY_START, LOW_MEMORY_END, Window, memslot};

/// Guest memory as devices see it: boot memory by guest address.
pub type GuestMemory = vm_memory::GuestMemoryMmap<()>;

const MIB: u64 = 1 << 20;

/// Why memory could not be made.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    #[error(
        "cannot reserve {size:#x} bytes of guest memory: {source}; raise the address-space limit (ulimit -v)"
    )]
    Map {
        size: u64,
        source: vm_memory::mmap::MmapRegionError,
    },
    #[error("guest memory regions overlap: {0}")]
    Regions(#[from] vm_memory::GuestRegionCollectionError),
    #[error("memory slot {slot}: {source}")]
    Slot {
        slot: u32,
        source: thaw_hypervisor::Error,
    },
}

/// The windows of boot memory of `memory_mib` MiB: below the MMIO hole, and above it for the rest.
pub fn boot_windows(memory_mib: u32) -> Vec<Window> {
    let bytes = u64::from(memory_mib) * MIB;
    let low = Window {
        start: 0,
        size: bytes.min(LOW_MEMORY_END),
    };
    let high = Window {
        start: HIGH_MEMORY_START,
        size: bytes - low.size,
    };
    [low, high].into_iter().filter(|window| window.size > 0).collect()
}

/// Maps boot memory of `memory_mib` MiB and registers it with KVM.
pub fn create(vm: &Vm, memory_mib: u32) -> Result<GuestMemory, MemoryError> {
    let mut regions = Vec::new();
    for (slot, window) in [memslot::LOW, memslot::HIGH]
        .into_iter()
        .zip(boot_windows(memory_mib))
    {
        let region = Arc::new(map(window)?);
        vm.set_memory(slot, region.clone(), Access::ReadWrite)
            .map_err(|source| MemoryError::Slot { slot, source })?;
        regions.push(region);
    }
    Ok(GuestMemory::from_arc_regions(regions)?)
}

fn map(window: Window) -> Result<GuestRegionMmap<()>, MemoryError> {
    let mapping = MmapRegion::build(
        None,
        window.size as usize,
        libc::PROT_READ | libc::PROT_WRITE,
        libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
    )
    .map_err(|source| MemoryError::Map {
        size: window.size,
        source,
    })?;
    Ok(GuestRegionMmap::new(mapping, GuestAddress(window.start))
        .expect("no window reaches the end of 64 bits"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use thaw_protocol::control::MEMORY_MIB;

    #[test]
    fn boot_memory_goes_around_the_hole() {
        assert_eq!(
            boot_windows(64),
            [Window {
                start: 0,
                size: 64 * MIB
            }]
        );
        assert_eq!(
            boot_windows(3072),
            [Window {
                start: 0,
                size: LOW_MEMORY_END
            }]
        );
        assert_eq!(
            boot_windows(3073),
            [
                Window {
                    start: 0,
                    size: LOW_MEMORY_END
                },
                Window {
                    start: HIGH_MEMORY_START,
                    size: MIB
                }
            ]
        );
    }

    proptest::proptest! {
        #[test]
        fn windows_hold_the_memory_and_neither_hole_nor_devices(mib in MEMORY_MIB) {
            let windows = boot_windows(mib);
            assert_eq!(windows.iter().map(|w| w.size).sum::<u64>(), u64::from(mib) * MIB);
            for window in windows {
                let end = window.start + window.size;
                assert!(end <= LOW_MEMORY_END || window.start >= HIGH_MEMORY_START);
                assert!(end <= crate::layout::PMEM0.start);
            }
        }
    }
}
