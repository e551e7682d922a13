//! Memory files over the reserved guest memory: private mappings of their data, nothing copied.

use std::fs::File;
use std::io;

use thaw_protocol::control::MappedRegion;

use super::MemoryMap;
use crate::memory::GuestMemory;

/// Why memory could not be mapped.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    #[error("the snapshot's memory has {needs} layers, {has} files came")]
    Layers { needs: u8, has: usize },
    #[error("memory file {layer} is cut short: {has:#x} bytes, {needs:#x} are needed")]
    CutShort { layer: u8, has: u64, needs: u64 },
    #[error("the snapshot's memory region {guest_address:#x} ({size:#x} bytes) does not match this machine's")]
    Shape { guest_address: u64, size: u64 },
    #[error("memory file {layer}: {error}")]
    File { layer: u8, error: io::Error },
    #[error("mapping memory {guest_address:#x} ({size:#x} bytes): {error}")]
    Map { guest_address: u64, size: u64, error: io::Error },
}

/// Whether `map` fits this machine and `layers`, the memory files from the bottom up. Changes nothing.
pub fn check_memory(memory: &GuestMemory, map: &MemoryMap, layers: &[File]) -> Result<(), RestoreError> {
    let _ = (memory, map, layers);
    unimplemented!()
}

/// Maps the layers' extents over guest memory, which is as [`crate::memory::create`] made it. `memory` is boot memory and
/// virtio-mem's region. The files are only read, and may be closed after. Where no extent is, memory stays anonymous.
///
/// # Errors
/// As [`check_memory`], before anything is changed; when a mapping fails, all memory is anonymous and zero again.
pub fn map_memory(memory: &GuestMemory, map: &MemoryMap, layers: &[File]) -> Result<(), RestoreError> {
    let _ = (memory, map, layers);
    unimplemented!()
}

/// [`thaw_protocol::control::MemoryMode::Populate`]: maps every page of the map's extents now. Best effort, as
/// [`super::working_set::populate`].
pub fn populate_all(memory: &GuestMemory, map: &MemoryMap) -> super::working_set::Populated {
    let _ = (memory, map);
    unimplemented!()
}

/// The map's regions as this process has them mapped.
pub fn mapped_regions(memory: &GuestMemory, map: &MemoryMap) -> Result<Vec<MappedRegion>, RestoreError> {
    let _ = (memory, map);
    unimplemented!()
}
