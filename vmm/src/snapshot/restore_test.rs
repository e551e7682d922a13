use std::fs::OpenOptions;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;

use thaw_protocol::control::FreezeKind::{Delta, Full};

use super::*;
use crate::snapshot::memory_map::Extent;
use crate::snapshot::pagemap::{PageKind, Pagemap};
use crate::snapshot::testing::*;
use crate::snapshot::{Frozen, PAGE};

/// Frozen memory with `value` in some pages of both regions.
fn template(value: u64) -> (Frozen, Vec<File>) {
    let original = Clone::booted();
    (10..20).for_each(|page| write(&original.memory, page, value));
    (PAGES..PAGES + 5).for_each(|page| write(&original.memory, page, value));
    original.freeze(Full, &[]).unwrap()
}

fn reopened(file: &File, options: &OpenOptions) -> File {
    options
        .open(format!("/proc/self/fd/{}", file.as_raw_fd()))
        .unwrap()
}

#[test]
fn clones_share_a_read_only_file_and_nothing_they_write() {
    let (frozen, layers) = template(9);
    let read_only = reopened(&layers[0], OpenOptions::new().read(true));
    let (one, other) = (memory(), memory());
    map_memory(&one, &frozen.map, &[], std::slice::from_ref(&read_only)).unwrap();
    map_memory(&other, &frozen.map, &[], &[read_only]).unwrap();
    write(&one, 10, 1);
    assert_eq!(
        [read(&one, 10), read(&other, 10), read(&one, PAGES + 4)],
        [1, 9, 9]
    );
    assert_eq!(read(&Clone::thawed((frozen, layers)).memory, 10), 9);
}

#[test]
fn reading_a_hole_of_the_snapshot_allocates_nothing() {
    let (frozen, layers) = template(9);
    let blocks = layers[0].metadata().unwrap().blocks();
    let clone = Clone::thawed((frozen, layers));
    (0..2 * PAGES).for_each(|page| {
        read(&clone.memory, page);
    });
    assert_eq!(clone.layers[0].metadata().unwrap().blocks(), blocks);
}

#[test]
fn files_that_do_not_match_are_refused_before_mapping() {
    let (frozen, layers) = template(9);
    let here = memory();
    let refused = |map: &MemoryMap, layers: &[File]| map_memory(&here, map, &[], layers).unwrap_err();
    assert!(matches!(
        refused(&frozen.map, &[]),
        RestoreError::Layers { needs: 1, has: 0 }
    ));
    let regions = frozen.map.regions().to_vec();
    let half = Region {
        size: SIZE / 2,
        ..regions[0]
    };
    let elsewhere = Region {
        guest_address: 1 << 30,
        size: SIZE,
    };
    for other in [
        vec![regions[0]],
        vec![half, regions[1]],
        vec![regions[0], elsewhere, regions[1]],
    ] {
        let map = MemoryMap::new(other, 1, vec![]).unwrap();
        assert!(matches!(refused(&map, &layers), RestoreError::Shape { .. }));
    }
    layers[0].set_len(SIZE + 5 * PAGE - 1).unwrap();
    assert!(matches!(
        refused(&frozen.map, &layers),
        RestoreError::CutShort { layer: 0, .. }
    ));
    layers[0].set_len(SIZE + 5 * PAGE).unwrap();
    assert_eq!(read(&here, 10), 0);
    map_memory(&here, &frozen.map, &[], &layers).unwrap();
}

#[test]
fn data_where_nothing_is_plugged_is_refused() {
    let original = Clone::booted();
    write(&original.memory, 2 * PAGES + 1, 9);
    let (frozen, layers) = original.freeze(Full, &[hotplugged()]).unwrap();
    let here = memory();
    let block = hotplugged().start..hotplugged().start + crate::virtio::mem::BLOCK;
    for plugged in [vec![], vec![block.end..hotplugged().end]] {
        let error = map_memory(&here, &frozen.map, &plugged, &layers).unwrap_err();
        let at = page(2 * PAGES + 1);
        assert!(
            matches!(error, RestoreError::Unplugged { guest_address, size } if (guest_address, size) == (at, PAGE)),
            "{error}"
        );
        assert_eq!(read(&here, 2 * PAGES + 1), 0);
    }
    map_memory(&here, &frozen.map, &[block], &layers).unwrap();
    assert_eq!(read(&here, 2 * PAGES + 1), 9);
}

#[test]
fn a_mapping_that_fails_leaves_nothing_of_the_snapshot() {
    let clone = Clone::thawed(template(9));
    write(&clone.memory, PAGES + 2, 1);
    let (frozen, mut layers) = clone.freeze(Delta, &[]).unwrap();
    layers[1] = reopened(&layers[1], OpenOptions::new().write(true));
    let here = memory();
    let error = map_memory(&here, &frozen.map, &[], &layers).unwrap_err();
    assert!(matches!(error, RestoreError::Map { .. }), "{error}");
    assert!((0..2 * PAGES).all(|page| read(&here, page) == 0));
}

#[test]
fn populating_maps_all_data_and_only_that() {
    let clone = Clone::thawed(template(9));
    let map = clone.map.as_ref().unwrap();
    let populated = populate_all(&clone.memory, map);
    assert_eq!(populated.pages, 15);
    let pagemap = pagemap();
    let pagemap = Pagemap::new(&pagemap).unwrap().unwrap();
    for region in mapped_regions(&clone.memory, map).unwrap() {
        let mut there = Vec::new();
        pagemap
            .runs(region.host_address, region.size, |range, kind| {
                if kind == PageKind::Read {
                    there.push(range.start + region.guest_address..range.end + region.guest_address);
                }
            })
            .unwrap();
        let data: Vec<_> = map
            .extents()
            .iter()
            .map(Extent::range)
            .filter(|data| (region.guest_address..region.guest_address + region.size).contains(&data.start))
            .collect();
        assert_eq!(there, data);
    }
}
