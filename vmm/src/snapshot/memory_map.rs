//! Which bytes of the memory files are which guest memory.
//!
//! A memory file has the machine's regions one after the other: boot memory below the hole, boot memory above it, virtio-mem's
//! region. *Extents* are ranges of guest addresses; each extent is in one *layer*, which is a memory file, at the same place in
//! every layer. Addresses in no extent are zero.
//!
//! Invariant: regions and extents are whole pages, sorted and disjoint; each extent lies in one region and names a layer that
//! exists. So no file, however damaged, can make two guest addresses share a page or reach past a region.

use std::ops::Range;

use super::{PAGE, ranges};

/// Most memory files in a stack: the full one and the deltas on top.
pub const MAX_LAYERS: u8 = 8;
/// Most extents. Each may cost a restored process two mappings, of which Linux allows 65,530 (`vm.max_map_count`).
pub const MAX_EXTENTS: usize = 16384;
/// Most regions.
pub const MAX_REGIONS: usize = 8;
/// The end of all guest-physical addresses a processor can have.
const ADDRESS_END: u64 = 1 << 52;

/// A range of guest-physical addresses that a memory file has space for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// First guest-physical address.
    pub guest_address: u64,
    /// Bytes.
    pub size: u64,
}

/// Guest memory whose contents are in one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// First guest-physical address.
    pub guest_address: u64,
    /// Bytes.
    pub size: u64,
    /// Index of the memory file; 0 is the bottom one.
    pub layer: u8,
}

/// Why regions and extents are not a valid memory map.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MapError {
    #[error("{0} memory regions; at most {MAX_REGIONS} can be")]
    TooManyRegions(usize),
    #[error("{0} extents of memory; at most {MAX_EXTENTS} can be")]
    TooManyExtents(usize),
    #[error("{0} memory layers; 1 to {MAX_LAYERS} can be")]
    Layers(u8),
    #[error(
        "memory region {guest_address:#x} ({size:#x} bytes) is empty, not whole pages, or past the last address"
    )]
    BadRegion { guest_address: u64, size: u64 },
    #[error("memory region {0:#x} overlaps or precedes the one before it")]
    RegionOrder(u64),
    #[error(
        "memory extent {guest_address:#x} ({size:#x} bytes) is empty, not whole pages, or in no one region"
    )]
    BadExtent { guest_address: u64, size: u64 },
    #[error("memory extent {0:#x} overlaps or precedes the one before it")]
    ExtentOrder(u64),
    #[error("memory extent {guest_address:#x} is in layer {layer} of {layers}")]
    NoSuchLayer {
        guest_address: u64,
        layer: u8,
        layers: u8,
    },
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
        if regions.len() > MAX_REGIONS {
            return Err(MapError::TooManyRegions(regions.len()));
        }
        if extents.len() > MAX_EXTENTS {
            return Err(MapError::TooManyExtents(extents.len()));
        }
        if !(1..=MAX_LAYERS).contains(&layers) {
            return Err(MapError::Layers(layers));
        }
        check_regions(&regions)?;
        check_extents(&regions, layers, &extents)?;
        Ok(MemoryMap {
            regions,
            extents,
            layers,
        })
    }

    /// In address order, which is also their order in a memory file.
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// Sorted by address.
    pub fn extents(&self) -> &[Extent] {
        &self.extents
    }

    /// Number of memory files.
    pub fn layers(&self) -> u8 {
        self.layers
    }

    /// The offset of a guest address in a memory file, if a region contains the address.
    pub fn file_offset(&self, guest_address: u64) -> Option<u64> {
        let mut before = 0;
        for region in &self.regions {
            if region.range().contains(&guest_address) {
                return Some(before + (guest_address - region.guest_address));
            }
            before += region.size;
        }
        None
    }

    /// The guest addresses at `offsets` of a memory file, region by region.
    pub fn guest_ranges(&self, offsets: Range<u64>) -> Vec<Range<u64>> {
        let mut before = 0;
        let mut ranges = Vec::new();
        for region in &self.regions {
            let from = offsets.start.clamp(before, before + region.size) - before;
            let to = offsets.end.clamp(before, before + region.size) - before;
            if from < to {
                ranges.push(region.guest_address + from..region.guest_address + to);
            }
            before += region.size;
        }
        ranges
    }

    /// Bytes of a memory file, holes included.
    pub fn file_size(&self) -> u64 {
        self.regions.iter().map(|region| region.size).sum()
    }

    /// Bytes that the file of `layer` must have at least: up to the end of its last extent.
    pub fn bytes_of_layer(&self, layer: u8) -> u64 {
        let last = self.extents.iter().rev().find(|extent| extent.layer == layer);
        last.and_then(|extent| Some(self.file_offset(extent.guest_address)? + extent.size))
            .unwrap_or(0)
    }

    /// Bytes in extents.
    pub fn data_bytes(&self) -> u64 {
        self.extents.iter().map(|extent| extent.size).sum()
    }

    /// The guest addresses in extents.
    pub fn data(&self) -> Vec<Range<u64>> {
        let mut data = Vec::with_capacity(self.extents.len());
        for extent in &self.extents {
            ranges::push(&mut data, extent.range());
        }
        data
    }

    /// The data of its layers from `layers` on.
    pub(super) fn data_above(&self, layers: u8) -> Vec<Range<u64>> {
        let mut data = Vec::new();
        for extent in self.extents.iter().filter(|extent| extent.layer >= layers) {
            ranges::push(&mut data, extent.range());
        }
        data
    }

    /// The map of its lowest `layers` alone, of which it has at least as many. Addresses that it has in a higher layer are in no extent.
    pub(super) fn lowest(&self, layers: u8) -> MemoryMap {
        let is_kept = |extent: &&Extent| extent.layer < layers;
        MemoryMap {
            regions: self.regions.clone(),
            extents: self.extents.iter().filter(is_kept).copied().collect(),
            layers,
        }
    }

    /// The parts of the extents that lie in `kept`.
    pub(super) fn extents_within(&self, kept: &[Range<u64>]) -> Vec<Extent> {
        let mut cut = Vec::new();
        let mut from = 0;
        for extent in &self.extents {
            while kept
                .get(from)
                .is_some_and(|range| range.end <= extent.guest_address)
            {
                from += 1;
            }
            for range in ranges::intersection(&[extent.range()], upto(&kept[from..], extent.range().end)) {
                cut.push(Extent::new(range, extent.layer));
            }
        }
        cut
    }
}

/// The ranges of `list` that begin before `end`.
fn upto(list: &[Range<u64>], end: u64) -> &[Range<u64>] {
    &list[..list.partition_point(|range| range.start < end)]
}

impl Region {
    /// Its guest addresses.
    pub fn range(&self) -> Range<u64> {
        self.guest_address..self.guest_address + self.size
    }
}

impl Extent {
    pub(super) fn new(range: Range<u64>, layer: u8) -> Extent {
        Extent {
            guest_address: range.start,
            size: range.end - range.start,
            layer,
        }
    }

    /// Its guest addresses.
    pub fn range(&self) -> Range<u64> {
        self.guest_address..self.guest_address + self.size
    }
}

/// The range, if it consists of whole pages and ends within the address space.
fn pages(guest_address: u64, size: u64) -> Option<Range<u64>> {
    let end = guest_address
        .checked_add(size)
        .filter(|end| *end <= ADDRESS_END)?;
    let whole = size > 0 && guest_address.is_multiple_of(PAGE) && size.is_multiple_of(PAGE);
    whole.then_some(guest_address..end)
}

fn check_regions(regions: &[Region]) -> Result<(), MapError> {
    let mut end = 0;
    for &Region { guest_address, size } in regions {
        let range = pages(guest_address, size).ok_or(MapError::BadRegion { guest_address, size })?;
        if range.start < end {
            return Err(MapError::RegionOrder(guest_address));
        }
        end = range.end;
    }
    Ok(())
}

fn check_extents(regions: &[Region], layers: u8, extents: &[Extent]) -> Result<(), MapError> {
    let mut end = 0;
    for &Extent {
        guest_address,
        size,
        layer,
    } in extents
    {
        let bad = MapError::BadExtent { guest_address, size };
        let range = pages(guest_address, size).ok_or(bad.clone())?;
        if range.start < end {
            return Err(MapError::ExtentOrder(guest_address));
        }
        if !regions
            .iter()
            .any(|region| region.range().contains(&range.start) && range.end <= region.range().end)
        {
            return Err(bad);
        }
        if layer >= layers {
            return Err(MapError::NoSuchLayer {
                guest_address,
                layer,
                layers,
            });
        }
        end = range.end;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOW: Region = Region {
        guest_address: 0,
        size: 16 * PAGE,
    };
    const HIGH: Region = Region {
        guest_address: 4 << 30,
        size: 4 * PAGE,
    };

    fn extent(guest_address: u64, size: u64, layer: u8) -> Extent {
        Extent {
            guest_address,
            size,
            layer,
        }
    }

    fn map(extents: Vec<Extent>) -> Result<MemoryMap, MapError> {
        MemoryMap::new(vec![LOW, HIGH], 2, extents)
    }

    #[test]
    fn a_file_has_the_regions_one_after_the_other() {
        let map = map(vec![extent(0, PAGE, 0), extent(HIGH.guest_address, 2 * PAGE, 1)]).unwrap();
        assert_eq!(map.file_size(), 20 * PAGE);
        assert_eq!(map.file_offset(15 * PAGE), Some(15 * PAGE));
        assert_eq!(map.file_offset(16 * PAGE), None);
        assert_eq!(map.file_offset(HIGH.guest_address + PAGE), Some(17 * PAGE));
        assert_eq!((map.bytes_of_layer(0), map.bytes_of_layer(1)), (PAGE, 18 * PAGE));
        assert_eq!(
            map.guest_ranges(15 * PAGE..18 * PAGE),
            [
                15 * PAGE..16 * PAGE,
                HIGH.guest_address..HIGH.guest_address + 2 * PAGE
            ]
        );
        assert_eq!(map.guest_ranges(20 * PAGE..90 * PAGE), []);
    }

    #[test]
    fn what_is_no_map_is_refused_and_named() {
        let bad_extents = [
            (vec![extent(0, 0, 0)], "empty"),
            (vec![extent(1, PAGE, 0)], "whole pages"),
            (vec![extent(0, PAGE + 1, 0)], "whole pages"),
            (vec![extent(u64::MAX - PAGE + 1, PAGE, 0)], "in no one region"),
            (vec![extent(15 * PAGE, 2 * PAGE, 0)], "in no one region"),
            (vec![extent(20 * PAGE, PAGE, 0)], "in no one region"),
            (vec![extent(0, 2 * PAGE, 0), extent(PAGE, PAGE, 0)], "overlaps"),
            (vec![extent(PAGE, PAGE, 0), extent(0, PAGE, 0)], "precedes"),
            (vec![extent(0, PAGE, 2)], "layer 2 of 2"),
            (vec![extent(0, PAGE, 0); MAX_EXTENTS + 1], "at most"),
        ];
        for (extents, why) in bad_extents {
            let error = map(extents).unwrap_err().to_string();
            assert!(error.contains(why), "{error} does not say {why}");
        }
        for regions in [
            vec![HIGH, LOW],
            vec![LOW, LOW],
            vec![Region { size: 1, ..LOW }],
            vec![Region { size: 0, ..LOW }],
            vec![Region {
                guest_address: u64::MAX - PAGE + 1,
                size: PAGE,
            }],
            vec![LOW; MAX_REGIONS + 1],
        ] {
            assert!(MemoryMap::new(regions, 1, vec![]).is_err());
        }
        for layers in [0, MAX_LAYERS + 1] {
            assert_eq!(
                MemoryMap::new(vec![LOW], layers, vec![]),
                Err(MapError::Layers(layers))
            );
        }
    }

    #[test]
    fn extents_are_cut_at_what_is_kept() {
        let map = map(vec![extent(0, 8 * PAGE, 0), extent(8 * PAGE, 4 * PAGE, 1)]).unwrap();
        assert_eq!(
            map.extents_within(&[PAGE..2 * PAGE, 3 * PAGE..10 * PAGE, 11 * PAGE..16 * PAGE]),
            [
                extent(PAGE, PAGE, 0),
                extent(3 * PAGE, 5 * PAGE, 0),
                extent(8 * PAGE, 2 * PAGE, 1),
                extent(11 * PAGE, PAGE, 1),
            ]
        );
        assert_eq!(map.data(), [0..12 * PAGE]);
    }

    #[test]
    fn map_is_divided_between_two_layers() {
        let map = map(vec![
            extent(0, 8 * PAGE, 0),
            extent(8 * PAGE, 2 * PAGE, 1),
            extent(10 * PAGE, PAGE, 0),
        ])
        .unwrap();
        let lowest = map.lowest(1);
        assert_eq!(lowest.layers(), 1);
        assert_eq!(lowest.data(), [0..8 * PAGE, 10 * PAGE..11 * PAGE]);
        assert_eq!(map.data_above(1), [8 * PAGE..10 * PAGE]);
        assert_eq!((map.lowest(2), map.data_above(2)), (map.clone(), vec![]));
    }
}
