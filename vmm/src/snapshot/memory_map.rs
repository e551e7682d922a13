//! Which bytes of the memory files are the guest's memory.
//!
//! A memory file has the machine's regions one after the other: boot memory below the hole, above it, virtio-mem's. What
//! it has of them is said by *extents*, ranges of guest addresses each of which is found in one *layer*: a memory file
//! at the place its address has in every layer. Addresses in no extent are zero.
//!
//! Invariant: regions and extents are whole pages, sorted, disjoint; each extent lies in one region and names a layer
//! that is there. So no file, however damaged, can make two guest addresses share a page or reach past a region.

use std::ops::Range;

/// Most memory files under one another: the full one and the deltas on it.
pub const MAX_LAYERS: u8 = 8;
/// Most extents. Each may cost a restored process two mappings, of which Linux allows 65,530 (`vm.max_map_count`).
pub const MAX_EXTENTS: usize = 16384;
/// Most regions.
pub const MAX_REGIONS: usize = 8;

/// A range of guest-physical addresses that a memory file has a place for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// First guest-physical address.
    pub guest_address: u64,
    /// Bytes.
    pub size: u64,
}

/// Guest memory whose contents one layer has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// First guest-physical address.
    pub guest_address: u64,
    /// Bytes.
    pub size: u64,
    /// Which memory file: 0 is the one at the bottom.
    pub layer: u8,
}

/// Why regions and extents are no memory map.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MapError {
    #[error("{0} memory regions; at most {MAX_REGIONS} can be")]
    TooManyRegions(usize),
    #[error("{0} extents of memory; at most {MAX_EXTENTS} can be")]
    TooManyExtents(usize),
    #[error("{0} memory layers; 1 to {MAX_LAYERS} can be")]
    Layers(u8),
    #[error("memory region {guest_address:#x} ({size:#x} bytes) is empty, not whole pages, or past the last address")]
    BadRegion { guest_address: u64, size: u64 },
    #[error("memory region {0:#x} overlaps or precedes the one before it")]
    RegionOrder(u64),
    #[error("memory extent {guest_address:#x} ({size:#x} bytes) is empty, not whole pages, or in no one region")]
    BadExtent { guest_address: u64, size: u64 },
    #[error("memory extent {0:#x} overlaps or precedes the one before it")]
    ExtentOrder(u64),
    #[error("memory extent {guest_address:#x} is in layer {layer} of {layers}")]
    NoSuchLayer { guest_address: u64, layer: u8, layers: u8 },
}

/// Checked regions and extents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryMap {
    regions: Vec<Region>,
    extents: Vec<Extent>,
    layers: u8,
}

impl MemoryMap {
    /// # Errors
    /// [`MapError`], naming the first region or extent that breaks the invariant.
    pub fn new(regions: Vec<Region>, layers: u8, extents: Vec<Extent>) -> Result<MemoryMap, MapError> {
        let _ = (regions, layers, extents);
        unimplemented!()
    }

    /// In the order of their addresses, which is the order they have in a memory file.
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// Sorted by address.
    pub fn extents(&self) -> &[Extent] {
        &self.extents
    }

    /// Memory files needed.
    pub fn layers(&self) -> u8 {
        self.layers
    }

    /// Where a memory file has this guest address, if it has.
    pub fn file_offset(&self, guest_address: u64) -> Option<u64> {
        let _ = guest_address;
        unimplemented!()
    }

    /// Bytes of a memory file, holes included.
    pub fn file_size(&self) -> u64 {
        unimplemented!()
    }

    /// Bytes that `layer` must have for this map: the end of the last extent in it.
    pub fn bytes_of_layer(&self, layer: u8) -> u64 {
        let _ = layer;
        unimplemented!()
    }

    /// Bytes in extents.
    pub fn data_bytes(&self) -> u64 {
        unimplemented!()
    }

    /// The extents inside `ranges`, cut where they reach out. `ranges` are sorted and disjoint.
    pub fn extents_within(&self, ranges: &[Range<u64>]) -> Vec<Extent> {
        let _ = ranges;
        unimplemented!()
    }
}
