//! The window: which files a guest may map, what it reads there, and that a thawed guest reads the same.

use std::sync::Arc;

use fuse_backend_rs::abi::fuse_abi::FUSE_ATTR_DAX;
use fuse_backend_rs::abi::virtio_fs::{RemovemappingOne, SetupmappingIn};
use thaw_imagefs::fs::{DAX_LEAST, DAX_RANGE};
use thaw_protocol::access::Access;
use vm_memory::{Bytes, GuestRegionMmap, MemoryRegionAddress};

use super::*;
use crate::virtio::state::MappingRecord;

const PAGE: u64 = 4096;
const FRAMES: u64 = 4;
/// A file that does not fill its last page, and is followed by another file's bytes.
const BIG: u64 = DAX_RANGE + 5 * PAGE + 100;
const BLOB: u64 = 2 * DAX_RANGE;

fn image() -> Image {
    let extent = |file_offset, data_offset, length| BlobExtent {
        blob: 0,
        file_offset,
        data_offset,
        length,
    };
    // Two pieces in the wrong order, and a hole before the second.
    let scattered = vec![extent(0, PAGE, PAGE), extent(DAX_LEAST - PAGE, 0, PAGE)];
    Image::made(
        "one",
        BLOB,
        vec![
            ("big", BIG, vec![extent(0, 0, BIG.next_multiple_of(PAGE))]),
            ("scattered", DAX_LEAST, scattered),
            ("small", PAGE, vec![extent(0, 0, PAGE)]),
        ],
    )
}

/// The memory at the window's guest addresses.
type Region = Arc<GuestRegionMmap<()>>;

fn device(gate: &Arc<Gate>) -> (Fs<Images>, Region) {
    let window = HostWindow::reserve(Window {
        start: 1 << 36,
        size: FRAMES * DAX_RANGE,
    })
    .unwrap();
    let region = window.region().clone();
    (Fs::root(window, gate.clone()), region)
}

fn guest(gate: &Arc<Gate>) -> (Guest, Region) {
    let (mut device, region) = device(gate);
    let image = image();
    device.add_image(1, image.spec.clone(), image.fds()).unwrap();
    let rig = Rig::new(device, 0);
    let guest = Guest {
        rig,
        image,
        unique: 0,
    };
    (guest, region)
}

fn seen(region: &Region, offset: u64, length: u64) -> Vec<u8> {
    let mut bytes = vec![0; length as usize];
    region
        .read_slice(&mut bytes, MemoryRegionAddress(offset))
        .unwrap();
    bytes
}

fn patterns(from: u64, length: u64) -> Vec<u8> {
    (from..from + length).map(pattern).collect()
}

fn setup_body(foffset: u64, len: u64, moffset: u64) -> Vec<u8> {
    let request = SetupmappingIn {
        fh: u64::MAX,
        foffset,
        len,
        flags: 2,
        moffset,
    };
    request.as_slice().to_vec()
}

fn remove_body(count: u32, frames: &[(u64, u64)]) -> Vec<u8> {
    let mut body = count.to_le_bytes().to_vec();
    for (moffset, len) in frames.iter().copied() {
        body.extend(RemovemappingOne { moffset, len }.as_slice());
    }
    body
}

impl Guest {
    fn node(&mut self, name: &str) -> u64 {
        let image = self.lookup(1, "one").unwrap();
        self.lookup(image, name).unwrap()
    }

    fn setup(&mut self, node: u64, foffset: u64, moffset: u64) -> i32 {
        self.call(
            Opcode::SetupMapping,
            node,
            &setup_body(foffset, DAX_RANGE, moffset),
        )
        .0
    }

    /// A file's flags according to LOOKUP and GETATTR.
    fn flags(&mut self, name: &str) -> (u32, u32) {
        let image = self.lookup(1, "one").unwrap();
        let (_, entry) = self.call(Opcode::Lookup, image, format!("{name}\0").as_bytes());
        let node = u64::from_le_bytes(entry[..8].try_into().unwrap());
        let (_, attributes) = self.call(Opcode::Getattr, node, &[0; 16]);
        let last = |bytes: &[u8]| u32::from_le_bytes(*bytes.last_chunk().unwrap());
        assert_eq!((entry.len(), attributes.len()), (128, 104));
        (last(&entry), last(&attributes))
    }
}

#[test]
fn only_files_that_are_whole_and_worth_it_may_be_mapped() {
    let (mut guest, _) = guest(&open_gate());
    for name in ["big", "scattered", "small"] {
        assert_eq!(guest.flags(name), (0, 0), "{name}: nothing is there yet");
    }
    guest.image.ready.set_ready(0);
    assert_eq!(guest.flags("scattered"), (FUSE_ATTR_DAX, FUSE_ATTR_DAX));
    assert_eq!(guest.flags("big"), (0, 0));
    guest.image.fill();
    assert_eq!(guest.flags("big"), (FUSE_ATTR_DAX, FUSE_ATTR_DAX));
    assert_eq!(guest.flags("small"), (0, 0));
}

#[test]
fn a_mapped_range_shows_the_file_and_nothing_beside_it() {
    let (mut guest, region) = guest(&open_gate());
    guest.image.fill();
    let (big, scattered) = (guest.node("big"), guest.node("scattered"));
    assert_eq!(guest.setup(big, 0, DAX_RANGE), 0);
    assert!(seen(&region, DAX_RANGE, DAX_RANGE) == patterns(0, DAX_RANGE));
    assert!(seen(&region, 0, DAX_RANGE) == vec![0; DAX_RANGE as usize]);
    // The tail: the file's last page as stored, and zeros instead of another file's bytes.
    assert_eq!(guest.setup(big, DAX_RANGE, 0), 0);
    assert!(seen(&region, 0, 6 * PAGE) == patterns(DAX_RANGE, 6 * PAGE));
    assert!(seen(&region, 6 * PAGE, DAX_RANGE - 6 * PAGE) == vec![0; (DAX_RANGE - 6 * PAGE) as usize]);
    // Maps over another file: none of its bytes are left.
    assert_eq!(guest.setup(scattered, 0, DAX_RANGE), 0);
    let at = |offset| seen(&region, DAX_RANGE + offset, PAGE);
    assert!(at(0) == patterns(PAGE, PAGE) && at(DAX_LEAST - PAGE) == patterns(0, PAGE));
    assert!(at(PAGE) == vec![0; PAGE as usize] && at(DAX_LEAST) == vec![0; PAGE as usize]);

    let both = remove_body(2, &[(0, DAX_RANGE), (DAX_RANGE, DAX_RANGE)]);
    assert_eq!(guest.call(Opcode::RemoveMapping, big, &both).0, 0);
    assert!(seen(&region, 0, 2 * DAX_RANGE).iter().all(|byte| *byte == 0));
}

#[test]
fn what_is_mapped_goes_with_its_image_its_mount_and_its_driver() {
    let (mut guest, region) = guest(&open_gate());
    guest.image.fill();
    let big = guest.node("big");
    let init = [7u32, 38, 1 << 20, u32::MAX, u32::MAX, 0]
        .map(u32::to_le_bytes)
        .concat();
    let ends: [&dyn Fn(&mut Guest); 4] = [
        &|guest| {
            assert_eq!(
                guest
                    .call(Opcode::Init, 0, &[init.clone(), vec![0; 40]].concat())
                    .0,
                0
            )
        },
        &|guest| assert_eq!(guest.call(Opcode::Destroy, 0, &[]).0, 0),
        &|guest| guest.rig.device.remove_image(1).unwrap(),
        &|guest| guest.rig.device.reset(),
    ];
    for (index, end) in ends.into_iter().enumerate() {
        if index == 3 {
            let image = &guest.image;
            guest
                .rig
                .device
                .add_image(1, image.spec.clone(), image.fds())
                .unwrap();
        }
        assert_eq!(guest.setup(big, 0, 0), 0);
        assert_eq!(seen(&region, 1, 1), [pattern(1)]);
        end(&mut guest);
        assert_eq!(seen(&region, 1, 1), [0], "{index}");
    }
}

#[test]
fn a_range_that_is_not_there_is_fetched_and_then_mapped() {
    let (mut guest, region) = guest(&open_gate());
    let socket = guest.misses();
    let (listener, told) = pair();
    guest.rig.device.attach(Backend::Accesses, vec![told]).unwrap();
    let big = guest.node("big");
    let asked = guest.ask(Opcode::SetupMapping, big, &setup_body(0, DAX_RANGE, 0), 64);
    let misses = [receive(&socket), receive(&socket)];
    assert_eq!(misses.each_ref().map(|miss| miss.length), [1 << 20; 2]);
    assert_eq!(seen(&region, 1, 1), [0]);
    guest.image.fill();
    misses.iter().for_each(|miss| reply(&socket, miss.id, Ok(())));
    let used = guest.wait_used();
    assert_eq!(guest.answer(&asked, used[0]), (0, vec![]));
    assert!(seen(&region, 0, DAX_RANGE) == patterns(0, DAX_RANGE));
    // Reported once, although it was executed twice. Reads are reported too.
    guest.call(Opcode::Read, big, &read_body(PAGE, 10));
    let told: Vec<Access> = (0..2).map(|_| packet::receive(&listener).unwrap().0).collect();
    let expected = [(0, DAX_RANGE as u32), (PAGE, 10)].map(|(offset, length)| Access {
        blob: DIGEST,
        offset,
        length,
        dropped: 0,
    });
    assert_eq!(told, expected);
    // Bytes that the node cannot get are an error, and nothing is mapped.
    let (mut other, region) = super::dax::guest(&open_gate());
    let socket = other.misses();
    let big = other.node("big");
    let asked = other.ask(Opcode::SetupMapping, big, &setup_body(0, PAGE, 0), 64);
    reply(&socket, receive(&socket).id, Err("no".into()));
    let used = other.wait_used();
    assert_eq!(other.answer(&asked, used[0]).0, -libc::EIO);
    assert_eq!(seen(&region, 1, 1), [0]);
}

#[test]
fn malformed_mappings_are_refused() {
    let (mut guest, region) = guest(&open_gate());
    guest.image.fill();
    let (big, small) = (guest.node("big"), guest.node("small"));
    assert_eq!(guest.setup(big, 0, 3 * DAX_RANGE), 0);
    let writable = SetupmappingIn {
        len: DAX_RANGE,
        flags: 3,
        ..SetupmappingIn::default()
    };
    let bodies = [
        vec![],
        setup_body(0, DAX_RANGE, 0)[..39].to_vec(),
        setup_body(0, 0, 0),
        setup_body(0, 2 * DAX_RANGE, 0),
        setup_body(0, u64::MAX, 0),
        setup_body(1, DAX_RANGE, 0),
        setup_body(0, PAGE + 1, 0),
        setup_body(0, DAX_RANGE, PAGE),
        setup_body(0, DAX_RANGE, FRAMES * DAX_RANGE),
        setup_body(0, DAX_RANGE, u64::MAX - DAX_RANGE + 1),
        setup_body(u64::MAX - PAGE + 1, DAX_RANGE, 0),
        setup_body(BIG.next_multiple_of(PAGE), DAX_RANGE, DAX_RANGE),
        writable.as_slice().to_vec(),
    ];
    for body in bodies {
        let error = guest.call(Opcode::SetupMapping, big, &body).0;
        assert!([-libc::EINVAL, -libc::EROFS].contains(&error), "{body:?}");
    }
    for node in [1, 2 << 48 | 36, 1 << 48 | 0xffff_ffff] {
        assert!(guest.setup(node, 0, DAX_RANGE) < 0, "{node:#x}");
    }
    let bodies = [
        vec![],
        vec![1, 0],
        remove_body(1, &[]),
        remove_body(u32::MAX, &[(DAX_RANGE, DAX_RANGE)]),
        remove_body(1, &[(PAGE, DAX_RANGE)]),
        remove_body(1, &[(FRAMES * DAX_RANGE, DAX_RANGE)]),
    ];
    for body in bodies {
        let error = guest.call(Opcode::RemoveMapping, big, &body).0;
        assert_eq!(error, -libc::EINVAL, "{body:?}");
    }
    // Any mappable range can be mapped, however small. An empty frame can be unmapped, and so can all frames at once.
    assert_eq!(seen(&region, 3 * DAX_RANGE + 1, 1), [pattern(1)]);
    assert_eq!(guest.setup(small, 0, 2 * DAX_RANGE), 0);
    let all = remove_body(1, &[(0, u64::MAX)]);
    assert_eq!(guest.call(Opcode::RemoveMapping, big, &all).0, 0);
    assert!(seen(&region, 0, FRAMES * DAX_RANGE).iter().all(|byte| *byte == 0));
}

/// A guest with the tail of `big` in frame 1, thawed and parked.
fn frozen_and_parked() -> (Guest, Region) {
    let gate = open_gate();
    let (mut guest, _) = guest(&gate);
    guest.image.fill();
    let big = guest.node("big");
    assert_eq!(guest.setup(big, DAX_RANGE, DAX_RANGE), 0);
    gate.close();
    let frozen = guest.rig.freeze();
    gate.open();
    let (device, region) = device(&Arc::new(Gate::new()));
    let rig = Rig::thaw(frozen, device);
    let thawed = Guest {
        rig,
        image: image(),
        unique: guest.unique,
    };
    (thawed, region)
}

#[test]
fn a_thawed_guest_finds_its_mappings_before_it_runs() {
    let (mut guest, region) = frozen_and_parked();
    let image = &guest.image;
    image.fill();
    // Fails without the image.
    guest.rig.device.before_running().unwrap_err();
    guest
        .rig
        .device
        .add_image(1, image.spec.clone(), image.fds())
        .unwrap();
    guest.rig.device.before_running().unwrap();
    assert!(seen(&region, DAX_RANGE, 6 * PAGE) == patterns(DAX_RANGE, 6 * PAGE));
    assert_eq!(seen(&region, DAX_RANGE + 6 * PAGE, 1), [0]);
    guest.rig.device.before_running().unwrap();
    // A second freeze still has the mappings.
    let state = guest.rig.device.save().state;
    let mappings = &state.of::<FsState>().unwrap().mappings;
    assert_eq!(
        (mappings.len(), mappings[0].window_offset, mappings[0].file_offset),
        (1, DAX_RANGE, DAX_RANGE)
    );
}

#[test]
fn thawed_guest_waits_for_its_mapped_bytes_before_it_runs() {
    let (mut guest, region) = frozen_and_parked();
    let image = &guest.image;
    let device = &mut guest.rig.device;
    device.add_image(1, image.spec.clone(), image.fds()).unwrap();
    let why = device.before_running().unwrap_err();
    assert!(why.contains("no miss socket"), "{why}");
    for (answer, word) in [
        (Some("the registry is gone"), "registry is gone"),
        (None, "closed"),
    ] {
        let (ours, theirs) = pair();
        device.attach(Backend::Misses, vec![theirs]).unwrap();
        let node = std::thread::spawn(move || {
            let miss = receive(&ours);
            assert_eq!((miss.blob, miss.offset), (DIGEST, DAX_RANGE));
            if let Some(reason) = answer {
                reply(&ours, miss.id, Err(reason.into()));
                // The socket stays open until the other end is gone.
                let _ = packet::receive::<Miss>(&ours);
            }
        });
        let why = device.before_running().unwrap_err();
        assert!(why.contains(word), "{why}");
        if answer.is_some() {
            let (_, other) = pair();
            device.attach(Backend::Misses, vec![other]).unwrap();
        }
        node.join().unwrap();
    }
    let (ours, theirs) = pair();
    device.attach(Backend::Misses, vec![theirs]).unwrap();
    let ready = &image.ready;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let miss = receive(&ours);
            // An answer without a question is ignored.
            reply(&ours, miss.id + 1000, Ok(()));
            for chunk in 0..ready.chunk_count() {
                ready.set_ready(chunk);
            }
            reply(&ours, miss.id, Ok(()));
        });
        device.before_running().unwrap();
    });
    assert!(seen(&region, DAX_RANGE, 6 * PAGE) == patterns(DAX_RANGE, 6 * PAGE));
}

#[test]
fn mappings_no_guest_could_have_are_refused() {
    let gate = open_gate();
    let (mut guest, _) = guest(&gate);
    gate.close();
    let frozen = guest.rig.freeze();
    let (device, _) = device(&gate);
    let good = MappingRecord {
        window_offset: DAX_RANGE,
        node: 1 << 48 | 36,
        file_offset: 0,
        length: DAX_RANGE,
    };
    let state = |mappings: Vec<MappingRecord>| {
        DeviceState::Fs(FsState {
            parked: Vec::new(),
            mappings,
        })
    };
    device.check(&state(vec![good]), Some(&frozen.queues)).unwrap();
    let bad = [
        vec![good, good],
        vec![MappingRecord {
            window_offset: PAGE,
            ..good
        }],
        vec![MappingRecord {
            window_offset: FRAMES * DAX_RANGE,
            ..good
        }],
        vec![MappingRecord {
            file_offset: 1,
            ..good
        }],
        vec![MappingRecord {
            file_offset: u64::MAX - PAGE + 1,
            ..good
        }],
        vec![MappingRecord { length: 0, ..good }],
        vec![MappingRecord {
            length: 2 * DAX_RANGE,
            ..good
        }],
        vec![MappingRecord { length: 100, ..good }],
    ];
    for mappings in bad {
        device.check(&state(mappings), Some(&frozen.queues)).unwrap_err();
    }
    device.check(&state(vec![good]), None).unwrap_err();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever is requested of the window, each frame shows the range requested last, or zeros.
    #[test]
    fn any_mappings_are_answered(
        requests in prop::collection::vec((
            any::<bool>(), 0u64..40, 0u64..6, prop::sample::select(vec![0, 1, 4096, 1 << 20, 1 << 21, u64::MAX]),
            prop::sample::select(vec![0u64, 4096, 1 << 21, u64::MAX - 4095]), 0u64..4,
        ), 1..20),
    ) {
        let (mut guest, region) = guest(&open_gate());
        guest.image.fill();
        guest.node("big");
        for (removes, node, frame, length, offset, flags) in requests {
            let moffset = frame << 20;
            let (opcode, body) = match removes {
                true => (Opcode::RemoveMapping, remove_body(1, &[(moffset, length)])),
                false => {
                    let request = SetupmappingIn { fh: 0, foffset: offset, len: length, flags, moffset };
                    (Opcode::SetupMapping, request.as_slice().to_vec())
                }
            };
            let (error, body) = guest.call(opcode, 1 << 48 | node, &body);
            prop_assert!(error <= 0 && body.is_empty());
        }
        // All of the window can be read: nothing is mapped past a file's end.
        seen(&region, 0, FRAMES * DAX_RANGE);
    }
}
