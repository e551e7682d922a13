use std::sync::Mutex;

use proptest::prelude::*;
use vm_memory::{Bytes, GuestMemoryRegion, GuestRegionMmap, MemoryRegionAddress};

use super::slots::Slots;
use super::*;
use crate::layout::memslot;
use crate::virtio::VirtioDevice;
use crate::virtio::interrupt::CONFIG_CHANGE;
use crate::virtio::testing::{Buf, NOWHERE, Rig};

const START: u64 = 256 << 30;
const GIB: u64 = 1 << 30;
const REGION: u64 = 3 * GIB;

/// The memory slots that the guest sees, by number.
#[derive(Clone, Default)]
struct Recorder(Arc<Mutex<Vec<(u32, u64, u64)>>>);

impl Slots for Recorder {
    fn show(&self, slot: u32, piece: Arc<GuestRegionMmap<()>>) -> Result<(), thaw_hypervisor::Error> {
        self.0
            .lock()
            .unwrap()
            .push((slot, piece.start_addr().0, piece.len()));
        Ok(())
    }
    fn hide(&self, slot: u32) -> Result<(), thaw_hypervisor::Error> {
        self.0.lock().unwrap().retain(|(shown, _, _)| *shown != slot);
        Ok(())
    }
}

struct Fixture {
    rig: Rig<Mem>,
    region: Arc<GuestRegionMmap<()>>,
    shown: Recorder,
}

fn fixture() -> Fixture {
    let window = Window {
        start: START,
        size: REGION,
    };
    let region = Arc::new(reserve(window).unwrap());
    let shown = Recorder::default();
    let mem = Mem::new(MemorySlots::new(region.clone(), shown.clone()));
    Fixture {
        rig: Rig::new(mem, 1 << F_UNPLUGGED_INACCESSIBLE),
        region,
        shown,
    }
}

const PLUG: u16 = 0;
const UNPLUG: u16 = 1;
const UNPLUG_ALL: u16 = 2;
const STATE: u16 = 3;

fn request(kind: u16, address: u64, blocks: u16) -> Vec<u8> {
    [
        &kind.to_le_bytes()[..],
        &[0; 6],
        &address.to_le_bytes(),
        &blocks.to_le_bytes(),
        &[0; 6],
    ]
    .concat()
}

/// The answer and state words of a response.
fn ask(rig: &mut Rig<Mem>, kind: u16, address: u64, blocks: u16) -> (u16, u16) {
    let (request, response) = (rig.readable(&request(kind, address, blocks)), rig.writable(10));
    assert_eq!(rig.request(0, &[request, response]), 10);
    let bytes = rig.bytes(response);
    (
        u16::from_le_bytes([bytes[0], bytes[1]]),
        u16::from_le_bytes([bytes[8], bytes[9]]),
    )
}

fn size(rig: &Rig<Mem>, offset: usize) -> u64 {
    u64::from_le_bytes(
        rig.device.config().bytes()[offset..offset + 8]
            .try_into()
            .unwrap(),
    )
}

const ACK: u16 = Response::Ack as u16;
const NACK: u16 = Response::Nack as u16;
const ERROR: u16 = Response::Error as u16;

#[test]
fn a_fresh_machine_requests_nothing_and_allows_nothing() {
    let mut f = fixture();
    assert_eq!(size(&f.rig, 0), BLOCK);
    assert_eq!((size(&f.rig, 16), size(&f.rig, 24)), (START, REGION));
    assert_eq!((size(&f.rig, 32), size(&f.rig, 40), size(&f.rig, 48)), (0, 0, 0));
    assert_eq!(ask(&mut f.rig, PLUG, START, 1).0, ERROR);
    assert_eq!(ask(&mut f.rig, UNPLUG_ALL, 0, 0).0, ACK);
    assert!(
        f.shown.0.lock().unwrap().is_empty(),
        "no memslot before a block is plugged"
    );
}

#[test]
fn what_is_requested_is_told_and_can_be_plugged_in_any_place() {
    let mut f = fixture();
    f.rig.device.set_requested_size(4 * BLOCK).unwrap();
    assert_eq!(f.rig.interrupt.reasons(), CONFIG_CHANGE);
    assert_eq!(
        (size(&f.rig, 48), size(&f.rig, 32)),
        (4 * BLOCK, 4 * BLOCK + USABLE_EXTENT)
    );
    assert_eq!(ask(&mut f.rig, PLUG, START + 8 * BLOCK, 3).0, ACK);
    assert_eq!(size(&f.rig, 40), 3 * BLOCK);
    assert_eq!(ask(&mut f.rig, PLUG, START, 2).0, NACK, "more than requested");
    assert_eq!(ask(&mut f.rig, PLUG, START, 1).0, ACK);
    assert_eq!(*f.shown.0.lock().unwrap(), [(memslot::VIRTIO_MEM, START, GIB)]);
}

#[test]
fn held_discards_make_plugging_busy() {
    let mut f = fixture();
    f.rig.device.set_requested_size(4 * BLOCK).unwrap();
    assert_eq!(ask(&mut f.rig, PLUG, START, 1).0, ACK);
    let discards = f.rig.device.discards();
    discards.hold();
    for (kind, address) in [(PLUG, START + BLOCK), (UNPLUG, START), (UNPLUG_ALL, 0)] {
        assert_eq!(ask(&mut f.rig, kind, address, 1).0, Response::Busy as u16);
    }
    assert_eq!(ask(&mut f.rig, STATE, START, 1), (ACK, State::Plugged as u16));
    discards.allow();
    assert_eq!(ask(&mut f.rig, UNPLUG, START, 1).0, ACK);
}

#[test]
fn requests_for_bad_blocks_are_errors() {
    let mut f = fixture();
    f.rig.device.set_requested_size(4 * BLOCK).unwrap();
    assert_eq!(ask(&mut f.rig, PLUG, START, 1).0, ACK);
    let end = START + 4 * BLOCK + USABLE_EXTENT;
    for (address, blocks) in [
        (START, 1),
        (START, 2),
        (START + 1, 1),
        (START + BLOCK, 0),
        (START - BLOCK, 1),
        (0, 1),
        (end, 1),
        (end - BLOCK, 2),
        (u64::MAX - BLOCK + 1, 1),
        (START, u16::MAX),
    ] {
        assert_eq!(
            ask(&mut f.rig, PLUG, address, blocks).0,
            ERROR,
            "plug {address:#x} {blocks}"
        );
    }
    assert_eq!(
        ask(&mut f.rig, UNPLUG, START, 2).0,
        ERROR,
        "one of them is not plugged"
    );
    assert_eq!(ask(&mut f.rig, 9, START, 1).0, ERROR);
    assert_eq!(size(&f.rig, 40), BLOCK);
}

#[test]
fn unplugged_blocks_lose_their_content() {
    let mut f = fixture();
    f.rig.device.set_requested_size(2 * BLOCK).unwrap();
    assert_eq!(ask(&mut f.rig, PLUG, START, 2).0, ACK);
    for block in 0..2 {
        f.region
            .write_obj(7u8, MemoryRegionAddress(block * BLOCK))
            .unwrap();
    }
    assert_eq!(ask(&mut f.rig, UNPLUG, START + BLOCK, 1).0, ACK);
    let byte = |at| f.region.read_obj::<u8>(MemoryRegionAddress(at)).unwrap();
    assert_eq!((byte(0), byte(BLOCK)), (7, 0));
    assert_eq!(ask(&mut f.rig, UNPLUG_ALL, 0, 0).0, ACK);
    assert_eq!((byte(0), size(&f.rig, 40)), (0, 0));
}

#[test]
fn states_are_told() {
    let mut f = fixture();
    f.rig.device.set_requested_size(2 * BLOCK).unwrap();
    ask(&mut f.rig, PLUG, START, 1);
    assert_eq!(ask(&mut f.rig, STATE, START, 1), (ACK, State::Plugged as u16));
    assert_eq!(
        ask(&mut f.rig, STATE, START + BLOCK, 1),
        (ACK, State::Unplugged as u16)
    );
    assert_eq!(ask(&mut f.rig, STATE, START, 2), (ACK, State::Mixed as u16));
    assert_eq!(ask(&mut f.rig, STATE, NOWHERE, 2).0, ERROR);
}

#[test]
fn the_usable_region_shrinks_only_when_nothing_is_plugged() {
    let mut f = fixture();
    f.rig.device.set_requested_size(GIB).unwrap();
    ask(&mut f.rig, PLUG, START, 1);
    f.rig.device.set_requested_size(0).unwrap();
    assert_eq!((size(&f.rig, 48), size(&f.rig, 32)), (0, GIB + USABLE_EXTENT));
    assert_eq!(ask(&mut f.rig, PLUG, START + BLOCK, 1).0, NACK);
    ask(&mut f.rig, UNPLUG_ALL, 0, 0);
    assert_eq!(size(&f.rig, 32), 0);
}

#[test]
fn each_piece_gets_one_memslot_and_gives_it_back() {
    let mut f = fixture();
    f.rig.device.set_requested_size(REGION).unwrap();
    let across = START + GIB - BLOCK;
    assert_eq!(ask(&mut f.rig, PLUG, across, 2).0, ACK);
    assert_eq!(ask(&mut f.rig, PLUG, START + 2 * GIB, 1).0, ACK);
    assert_eq!(ask(&mut f.rig, PLUG, START, 1).0, ACK);
    let slot = memslot::VIRTIO_MEM;
    let pieces = [
        (slot, START, GIB),
        (slot + 1, START + GIB, GIB),
        (slot + 2, START + 2 * GIB, GIB),
    ];
    assert_eq!(*f.shown.0.lock().unwrap(), pieces);
    drop(f.rig);
    assert!(f.shown.0.lock().unwrap().is_empty());
}

#[test]
fn impossible_sizes_are_refused() {
    let mut f = fixture();
    for bytes in [1, BLOCK + 1, REGION + BLOCK] {
        assert!(f.rig.device.set_requested_size(bytes).is_err());
    }
    assert_eq!(f.rig.interrupt.reasons(), 0);
    f.rig.device.set_requested_size(REGION).unwrap();
    assert_eq!(size(&f.rig, 32), REGION);
}

#[test]
fn plugged_memory_survives_a_reset_of_the_device() {
    let mut f = fixture();
    f.rig.device.set_requested_size(BLOCK).unwrap();
    ask(&mut f.rig, PLUG, START, 1);
    f.rig.device.reset();
    assert_eq!(size(&f.rig, 40), BLOCK);
}

#[test]
fn short_request_is_answered_and_short_response_stops_it() {
    let mut f = fixture();
    let (short, response) = (f.rig.readable(&[2, 0, 0]), f.rig.writable(10));
    f.rig.request(0, &[short, response]);
    assert_eq!(f.rig.bytes(response)[..2], ERROR.to_le_bytes());
    let (request, response) = (f.rig.readable(&request(UNPLUG_ALL, 0, 0)), f.rig.writable(9));
    f.rig.submit(0, &[request, response]);
    assert!(matches!(f.rig.kick(0), Err(DeviceError::Unanswerable { .. })));
    let mut f = fixture();
    let request = f.rig.readable(&self::request(UNPLUG_ALL, 0, 0));
    f.rig.submit(
        0,
        &[
            request,
            Buf {
                address: NOWHERE,
                length: 10,
                write: true,
            },
        ],
    );
    assert!(matches!(f.rig.kick(0), Err(DeviceError::Unanswerable { .. })));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// Compares with a simple model: an acknowledged request is done completely, any other changes nothing, and the plugged size never
    /// exceeds the largest requested size.
    #[test]
    fn requests_are_done_whole_or_not_at_all(
        steps in prop::collection::vec((0u16..3, 0u64..12, 0u16..6, 0u64..8), 1..40),
    ) {
        let mut f = fixture();
        let mut model = std::collections::BTreeSet::new();
        for (kind, first, count, requested) in steps {
            f.rig.device.set_requested_size(requested * BLOCK).unwrap();
            let before = model.len() as u64;
            let (answer, _) = ask(&mut f.rig, kind, START + first * BLOCK, count);
            let span: Vec<u64> = (first..first + u64::from(count)).collect();
            if answer == ACK {
                match kind {
                    PLUG => {
                        prop_assert!(!span.is_empty() && span.iter().all(|b| model.insert(*b)));
                        prop_assert!(model.len() as u64 <= requested);
                    }
                    UNPLUG => prop_assert!(!span.is_empty() && span.iter().all(|b| model.remove(b))),
                    _ => model.clear(),
                }
            } else {
                prop_assert!(kind != UNPLUG_ALL);
                let possible = match kind {
                    PLUG => requested > 0 && count > 0 && before + u64::from(count) <= requested
                        && span.iter().all(|b| !model.contains(b)),
                    _ => count > 0 && span.iter().all(|b| model.contains(b)),
                };
                prop_assert!(!possible, "a good request was refused");
            }
            prop_assert_eq!(size(&f.rig, 40), model.len() as u64 * BLOCK);
        }
    }
}

/// The ranges of `region` that a guest can write to, in bytes from its start, according to the kernel's list of this process's mappings.
fn writable(region: &GuestRegionMmap<()>) -> Vec<std::ops::Range<u64>> {
    let start = region.as_ptr() as u64;
    let mut found: Vec<std::ops::Range<u64>> = Vec::new();
    for line in std::fs::read_to_string("/proc/self/maps").unwrap().lines() {
        let (range, rest) = line.split_once(' ').unwrap();
        let (from, to) = range.split_once('-').unwrap();
        let hex = |digits| u64::from_str_radix(digits, 16).unwrap();
        let (from, to) = (hex(from).max(start), hex(to).min(start + region.len()));
        if from < to && rest.starts_with("rw") {
            match found.last_mut() {
                Some(last) if last.end == from - start => last.end = to - start,
                _ => found.push(from - start..to - start),
            }
        }
    }
    found
}

/// The bytes of the first `blocks` of `region` that are present.
fn resident(region: &GuestRegionMmap<()>, blocks: u64) -> u64 {
    let mut state = vec![0u8; (blocks * BLOCK / 4096) as usize];
    let length = (blocks * BLOCK) as usize;
    // SAFETY: the region is mapped, and `state` has a byte for each of its pages in question.
    let done = unsafe { libc::mincore(region.as_ptr().cast(), length, state.as_mut_ptr()) };
    assert_eq!(done, 0);
    state.iter().filter(|page| **page & 1 != 0).count() as u64 * 4096
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    /// Whatever a guest requests, it reaches only its plugged blocks. They never exceed the largest size ever requested, and they keep
    /// their contents.
    #[test]
    fn reachable_memory_is_what_is_plugged(
        steps in prop::collection::vec((0u16..3, 0u64..24, 0u16..9, prop::option::weighted(0.3, 0u64..12)), 1..40),
    ) {
        let mut f = fixture();
        let mut contents = std::collections::BTreeMap::new();
        let mut requested = 6;
        f.rig.device.set_requested_size(requested * BLOCK).unwrap();
        for (number, (kind, first, count, resize)) in steps.into_iter().enumerate() {
            if let Some(size) = resize {
                requested = size;
                f.rig.device.set_requested_size(requested * BLOCK).unwrap();
            }
            let most = requested.max(contents.len() as u64);
            let done = ask(&mut f.rig, kind, START + first * BLOCK, count).0 == ACK;
            let span = first..first + u64::from(count);
            match kind {
                PLUG if done => for block in span {
                    // The whole block is the guest's: it writes to the first and the last bytes.
                    let tag = (number as u64) << 32 | block;
                    let at = MemoryRegionAddress(block * BLOCK);
                    prop_assert_eq!(f.region.read_obj::<u64>(at).unwrap(), 0, "what was there before is gone");
                    f.region.write_obj(tag, at).unwrap();
                    f.region.write_obj(tag, MemoryRegionAddress((block + 1) * BLOCK - 8)).unwrap();
                    contents.insert(block, tag);
                },
                UNPLUG if done => span.for_each(|block| { contents.remove(&block); }),
                UNPLUG_ALL if done => contents.clear(),
                _ => {}
            }
            let mut plugged: Vec<std::ops::Range<u64>> = Vec::new();
            for (&block, &tag) in &contents {
                crate::snapshot::ranges::push(&mut plugged, block * BLOCK..(block + 1) * BLOCK);
                for at in [block * BLOCK, (block + 1) * BLOCK - 8] {
                    prop_assert_eq!(f.region.read_obj::<u64>(MemoryRegionAddress(at)).unwrap(), tag);
                }
            }
            prop_assert_eq!(writable(&f.region), plugged);
            prop_assert!(contents.len() as u64 <= most);
            prop_assert!(resident(&f.region, 32) <= contents.len() as u64 * BLOCK);
        }
    }
}

#[test]
fn unplugged_memory_reads_as_zeros_and_costs_nothing() {
    let f = fixture();
    for page in (0..GIB).step_by(4096) {
        assert_eq!(f.region.read_obj::<u64>(MemoryRegionAddress(page)).unwrap(), 0);
    }
    // The zero page is shared by all processes: only its bit in the pagemap is set.
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let header = format!("\n{:x}-", f.region.as_ptr() as u64);
    let entry = smaps.split_once(&header).expect("the mapping").1;
    let rss = entry.lines().find_map(|line| line.strip_prefix("Rss:")).unwrap();
    assert_eq!(rss.trim(), "0 kB");
}

fn fresh() -> (Mem, Arc<GuestRegionMmap<()>>, Recorder) {
    let f = fixture();
    (f.rig.device, f.region, f.shown)
}

#[test]
fn plugged_memory_is_shown_again_after_a_thaw() {
    let mut f = fixture();
    f.rig.device.set_requested_size(6 * BLOCK).unwrap();
    assert_eq!(ask(&mut f.rig, PLUG, START, 3).0, 0);
    assert_eq!(ask(&mut f.rig, PLUG, START + 5 * BLOCK, 1).0, 0);
    let plugged = f.rig.device.plugged();
    let frozen = f.rig.freeze();

    let (device, region, shown) = fresh();
    let mut thawed = Rig::thaw(frozen, device);
    assert_eq!(
        shown.0.lock().unwrap().len(),
        1,
        "the piece with the plugged blocks"
    );
    assert_eq!(thawed.device.plugged(), plugged);
    assert_eq!(size(&thawed, offset_of!(MemConfig, plugged_size)), 4 * BLOCK);
    assert_eq!(size(&thawed, offset_of!(MemConfig, requested_size)), 6 * BLOCK);
    assert_eq!(ask(&mut thawed, STATE, START + 3 * BLOCK, 1), (0, 1));
    assert_eq!(ask(&mut thawed, PLUG, START, 1).0, 3, "plugged already");
    region.write_obj(7u8, MemoryRegionAddress(0)).unwrap();
    assert_eq!(ask(&mut thawed, UNPLUG, START, 1).0, 0);
    assert_eq!(region.read_obj::<u8>(MemoryRegionAddress(0)).unwrap(), 0);
    thawed.device.set_requested_size(8 * BLOCK).unwrap();
    assert_eq!(thawed.interrupt.reasons() & CONFIG_CHANGE, CONFIG_CHANGE);
    assert!(
        thawed.interrupt.line().read().is_err(),
        "told when the thaw lets it"
    );
    thawed.start_work();
    assert_eq!(thawed.interrupt.line().read().unwrap(), 1);
}

#[test]
fn states_of_no_region_are_refused() {
    let (device, ..) = fresh();
    let state = |requested, usable, plugged: &[(u32, u32)]| {
        DeviceState::Mem(MemState {
            requested,
            usable,
            plugged: plugged.to_vec(),
        })
    };
    device
        .check(&state(BLOCK, 4 * BLOCK, &[(0, 1), (2, 2)]), None)
        .unwrap();
    for bad in [
        state(1, 0, &[]),
        state(REGION + BLOCK, 0, &[]),
        state(0, REGION + BLOCK, &[]),
        state(0, BLOCK, &[(0, 2)]),
        state(0, 4 * BLOCK, &[(0, 0)]),
        state(0, 4 * BLOCK, &[(2, 1), (0, 1)]),
        state(0, 4 * BLOCK, &[(0, 2), (1, 1)]),
        state(0, 4 * BLOCK, &[(0, 1), (1, 1)]),
        state(0, 4 * BLOCK, &[(u32::MAX, u32::MAX)]),
        DeviceState::Plain,
    ] {
        assert!(device.check(&bad, None).is_err(), "{bad:?}");
    }
}
