use std::cell::Cell;
use std::io::Seek;
use std::os::fd::AsFd;
use std::sync::RwLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;
use thaw_protocol::control::FreezeKind::{Delta, DeltaOver, Full};
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::snapshot::freeze_memory;
use crate::snapshot::protection::COPIES;
use crate::snapshot::testing::*;
use crate::virtio::guest_io;

/// A freeze of `memory`, which is the machine's, prepared.
fn prepared(
    kind: FreezeKind,
    memory: &GuestMemory,
    live: Vec<Range<u64>>,
    base: Option<&MemoryMap>,
    protector: &Protector,
) -> Result<(LiveFreeze, File), LiveError> {
    let out = empty_file();
    let source = Source {
        kind,
        memory: memory.clone(),
        live,
        base: base.cloned(),
        out: out.try_clone().unwrap(),
    };
    let device = userfaultfd().unwrap();
    let freeze = LiveFreeze::prepare(source, &pagemap(), device.as_fd(), protector)?;
    Ok((freeze, out))
}

fn prepared_in_full(memory: &GuestMemory, protector: &Protector) -> (LiveFreeze, File) {
    let live = all_of(memory);
    prepared(Full, memory, live, None, protector).unwrap()
}

fn all_of(memory: &GuestMemory) -> Vec<Range<u64>> {
    use vm_memory::{Address, GuestMemory, GuestMemoryRegion};
    let ranges = memory.iter().map(|region| {
        let start = region.start_addr().raw_value();
        start..start + region.len()
    });
    ranges.collect()
}

fn finished(freeze: &mut LiveFreeze) -> Frozen {
    loop {
        if let Some(frozen) = freeze.step().unwrap() {
            return frozen;
        }
    }
}

fn contents(mut file: &File) -> Vec<u8> {
    let mut bytes = Vec::new();
    file.rewind().unwrap();
    std::io::Read::read_to_end(&mut file, &mut bytes).unwrap();
    bytes
}

/// A step of a guest, or of the freeze.
#[derive(Clone, Debug)]
enum Act {
    Write(u64, u64),
    Read(u64),
    Work,
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    // Few pages, so that they meet; some far apart, so that gaps stay open.
    let page = (0u64..12, 0u64..4).prop_map(|(page, part)| page * 36 + part * (PAGES - 200));
    let act = prop_oneof![
        4 => (page.clone(), 0u64..3).prop_map(|(page, value)| Act::Write(page, value)),
        2 => page.prop_map(Act::Read),
        1 => Just(Act::Work),
    ];
    vec(act, 0..30)
}

fn kinds() -> impl Strategy<Value = FreezeKind> {
    let over = (1u8..3).prop_map(|layers| DeltaOver { layers });
    prop_oneof![Just(Full), Just(Delta), over]
}

fn run(acts: &[Act], memories: &[&GuestMemory], mut work: impl FnMut()) {
    for act in acts {
        match act {
            Act::Write(page, value) => memories.iter().for_each(|memory| write(memory, *page, *value)),
            Act::Read(page) => memories.iter().for_each(|memory| _ = read(memory, *page)),
            Act::Work => work(),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// Whatever is written before, while it is prepared and while it is written, the file and the map are those of a freeze of a machine that
    /// has stopped at the moment.
    #[test]
    fn a_live_freeze_is_one_of_its_moment(kind in kinds(), template in acts(), parts in vec(acts(), 4)) {
        if userfaultfd().is_none() {
            return Ok(());
        }
        let original = Clone::booted();
        run(&template, &[&original.memory], || {});
        let plugged = [hotplugged()];
        let parent = Clone::thawed(original.freeze(Full, &plugged).unwrap());
        run(&parts[3], &[&parent.memory], || {});
        let (frozen, layers) = parent.freeze(Delta, &plugged).unwrap();
        let clone = || {
            let layers = layers.iter().map(|layer| layer.try_clone().unwrap()).collect();
            Clone::thawed((frozen.clone(), layers))
        };
        let (one, twin) = (clone(), clone());
        run(&parts[0], &[&one.memory, &twin.memory], || {});
        let protector = Protector::start().unwrap();
        let live = boot().into_iter().chain(plugged).collect::<Vec<_>>();
        let (mut freeze, out) = prepared(kind, &one.memory, live.clone(), one.map.as_ref(), &protector).unwrap();
        run(&parts[1], &[&one.memory, &twin.memory], || {});
        let wanted = empty_file();
        let expected = freeze_memory(kind, &twin.memory, &live, twin.map.as_ref(), &pagemap(), &wanted).unwrap();
        freeze.begin().unwrap();
        let mut result = None;
        run(&parts[2], &[&one.memory], || {
            if result.is_none() {
                result = freeze.step().unwrap();
            }
        });
        let result = result.unwrap_or_else(|| finished(&mut freeze));
        prop_assert_eq!(result, expected);
        prop_assert!(contents(&out) == contents(&wanted), "the files differ");
        // What was written goes on to be there.
        run(&parts[2], &[&twin.memory], || {});
        for page in 0..3 * PAGES {
            prop_assert_eq!(read(&one.memory, page), read(&twin.memory, page), "page {}", page);
        }
    }
}

/// Threads that write memory as the guest does, and as a device's system call does.
#[test]
fn writers_do_not_change_what_is_being_written() {
    if userfaultfd().is_none() {
        return;
    }
    let memory = memory();
    (0..3 * PAGES).for_each(|page| write(&memory, page, 1));
    let source = empty_file();
    source.write_all_at(&[0xab; 3 * PAGE as usize], 0).unwrap();
    let protector = Protector::start().unwrap();
    let (gate, stop) = (RwLock::new(()), AtomicBool::new(false));
    let stored = |round: u64, page: u64| {
        let _inside = gate.read().unwrap();
        match page % 64 {
            0 => {
                let pages = memory_slice(&memory, page);
                guest_io::read_exact_at(source.as_fd(), &[pages], 0).unwrap();
            }
            _ => write(&memory, page, round),
        }
    };
    thread::scope(|scope| {
        let _stops = Stops(&stop);
        for writer in 0..2 {
            let (stored, stop) = (&stored, &stop);
            scope.spawn(move || {
                for round in 2.. {
                    for page in (writer..3 * PAGES).step_by(2) {
                        if stop.load(Ordering::Relaxed) {
                            return;
                        }
                        stored(round, page);
                    }
                }
            });
        }
        for _ in 0..3 {
            let (mut freeze, out) = prepared_in_full(&memory, &protector);
            let moment = {
                let _stopped = gate.write().unwrap();
                freeze.begin().unwrap();
                (0..3 * PAGES).map(|page| read(&memory, page)).collect::<Vec<_>>()
            };
            let frozen = finished(&mut freeze);
            let clone = Clone::thawed((frozen, vec![out]));
            for (page, value) in moment.iter().enumerate() {
                assert_eq!(read(&clone.memory, page as u64), *value, "page {page}");
            }
        }
    });
}

/// Makes writers end, also if the test fails.
struct Stops<'a>(&'a AtomicBool);

impl Drop for Stops<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn memory_slice(memory: &GuestMemory, number: u64) -> vm_memory::VolatileSlice<'_> {
    vm_memory::GuestMemory::get_slice(memory, GuestAddress(page(number)), PAGE as usize).unwrap()
}

#[test]
fn writers_wait_for_room_unless_hurried() {
    if userfaultfd().is_none() {
        return;
    }
    let pages = COPIES as u64 + 100;
    let memory = GuestMemory::from_ranges(&[(GuestAddress(0), (pages * PAGE) as usize)]).unwrap();
    let fill = |value: u64| {
        for page in 0..pages {
            memory.write_obj(value, GuestAddress(page * PAGE)).unwrap();
        }
    };
    fill(1);
    let protector = Protector::start().unwrap();
    for is_hurried in [true, false] {
        let (mut freeze, out) = prepared_in_full(&memory, &protector);
        freeze.begin().unwrap();
        let frozen = thread::scope(|scope| {
            let (done, filled) = channel();
            scope.spawn(move || {
                fill(2);
                done.send(()).unwrap();
            });
            let patience = Duration::from_millis(100);
            assert_eq!(filled.recv_timeout(patience), Err(RecvTimeoutError::Timeout));
            if is_hurried {
                freeze.hurry(true);
                filled.recv().unwrap();
                freeze.hurry(false);
            }
            let frozen = finished(&mut freeze);
            if !is_hurried {
                filled.recv().unwrap();
            }
            frozen
        });
        assert_eq!(frozen.bytes, pages * PAGE);
        let written = contents(&out);
        assert!(
            written.chunks(PAGE as usize).all(|page| page[0] == 1),
            "{is_hurried}"
        );
        drop(freeze);
        fill(1);
    }
}

#[test]
fn memory_plugged_again_has_lost_its_bytes_in_a_live_delta() {
    if userfaultfd().is_none() {
        return;
    }
    let clone = Clone::plugged_again();
    let live = boot().into_iter().chain([hotplugged()]).collect();
    let protector = Protector::start().unwrap();
    let (mut freeze, out) = prepared(Delta, &clone.memory, live, clone.map.as_ref(), &protector).unwrap();
    freeze.begin().unwrap();
    let frozen = finished(&mut freeze);
    drop(freeze);
    Clone::thawed((frozen, clone.layers.into_iter().chain([out]).collect())).is_plugged_again();
}

#[test]
fn pages_looked_at_too_slowly_are_looked_at_again() {
    let late = || thread::sleep(WINDOW + Duration::from_millis(1));
    let (looks, undone) = (Cell::new(0), Cell::new(0));
    let look = |is_late: bool| {
        looks.set(looks.get() + 1);
        if is_late {
            late();
        }
        Ok(looks.get())
    };
    let undo = || {
        undone.set(undone.get() + 1);
        Ok(())
    };
    // A busy host may be late more often.
    let found = in_time(|| look(looks.get() == 0), undo).unwrap().unwrap();
    assert!(found >= 2 && undone.get() == found - 1);
    assert_eq!(in_time(|| look(true), undo).unwrap(), None);
    assert_eq!(looks.get(), found + TRIES);
}

#[test]
fn pages_written_between_two_looks_are_found() {
    if userfaultfd().is_none() {
        return;
    }
    let memory = memory();
    write(&memory, 1, 1);
    let protector = Protector::start().unwrap();
    let (freeze, _) = prepared_in_full(&memory, &protector);
    let (slice, file) = (0..SIZE, pagemap());
    freeze.protection.unprotect(&slice).unwrap();
    write(&memory, 2, 2);
    let pagemap = Pagemap::new(&file).unwrap().unwrap();
    let seen = freeze.protect_slice(&slice, &pagemap).unwrap();
    assert_eq!(
        [1, 2, 1000].map(|number| contains(&seen.written, page(number))),
        [true, true, false]
    );
}

#[test]
fn a_freeze_that_ends_early_leaves_no_protection() {
    if userfaultfd().is_none() {
        return;
    }
    let original = Clone::booted();
    (0..PAGES).for_each(|page| write(&original.memory, page, 1));
    let protector = Protector::start().unwrap();
    for steps in 0..8 {
        let (mut freeze, _) = prepared_in_full(&original.memory, &protector);
        write(&original.memory, 1, steps);
        if steps > 0 {
            freeze.begin().unwrap();
            (1..steps).for_each(|_| drop(freeze.step().unwrap()));
            write(&original.memory, 2, steps);
        }
        drop(freeze);
        (0..PAGES).for_each(|page| write(&original.memory, page, steps));
    }
    // A file that cannot be written ends one too.
    let (mut freeze, _) = prepared_in_full(&original.memory, &protector);
    freeze.source.out = File::options().write(true).open("/dev/full").unwrap();
    freeze.begin().unwrap();
    let failed = (0..100).find_map(|_| freeze.step().err()).unwrap();
    assert!(matches!(failed, LiveError::Freeze(_)), "{failed}");
    drop(freeze);
    write(&original.memory, 3, 3);
    prepared_in_full(&original.memory, &protector);
}

#[test]
fn memory_that_cannot_be_protected_is_refused_by_name() {
    if userfaultfd().is_none() {
        return;
    }
    let original = Clone::booted();
    write(&original.memory, 3, 30);
    let (frozen, layers) = original.freeze(Full, &[]).unwrap();
    let on_disk = tempfile::tempfile().unwrap();
    on_disk.write_all_at(&contents(&layers[0]), 0).unwrap();
    let clone = Clone::thawed((frozen, vec![on_disk]));
    let protector = Protector::start().unwrap();
    match prepared(Full, &clone.memory, boot(), clone.map.as_ref(), &protector) {
        Ok(_) => thaw_test_skip::skip("files of this host's temporary directory are in memory"),
        Err(LiveError::Protection(error @ ProtectionError::Register { .. })) => {
            assert!(error.to_string().contains("cannot be write-protected"), "{error}");
        }
        Err(error) => panic!("{error}"),
    }
    write(&clone.memory, 3, 31);
    // Not the device; no base for a delta.
    let zero = File::open("/dev/zero").unwrap();
    let opened = Protector::start()
        .unwrap()
        .protection(zero.as_fd(), &original.memory, &boot());
    assert!(matches!(opened, Err(ProtectionError::Open(_))));
    let refused = prepared(Delta, &original.memory, boot(), None, &protector).err();
    assert!(matches!(refused, Some(LiveError::Freeze(FreezeError::NoBase))));
}
