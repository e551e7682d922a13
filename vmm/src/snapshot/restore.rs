//! Maps memory files over the reserved guest memory, privately. Nothing is copied.
//!
//! Invariant: everything is checked before the first mapping. This process and the guest only read the files; the guest's writes make
//! private copies. Memory in no extent stays anonymous, because reading a hole of a shared file would allocate a page in that file.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;

use rustix::mm::Advice;
use thaw_protocol::control::MappedRegion;
use vm_memory::{Address, GuestAddress, GuestMemory as _, GuestMemoryRegion, MemoryRegionAddress};

use super::mapping::{self, Hint};
use super::memory_map::Region;
use super::working_set::{self, Populated};
use super::{MemoryMap, ranges};
use crate::layout::{self, Window};
use crate::memory::GuestMemory;
use crate::virtio::guest_io;

/// Why memory could not be mapped.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    #[error("the snapshot's memory has {needs} layers, {has} memory files came")]
    Layers { needs: u8, has: usize },
    #[error("memory file {layer} is cut short: {has:#x} bytes of {needs:#x}; fetch or freeze it again")]
    CutShort { layer: usize, has: u64, needs: u64 },
    #[error(
        "the snapshot has {size:#x} bytes of memory at {guest_address:#x}, this machine {here:#x}: make it with the \
         snapshot's memory size"
    )]
    Shape {
        guest_address: u64,
        size: u64,
        here: u64,
    },
    #[error(
        "the snapshot has data at {guest_address:#x} ({size:#x} bytes), where its virtio-mem has nothing plugged: it was \
         changed; fetch or freeze it again"
    )]
    Unplugged { guest_address: u64, size: u64 },
    #[error("memory file {layer}: {error}")]
    File { layer: usize, error: io::Error },
    #[error("mapping memory {guest_address:#x} ({size:#x} bytes): {error}; is vm.max_map_count below 65530?")]
    Map {
        guest_address: u64,
        size: u64,
        error: io::Error,
    },
}

/// Whether `map` fits this machine and `layers`, the memory files from the bottom up. Changes nothing.
pub fn check_memory(memory: &GuestMemory, map: &MemoryMap, layers: &[File]) -> Result<(), RestoreError> {
    check_shape(memory, map)?;
    if layers.len() != usize::from(map.layers()) {
        return Err(RestoreError::Layers {
            needs: map.layers(),
            has: layers.len(),
        });
    }
    for (layer, file) in layers.iter().enumerate() {
        let has = file
            .metadata()
            .map_err(|error| RestoreError::File { layer, error })?
            .len();
        let needs = map.bytes_of_layer(layer as u8);
        if has < needs {
            return Err(RestoreError::CutShort { layer, has, needs });
        }
    }
    Ok(())
}

/// Checks that the machine has the map's regions, and no boot memory outside them.
pub(super) fn check_shape(memory: &GuestMemory, map: &MemoryMap) -> Result<(), RestoreError> {
    let region_at = |guest_address| {
        let found = map.regions().iter().find(|r| r.guest_address == guest_address);
        found.map_or(0, |region| region.size)
    };
    for here in memory.iter() {
        let (guest_address, here) = (here.start_addr().raw_value(), here.len());
        let size = region_at(guest_address);
        // A memory file has only as much of virtio-mem's region as it needs.
        let fits = size == here || guest_address == layout::VIRTIO_MEM.start && size < here;
        if !fits {
            return Err(RestoreError::Shape {
                guest_address,
                size,
                here,
            });
        }
    }
    for &Region { guest_address, size } in map.regions() {
        if !memory
            .iter()
            .any(|here| here.start_addr().raw_value() == guest_address)
        {
            return Err(RestoreError::Shape {
                guest_address,
                size,
                here: 0,
            });
        }
    }
    Ok(())
}

/// Checks that all of the map's data is in boot memory or in `plugged`, the memory that virtio-mem had plugged at the freeze. Data
/// elsewhere would give the guest memory that it was not given.
pub fn check_plugged(map: &MemoryMap, plugged: &[Range<u64>]) -> Result<(), RestoreError> {
    let hotplug = [hotplug()];
    let data = ranges::intersection(&map.data(), &hotplug);
    match ranges::difference(&data, plugged).first() {
        None => Ok(()),
        Some(range) => Err(RestoreError::Unplugged {
            guest_address: range.start,
            size: range.end - range.start,
        }),
    }
}

/// Maps the layers' extents over guest memory, which must be untouched. `memory` is boot memory and virtio-mem's region; `plugged` is the
/// plugged part of the latter. The files need only be readable, and may be closed afterwards.
///
/// # Errors
/// As [`check_memory`], before anything is changed. If a mapping fails, all memory is anonymous and zero again.
pub fn map_memory(
    memory: &GuestMemory,
    map: &MemoryMap,
    plugged: &[Range<u64>],
    layers: &[File],
) -> Result<(), RestoreError> {
    check_memory(memory, map, layers)?;
    check_plugged(map, plugged)?;
    choose_page_sizes(memory, plugged);
    for extent in map.extents() {
        let (guest_address, size) = (extent.guest_address, extent.size);
        let mapped = match (
            layers.get(usize::from(extent.layer)),
            map.file_offset(guest_address),
        ) {
            (Some(file), Some(offset)) => {
                mapping::map_file(memory, guest_address, size, file.as_fd(), offset)
            }
            _ => Err(io::ErrorKind::InvalidInput.into()),
        };
        if let Err(error) = mapped {
            unmap(memory);
            return Err(RestoreError::Map {
                guest_address,
                size,
                error,
            });
        }
    }
    Ok(())
}

/// Sets small pages for boot memory's holes, even if the host has huge pages enabled: a clone touches little of them, and each touch would
/// zero 2 MiB during its first microseconds. Memory that virtio-mem plugs gets huge pages: the sandbox asked for it beyond the template,
/// the guest's allocator fills it from one end, and pages of 2 MiB take 512 times fewer faults. Best effort: a kernel may have no huge
/// pages.
fn choose_page_sizes(memory: &GuestMemory, plugged: &[Range<u64>]) {
    let boot = boot_regions(memory).map(|range| (range, Advice::LinuxNoHugepage));
    let plugged = plugged.iter().map(|range| (range.clone(), Advice::LinuxHugepage));
    for (range, advice) in boot.chain(plugged) {
        let pages = memory.get_slice(GuestAddress(range.start), (range.end - range.start) as usize);
        if let Ok(pages) = pages {
            guest_io::advise_page_size(&pages, advice);
        }
    }
}

/// Undoes the mappings of a failed restore.
fn unmap(memory: &GuestMemory) {
    let boot = boot_regions(memory)
        .try_for_each(|range| mapping::map_nothing(memory, range.start, range.end - range.start));
    let hotplug = memory
        .find_region(GuestAddress(layout::VIRTIO_MEM.start))
        .map(|region| region.get_slice(MemoryRegionAddress(0), region.len() as usize))
        .transpose()
        .map_err(io::Error::other)
        .and_then(|pages| pages.iter().try_for_each(guest_io::withdraw));
    if let Err(error) = boot.and(hotplug) {
        tracing::error!(%error, "guest memory keeps parts of a snapshot that could not be restored");
    }
}

/// The guest addresses of boot memory.
fn boot_regions(memory: &GuestMemory) -> impl Iterator<Item = Range<u64>> {
    memory
        .iter()
        .map(|region| region.start_addr().raw_value()..region.start_addr().raw_value() + region.len())
        .filter(|range| range.start != layout::VIRTIO_MEM.start)
}

fn hotplug() -> Range<u64> {
    let Window { start, size } = layout::VIRTIO_MEM;
    start..start + size
}

/// [`thaw_protocol::control::MemoryMode::Populate`]: maps every page of the map's extents now, for reading. Best effort,
/// as [`working_set::populate`].
pub fn populate_all(memory: &GuestMemory, map: &MemoryMap) -> Populated {
    working_set::populate_ranges(memory, &map.data(), Hint::PopulateRead)
}

/// The host addresses at which this process has the map's regions.
///
/// # Errors
/// [`RestoreError::Shape`].
pub fn mapped_regions(memory: &GuestMemory, map: &MemoryMap) -> Result<Vec<MappedRegion>, RestoreError> {
    let regions = map.regions().iter().map(|&Region { guest_address, size }| {
        let host_address = mapping::host_address(memory, guest_address, size).ok_or(RestoreError::Shape {
            guest_address,
            size,
            here: 0,
        })?;
        Ok(MappedRegion {
            host_address,
            size,
            guest_address,
        })
    });
    regions.collect()
}

#[cfg(test)]
#[path = "restore_test.rs"]
mod tests;
