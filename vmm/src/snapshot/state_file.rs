//! The `state` file: everything of a machine except its memory's contents.
//!
//! Records, in this order: the machine's shape; the guest's clock; the memory map; the console; the parts of each vCPU; the parts of the
//! interrupt controllers; the devices. Each must be present exactly once, and there must be no others.

use std::fs::File;

use thaw_hypervisor::state::{ClockState, InterruptPart, InterruptState, StateError, VcpuPart, VcpuState};
use thaw_protocol::control::{MEMORY_MIB, VCPUS};

use super::memory_map::{Extent, MAX_EXTENTS, MAX_REGIONS, Region};
use super::records::{Fields, Format, HEADER, Record, Records, push_record};
use super::{FileError, MemoryMap};
use crate::virtio::state::{BusRecords, ConsoleRecord, DeviceRecord};

/// The `state` file.
pub const FORMAT: Format = Format {
    name: "state",
    magic: *b"THAWSTAT",
    version: 1,
    max_bytes: 16 << 20,
};

/// Kinds of records. The numbers never change their meaning.
mod kind {
    pub const MACHINE: u16 = 0x01;
    pub const CLOCK: u16 = 0x02;
    pub const REGIONS: u16 = 0x03;
    pub const EXTENTS: u16 = 0x04;
    pub const CONSOLE: u16 = 0x05;
    /// Plus the part's number; the instance is the vCPU.
    pub const VCPU: u16 = 0x100;
    pub const VCPU_END: u16 = 0x1FF;
    /// Plus the part's number.
    pub const INTERRUPTS: u16 = 0x200;
    pub const INTERRUPTS_END: u16 = 0x2FF;
    /// The instance is the device's slot.
    pub const DEVICE: u16 = 0x300;
}

/// The version of every record so far.
const RECORD_VERSION: u16 = 1;
/// Bytes of a region and of an extent.
const REGION: usize = 16;
const EXTENT: usize = 24;

/// The properties that a machine was made with. A snapshot thaws only in a machine with the same ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    pub vcpus: u8,
    /// Boot memory, MiB.
    pub memory_mib: u32,
    /// [`crate::layout::VERSION`] of the guest-physical address map.
    pub address_map: u32,
}

/// A frozen machine without its memory's contents.
#[derive(Clone, Debug)]
pub struct Snapshot {
    pub shape: Shape,
    pub clock: ClockState,
    pub memory: MemoryMap,
    /// By index; the shape has their number.
    pub vcpus: Vec<VcpuState>,
    pub interrupts: InterruptState,
    pub bus: BusRecords,
}

impl Snapshot {
    /// Writes the snapshot to a file, which must be empty.
    pub fn write(&self, file: &File) -> Result<(), FileError> {
        FORMAT.write_file(file, &self.encode_body())
    }

    /// Reads and checks a file.
    pub fn read(file: &File) -> Result<Snapshot, FileError> {
        Snapshot::decode(&FORMAT.read_file(file)?)
    }

    /// Reads and checks a file's bytes.
    pub fn decode(bytes: &[u8]) -> Result<Snapshot, FileError> {
        Snapshot::decode_body(FORMAT.open(bytes)?)
    }

    /// The records.
    pub fn encode_body(&self) -> Vec<u8> {
        let mut body = Vec::new();
        let mut push = |kind, instance, payload: &[u8]| {
            push_record(&mut body, kind, RECORD_VERSION, instance, payload);
        };
        push(kind::MACHINE, 0, &self.shape.encode());
        push(kind::CLOCK, 0, &self.clock.to_bytes());
        push(kind::REGIONS, 0, &encode_regions(&self.memory));
        push(kind::EXTENTS, 0, &encode_extents(&self.memory));
        push(kind::CONSOLE, 0, &self.bus.console.encode());
        // Sorted by part, then by vCPU, because records ascend.
        let mut parts: Vec<(u16, u32, Vec<u8>)> = Vec::new();
        for (index, vcpu) in (0..).zip(&self.vcpus) {
            let numbered = vcpu.parts().into_iter();
            parts.extend(numbered.map(|(part, bytes)| (kind::VCPU + part as u16, index, bytes)));
        }
        parts.sort_unstable_by_key(|(kind, vcpu, _)| (*kind, *vcpu));
        for (kind, vcpu, bytes) in &parts {
            push(*kind, *vcpu, bytes);
        }
        for (part, bytes) in self.interrupts.parts() {
            push(kind::INTERRUPTS + part as u16, 0, &bytes);
        }
        for device in &self.bus.devices {
            push(kind::DEVICE, device.id as u32, &device.encode());
        }
        body
    }

    /// Reads the records: what follows the header.
    pub fn decode_body(body: &[u8]) -> Result<Snapshot, FileError> {
        let mut records = Records::new(&FORMAT, body);
        let mut read = Read::default();
        while let Some(record) = records.read()? {
            read.record(record)?;
        }
        read.finish(HEADER as u64 + body.len() as u64)
    }
}

impl Shape {
    fn encode(&self) -> Vec<u8> {
        let fields = [self.vcpus.into(), self.memory_mib, self.address_map];
        fields
            .iter()
            .flat_map(|field: &u32| field.to_le_bytes())
            .collect()
    }

    fn decode(fields: &mut Fields<'_>) -> Result<Shape, FileError> {
        let at = fields.at();
        let (vcpus, memory_mib, address_map) = (fields.u32()?, fields.u32()?, fields.u32()?);
        match u8::try_from(vcpus) {
            Ok(vcpus) if VCPUS.contains(&vcpus) && MEMORY_MIB.contains(&memory_mib) => Ok(Shape {
                vcpus,
                memory_mib,
                address_map,
            }),
            _ => {
                let what = format!("no machine has {vcpus} vCPUs and {memory_mib} MiB of memory");
                Err(FORMAT.damaged(at, what))
            }
        }
    }
}

/// The bytes of a vCPU's or the interrupt controllers' parts.
type Parts<'b, P> = Vec<(P, &'b [u8])>;

/// The records read so far.
#[derive(Default)]
struct Read<'b> {
    shape: Option<Shape>,
    clock: Option<ClockState>,
    regions: Option<(u8, Vec<Region>)>,
    memory: Option<MemoryMap>,
    console: Option<ConsoleRecord>,
    vcpus: Vec<Parts<'b, VcpuPart>>,
    interrupts: Parts<'b, InterruptPart>,
    devices: Vec<DeviceRecord>,
}

impl<'b> Read<'b> {
    fn record(&mut self, record: Record<'b>) -> Result<(), FileError> {
        let Record {
            at: start,
            kind,
            version,
            instance,
            mut payload,
        } = record;
        if version != RECORD_VERSION {
            return Err(FileError::UnknownRecordVersion {
                file: FORMAT.name,
                record: kind,
                found: version,
                known: RECORD_VERSION,
            });
        }
        let single = |what| match instance {
            0 => Ok(()),
            _ => Err(FORMAT.damaged(start, format!("there is one {what}, not number {instance}"))),
        };
        let at = payload.at();
        let state = |e: StateError| FORMAT.damaged(at, e.to_string());
        match kind {
            kind::MACHINE => {
                single("machine")?;
                let shape = Shape::decode(&mut payload)?;
                self.vcpus = vec![Vec::new(); shape.vcpus.into()];
                self.shape = Some(shape);
            }
            kind::CLOCK => {
                single("clock")?;
                self.clock = Some(ClockState::from_bytes(payload.rest()).map_err(state)?);
            }
            kind::REGIONS => {
                single("list of memory regions")?;
                self.regions = Some(decode_regions(&mut payload)?);
            }
            kind::EXTENTS => {
                single("list of memory extents")?;
                let (layers, regions) = there(self.regions.take(), "memory regions", start)?;
                self.memory = Some(decode_memory(layers, regions, &mut payload)?);
            }
            kind::CONSOLE => {
                single("console")?;
                let console = ConsoleRecord::decode(payload.rest());
                self.console = Some(console.map_err(|e| FORMAT.damaged(at, format!("console: {e}")))?);
            }
            kind::VCPU..=kind::VCPU_END => {
                let part = VcpuPart::try_from(kind - kind::VCPU).map_err(state)?;
                let vcpu = self.vcpus.get_mut(instance as usize).ok_or_else(|| {
                    FORMAT.damaged(start, format!("a part of vCPU {instance}, which is not there"))
                })?;
                vcpu.push((part, payload.rest()));
            }
            kind::INTERRUPTS..=kind::INTERRUPTS_END => {
                single("set of interrupt controllers")?;
                let part = InterruptPart::try_from(kind - kind::INTERRUPTS).map_err(state)?;
                self.interrupts.push((part, payload.rest()));
            }
            kind::DEVICE => {
                let device = DeviceRecord::decode(payload.rest())
                    .map_err(|e| FORMAT.damaged(at, format!("device {instance}: {e}")))?;
                if device.id as u32 != instance {
                    return Err(FORMAT.damaged(at, format!("device {instance} says it is {:?}", device.id)));
                }
                self.devices.push(device);
            }
            unknown => {
                return Err(FORMAT.damaged(start, format!("there are no records of kind {unknown:#x}")));
            }
        }
        payload.end()
    }

    /// `end` is the offset of the file's end.
    fn finish(self, end: u64) -> Result<Snapshot, FileError> {
        let shape = there(self.shape, "machine", end)?;
        let vcpus = (0..).zip(&self.vcpus).map(|(index, parts): (u32, _)| {
            VcpuState::from_parts(parts).map_err(|e| FORMAT.damaged(end, format!("vCPU {index}: {e}")))
        });
        Ok(Snapshot {
            shape,
            clock: there(self.clock, "clock", end)?,
            memory: there(self.memory, "memory", end)?,
            vcpus: vcpus.collect::<Result<_, _>>()?,
            interrupts: InterruptState::from_parts(&self.interrupts)
                .map_err(|e| FORMAT.damaged(end, format!("interrupt controllers: {e}")))?,
            bus: BusRecords {
                console: there(self.console, "console", end)?,
                devices: self.devices,
            },
        })
    }
}

/// The contents of a record, or an error at `at` if the record is missing.
fn there<T>(read: Option<T>, what: &str, at: u64) -> Result<T, FileError> {
    read.ok_or_else(|| FORMAT.damaged(at, format!("the record of its {what} is missing")))
}

fn encode_regions(map: &MemoryMap) -> Vec<u8> {
    let mut bytes = vec![map.layers(), 0, 0, 0, 0, 0, 0, 0];
    for region in map.regions() {
        bytes.extend_from_slice(&region.guest_address.to_le_bytes());
        bytes.extend_from_slice(&region.size.to_le_bytes());
    }
    bytes
}

/// Reads the number of layers, and the regions.
fn decode_regions(fields: &mut Fields<'_>) -> Result<(u8, Vec<Region>), FileError> {
    let layers = fields.u8()?;
    fields.zeros(7)?;
    let mut regions = Vec::with_capacity(fields.left().min(MAX_REGIONS * REGION) / REGION);
    while fields.left() > 0 {
        regions.push(Region {
            guest_address: fields.u64()?,
            size: fields.u64()?,
        });
    }
    Ok((layers, regions))
}

fn encode_extents(map: &MemoryMap) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(map.extents().len() * EXTENT);
    for extent in map.extents() {
        bytes.extend_from_slice(&extent.guest_address.to_le_bytes());
        bytes.extend_from_slice(&extent.size.to_le_bytes());
        bytes.extend_from_slice(&[extent.layer, 0, 0, 0, 0, 0, 0, 0]);
    }
    bytes
}

fn decode_memory(layers: u8, regions: Vec<Region>, fields: &mut Fields<'_>) -> Result<MemoryMap, FileError> {
    let at = fields.at();
    let mut extents = Vec::with_capacity(fields.left().min(MAX_EXTENTS * EXTENT) / EXTENT);
    while fields.left() > 0 {
        let (guest_address, size, layer) = (fields.u64()?, fields.u64()?, fields.u8()?);
        fields.zeros(7)?;
        extents.push(Extent {
            guest_address,
            size,
            layer,
        });
    }
    MemoryMap::new(regions, layers, extents).map_err(|e| FORMAT.damaged(at, e.to_string()))
}

#[cfg(test)]
#[path = "state_file_test.rs"]
mod tests;
