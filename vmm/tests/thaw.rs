//! Freezing a machine and thawing clones of it: tiny guests, real processes, whatever KVM this host has.

#![allow(clippy::unwrap_used)]

mod support;

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use support::snapshot::*;
use support::{Vmm, readable, spec, started};
use thaw_protocol::control::*;
use thaw_tiny_guest::bare::{self, ACKNOWLEDGEMENT, GENERATION_ID, READY, acknowledged};
use thaw_tiny_guest::{Code, DATA, Guest};

const MIB: u64 = 1 << 20;

fn generation(console: &mut File) -> [u8; 16] {
    acknowledged(&read_exactly(console, ACKNOWLEDGEMENT)).expect("a whole acknowledgement")
}

#[test]
fn clones_go_on_where_their_source_was_frozen_each_with_a_generation_of_its_own() {
    let (vmm, mut source, mut source_console) = paused_at(spec(1, 64), &bare::bare(0).kernel(), READY);
    let snapshot = Snapshot::full(&vmm, &mut source);
    let frozen = &contents(&snapshot.layers[0])[GENERATION_ID as usize..][..16];
    let mut generations = vec![<[u8; 16]>::try_from(frozen).unwrap()];
    for _ in 0..3 {
        let (clone, mut control, mut console) = snapshot.thawed(spec(1, 64));
        let printed = generation(&mut console);
        control.request(Command::Pause, &[]).unwrap();
        let memory = Snapshot::full(&clone, &mut control).layers.remove(0);
        let mut written = [0; 16];
        memory.read_exact_at(&mut written, GENERATION_ID.into()).unwrap();
        assert_eq!(printed, written);
        generations.push(printed);
    }
    for (index, generation) in generations.iter().enumerate() {
        assert!(!generations[..index].contains(generation), "{generations:x?}");
    }
    // The source is the machine it was: it goes on, and sees no other generation.
    assert_eq!(source.state(), MachineState::Paused);
    source.request(Command::Resume, &[]).unwrap();
    assert_eq!(source.state(), MachineState::Running);
    source.request(Command::Pause, &[]).unwrap();
    let again = contents(&Snapshot::full(&vmm, &mut source).layers[0]);
    assert_eq!(again[GENERATION_ID as usize..][..16], generations[0]);
    assert!(!readable(&source_console, std::time::Duration::ZERO));
    drop((vmm, source));
    assert_eq!(std::io::Read::read(&mut source_console, &mut [0; 1]).unwrap(), 0);
}

#[test]
fn a_guest_that_sleeps_is_woken_by_each_new_generation() {
    let snapshot = frozen_at(&bare::lasting().kernel(), READY);
    let (clone, mut control, mut console) = snapshot.thawed(spec(1, 64));
    let first = generation(&mut console);
    assert_eq!(read_exactly(&mut console, READY.len()), READY.as_bytes());
    control.request(Command::Pause, &[]).unwrap();
    let again = Snapshot::full(&clone, &mut control);
    let (_vmm, _control, mut console) = again.thawed(spec(1, 64));
    assert_ne!(generation(&mut console), first);
}

#[test]
fn a_source_and_its_clone_both_go_on_after_the_freeze() {
    let tick = Code::default().print("tick\n").repeat_from(0).kernel();
    let (vmm, mut source, mut source_console) = paused_at(spec(2, 64), &tick, "tick\n");
    let snapshot = Snapshot::full(&vmm, &mut source);
    while readable(&source_console, std::time::Duration::ZERO) {
        std::io::Read::read(&mut source_console, &mut [0; 65536]).unwrap();
    }
    source.request(Command::Resume, &[]).unwrap();
    let (_clone, _control, mut console) = snapshot.thawed(spec(2, 64));
    for console in [&mut source_console, &mut console] {
        let text = String::from_utf8(read_exactly(console, 1000)).unwrap();
        // The freeze wrote out what was gathered of a line; what follows goes on inside it.
        let (_, whole) = text.split_once('\n').unwrap();
        assert!(whole.starts_with("tick\ntick\n"), "{text}");
    }
}

/// Fills pages from a memory file whose regions are `regions`, until the machine is gone.
fn serve(uffd: std::os::fd::OwnedFd, regions: &[MappedRegion], memory: &File) {
    #[repr(C)]
    struct UffdioCopy {
        dst: u64,
        src: u64,
        len: u64,
        mode: u64,
        copy: i64,
    }
    /// `_IOWR(0xAA, 3, struct uffdio_copy)` of linux/userfaultfd.h.
    const UFFDIO_COPY: libc::Ioctl = 0xC028_AA03;
    // struct uffd_msg: the event in byte 0 (0x12: a page fault), the address at byte 16.
    let mut message = [0; 32];
    loop {
        use rustix::event::{PollFd, PollFlags, poll};
        let mut ready = [PollFd::new(&uffd, PollFlags::IN)];
        poll(&mut ready, None).unwrap();
        match rustix::io::read(&uffd, &mut message) {
            Ok(32) => {}
            Err(rustix::io::Errno::AGAIN) => continue,
            other => panic!("{other:?}"),
        }
        assert_eq!(message[0], 0x12);
        let address = u64::from_le_bytes(message[16..24].try_into().unwrap()) & !4095;
        let mut before = 0;
        let mut offset = None;
        for region in regions {
            match address.checked_sub(region.host_address) {
                Some(inside) if inside < region.size => offset = Some(before + inside),
                _ => before += region.size,
            }
        }
        let mut page = [0u8; 4096];
        memory.read_exact_at(&mut page, offset.unwrap()).unwrap();
        let mut copy = UffdioCopy {
            dst: address,
            src: page.as_ptr() as u64,
            len: 4096,
            mode: 0,
            copy: 0,
        };
        // SAFETY: it reads a page of ours and fills one of another process's.
        let done = unsafe { libc::ioctl(std::os::fd::AsRawFd::as_raw_fd(&uffd), UFFDIO_COPY, &raw mut copy) };
        if done != 0 {
            // ESRCH: that process has ended.
            assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::ESRCH));
            return;
        }
    }
}

#[test]
fn memory_that_is_not_here_is_filled_by_who_holds_the_userfaultfd_even_what_kvm_looks_at_itself() {
    let Ok(device) = File::options().read(true).write(true).open("/dev/userfaultfd") else {
        eprintln!("skipped: this host has no /dev/userfaultfd, or not for us");
        return;
    };
    // The guest tells KVM where its clock is (MSR 0x4b564d01): mov ecx, 0x4b564d01; mov eax, 3 MiB + 1; cdq; wrmsr
    let clocked = Code::default().raw(&[
        0xb9, 0x01, 0x4d, 0x56, 0x4b, 0xb8, 1, 0, 0x30, 0, 0x99, 0x0f, 0x30,
    ]);
    let snapshot = frozen_at(&stepping(clocked).kernel(), STEPS_READY);
    let vmm = Vmm::spawn();
    let mut control = vmm.connect();
    control.create(spec(1, 64)).unwrap();
    let command = Command::Restore {
        layers: 1,
        working_set: false,
        mode: MemoryMode::Uffd,
    };
    let fds = [&snapshot.state, &device].map(std::os::fd::AsFd::as_fd);
    let (response, mut beside) = control.request_for_fds(command, &fds).unwrap();
    let Response::Restored { regions, .. } = response else {
        panic!("{response:?}")
    };
    assert_eq!((regions.len(), beside.len()), (1, 1));
    assert_eq!((regions[0].guest_address, regions[0].size), (0, 64 * MIB));
    let (uffd, memory) = (beside.remove(0), snapshot.layers[0].try_clone().unwrap());
    // It ends with the test's process.
    std::thread::spawn(move || serve(uffd, &regions, &memory));
    let mut console = control.console();
    thaw(&mut control).unwrap();
    assert_eq!(read_exactly(&mut console, 1), b"\n");
    // Frozen from there, it is whole.
    control.request(Command::Pause, &[]).unwrap();
    let full = Snapshot::full(&vmm, &mut control);
    assert_eq!(read_exactly(&mut full.thawed(spec(1, 64)).2, 1), b"\n");
}

/// Where the guests below leave a page a generation: linear addresses from here.
const STEPS: u32 = 2 * MIB as u32;
const STEPS_READY: &str = "ready\n";

/// A guest that, each time its generation changes, checks every page it wrote before, writes one more, and prints a newline.
/// What it finds wrong resets it.
fn stepping(prefix: Code) -> Code {
    let code = prefix
        // mov esi, GENERATION_ID; mov edi, STEPS; mov ebx, [esi]
        .raw(&[0xbe])
        .raw(&GENERATION_ID.to_le_bytes())
        .raw(&[0xbf])
        .raw(&STEPS.to_le_bytes())
        .raw(&[0x8b, 0x1e])
        .print(STEPS_READY);
    let wait = code.0.len();
    let failure = Code::default().out(0x602, 1).0;
    // 1: cmp ebx, [esi]; je 1b; mov ebx, [esi]; mov ecx, STEPS
    code.raw(&[0x3b, 0x1e, 0x74, 0xfc, 0x8b, 0x1e, 0xb9])
        .raw(&STEPS.to_le_bytes())
        // 2: cmp ecx, edi; jae 3f
        .raw(&[0x39, 0xf9, 0x73, 12 + failure.len() as u8])
        // cmp [ecx], ecx; je +failure
        .raw(&[0x39, 0x09, 0x74, failure.len() as u8])
        .raw(&failure)
        // add ecx, 4096; jmp 2b
        .raw(&[
            0x81,
            0xc1,
            0,
            0x10,
            0,
            0,
            0xeb,
            (-(16 + failure.len() as i8)) as u8,
        ])
        // 3: mov [edi], edi; add edi, 4096
        .raw(&[0x89, 0x3f, 0x81, 0xc7, 0, 0x10, 0, 0])
        .print("\n")
        .repeat_from(wait)
}

/// Four-level paging in 32-bit compatibility mode: the first 2 MiB as they are, the second at guest-physical `high`.
fn paging(high: u64) -> (Code, Vec<u8>) {
    const LARGE_PAGE: u64 = 1 << 7;
    let mut tables = vec![0u8; 0x3000];
    let mut entry = |at: usize, value: u64| tables[at..at + 8].copy_from_slice(&(value | 3).to_le_bytes());
    entry(0, u64::from(DATA) + 0x1000);
    entry(0x1000, u64::from(DATA) + 0x2000);
    entry(0x2000, LARGE_PAGE);
    entry(0x2008, high | LARGE_PAGE);
    let code = Code::default()
        // cr4.PAE; cr3
        .raw(&[0x0f, 0x20, 0xe0, 0x83, 0xc8, 0x20, 0x0f, 0x22, 0xe0, 0xb8])
        .raw(&DATA.to_le_bytes())
        .raw(&[0x0f, 0x22, 0xd8])
        // EFER.LME
        .raw(&[0xb9, 0x80, 0, 0, 0xc0, 0x0f, 0x32, 0x0d, 0, 1, 0, 0, 0x0f, 0x30])
        // cr0.PG
        .raw(&[0x0f, 0x20, 0xc0, 0x0d, 0, 0, 0, 0x80, 0x0f, 0x22, 0xc0]);
    (code, tables)
}

/// Delta upon delta upon a full freeze, each thawed: every clone finds what all before it wrote.
fn stacks(machine: MachineSpec, kernel: &File) {
    let (vmm, mut control, _console) = paused_at(machine.clone(), kernel, STEPS_READY);
    let mut snapshot = Snapshot::full(&vmm, &mut control);
    for step in 0..3 {
        let (clone, mut control, mut console) = snapshot.thawed(machine.clone());
        assert_eq!(
            read_exactly(&mut console, 1),
            b"\n",
            "step {step}: {:?}",
            control.state()
        );
        control.request(Command::Pause, &[]).unwrap();
        let (delta, bytes) = snapshot.delta(&clone, &mut control);
        assert!(
            bytes > 0 && bytes < MIB,
            "step {step}: a delta of {bytes:#x} bytes"
        );
        // A full freeze of the same moment has the same memory.
        let full = Snapshot::full(&clone, &mut control);
        let (_vmm, _control, mut console) = full.thawed(machine.clone());
        assert_eq!(read_exactly(&mut console, 1), b"\n", "step {step}, in full");
        snapshot = delta;
    }
    assert_eq!(snapshot.layers.len(), 4);
    let (_vmm, _control, mut console) = snapshot.thawed(machine);
    assert_eq!(read_exactly(&mut console, 1), b"\n");
}

#[test]
fn deltas_stack() {
    stacks(spec(1, 64), &stepping(Code::default()).kernel());
}

#[test]
fn memory_on_the_other_side_of_the_hole_is_frozen_too_in_full_and_as_deltas() {
    let (code, data) = paging(4096 * MIB);
    let guest = Guest {
        code: stepping(code).0,
        data,
    };
    stacks(spec(1, 3074), &guest.kernel());
}

#[test]
fn a_delta_of_a_booted_machine_is_refused() {
    let (vmm, mut control, _console) = paused_at(spec(1, 64), &bare::bare(0).kernel(), READY);
    let refused = freeze(&vmm, &mut control, FreezeKind::Delta, &empty(), &empty()).unwrap_err();
    assert_eq!(refused.code, ErrorCode::Invalid);
    assert_eq!(control.state(), MachineState::Paused);
    Snapshot::full(&vmm, &mut control);
}

#[test]
fn the_moments_of_a_thaw_are_in_order() {
    let snapshot = frozen_at(&bare::bare(0).kernel(), READY);
    let (_vmm, mut control, mut console) = snapshot.parked(spec(1, 64));
    let (_, times, faults) = control.status();
    assert!(
        times.created < times.restored && times.thawed == 0 && times.entered == 0,
        "{times:?}"
    );
    assert_eq!(faults, 0);
    thaw(&mut control).unwrap();
    generation(&mut console);
    let (state, times, faults) = control.status();
    assert_eq!(state, MachineState::Running);
    assert!(
        times.restored < times.thawed && times.thawed <= times.entered,
        "{times:?}"
    );
    assert!(faults > 0);
}

#[test]
fn a_thaw_names_every_device_nobody_spoke_of() {
    let snapshot = frozen_at(&bare::bare(0).kernel(), READY);
    let vmm = Vmm::spawn();
    let mut control = vmm.connect();
    control.create(spec(1, 64)).unwrap();
    snapshot.restore(&mut control).unwrap();
    let needs_none = [DeviceId::Mem, DeviceId::Balloon, DeviceId::Rng];
    let mut left: Vec<DeviceId> = DeviceId::ALL
        .into_iter()
        .filter(|id| !needs_none.contains(id))
        .collect();
    let mut empty = Vec::new();
    while let Some(device) = left.first().copied() {
        let refused = thaw_without(&mut control, &empty).unwrap_err();
        assert_eq!(refused.code, ErrorCode::Unswapped);
        for id in DeviceId::ALL {
            let named = refused.message.contains(&format!("{id:?}"));
            assert_eq!(named, left.contains(&id), "{id:?}: {refused}");
        }
        assert_eq!(control.state(), MachineState::Parked);
        if device == DeviceId::Console {
            // It had a backend: it cannot be without one.
            let refused = thaw_without(&mut control, &DeviceId::ALL).unwrap_err();
            assert_eq!(refused.code, ErrorCode::Unswapped);
            assert!(refused.message.starts_with("[Console] had"), "{refused}");
            control.console();
            let refused = thaw_without(&mut control, &DeviceId::ALL).unwrap_err();
            assert!(refused.message.starts_with("[Console] cannot"), "{refused}");
        } else {
            empty.push(device);
        }
        left.remove(0);
    }
    thaw_without(&mut control, &empty).unwrap();
}

#[test]
fn requests_that_do_not_fit_the_state_are_refused() {
    let snapshot = frozen_at(&bare::bare(0).kernel(), READY);
    let refused = |control: &mut support::Connection, command: Command| {
        let code = control.request(command.clone(), &[]).unwrap_err().code;
        assert_eq!(code, ErrorCode::WrongState, "{command:?}");
    };
    let restore = Command::Restore {
        layers: 1,
        working_set: false,
        mode: MemoryMode::Cow,
    };
    let freeze = Command::Freeze {
        kind: FreezeKind::Full,
    };
    let boot = Command::Boot {
        cmdline: String::new(),
    };
    let thaw = Command::Thaw {
        memory_mib: 0,
        empty: Vec::new(),
    };
    let resize = Command::Resize { memory_mib: 128 };
    let vmm = Vmm::spawn();
    let mut control = vmm.connect();
    for command in [&restore, &thaw, &freeze, &Command::WorkingSet, &resize] {
        refused(&mut control, command.clone());
    }
    control.create(spec(1, 64)).unwrap();
    for command in [&thaw, &freeze, &Command::WorkingSet, &resize, &Command::Pause] {
        refused(&mut control, command.clone());
    }
    assert_eq!(control.state(), MachineState::Created);
    snapshot.restore(&mut control).unwrap();
    let parked = [
        &restore,
        &boot,
        &freeze,
        &Command::WorkingSet,
        &resize,
        &Command::Pause,
        &Command::Resume,
    ];
    for command in parked {
        refused(&mut control, command.clone());
    }
    assert_eq!(control.state(), MachineState::Parked);
    let mut console = control.console();
    support::snapshot::thaw(&mut control).unwrap();
    generation(&mut console);
    for command in [&restore, &boot, &freeze, &thaw, &Command::Resume] {
        refused(&mut control, command.clone());
    }
    assert_eq!(control.state(), MachineState::Running);
}

/// Restores into a fresh machine of `machine` what must be refused with `code`; it stays usable.
fn refuse(machine: MachineSpec, snapshot: &Snapshot, code: ErrorCode, says: &str) {
    let vmm = Vmm::spawn();
    let mut control = vmm.connect();
    control.create(machine).unwrap();
    let refused = snapshot.restore(&mut control).unwrap_err();
    assert_eq!(refused.code, code, "{refused}");
    assert!(refused.message.contains(says), "{refused}");
    assert_eq!(control.state(), MachineState::Created);
    let mut console = control.console();
    control.boot(&Code::default().print("usable\n").kernel()).unwrap();
    assert_eq!(read_exactly(&mut console, 7), b"usable\n");
}

#[test]
fn another_shape_is_refused_and_the_machine_can_still_be_booted() {
    let snapshot = frozen_at(&bare::bare(0).kernel(), READY);
    refuse(spec(2, 64), &snapshot, ErrorCode::Incompatible, "vCPU");
    refuse(spec(1, 128), &snapshot, ErrorCode::Incompatible, "MiB");
    let two = Snapshot {
        state: snapshot.state.try_clone().unwrap(),
        layers: vec![
            snapshot.layers[0].try_clone().unwrap(),
            snapshot.layers[0].try_clone().unwrap(),
        ],
    };
    refuse(spec(1, 64), &two, ErrorCode::Incompatible, "layer");
    let cut = empty();
    std::io::Write::write_all(&mut &cut, &contents(&snapshot.layers[0])[..MIB as usize]).unwrap();
    let short = Snapshot {
        state: snapshot.state.try_clone().unwrap(),
        layers: vec![cut],
    };
    refuse(spec(1, 64), &short, ErrorCode::Snapshot, "cut short");
}

#[test]
fn a_damaged_state_file_is_refused_wherever_it_is_damaged_and_a_whole_one_still_thaws() {
    let snapshot = frozen_at(&bare::bare(0).kernel(), READY);
    let whole = snapshot.state_bytes();
    let vmm = Vmm::spawn();
    let mut control = vmm.connect();
    control.create(spec(1, 64)).unwrap();
    let mut refuse = |bytes: &[u8], what: &str| {
        let refused = snapshot.with_state(bytes).restore(&mut control).unwrap_err();
        assert_eq!(refused.code, ErrorCode::Snapshot, "{what}: {refused}");
    };
    // Every byte of the header, and so many others that no record is left out.
    for at in (0..64).chain((64..whole.len()).step_by(61)) {
        let mut bytes = whole.clone();
        bytes[at] ^= 0x10;
        refuse(&bytes, &format!("byte {at} flipped"));
    }
    for length in (0..128)
        .chain((128..whole.len()).step_by(977))
        .chain([whole.len() - 1])
    {
        refuse(&whole[..length], &format!("cut to {length}"));
    }
    refuse(&[&whole[..], &[0]].concat(), "one byte more");
    assert_eq!(control.state(), MachineState::Created);
    snapshot.restore(&mut control).unwrap();
    let mut console = control.console();
    thaw(&mut control).unwrap();
    generation(&mut console);
}

/// A state file whose hash is right whatever is in it.
fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
    let hash = blake3::hash(&bytes[64..]);
    bytes[32..64].copy_from_slice(hash.as_bytes());
    bytes
}

#[test]
fn a_hostile_state_file_with_a_right_hash_never_takes_the_process_down() {
    let snapshot = frozen_at(&bare::bare(0).kernel(), READY);
    let whole = snapshot.state_bytes();
    assert_eq!(sealed(whole.clone()), whole);
    let (mut vmm, mut accepted, mut refused) = (Vmm::spawn(), 0, 0);
    let mut control = vmm.connect();
    control.create(spec(1, 64)).unwrap();
    for at in (64..whole.len()).step_by(131) {
        for flip in [0x01, 0x80, 0xff] {
            let mut bytes = whole.clone();
            bytes[at] ^= flip;
            let result = snapshot.with_state(&sealed(bytes)).restore(&mut control);
            match (result, control.state()) {
                (Err(_), MachineState::Created) => {
                    refused += 1;
                    continue;
                }
                // Well-formed: it parks, or KVM does not take a value and the machine has ended.
                (Ok(_), MachineState::Parked) => accepted += 1,
                (Err(e), MachineState::Exited(ExitReason::Fault(_))) if e.code == ErrorCode::Kvm => {}
                (result, state) => panic!("byte {at} ^ {flip:#x}: {result:?}, {state:?}"),
            }
            vmm = Vmm::spawn();
            control = vmm.connect();
            control.create(spec(1, 64)).unwrap();
        }
    }
    assert!(
        refused > 0 && accepted > 0,
        "{refused} refused, {accepted} accepted"
    );
}

#[test]
fn files_that_cannot_be_written_are_refused_and_the_machine_stays_paused() {
    let (vmm, mut control, _console) = paused_at(spec(1, 64), &bare::bare(0).kernel(), READY);
    let full = thaw_tiny_guest::memfd(b"not empty");
    for (state, memory) in [(&full, &empty()), (&empty(), &full)] {
        let refused = freeze(&vmm, &mut control, FreezeKind::Full, state, memory).unwrap_err();
        assert_eq!(refused.code, ErrorCode::Invalid, "{refused}");
    }
    let other = File::open("/proc/self/pagemap").unwrap();
    let (state, memory) = (empty(), empty());
    let fds = [&state, &memory, &other].map(std::os::fd::AsFd::as_fd);
    let command = Command::Freeze {
        kind: FreezeKind::Full,
    };
    for fds in [&fds[..], &fds[..2], &[]] {
        let refused = control.request(command.clone(), fds).unwrap_err();
        assert_eq!(refused.code, ErrorCode::Invalid, "{refused}");
    }
    assert_eq!(state.metadata().unwrap().len(), 0);
    assert_eq!(control.state(), MachineState::Paused);
    let snapshot = Snapshot::full(&vmm, &mut control);
    generation(&mut snapshot.thawed(spec(1, 64)).2);
}

#[test]
fn a_machine_with_a_share_is_not_frozen_also_when_its_server_has_ended() {
    let (vmm, mut control, _console) = paused_at(spec(1, 64), &bare::bare(0).kernel(), READY);
    let (far, near) = std::os::unix::net::UnixStream::pair().unwrap();
    let attach = || Command::Attach {
        device: DeviceId::Shared,
        backend: Backend::Share,
    };
    control.request(attach(), &[near.as_fd()]).unwrap();
    for far in [Some(far), None] {
        let refused = freeze(&vmm, &mut control, FreezeKind::Full, &empty(), &empty()).unwrap_err();
        assert_eq!(refused.code, ErrorCode::Shared, "{refused}");
        drop(far);
    }
    let again = control.request(attach(), &[near.as_fd()]).unwrap_err();
    assert_eq!(again.code, ErrorCode::Invalid, "{again}");
    assert_eq!(control.state(), MachineState::Paused);
}

/// The boot vCPU waits for a generation if `late`, wakes the others, which count themselves and wait for the next one;
/// when all have counted, it says [`STEPS_READY`]. At the next generation the others count themselves again and halt; when
/// all have, it prints a newline.
fn companions(vcpus: u8, late: bool) -> Guest {
    const TRAMPOLINE: u32 = 0x8000;
    const COUNT: u32 = 0x9000;
    // 16-bit: mov ax, 0xf000; mov ds, ax; mov bx, [0xf000]; lock inc byte es:[COUNT]; 1: cmp bx, [0xf000]; je 1b;
    // lock inc byte es:[COUNT]; cli; 2: hlt; jmp 2b
    let trampoline = [
        &[0xb8, 0x00, 0xf0, 0x8e, 0xd8, 0x8b, 0x1e, 0x00, 0xf0][..],
        &[0x26, 0xf0, 0xfe, 0x06, 0x00, 0x90],
        &[0x3b, 0x1e, 0x00, 0xf0, 0x74, 0xfa],
        &[0x26, 0xf0, 0xfe, 0x06, 0x00, 0x90],
        &[0xfa, 0xf4, 0xeb, 0xfd],
    ]
    .concat();
    let count_to = |code: Code, count: u8| {
        // 1: cmp byte [COUNT], count; jne 1b
        code.raw(&[0x80, 0x3d])
            .raw(&COUNT.to_le_bytes())
            .raw(&[count, 0x75, 0xf7])
    };
    // mov ebp, GENERATION_ID; mov ebx, [ebp]
    let code = Code::default()
        .raw(&[0xbd])
        .raw(&GENERATION_ID.to_le_bytes())
        .raw(&[0x8b, 0x5d, 0x00]);
    // 1: cmp ebx, [ebp]; je 1b; mov ebx, [ebp]
    let wait = [0x3b, 0x5d, 0x00, 0x74, 0xfb, 0x8b, 0x5d, 0x00];
    let code = match late {
        true => code.print(STEPS_READY).raw(&wait),
        false => code,
    };
    // mov esi, DATA; mov edi, TRAMPOLINE; mov ecx, length; cld; rep movsb
    let code = code
        .raw(&[0xbe])
        .raw(&DATA.to_le_bytes())
        .raw(&[0xbf])
        .raw(&TRAMPOLINE.to_le_bytes())
        .raw(&[0xb9])
        .raw(&(trampoline.len() as u32).to_le_bytes())
        .raw(&[0xfc, 0xf3, 0xa4])
        // The local APIC's interrupt command: INIT, then SIPI, to all but self.
        .store(0xfee0_0300, 0x000c_4500)
        .store(0xfee0_0300, 0x000c_4600 | TRAMPOLINE >> 12);
    let code = count_to(code, vcpus - 1);
    let code = match late {
        true => code.print("\n"),
        false => count_to(code.print(STEPS_READY).raw(&wait), 2 * (vcpus - 1)).print("\n"),
    };
    let end = code.0.len();
    Guest {
        code: code.repeat_from(end).0,
        data: trampoline,
    }
}

#[test]
fn every_vcpu_goes_on_and_those_that_never_ran_can_still_be_woken() {
    for (vcpus, late) in [(2, false), (4, false), (2, true), (4, true), (16, true)] {
        let machine = spec(vcpus, 64);
        let kernel = companions(vcpus, late).kernel();
        let (vmm, mut control, _console) = paused_at(machine.clone(), &kernel, STEPS_READY);
        let snapshot = Snapshot::full(&vmm, &mut control);
        for _ in 0..3 {
            let (_vmm, _control, mut console) = snapshot.thawed(machine.clone());
            assert_eq!(
                read_exactly(&mut console, 1),
                b"\n",
                "{vcpus} vCPUs, late: {late}"
            );
        }
    }
}

/// Prints its TSC; then reads it until the generation changes, and prints what lay between the last two readings. Each
/// time sixteen hexadecimal digits.
fn clockwatching() -> Code {
    let digit = [0x04, 0x30, 0x3c, 0x3a, 0x72, 0x02, 0x04, 0x27];
    // For each half: mov ecx, 8; 1: rol HALF, 4; mov eax, HALF; and al, 15; DIGIT; mov dx, 0x3f8; out dx, al
    let half = |code: Code, rol: [u8; 3], mov: [u8; 2]| {
        let body = [
            &rol[..],
            &mov,
            &[0x24, 0x0f],
            &digit,
            &[0x66, 0xba, 0xf8, 0x03, 0xee, 0x49],
        ]
        .concat();
        code.raw(&[0xb9, 8, 0, 0, 0])
            .raw(&body)
            .raw(&[0x75, (-(body.len() as i8 + 2)) as u8])
    };
    // mov edi, eax; mov ebp, edx; then EBP, EDI
    let print = |code: Code| {
        let code = half(code.raw(&[0x89, 0xc7, 0x89, 0xd5]), [0xc1, 0xc5, 4], [0x89, 0xe8]);
        half(code, [0xc1, 0xc7, 4], [0x89, 0xf8]).print("\n")
    };
    // rdtsc
    let code = print(Code::default().raw(&[0x0f, 0x31]))
        // mov esi, GENERATION_ID; mov ebx, [esi]
        .raw(&[0xbe])
        .raw(&GENERATION_ID.to_le_bytes())
        .raw(&[0x8b, 0x1e])
        .print(STEPS_READY)
        // rdtsc; 1: mov edi, eax; mov ebp, edx; rdtsc; cmp ebx, [esi]; je 1b; sub eax, edi; sbb edx, ebp
        .raw(&[
            0x0f, 0x31, 0x89, 0xc7, 0x89, 0xd5, 0x0f, 0x31, 0x3b, 0x1e, 0x74, 0xf6,
        ])
        .raw(&[0x29, 0xf8, 0x19, 0xea]);
    let code = print(code);
    let end = code.0.len();
    code.repeat_from(end)
}

fn tsc() -> u64 {
    // SAFETY: rdtsc has no preconditions on x86-64.
    unsafe { core::arch::x86_64::_rdtsc() }
}

#[test]
fn a_machine_that_was_parked_sees_no_jump_in_time() {
    let number = |console: &mut File| {
        let line = String::from_utf8(read_exactly(console, 17)).unwrap();
        u64::from_str_radix(line.trim_end(), 16).unwrap()
    };
    let before_boot = tsc();
    let (vmm, mut control, mut console) = started(spec(1, 64), &clockwatching().kernel());
    let booted = number(&mut console);
    read_exactly(&mut console, STEPS_READY.len());
    let before_pause = tsc();
    control.request(Command::Pause, &[]).unwrap();
    let snapshot = Snapshot::full(&vmm, &mut control);
    let after_freeze = tsc();
    let (_vmm, mut control, mut console) = snapshot.parked(spec(1, 64));
    // Long beside what it is awake; were it not, the test would only be less strict.
    std::thread::sleep(std::time::Duration::from_millis(300));
    let before_thaw = tsc();
    thaw(&mut control).unwrap();
    let gap = number(&mut console);
    let ran = (after_freeze - before_pause) + (tsc() - before_thaw);
    assert!(gap > 0);
    if booted >= before_boot {
        eprintln!("skipped: this host's KVM shows guests the host's own TSC");
        return;
    }
    // Guest time ran before the freeze and after the thaw only.
    assert!(
        gap <= ran,
        "the guest saw {gap} cycles pass; it was awake for {ran}"
    );
}

/// Reads one word of every page from 2 MiB up to `mib`, then prints a newline, when its generation changes; before, it
/// writes them.
fn rereading(mib: u32) -> Code {
    let sweep = |code: Code, access: [u8; 2]| {
        // mov edi, 2 MiB; 1: ACCESS; add edi, 4096; cmp edi, end; jb 1b
        code.raw(&[0xbf])
            .raw(&STEPS.to_le_bytes())
            .raw(&access)
            .raw(&[0x81, 0xc7, 0, 0x10, 0, 0, 0x81, 0xff])
            .raw(&(mib * MIB as u32).to_le_bytes())
            .raw(&[0x72, 0xf0])
    };
    // mov [edi], edi; then mov esi, GENERATION_ID; mov ebx, [esi]
    let code = sweep(Code::default(), [0x89, 0x3f])
        .raw(&[0xbe])
        .raw(&GENERATION_ID.to_le_bytes())
        .raw(&[0x8b, 0x1e])
        .print(STEPS_READY)
        // 1: cmp ebx, [esi]; je 1b
        .raw(&[0x3b, 0x1e, 0x74, 0xfc]);
    // mov eax, [edi]
    let code = sweep(code, [0x8b, 0x07]).print("\n");
    let end = code.0.len();
    code.repeat_from(end)
}

#[test]
fn a_recorded_working_set_spares_the_next_clone_most_of_its_page_faults() {
    let snapshot = frozen_at(&rereading(32).kernel(), STEPS_READY);
    let (vmm, mut control, mut console) = snapshot.thawed(spec(1, 64));
    read_exactly(&mut console, 1);
    let (_, _, without) = control.status();
    let (set, pagemap) = (empty(), vmm.pagemap());
    let fds = [&set, &pagemap].map(std::os::fd::AsFd::as_fd);
    assert_eq!(control.request(Command::WorkingSet, &fds), Ok(Response::Done));
    assert!(set.metadata().unwrap().len() > 0);
    assert_eq!(control.state(), MachineState::Running);

    let restore_with = |mode: MemoryMode, set: Option<&File>| {
        let vmm = Vmm::spawn();
        let mut control = vmm.connect();
        control.create(spec(1, 64)).unwrap();
        let response = snapshot.restore_as(&mut control, mode, set).unwrap();
        let Response::Restored { populated_pages, .. } = response else {
            panic!("{response:?}")
        };
        let mut console = control.console();
        thaw(&mut control).unwrap();
        read_exactly(&mut console, 1);
        (populated_pages, control.status().2)
    };
    assert_eq!(restore_with(MemoryMode::Cow, None).0, 0);
    for (mode, set) in [(MemoryMode::Cow, Some(&set)), (MemoryMode::Populate, None)] {
        let (populated, with) = restore_with(mode, set);
        assert!(
            populated >= 30 * 256,
            "{mode:?}: {populated} pages were populated"
        );
        assert!(
            with * 5 <= without,
            "{mode:?}: {with} faults with, {without} without"
        );
    }

    let mut damaged = contents(&set);
    let last = damaged.len() - 1;
    damaged[last] ^= 1;
    let vmm = Vmm::spawn();
    let mut control = vmm.connect();
    control.create(spec(1, 64)).unwrap();
    let damaged = thaw_tiny_guest::memfd(&damaged);
    let refused = snapshot
        .restore_as(&mut control, MemoryMode::Cow, Some(&damaged))
        .unwrap_err();
    assert_eq!(refused.code, ErrorCode::Snapshot);
    assert_eq!(control.state(), MachineState::Created);
}

/// Says which x86-64 level's registers it is told of: a digit, 3 with AVX2 (CPUID leaf 7, EBX bit 5), else 2; at boot
/// and when its generation changes.
fn avx2_teller() -> Code {
    // mov eax, 7; xor ecx, ecx; cpuid; shr ebx, 5; and bl, 1; add bl, '2'; mov al, bl; mov dx, 0x3f8; out dx, al
    let tell = |code: Code| {
        code.raw(&[0xb8, 7, 0, 0, 0, 0x31, 0xc9, 0x0f, 0xa2, 0xc1, 0xeb, 5])
            .raw(&[
                0x80, 0xe3, 1, 0x80, 0xc3, b'2', 0x88, 0xd8, 0x66, 0xba, 0xf8, 0x03, 0xee,
            ])
            .print("\n")
    };
    let code = tell(Code::default())
        .raw(&[0xbe])
        .raw(&GENERATION_ID.to_le_bytes())
        // mov ebx, [esi]; 1: cmp ebx, [esi]; je 1b
        .raw(&[0x8b, 0x1e])
        .print(STEPS_READY)
        .raw(&[0x3b, 0x1e, 0x74, 0xfc]);
    let code = tell(code);
    let end = code.0.len();
    code.repeat_from(end)
}

/// Whether a machine of the least baseline can be had here; one that cannot is refused by name.
fn has_v2() -> bool {
    let vmm = Vmm::spawn();
    let mut control = vmm.connect();
    let low = MachineSpec {
        cpu: CpuBaseline::V2,
        ..spec(1, 64)
    };
    match control.create(low) {
        Ok(_) => true,
        Err(refused) => {
            assert_eq!(refused.code, ErrorCode::Incompatible, "{refused}");
            assert!(refused.message.contains("x86-64-v2"), "{refused}");
            assert_eq!(control.state(), MachineState::Shell);
            control.create(spec(1, 64)).unwrap();
            false
        }
    }
}

#[test]
fn a_machine_of_a_lower_baseline_stays_one_wherever_it_is_thawed() {
    let low = MachineSpec {
        cpu: CpuBaseline::V2,
        ..spec(1, 64)
    };
    if !has_v2() {
        eprintln!("skipped: this host's KVM offers less than x86-64-v2");
        return;
    }
    let ready = format!("2\n{STEPS_READY}");
    let (vmm, mut control, _console) = paused_at(low, &avx2_teller().kernel(), &ready);
    let snapshot = Snapshot::full(&vmm, &mut control);
    let (_vmm, _control, mut console) = snapshot.thawed(spec(1, 64));
    assert_eq!(read_exactly(&mut console, 2), b"2\n");
}

#[test]
fn a_host_that_lacks_a_feature_refuses_and_names_it() {
    let snapshot = frozen_at(&bare::bare(0).kernel(), READY);
    let mut bytes = snapshot.state_bytes();
    // struct kvm_cpuid_entry2 of leaf 7: function 7, index 0, KVM_CPUID_FLAG_SIGNIFCANT_INDEX; then EAX, EBX.
    let leaf7 = [7u8, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0];
    let at = bytes
        .windows(leaf7.len())
        .position(|window| window == leaf7)
        .unwrap();
    // AVX512PF, ER and 4VNNIW's like: of a processor that is no longer made.
    bytes[at + 16..at + 20].copy_from_slice(&u32::MAX.to_le_bytes());
    refuse(
        spec(1, 64),
        &snapshot.with_state(&sealed(bytes)),
        ErrorCode::Incompatible,
        "avx512er",
    );
}
