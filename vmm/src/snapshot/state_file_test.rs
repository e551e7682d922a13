use proptest::collection::vec;
use proptest::prelude::*;
use thaw_protocol::control::DeviceId;

use super::*;
use crate::snapshot::PAGE;
use crate::snapshot::testing::empty_file;
use crate::virtio::state::{DeviceState, InventoryRecord, TransportRecord};

fn vcpu(tsc: u64) -> VcpuState {
    let tsc_entry = [&0x10u32.to_le_bytes()[..], &[0; 4], &tsc.to_le_bytes()].concat();
    let bytes: Vec<(VcpuPart, Vec<u8>)> = VcpuPart::ALL
        .into_iter()
        .map(|part| {
            let bytes = match part {
                VcpuPart::Cpuid => vec![0; 40],
                VcpuPart::TscKhz => 2_000_000u32.to_le_bytes().into(),
                VcpuPart::MpState => vec![0; 4],
                VcpuPart::Regs => vec![3; 144],
                VcpuPart::Sregs => vec![0; 312],
                VcpuPart::Xsave => vec![0; 4096],
                VcpuPart::Xcrs => vec![0; 392],
                VcpuPart::DebugRegs => vec![0; 128],
                VcpuPart::Lapic => vec![0; 1024],
                VcpuPart::Msrs => tsc_entry.clone(),
                VcpuPart::Events => vec![0; 64],
            };
            (part, bytes)
        })
        .collect();
    let parts: Vec<_> = bytes
        .iter()
        .map(|(part, bytes)| (*part, bytes.as_slice()))
        .collect();
    VcpuState::from_parts(&parts).unwrap()
}

fn interrupts() -> InterruptState {
    let chip = |id: u32| [&id.to_le_bytes()[..], &[0; 516]].concat();
    let chips = [0, 1, 2].map(chip);
    let parts: Vec<_> = InterruptPart::ALL
        .into_iter()
        .zip(&chips)
        .map(|(part, bytes)| (part, bytes.as_slice()))
        .collect();
    InterruptState::from_parts(&parts).unwrap()
}

fn device(id: DeviceId) -> DeviceRecord {
    DeviceRecord {
        id,
        inventory: InventoryRecord {
            device_type: 4,
            features: 1 << 32,
            queue_sizes: vec![64],
            shared_memory: vec![],
        },
        transport: TransportRecord {
            status: 15,
            device_features_select: 0,
            driver_features_select: 0,
            driver_features: 1 << 32,
            queue_select: 0,
            shared_memory_select: 0,
            queues: vec![],
            reasons: 1,
            needs_reset: false,
        },
        config: vec![1, 2, 3],
        generation: 7,
        state: DeviceState::Plain,
        backed: false,
    }
}

fn snapshot(vcpus: u8) -> Snapshot {
    let regions = vec![Region {
        guest_address: 0,
        size: 64 << 20,
    }];
    let extents = vec![Extent::new(0..16 * PAGE, 0), Extent::new(16 * PAGE..32 * PAGE, 1)];
    Snapshot {
        shape: Shape {
            vcpus,
            memory_mib: 64,
            address_map: crate::layout::VERSION,
        },
        clock: ClockState {
            nanoseconds: 123_456_789,
        },
        memory: MemoryMap::new(regions, 2, extents).unwrap(),
        vcpus: (0..vcpus).map(|index| vcpu(index.into())).collect(),
        interrupts: interrupts(),
        bus: BusRecords {
            console: ConsoleRecord {
                baud_divisor_low: 12,
                baud_divisor_high: 0,
                interrupt_enable: 0,
                interrupt_identification: 1,
                line_control: 3,
                line_status: 0x60,
                modem_control: 8,
                modem_status: 0xB0,
                scratch: 0,
                in_buffer: vec![],
                backed: true,
            },
            devices: vec![device(DeviceId::Root), device(DeviceId::Rng)],
        },
    }
}

/// The records of a body, as bytes.
fn split(body: &[u8]) -> Vec<Vec<u8>> {
    let mut records = Vec::new();
    let mut rest = body;
    while !rest.is_empty() {
        let length = u32::from_le_bytes(rest[8..12].try_into().unwrap()) as usize;
        let (record, after) = rest.split_at(12 + length);
        records.push(record.to_vec());
        rest = after;
    }
    records
}

fn refusal(body: &[u8]) -> String {
    Snapshot::decode(&FORMAT.seal(body)).unwrap_err().to_string()
}

#[test]
fn a_file_says_what_was_written_to_it() {
    for vcpus in [1, 4] {
        let snapshot = snapshot(vcpus);
        let file = empty_file();
        snapshot.write(&file).unwrap();
        let read = Snapshot::read(&file).unwrap();
        assert_eq!(
            (read.shape, read.clock, &read.memory, &read.bus),
            (snapshot.shape, snapshot.clock, &snapshot.memory, &snapshot.bus)
        );
        assert_eq!(
            read.vcpus[usize::from(vcpus) - 1].msr(0x10),
            Some(u64::from(vcpus) - 1)
        );
        assert_eq!(read.encode_body(), snapshot.encode_body());
        assert!(matches!(snapshot.write(&file), Err(FileError::NotEmpty { .. })));
    }
}

#[test]
fn a_flipped_bit_in_any_byte_is_refused() {
    let bytes = FORMAT.seal(&snapshot(1).encode_body());
    for at in 0..bytes.len() {
        let mut flipped = bytes.clone();
        flipped[at] ^= 1 << (at % 8);
        assert!(Snapshot::decode(&flipped).is_err(), "byte {at}");
    }
}

#[test]
fn a_file_cut_anywhere_is_refused_as_cut_short() {
    let bytes = FORMAT.seal(&snapshot(1).encode_body());
    for length in 0..bytes.len() {
        let error = Snapshot::decode(&bytes[..length]).unwrap_err();
        assert!(matches!(error, FileError::CutShort { .. }), "{length}: {error}");
    }
}

#[test]
fn each_refusal_says_what_is_wrong() {
    let body = snapshot(1).encode_body();
    let bytes = FORMAT.seal(&body);
    let decode = |bytes: &[u8]| Snapshot::decode(bytes).unwrap_err();
    assert!(matches!(
        decode(b"PK\x03\x04 something else"),
        FileError::NotOurs { .. }
    ));
    let newer = [&bytes[..8], &[2], &bytes[9..]].concat();
    assert!(matches!(
        decode(&newer),
        FileError::UnknownVersion { found: 2, .. }
    ));
    assert!(matches!(
        decode(&[&bytes[..], &[0]].concat()),
        FileError::Damaged { .. }
    ));
    let huge = [&bytes[..16], &u64::MAX.to_le_bytes()[..], &bytes[24..]].concat();
    assert!(matches!(decode(&huge), FileError::TooLarge { .. }));
}

/// A body with a correct hash, as a hostile writer would make it.
#[test]
fn records_missing_twice_or_unknown_are_refused() {
    let records = split(&snapshot(2).encode_body());
    for index in 0..records.len() {
        let is_device = u16::from_le_bytes([records[index][0], records[index][1]]) == kind::DEVICE;
        let without = [&records[..index], &records[index + 1..]].concat().concat();
        // The device records are checked later, by the devices.
        assert!(
            is_device || refusal(&without).contains("damaged"),
            "without {index}"
        );
        let twice = [&records[..=index], &records[index..]].concat().concat();
        assert!(refusal(&twice).contains("twice or out of order"), "{index} twice");
        let mut longer = records.clone();
        longer[index].push(0);
        let length = longer[index].len() as u32 - 12;
        longer[index][8..12].copy_from_slice(&length.to_le_bytes());
        refusal(&longer.concat());
        let mut newer = records.clone();
        newer[index][2] = 9;
        assert!(refusal(&newer.concat()).contains("version 9"), "{index} newer");
        let mut other = records.clone();
        other[index][4..8].copy_from_slice(&77u32.to_le_bytes());
        refusal(&other.concat());
    }
    let mut unknown = records.clone();
    unknown.insert(1, [&[1, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0][..]].concat());
    assert!(refusal(&unknown.concat()).contains("there is one machine"));
    let mut late = records.clone();
    late.push([&0x777u16.to_le_bytes()[..], &[1, 0, 0, 0, 0, 0, 0, 0, 0, 0]].concat());
    assert!(refusal(&late.concat()).contains("no records of kind 0x777"));
}

#[test]
fn shapes_no_machine_has_are_refused() {
    for (vcpus, memory_mib) in [(0u32, 64u32), (17, 64), (257, 64), (1, 0), (1, u32::MAX)] {
        let mut records = split(&snapshot(1).encode_body());
        records[0][12..16].copy_from_slice(&vcpus.to_le_bytes());
        records[0][16..20].copy_from_slice(&memory_mib.to_le_bytes());
        assert!(refusal(&records.concat()).contains("no machine has"));
    }
}

proptest! {
    /// The hash is corrected, so that only the contents decide whether the file decodes.
    #[test]
    fn decoding_mutated_bytes_never_panics(
        changes in vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        cut in any::<Option<prop::sample::Index>>(),
    ) {
        let mut body = snapshot(2).encode_body();
        for (at, byte) in changes {
            let at = at.index(body.len());
            body[at] = byte;
        }
        if let Some(cut) = cut {
            body.truncate(cut.index(body.len()));
        }
        if let Ok(read) = Snapshot::decode(&FORMAT.seal(&body)) {
            // A file that passes is a snapshot: it can be written, and decodes to the same.
            prop_assert!(Snapshot::decode_body(&read.encode_body()).is_ok());
        }
    }

    #[test]
    fn decoding_any_bytes_never_panics(bytes in vec(any::<u8>(), 0..300)) {
        let _ = Snapshot::decode(&bytes);
        let _ = Snapshot::decode_body(&bytes);
    }
}

/// A snapshot of a tiny guest, written by the thaw-vmm of the release before this one.
#[test]
fn state_file_of_the_previous_release_is_read_and_written_alike() {
    let bytes = include_bytes!("fixtures/previous-state");
    let snapshot = Snapshot::decode(bytes).unwrap();
    assert_eq!((snapshot.shape.vcpus, snapshot.shape.memory_mib), (4, 128));
    assert_eq!(snapshot.vcpus.len(), 4);
    let devices: Vec<DeviceId> = snapshot.bus.devices.iter().map(|device| device.id).collect();
    assert!(
        devices.contains(&DeviceId::Net) && devices.is_sorted(),
        "{devices:?}"
    );
    let body = &bytes[bytes.len() - snapshot.encode_body().len()..];
    assert!(snapshot.encode_body() == body, "it is written otherwise now");
}
