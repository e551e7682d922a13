//! What is refused, by name, before a vCPU runs; the machine stays usable.

use super::*;

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
pub(super) fn refuse(machine: MachineSpec, snapshot: &Snapshot, code: ErrorCode, says: &str) {
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
fn damaged_state_file_is_refused_and_a_whole_one_thaws() {
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
pub(super) fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
    let hash = blake3::hash(&bytes[64..]);
    bytes[32..64].copy_from_slice(hash.as_bytes());
    bytes
}

#[test]
fn hostile_state_file_with_a_right_hash_does_not_end_the_vmm() {
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
fn files_that_cannot_be_written_leave_the_machine_paused() {
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
fn machine_with_a_share_is_not_frozen() {
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
    // Another server takes over the files that the guest has open.
    let (_far, near) = std::os::unix::net::UnixStream::pair().unwrap();
    control.request(attach(), &[near.as_fd()]).unwrap();
    let refused = freeze(&vmm, &mut control, FreezeKind::Full, &empty(), &empty()).unwrap_err();
    assert_eq!(refused.code, ErrorCode::Shared, "{refused}");
    assert_eq!(control.state(), MachineState::Paused);
}
