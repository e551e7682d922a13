//! Compares records of every kind of device with the bytes that earlier releases write for them: `golden/state.txt`, one line per record. A
//! line there never changes; a new variant adds one.

use std::collections::BTreeMap;

use thaw_protocol::control::DeviceId;
use thaw_protocol::tags::Tagged;

use super::*;

fn record(id: DeviceId, state: DeviceState) -> DeviceRecord {
    DeviceRecord {
        id,
        inventory: InventoryRecord {
            device_type: 26,
            features: 1 << 32,
            queue_sizes: vec![256, 128],
            shared_memory: vec![(0, 1 << 38, 1 << 30)],
        },
        transport: TransportRecord {
            status: 15,
            device_features_select: 1,
            driver_features_select: 0,
            driver_features: 1 << 33,
            queue_select: 1,
            shared_memory_select: 0,
            queues: vec![QueueRecord {
                size: 256,
                ready: true,
                descriptors: 0x1000,
                available: 0x2000,
                used: 0x3000,
                next_available: 7,
                next_used: 300,
                has_work: true,
            }],
            reasons: 1,
            needs_reset: false,
        },
        config: vec![1, 2, 3],
        generation: 9,
        state,
        backed: true,
    }
}

/// A state of each variant, with the name of its line.
fn states() -> [(&'static str, DeviceId, DeviceState); 6] {
    let mappings = vec![MappingRecord {
        window_offset: 2 << 20,
        node: 1 << 48,
        file_offset: 4096,
        length: 8192,
    }];
    let resets = vec![ResetRecord {
        host_port: 1025,
        guest_port: 70000,
        kind: 1,
    }];
    [
        ("Plain", DeviceId::Balloon, DeviceState::Plain),
        (
            "Blk",
            DeviceId::Blk1,
            DeviceState::Blk(BlkState {
                read_only: true,
                capacity: 2048,
                parked: vec![3],
            }),
        ),
        ("Pmem", DeviceId::Pmem1, PmemState { mapped: 1 << 21 }.into()),
        (
            "Fs",
            DeviceId::Root,
            DeviceState::Fs(FsState {
                parked: vec![vec![], vec![1, 2]],
                mappings,
            }),
        ),
        (
            "Vsock",
            DeviceId::Vsock,
            DeviceState::Vsock(VsockState {
                resets,
                connections: vec![(1, 1024)],
                next_port: 1 << 30,
            }),
        ),
        (
            "Mem",
            DeviceId::Mem,
            DeviceState::Mem(MemState {
                requested: 1 << 30,
                usable: 1 << 31,
                plugged: vec![(0, 4), (9, 1)],
            }),
        ),
    ]
}

#[test]
fn device_records_keep_their_bytes() {
    let mut lines: BTreeMap<&str, &str> = include_str!("golden/state.txt")
        .lines()
        .map(|line| line.split_once(' ').unwrap())
        .collect();
    for (tag, variant) in DeviceState::TAGS {
        assert!(
            states().iter().any(|(_, _, state)| state.tag() == *tag),
            "{variant} is missing"
        );
    }
    for (name, id, state) in states() {
        let record = record(id, state);
        let bytes = record.encode();
        assert_eq!(Some(hex(&bytes).as_str()), lines.remove(name), "{name}");
        assert_eq!(DeviceRecord::decode(&bytes).unwrap(), record);
    }
    let console = ConsoleRecord {
        baud_divisor_low: 1,
        baud_divisor_high: 0,
        interrupt_enable: 5,
        interrupt_identification: 0xc1,
        line_control: 0x13,
        line_status: 0x60,
        modem_control: 11,
        modem_status: 0xb0,
        scratch: 2,
        in_buffer: vec![b'x'],
        backed: false,
    };
    let bytes = console.encode();
    assert_eq!(Some(hex(&bytes).as_str()), lines.remove("Console"));
    assert_eq!(ConsoleRecord::decode(&bytes).unwrap(), console);
    assert_eq!(lines, BTreeMap::new(), "lines that no record has");
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
