//! The guest-physical address map. Every template has these addresses in its memory, so the map must not change within a [`VERSION`].
//!
//! | range | contents |
//! |---|---|
//! | 0 .. 3 GiB | boot memory, low part; its first MiB has the data that firmware would leave (PVH start info, ACPI, VMGenID) |
//! | 0xD000_0000 | virtio-mmio windows, one page a device slot |
//! | 0xFEC0_0000 .. | IOAPIC, local APIC, TSS: KVM's own |
//! | 4 GiB .. 65 GiB | boot memory, high part (the rest, if it does not fit below 3 GiB) |
//! | 128 GiB .. | pmem windows, virtio-fs DAX window |
//! | 256 GiB .. 320 GiB | virtio-mem |
//!
//! Everything stays below 2^[`ADDRESS_BITS`], the least physical address width among CPUs that run KVM with 64 GiB.

use thaw_protocol::control::DeviceId;

/// Version of this map, memory slots and interrupt lines included. A snapshot with another version is refused, so raise it with every
/// change.
pub const VERSION: u32 = 1;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// End of the low part of boot memory: the MMIO hole begins.
pub const LOW_MEMORY_END: u64 = 3 * GIB;
/// Start of the high part of boot memory: the MMIO hole ends.
pub const HIGH_MEMORY_START: u64 = 4 * GIB;

/// Guest-physical address bits that a vCPU needs to reach all of this map.
pub const ADDRESS_BITS: u8 = 39;

/// The PVH start info; the boot vCPU's EBX points at it.
pub const PVH_START_INFO: u64 = 0x6000;
/// The PVH memory map.
pub const PVH_MEMORY_MAP: u64 = 0x7000;
/// The kernel command line.
pub const COMMAND_LINE: u64 = 0x2_0000;
/// Bytes of the command line, NUL included: Linux's `COMMAND_LINE_SIZE` on x86.
pub const COMMAND_LINE_SIZE: u64 = 2048;
/// End of the usable memory below 1 MiB: a PC's extended BIOS data area and video memory begin.
pub const LOW_MEMORY_USABLE_END: u64 = 0x9_FC00;
/// The ACPI tables, RSDP first, where a PC's BIOS has them.
pub const ACPI_TABLES: Window = Window {
    start: 0xE_0000,
    size: 0x1_F000,
};
/// The page whose first 16 bytes are the VM generation ID.
pub const VMGENID_PAGE: Window = Window {
    start: 0xF_F000,
    size: 0x1000,
};

/// First virtio-mmio window.
pub const MMIO_BASE: u64 = 0xD000_0000;
/// Bytes of one virtio-mmio window.
pub const MMIO_WINDOW: u64 = 0x1000;

/// The page the IOAPIC answers at.
pub const IOAPIC_BASE: u32 = 0xFEC0_0000;
/// The page the local APICs answer at.
pub const LAPIC_BASE: u32 = 0xFEE0_0000;
/// Three pages KVM needs for real mode on Intel (`KVM_SET_TSS_ADDR`).
pub const TSS_ADDRESS: u64 = 0xFFFB_D000;
/// One page KVM needs for real-mode paging on Intel (`KVM_SET_IDENTITY_MAP_ADDR`).
pub const IDENTITY_MAP_ADDRESS: u64 = 0xFFFB_C000;

/// Window of the guest image. Struct pages for a window cost the guest 1/64 of its size, so windows are small.
pub const PMEM0: Window = Window {
    start: 128 * GIB,
    size: 16 * MIB,
};
/// Window of image data.
pub const PMEM1: Window = Window {
    start: 129 * GIB,
    size: 128 * MIB,
};
/// DAX window of the root virtio-fs device.
pub const ROOT_DAX: Window = Window {
    start: 130 * GIB,
    size: 256 * MIB,
};
/// Region in which virtio-mem may plug memory.
pub const VIRTIO_MEM: Window = Window {
    start: 256 * GIB,
    size: 64 * GIB,
};

/// A range of guest-physical addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// First address.
    pub start: u64,
    /// Bytes.
    pub size: u64,
}

impl Window {
    /// Whether `address` is in it.
    pub fn contains(self, address: u64) -> bool {
        address
            .checked_sub(self.start)
            .is_some_and(|offset| offset < self.size)
    }
}

/// KVM memory slots. Boot memory uses 0 (low) and 1 (high).
pub mod memslot {
    pub const LOW: u32 = 0;
    pub const HIGH: u32 = 1;
    pub const PMEM0: u32 = 2;
    pub const PMEM1: u32 = 3;
    pub const ROOT_DAX: u32 = 4;
    /// The first slot of plugged memory. Each GiB of its region has one slot.
    pub const VIRTIO_MEM: u32 = 5;
    /// Number of slots that a machine may use.
    pub const COUNT: usize = VIRTIO_MEM as usize + (super::VIRTIO_MEM.size / super::GIB) as usize;
}

/// First 16550 register port of the console.
pub const CONSOLE_PORT: u16 = 0x3F8;
/// Interrupt line of the console.
pub const CONSOLE_GSI: u32 = 4;
/// Interrupt line of the first virtio-mmio device; slot n has this plus n.
pub const FIRST_VIRTIO_GSI: u32 = 5;
/// Interrupt line of the ACPI generic event device.
pub const GED_GSI: u32 = 19;

/// The virtio-mmio window of a device, or `None` for the console, which is not a virtio device.
pub fn mmio_window(device: DeviceId) -> Option<Window> {
    match device {
        DeviceId::Console => None,
        virtio => Some(Window {
            start: MMIO_BASE + virtio as u64 * MMIO_WINDOW,
            size: MMIO_WINDOW,
        }),
    }
}

/// The interrupt line of a device.
pub const fn gsi(device: DeviceId) -> u32 {
    match device {
        DeviceId::Console => CONSOLE_GSI,
        virtio => FIRST_VIRTIO_GSI + virtio as u32,
    }
}

// No virtio device may have the generic event device's line: a device whose number would give it that line needs another rule in `gsi`.
const _: () = {
    let mut n = 0;
    while n < DeviceId::ALL.len() {
        assert!(gsi(DeviceId::ALL[n]) != GED_GSI);
        n += 1;
    }
};
