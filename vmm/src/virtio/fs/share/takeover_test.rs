//! thaw-share dies, and another one comes or does not.

use super::*;

fn attach(rig: &mut Rig<Fs<Share>>) -> Far {
    let (far, near) = pair();
    rig.device.attach(Backend::Share, vec![near]).unwrap();
    far
}

fn init(flags: u32) -> Vec<u8> {
    let mut body = [7u32, 38, 1 << 20, flags].map(u32::to_le_bytes).concat();
    body.extend([0; 48]);
    message(Opcode::Init, 77, &body)
}

#[test]
fn requests_are_answered_eio_when_no_thaw_share_comes() {
    let (mut rig, mut far) = rig();
    let asked: Vec<(u16, Vec<Buf>)> = (0..5)
        .map(|n| ask(&mut rig, &message(Opcode::Getattr, n, &[0; 16]), &[16, 104]))
        .collect();
    let (_, name) = ask(&mut rig, &message(Opcode::Lookup, 5, b"name\0"), &[16, 128]);
    far.request();
    far.request();
    drop(far);
    used(&mut rig, REQUESTS, 6);
    for (unique, (_, reply)) in asked.iter().enumerate() {
        assert_eq!(error_of(&rig, reply[0]), (-libc::EIO, unique as u64));
    }
    assert_eq!(error_of(&rig, name[0]), (-libc::EIO, 5));
    for unique in 50..52 {
        let (head, reply) = ask(&mut rig, &message(Opcode::Getattr, unique, &[0; 16]), &[16, 104]);
        assert_eq!(rig.wait_used(REQUESTS), [(head, 16)]);
        assert_eq!(error_of(&rig, reply[0]), (-libc::EIO, unique));
    }
    assert!(rig.device.is_backed());
    // One may still come.
    let mut far = attach(&mut rig);
    let (head, _) = ask(&mut rig, &message(Opcode::Getattr, 60, &[0; 16]), &[16, 104]);
    let (asked, _) = far.request();
    far.reply(asked.id, &answer(60, &[0; 104]));
    assert_eq!(rig.wait_used(REQUESTS), [(head, 120)]);
}

#[test]
fn another_thaw_share_is_told_init_and_serves_what_waits() {
    let (mut rig, mut far) = patient(LONG);
    let begun = init(0x1234);
    ask(&mut rig, &begun, &[16, 64]);
    let (header, message_seen) = far.request();
    assert!(message_seen == begun);
    far.reply(header.id, &answer(77, &[0; 64]));
    used(&mut rig, REQUESTS, 1);
    // In flight: a lookup, which may be sent again, and a write, which may not.
    let lookup = message(Opcode::Lookup, 1, b"name\0");
    let (name, name_reply) = ask(&mut rig, &lookup, &[16, 128]);
    let (write, write_reply) = ask(&mut rig, &message(Opcode::Write, 2, &[0; 100]), &[24]);
    far.request();
    far.request();
    drop(far);
    assert_eq!(rig.wait_used(REQUESTS), [(write, 16)]);
    assert_eq!(error_of(&rig, write_reply[0]), (-libc::EIO, 2));
    // Requested while there is no thaw-share.
    let (later, _) = ask(&mut rig, &message(Opcode::Getattr, 3, &[0; 16]), &[16, 104]);

    let mut far = attach(&mut rig);
    let (header, seen) = far.request();
    assert!(seen == begun, "the guest's own INIT");
    far.0.set_nonblocking(true).unwrap();
    let early = far.0.read(&mut [0; 1]).unwrap_err();
    assert_eq!(
        early.kind(),
        io::ErrorKind::WouldBlock,
        "nothing before that is answered"
    );
    far.0.set_nonblocking(false).unwrap();
    far.reply(header.id, &answer(77, &[9; 64]));
    for _ in 0..2 {
        let (header, seen) = far.request();
        match seen == lookup {
            true => far.reply(header.id, &answer(1, &[4; 128])),
            false => far.reply(header.id, &answer(3, &[5; 104])),
        }
    }
    let answered = used(&mut rig, REQUESTS, 2);
    assert!(answered.contains(&(name, 144)) && answered.contains(&(later, 120)));
    assert_eq!(rig.bytes(name_reply[1]), [4; 128]);
}

#[test]
fn a_thaw_share_that_refuses_init_does_not_take_over() {
    let (mut rig, mut far) = patient(LONG);
    ask(&mut rig, &init(1), &[16, 64]);
    let (header, _) = far.request();
    far.reply(header.id, &answer(77, &[0; 64]));
    used(&mut rig, REQUESTS, 1);
    // Dropping it is not enough: a process that another test is starting may hold a copy of the descriptor for a moment.
    far.0.shutdown(std::net::Shutdown::Both).unwrap();
    let (head, reply) = ask(&mut rig, &message(Opcode::Getattr, 3, &[0; 16]), &[16, 104]);
    let mut refusing = attach(&mut rig);
    let (header, _) = refusing.request();
    let refusal = OutHeader {
        len: 16,
        error: -libc::EPROTO,
        unique: 77,
    };
    refusing.reply(header.id, refusal.as_slice());
    assert!(!matches!(refusing.0.read(&mut [0; 1]), Ok(1)), "it is hung up on");
    let mut far = attach(&mut rig);
    let (header, _) = far.request();
    far.reply(header.id, &answer(77, &[0; 64]));
    let (header, _) = far.request();
    far.reply(header.id, &answer(3, &[6; 104]));
    assert_eq!(rig.wait_used(REQUESTS), [(head, 120)]);
    assert_eq!(rig.bytes(reply[1]), [6; 104]);
}

#[test]
fn a_relay_that_comes_while_one_is_up_takes_its_place() {
    let (mut rig, mut far) = patient(LONG);
    let (head, reply) = ask(&mut rig, &message(Opcode::Getattr, 1, &[0; 16]), &[16, 104]);
    far.request();
    let mut next = attach(&mut rig);
    assert!(!matches!(far.0.read(&mut [0; 1]), Ok(1)));
    assert_eq!(rig.wait_used(REQUESTS), [(head, 16)]);
    assert_eq!(error_of(&rig, reply[0]), (-libc::EIO, 1));
    let (head, _) = ask(&mut rig, &message(Opcode::Getattr, 2, &[0; 16]), &[16, 104]);
    let (header, _) = next.request();
    next.reply(header.id, &answer(2, &[1; 104]));
    assert_eq!(rig.wait_used(REQUESTS), [(head, 120)]);
}

#[test]
fn driver_reset_without_thaw_share_drops_its_old_requests() {
    let (mut rig, mut far) = patient(LONG);
    let begun = init(1);
    ask(&mut rig, &begun, &[16, 64]);
    let (header, _) = far.request();
    far.reply(header.id, &answer(77, &[0; 64]));
    used(&mut rig, REQUESTS, 1);
    ask(&mut rig, &message(Opcode::Lookup, 1, b"name\0"), &[16, 128]);
    far.request();
    drop(far);
    rig.device.reset();
    let mut far = attach(&mut rig);
    // Neither the earlier INIT nor the lookup: the driver starts anew.
    far.0.set_read_timeout(Some(SHORT)).unwrap();
    let nothing = far.0.read(&mut [0; 1]).unwrap_err();
    assert_eq!(nothing.kind(), io::ErrorKind::WouldBlock);
}
