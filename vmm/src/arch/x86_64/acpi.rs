//! The ACPI tables of a hardware-reduced platform (ACPI 6.5 §4.1): no SCI, no PM timer, no PIC, no PCI.
//!
//! RSDP → XSDT → FADT (sleep and reset registers) → DSDT, and MADT. The DSDT names the virtio-mmio devices, the console, the VMGenID device
//! and the generic event device, which reports changes of the ID. All tables are part of every template.

use acpi_tables::Aml;
use acpi_tables::aml::{
    Arg, Device, EISAName, Equal, IO, If, Interrupt, Memory32Fixed, Method, Name, Notify, Package, Path,
    ResourceTemplate, Scope,
};
use acpi_tables::fadt::{FADTBuilder, Flags};
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};
use acpi_tables::madt::{EnabledStatus, IoApic, LocalInterruptController, MADT, ProcessorLocalApic};
use acpi_tables::rsdp::Rsdp;
use acpi_tables::sdt::Sdt;
use acpi_tables::xsdt::XSDT;
use thaw_protocol::control::DeviceId;
use vm_memory::{Bytes, GuestAddress};

use crate::layout::{
    self, ACPI_TABLES, CONSOLE_GSI, CONSOLE_PORT, GED_GSI, IOAPIC_BASE, LAPIC_BASE, VMGENID_PAGE,
};
use crate::memory::GuestMemory;
use crate::power::{RESET_PORT, RESET_VALUE, SLEEP_CONTROL_PORT, SLEEP_STATUS_PORT, SLEEP_TYPE_S5};

const OEM: [u8; 6] = *b"THAW  ";
const OEM_TABLE: [u8; 8] = *b"MICROVM ";
const OEM_REVISION: u32 = 1;
/// DSDT revision 2: 64-bit integers.
const DSDT_REVISION: u8 = 2;

/// FADT `IAPC_BOOT_ARCH` (ACPI 6.5 table 5.10): the guest need not probe for VGA, MSI or a CMOS clock. Bits 0 and 1 are clear: there are no
/// legacy devices and no 8042.
const NO_VGA: u16 = 1 << 2;
const NO_MSI: u16 = 1 << 3;
const NO_CMOS_RTC: u16 = 1 << 5;

/// Why the tables could not be written.
#[derive(Debug, thiserror::Error)]
pub enum AcpiError {
    #[error("the ACPI tables need {0:#x} bytes; there is room for {room:#x}", room = ACPI_TABLES.size)]
    NoRoom(u64),
    #[error("writing ACPI tables into guest memory: {0}")]
    Memory(#[from] vm_memory::GuestMemoryError),
}

/// Writes the tables for a machine of `vcpus` and returns the address of the RSDP.
pub fn write_tables(memory: &GuestMemory, vcpus: u8) -> Result<u64, AcpiError> {
    let mut writer = Writer {
        memory,
        next: ACPI_TABLES.start,
    };
    let rsdp = writer.reserve(Rsdp::len() as u64)?;
    let dsdt = writer.place(dsdt().as_slice())?;
    let fadt = writer.place(&bytes(&fadt(dsdt)))?;
    let madt = writer.place(&bytes(&madt(vcpus)))?;
    let mut xsdt = XSDT::new(OEM, OEM_TABLE, OEM_REVISION);
    xsdt.add_entry(fadt);
    xsdt.add_entry(madt);
    let xsdt = writer.place(&bytes(&xsdt))?;
    memory.write_slice(&bytes(&Rsdp::new(OEM, xsdt)), GuestAddress(rsdp))?;
    Ok(rsdp)
}

/// Writes tables one after the other, 16-byte aligned.
struct Writer<'a> {
    memory: &'a GuestMemory,
    next: u64,
}

impl Writer<'_> {
    fn reserve(&mut self, size: u64) -> Result<u64, AcpiError> {
        let at = self.next;
        self.next = (at + size).next_multiple_of(16);
        match self.next - ACPI_TABLES.start {
            used if used > ACPI_TABLES.size => Err(AcpiError::NoRoom(used)),
            _ => Ok(at),
        }
    }

    fn place(&mut self, table: &[u8]) -> Result<u64, AcpiError> {
        let at = self.reserve(table.len() as u64)?;
        self.memory.write_slice(table, GuestAddress(at))?;
        Ok(at)
    }
}

fn bytes(table: &dyn Aml) -> Vec<u8> {
    let mut bytes = Vec::new();
    table.to_aml_bytes(&mut bytes);
    bytes
}

/// A byte-wide I/O port register.
fn port(address: u16) -> GAS {
    GAS::new(
        AddressSpace::SystemIo,
        8,
        0,
        AccessSize::ByteAccess,
        address.into(),
    )
}

fn fadt(dsdt: u64) -> acpi_tables::fadt::FADT {
    let mut fadt = FADTBuilder::new(OEM, OEM_TABLE, OEM_REVISION)
        .dsdt_64(dsdt)
        .flag(Flags::HwReducedAcpi)
        .flag(Flags::ResetRegSup)
        // If set, these buttons are not fixed hardware.
        .flag(Flags::PwrButton)
        .flag(Flags::SlpButton);
    fadt.iapc_boot_arch = (NO_VGA | NO_MSI | NO_CMOS_RTC).into();
    fadt.reset_reg = port(RESET_PORT);
    fadt.reset_value = RESET_VALUE;
    fadt.sleep_control_reg = port(SLEEP_CONTROL_PORT);
    fadt.sleep_status_reg = port(SLEEP_STATUS_PORT);
    fadt.hypervisor_vendor_identity = u64::from_le_bytes(*b"THAW\0\0\0\0").into();
    fadt.finalize()
}

fn madt(vcpus: u8) -> MADT {
    let mut madt = MADT::new(
        OEM,
        OEM_TABLE,
        OEM_REVISION,
        LocalInterruptController::Address(LAPIC_BASE),
    );
    for index in 0..vcpus {
        madt.add_structure(ProcessorLocalApic::new(index, index, EnabledStatus::Enabled));
    }
    madt.add_structure(IoApic::new(0, IOAPIC_BASE, 0));
    madt
}

fn dsdt() -> Sdt {
    let mut aml = Vec::new();
    for device in DeviceId::ALL {
        virtio_mmio(device, &mut aml);
    }
    console(&mut aml);
    vmgenid(&mut aml);
    generic_event_device(&mut aml);
    let mut body = Scope::raw(Path::new("\\_SB_"), aml);
    let sleep = [&SLEEP_TYPE_S5 as &dyn Aml, &0u8, &0u8, &0u8];
    Name::new(Path::new("\\_S5_"), &Package::new(sleep.to_vec())).to_aml_bytes(&mut body);

    let mut dsdt = Sdt::new(*b"DSDT", 36, DSDT_REVISION, OEM, OEM_TABLE, OEM_REVISION);
    dsdt.append_slice(&body);
    dsdt
}

/// One virtio-mmio device, in the form that Linux's virtio_mmio driver matches: `LNRO0005` with a window and an interrupt.
fn virtio_mmio(device: DeviceId, aml: &mut Vec<u8>) {
    let Some(window) = layout::mmio_window(device) else {
        return;
    };
    let slot = device as u8;
    Device::new(
        Path::new(&format!("VR{slot:02}")),
        vec![
            &Name::new(Path::new("_HID"), &"LNRO0005"),
            &Name::new(Path::new("_UID"), &slot),
            &Name::new(Path::new("_CCA"), &1u8),
            &Name::new(
                Path::new("_CRS"),
                &ResourceTemplate::new(vec![
                    &Memory32Fixed::new(true, window.start as u32, window.size as u32),
                    &edge(layout::gsi(device)),
                ]),
            ),
        ],
    )
    .to_aml_bytes(aml);
}

/// The 16550. Without this entry Linux would not know its interrupt, because this platform has no legacy lines.
fn console(aml: &mut Vec<u8>) {
    Device::new(
        Path::new("COM1"),
        vec![
            &Name::new(Path::new("_HID"), &EISAName::new("PNP0501")),
            &Name::new(Path::new("_UID"), &0u8),
            &Name::new(
                Path::new("_CRS"),
                &ResourceTemplate::new(vec![
                    &IO::new(CONSOLE_PORT, CONSOLE_PORT, 1, 8),
                    &edge(CONSOLE_GSI),
                ]),
            ),
        ],
    )
    .to_aml_bytes(aml);
}

/// The VM generation ID device: `ADDR` is the address of its 16 bytes, low and high half.
fn vmgenid(aml: &mut Vec<u8>) {
    let (low, high) = (VMGENID_PAGE.start as u32, (VMGENID_PAGE.start >> 32) as u32);
    Device::new(
        Path::new("VGEN"),
        vec![
            &Name::new(Path::new("_HID"), &"QEMUVGID"),
            &Name::new(Path::new("_CID"), &"VM_Gen_Counter"),
            &Name::new(Path::new("_DDN"), &"VM_Gen_Counter"),
            &Name::new(Path::new("ADDR"), &Package::new(vec![&low, &high])),
        ],
    )
    .to_aml_bytes(aml);
}

/// The generic event device (ACPI 6.5 §5.6.9): its interrupt reports that the generation ID has changed.
fn generic_event_device(aml: &mut Vec<u8>) {
    Device::new(
        Path::new("GED_"),
        vec![
            &Name::new(Path::new("_HID"), &"ACPI0013"),
            &Name::new(Path::new("_UID"), &0u8),
            &Name::new(Path::new("_CRS"), &ResourceTemplate::new(vec![&edge(GED_GSI)])),
            &Method::new(
                Path::new("_EVT"),
                1,
                true,
                vec![&If::new(
                    &Equal::new(&Arg(0), &GED_GSI),
                    vec![&Notify::new(&Path::new("\\_SB_.VGEN"), &0x80u8)],
                )],
            ),
        ],
    )
    .to_aml_bytes(aml);
}

/// An edge-triggered, active-high, exclusive interrupt, like an irqfd without resampling.
fn edge(gsi: u32) -> Interrupt {
    Interrupt::new(true, true, false, false, gsi)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(memory: &GuestMemory, at: u64, size: usize) -> Vec<u8> {
        let mut bytes = vec![0; size];
        memory.read_slice(&mut bytes, GuestAddress(at)).unwrap();
        bytes
    }

    fn table(memory: &GuestMemory, at: u64) -> Vec<u8> {
        let size = u32::from_le_bytes(read(memory, at + 4, 4).try_into().unwrap());
        let table = read(memory, at, size as usize);
        assert_eq!(
            table.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte)),
            0,
            "checksum"
        );
        table
    }

    fn word64(bytes: &[u8], at: usize) -> u64 {
        u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
    }

    #[test]
    fn every_table_is_reachable_from_the_rsdp_and_sums_to_zero() {
        let memory = GuestMemory::from_ranges(&[(GuestAddress(0), 2 << 20)]).unwrap();
        let rsdp = write_tables(&memory, 16).unwrap();
        let pointer = read(&memory, rsdp, 36);
        assert_eq!(&pointer[..8], b"RSD PTR ");
        assert_eq!(pointer.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte)), 0);
        let xsdt = table(&memory, word64(&pointer, 24));
        let tables: Vec<_> = xsdt[36..]
            .chunks(8)
            .map(|entry| table(&memory, word64(entry, 0)))
            .collect();
        let signatures: Vec<_> = tables.iter().map(|t| t[..4].to_vec()).collect();
        assert_eq!(signatures, [b"FACP", b"APIC"]);
        let dsdt = table(&memory, word64(&tables[0], 140));
        assert_eq!(&dsdt[..4], b"DSDT");
        // 16 local APICs of 8 bytes and an IOAPIC of 12 behind a 44-byte header.
        assert_eq!(tables[1].len(), 44 + 16 * 8 + 12);
        let hids = dsdt.windows(8).filter(|w| w == b"LNRO0005").count();
        assert_eq!(hids, 13);
    }
}
