//! Requests in progress at a freeze: each is answered once by the thawed device, and once by the original.

use super::*;

/// Freezes the guest, and thaws it over another copy of its image. The thawed guest is parked at the returned gate.
fn freeze_and_thaw(guest: &mut Guest, gate: &Gate) -> (Guest, Arc<Gate>) {
    gate.close();
    let frozen = guest.rig.freeze();
    gate.open();
    let parked = Arc::new(Gate::new());
    let mut rig = Rig::thaw(frozen, root_at(&parked));
    assert!(!rig.device.is_backed());
    let image = Image::new("one");
    rig.device.add_image(1, image.spec.clone(), image.fds()).unwrap();
    let thawed = Guest {
        rig,
        image,
        unique: guest.unique,
    };
    (thawed, parked)
}

/// Starts a thawed guest's device.
fn start_work(rig: &Rig<Fs<Images>>, parked: &Gate) {
    rig.interrupt.release();
    parked.open();
}

#[test]
fn read_waiting_at_the_freeze_is_answered_once_on_each_side() {
    let gate = open_gate();
    let mut guest = guest_at(&gate);
    let socket = guest.misses();
    let node = guest.file();
    let asked = guest.ask(Opcode::Read, node, &read_body(10, 100), 4096);
    let miss = receive(&socket);

    let (mut thawed, parked) = freeze_and_thaw(&mut guest, &gate);
    thawed.image.fill();
    assert!(thawed.rig.used(REQUESTS).is_empty(), "parked");
    start_work(&thawed.rig, &parked);
    guest.image.fill();
    reply(&socket, miss.id, Ok(()));
    for guest in [&mut thawed, &mut guest] {
        let used = guest.wait_used();
        assert_eq!(used.len(), 1);
        assert_eq!(guest.answer(&asked, used[0]), (0, content(10, 100)));
        // Its head may be used again, and nothing else is answered.
        assert_eq!(guest.file(), node);
    }
}

#[test]
fn bytes_a_thawed_guest_waits_for_are_asked_for_anew() {
    let gate = open_gate();
    let mut guest = guest_at(&gate);
    let socket = guest.misses();
    let node = guest.file();
    let asked = guest.ask(Opcode::Read, node, &read_body(CHUNK_SIZE, 10), 4096);
    receive(&socket);

    let (mut thawed, parked) = freeze_and_thaw(&mut guest, &gate);
    let socket = thawed.misses();
    start_work(&thawed.rig, &parked);
    let miss = receive(&socket);
    assert_eq!(
        (miss.blob, miss.offset, u64::from(miss.length)),
        (DIGEST, CHUNK_SIZE, CHUNK_SIZE)
    );
    // Frozen again while it waits, it is not lost either.
    let (mut again, parked) = freeze_and_thaw(&mut thawed, &parked);
    again.image.fill();
    start_work(&again.rig, &parked);
    thawed.image.ready.set_ready(1);
    reply(&socket, miss.id, Ok(()));
    for guest in [&mut again, &mut thawed] {
        let used = guest.wait_used();
        assert_eq!(guest.answer(&asked, used[0]), (0, content(CHUNK_SIZE, 10)));
    }
}

#[test]
fn request_queued_at_the_freeze_is_served_after_the_thaw() {
    let gate = open_gate();
    let mut guest = guest_at(&gate);
    let node = guest.file();
    gate.close();
    let asked = guest.ask(Opcode::Read, node, &read_body(0, 10), 4096);
    let (mut thawed, parked) = freeze_and_thaw(&mut guest, &gate);
    thawed.image.fill();
    start_work(&thawed.rig, &parked);
    let used = thawed.wait_used();
    assert_eq!(used.len(), 1);
    assert_eq!(thawed.answer(&asked, used[0]), (0, content(0, 10)));
}

#[test]
fn heads_no_driver_gave_are_refused() {
    let gate = open_gate();
    let mut guest = guest_at(&gate);
    let socket = guest.misses();
    let node = guest.file();
    guest.ask(Opcode::Read, node, &read_body(0, 10), 4096);
    receive(&socket);
    gate.close();
    let mut frozen = guest.rig.freeze();
    let device = root_at(&gate);
    let size = frozen.queues[REQUESTS].size;
    for heads in [vec![size], vec![0, 0], vec![u16::MAX]] {
        let state = DeviceState::Fs(FsState {
            parked: vec![Vec::new(), heads],
            mappings: Vec::new(),
        });
        assert!(device.check(&state, Some(&frozen.queues)).is_err());
    }
    let three = DeviceState::Fs(FsState {
        parked: vec![Vec::new(), Vec::new(), vec![0]],
        mappings: Vec::new(),
    });
    assert!(device.check(&three, Some(&frozen.queues)).is_err());
    let idle = DeviceState::Fs(FsState {
        parked: vec![vec![0]],
        mappings: Vec::new(),
    });
    assert!(device.check(&idle, None).is_err());

    // The last descriptor was never written, so it is no message and is returned unanswered.
    frozen.state = DeviceState::Fs(FsState {
        parked: vec![Vec::new(), vec![size - 1]],
        mappings: Vec::new(),
    });
    let parked = Arc::new(Gate::new());
    let mut thawed = Rig::thaw(frozen, root_at(&parked));
    start_work(&thawed, &parked);
    thawed.notify(REQUESTS);
    assert_eq!(thawed.wait_used(REQUESTS), [(size - 1, 0)]);
}
