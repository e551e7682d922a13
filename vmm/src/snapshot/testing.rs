//! Guest memory and memory files for tests.

use std::fs::File;
use std::ops::Range;
use std::os::fd::AsFd;

use rustix::fs::{MemfdFlags, memfd_create};
use thaw_protocol::control::FreezeKind;
use vm_memory::{Bytes, GuestAddress};

use super::freeze::{FreezeError, Frozen, freeze_memory};
use super::{MemoryMap, PAGE, map_memory, mapping};
use crate::layout::{HIGH_MEMORY_START, VIRTIO_MEM};
use crate::memory::GuestMemory;
use crate::virtio::mem::BLOCK;

/// Bytes of each of the three regions.
pub const SIZE: u64 = 4 << 20;
/// Pages of each region.
pub const PAGES: u64 = SIZE / PAGE;

/// Memory on both sides of the MMIO hole, and virtio-mem's region.
pub fn memory() -> GuestMemory {
    let ranges = [0, HIGH_MEMORY_START, VIRTIO_MEM.start].map(|start| (GuestAddress(start), SIZE as usize));
    GuestMemory::from_ranges(&ranges).unwrap()
}

/// The guest addresses of boot memory.
pub fn boot() -> Vec<Range<u64>> {
    [0, HIGH_MEMORY_START].map(|start| start..start + SIZE).into()
}

/// The guest addresses of virtio-mem's region.
pub fn hotplugged() -> Range<u64> {
    VIRTIO_MEM.start..VIRTIO_MEM.start + SIZE
}

/// The address of a page by number: pages below the hole come first, then those above it, then virtio-mem's.
pub fn page(number: u64) -> u64 {
    [0, HIGH_MEMORY_START, VIRTIO_MEM.start][(number / PAGES) as usize] + number % PAGES * PAGE
}

pub fn write(memory: &GuestMemory, page_number: u64, value: u64) {
    memory
        .write_obj(value, GuestAddress(page(page_number) + 8 * (page_number % 512)))
        .unwrap();
}

pub fn read(memory: &GuestMemory, page_number: u64) -> u64 {
    memory
        .read_obj(GuestAddress(page(page_number) + 8 * (page_number % 512)))
        .unwrap()
}

pub fn empty_file() -> File {
    memfd_create("memory", MemfdFlags::CLOEXEC).unwrap().into()
}

/// /dev/userfaultfd, unless this host has none for us.
pub fn userfaultfd() -> Option<File> {
    let device = File::options().read(true).write(true).open("/dev/userfaultfd");
    if device.is_err() {
        thaw_test_skip::skip("this host has no /dev/userfaultfd, or not for us");
    }
    device.ok()
}

pub fn pagemap() -> File {
    File::open("/proc/self/pagemap").unwrap()
}

/// Guest memory, and the map and files that it came from.
pub struct Clone {
    pub memory: GuestMemory,
    pub map: Option<MemoryMap>,
    pub layers: Vec<File>,
}

impl Clone {
    pub fn booted() -> Clone {
        Clone {
            memory: memory(),
            map: None,
            layers: vec![],
        }
    }

    /// Freezes with the given virtio-mem memory plugged beside boot memory. Returns what a restore needs.
    pub fn freeze(
        &self,
        kind: FreezeKind,
        plugged: &[Range<u64>],
    ) -> Result<(Frozen, Vec<File>), FreezeError> {
        let out = empty_file();
        let live: Vec<_> = boot().into_iter().chain(plugged.iter().cloned()).collect();
        let frozen = freeze_memory(kind, &self.memory, &live, self.map.as_ref(), &pagemap(), &out)?;
        let kept = match kind {
            FreezeKind::Full => 0,
            FreezeKind::Delta => self.layers.len(),
            FreezeKind::DeltaOver { layers } => usize::from(layers),
        };
        let below = self.layers[..kept].iter().map(|file| file.try_clone().unwrap());
        let layers = below.chain([out]).collect();
        Ok((frozen, layers))
    }

    /// Restores a clone from the result of [`Self::freeze`].
    pub fn thawed((frozen, layers): (Frozen, Vec<File>)) -> Clone {
        let memory = memory();
        map_memory(&memory, &frozen.map, &[hotplugged()], &layers).unwrap();
        Clone {
            memory,
            map: Some(frozen.map),
            layers,
        }
    }

    /// A clone whose template has data in all of virtio-mem's region. Its second block is plugged again: one page was only read since, as a
    /// page of a file, which the kernel's huge page of zeros looks like, and the last one was written.
    pub fn plugged_again() -> Clone {
        let original = Clone::booted();
        (2 * PAGES..3 * PAGES).for_each(|page| write(&original.memory, page, 7));
        let clone = Clone::thawed(original.freeze(FreezeKind::Full, &[hotplugged()]).unwrap());
        mapping::map_nothing(&clone.memory, VIRTIO_MEM.start + BLOCK, BLOCK).unwrap();
        let zeros = empty_file();
        zeros.set_len(PAGE).unwrap();
        mapping::map_file(&clone.memory, page(2 * PAGES + 600), PAGE, zeros.as_fd(), 0).unwrap();
        assert_eq!(read(&clone.memory, 2 * PAGES + 600), 0);
        write(&clone.memory, 3 * PAGES - 1, 8);
        clone
    }

    /// Checks that this is a clone of [`Self::plugged_again`].
    pub fn is_plugged_again(&self) {
        let pages = [0, 511, 512, 600, PAGES - 2, PAGES - 1];
        let values = pages.map(|page| read(&self.memory, 2 * PAGES + page));
        assert_eq!(values, [7, 7, 0, 0, 0, 8]);
    }
}
