//! The PVH start info (xen/public/arch-x86/hvm/start_info.h). It gives the guest kernel its memory map, its command line and the address of
//! the ACPI tables.

use linux_loader::start_info::{hvm_memmap_table_entry, hvm_start_info};
use vm_memory::{Address, Bytes, GuestAddress, GuestMemory as _, GuestMemoryRegion};

use crate::layout::{
    ACPI_TABLES, COMMAND_LINE, COMMAND_LINE_SIZE, LOW_MEMORY_USABLE_END, PVH_MEMORY_MAP, PVH_START_INFO,
    VMGENID_PAGE,
};
use crate::memory::GuestMemory;

/// `XEN_HVM_START_MAGIC_VALUE`.
const MAGIC: u32 = 0x336e_c578;
/// Version 1 has the memory map.
const VERSION: u32 = 1;

/// E820 types, which the memory map uses.
const RAM: u32 = 1;
const RESERVED: u32 = 2;
const ACPI: u32 = 3;

const MIB: u64 = 1 << 20;

/// Why the start info could not be written.
#[derive(Debug, thiserror::Error)]
pub enum StartInfoError {
    #[error("the kernel command line has {0} bytes; the kernel takes {max}", max = COMMAND_LINE_SIZE - 1)]
    CommandLineTooLong(usize),
    #[error("the kernel command line has a NUL byte in it")]
    CommandLineNul,
    #[error("writing boot information into guest memory: {0}")]
    Memory(#[from] vm_memory::GuestMemoryError),
}

/// Writes start info, memory map and command line. The boot vCPU's EBX must hold [`PVH_START_INFO`].
pub fn write_start_info(memory: &GuestMemory, cmdline: &str, rsdp: u64) -> Result<(), StartInfoError> {
    if cmdline.len() as u64 >= COMMAND_LINE_SIZE {
        return Err(StartInfoError::CommandLineTooLong(cmdline.len()));
    }
    if cmdline.bytes().any(|byte| byte == 0) {
        return Err(StartInfoError::CommandLineNul);
    }
    memory.write_slice(cmdline.as_bytes(), GuestAddress(COMMAND_LINE))?;
    memory.write_obj(0u8, GuestAddress(COMMAND_LINE + cmdline.len() as u64))?;

    let map = memory_map(memory);
    let mut at = GuestAddress(PVH_MEMORY_MAP);
    for entry in &map {
        memory.write_obj(*entry, at)?;
        at = at.unchecked_add(size_of::<hvm_memmap_table_entry>() as u64);
    }
    let info = hvm_start_info {
        magic: MAGIC,
        version: VERSION,
        cmdline_paddr: COMMAND_LINE,
        rsdp_paddr: rsdp,
        memmap_paddr: PVH_MEMORY_MAP,
        memmap_entries: map.len() as u32,
        ..Default::default()
    };
    memory.write_obj(info, GuestAddress(PVH_START_INFO))?;
    Ok(())
}

/// The mapped memory as RAM, except the ACPI tables and the VMGenID page in the first MiB.
fn memory_map(memory: &GuestMemory) -> Vec<hvm_memmap_table_entry> {
    let entry = |addr, size, type_| hvm_memmap_table_entry {
        addr,
        size,
        type_,
        reserved: 0,
    };
    let mut map = vec![
        entry(0, LOW_MEMORY_USABLE_END, RAM),
        entry(ACPI_TABLES.start, ACPI_TABLES.size, ACPI),
        entry(VMGENID_PAGE.start, VMGENID_PAGE.size, RESERVED),
    ];
    for region in memory.iter() {
        let (start, end) = (
            region.start_addr().raw_value(),
            region.start_addr().raw_value() + region.len(),
        );
        let start = start.max(MIB);
        map.push(entry(start, end - start, RAM));
    }
    map
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(ranges: &[(u64, usize)]) -> GuestMemory {
        GuestMemory::from_ranges(
            &ranges
                .iter()
                .map(|&(start, size)| (GuestAddress(start), size))
                .collect::<Vec<_>>(),
        )
        .unwrap()
    }

    #[test]
    fn the_map_covers_memory_once_and_in_order() {
        let memory = memory(&[(0, 64 << 20), (4 << 30, 2 << 20)]);
        let map = memory_map(&memory);
        for pair in map.windows(2) {
            assert!(pair[0].addr + pair[0].size <= pair[1].addr);
        }
        let last = map.last().unwrap();
        assert_eq!((last.addr, last.size, last.type_), (4 << 30, 2 << 20, RAM));
        assert_eq!(map[3].addr + map[3].size, 64 << 20);
    }

    #[test]
    fn a_command_line_the_kernel_would_cut_short_is_refused() {
        let memory = memory(&[(0, 4 << 20)]);
        let longest = "x".repeat(COMMAND_LINE_SIZE as usize - 1);
        write_start_info(&memory, &longest, 0).unwrap();
        let long = "x".repeat(COMMAND_LINE_SIZE as usize);
        assert!(matches!(
            write_start_info(&memory, &long, 0),
            Err(StartInfoError::CommandLineTooLong(_))
        ));
        assert!(matches!(
            write_start_info(&memory, "a\0b", 0),
            Err(StartInfoError::CommandLineNul)
        ));
    }

    #[test]
    fn the_start_info_points_at_the_map_and_the_command_line() {
        let memory = memory(&[(0, 4 << 20)]);
        write_start_info(&memory, "quiet", 0xe0000).unwrap();
        let info: hvm_start_info = memory.read_obj(GuestAddress(PVH_START_INFO)).unwrap();
        assert_eq!((info.magic, info.rsdp_paddr), (MAGIC, 0xe0000));
        let mut line = [0u8; 6];
        memory
            .read_slice(&mut line, GuestAddress(info.cmdline_paddr))
            .unwrap();
        assert_eq!(&line, b"quiet\0");
        let first: hvm_memmap_table_entry = memory.read_obj(GuestAddress(info.memmap_paddr)).unwrap();
        assert_eq!((first.addr, first.type_), (0, RAM));
    }
}
