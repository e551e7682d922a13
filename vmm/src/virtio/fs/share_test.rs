//! The device as its driver sees it, with a test in place of thaw-share.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use fuse_backend_rs::abi::fuse_abi::{InHeader, Opcode, OutHeader};
use proptest::prelude::*;
use thaw_protocol::share::{MESSAGE, OUTSTANDING, REPLY, ReplyHeader, RequestHeader};
use vm_memory::ByteValued;

use super::*;
use crate::virtio::VirtioDevice;
use crate::virtio::state::DeviceState;
use crate::virtio::testing::{Buf, NOWHERE, Rig, open_gate, send_with};

#[path = "share/open_files_test.rs"]
mod open_files;
#[path = "share/takeover_test.rs"]
mod takeover;

const HIPRIO: usize = 0;

fn message(opcode: Opcode, unique: u64, body: &[u8]) -> Vec<u8> {
    let mut header = InHeader {
        opcode: opcode as u32,
        unique,
        nodeid: 1,
        ..InHeader::default()
    };
    header.len = (size_of::<InHeader>() + body.len()) as u32;
    [header.as_slice(), body].concat()
}

/// The far end of the relay.
struct Far(UnixStream);

impl Far {
    fn request(&mut self) -> (RequestHeader, Vec<u8>) {
        let mut header = [0; RequestHeader::BYTES];
        self.0.read_exact(&mut header).unwrap();
        let header = RequestHeader::decode(&header).unwrap();
        let mut message = vec![0; header.length as usize];
        self.0.read_exact(&mut message).unwrap();
        (header, message)
    }

    fn reply(&mut self, id: u32, reply: &[u8]) {
        let header = ReplyHeader {
            id,
            length: reply.len() as u32,
        };
        self.0.write_all(&header.encode()).unwrap();
        self.0.write_all(reply).unwrap();
    }

    fn reply_with(&mut self, id: u32, reply: &[u8], file: impl AsFd) {
        let header = ReplyHeader {
            id,
            length: reply.len() as u32,
        };
        send_with(&self.0, &[&header.encode(), reply].concat(), &[file.as_fd()]);
    }

    /// Whether nothing was sent here that was not taken.
    fn has_nothing(&self) -> bool {
        self.0.set_nonblocking(true).unwrap();
        let peeked = rustix::net::recv(&self.0, &mut [0; 1][..], rustix::net::RecvFlags::PEEK);
        self.0.set_nonblocking(false).unwrap();
        peeked.is_err()
    }
}

/// A FUSE reply.
fn answer(unique: u64, body: &[u8]) -> Vec<u8> {
    let header = OutHeader {
        len: (size_of::<OutHeader>() + body.len()) as u32,
        error: 0,
        unique,
    };
    [header.as_slice(), body].concat()
}

fn pair() -> (Far, OwnedFd) {
    let (far, near) = UnixStream::pair().unwrap();
    (Far(far), near.into())
}

/// How long requests wait for another thaw-share in tests where none comes.
const SHORT: Duration = Duration::from_millis(50);
/// The same in tests where one comes.
const LONG: Duration = Duration::from_secs(100);

fn rig() -> (Rig<Fs<Share>>, Far) {
    patient(SHORT)
}

fn patient(patience: Duration) -> (Rig<Fs<Share>>, Far) {
    let (far, near) = pair();
    let mut rig = Rig::new(Fs::shared(open_gate(), patience), 0);
    rig.device.attach(Backend::Share, vec![near]).unwrap();
    (rig, far)
}

/// Makes a request available. Returns its head and the buffers of its reply.
fn ask(rig: &mut Rig<Fs<Share>>, message: &[u8], room: &[u32]) -> (u16, Vec<Buf>) {
    let mut buffers = vec![rig.readable(message)];
    buffers.extend(room.iter().map(|length| rig.writable(*length)));
    let head = rig.submit(REQUESTS, &buffers);
    rig.notify(REQUESTS);
    (head, buffers.split_off(1))
}

fn error_of(rig: &Rig<Fs<Share>>, reply: Buf) -> (i32, u64) {
    let bytes = rig.bytes(reply);
    let header = *OutHeader::from_slice(&bytes[..16]).unwrap();
    assert_eq!(header.len, 16);
    (header.error, header.unique)
}

/// Collects used chains until there are `count`.
fn used(rig: &mut Rig<Fs<Share>>, queue: usize, count: usize) -> Vec<(u16, u32)> {
    let mut all = Vec::new();
    while all.len() < count {
        all.extend(rig.wait_used(queue));
    }
    assert_eq!(all.len(), count);
    all
}

#[test]
fn the_configuration_names_the_device() {
    let device = Fs::shared(open_gate(), PATIENCE);
    let bytes = device.config().bytes();
    assert_eq!((&bytes[..7], &bytes[36..]), (&b"shared\0"[..], &[1, 0, 0, 0][..]));
    assert!(device.shared_memory().is_empty() && !device.is_backed());
}

#[test]
fn a_message_goes_out_whole_and_its_reply_comes_in_pieces() {
    let (mut rig, mut far) = rig();
    let sent = message(Opcode::Write, 7, &vec![3; 100_000]);
    let (head, reply) = ask(&mut rig, &sent, &[10, 6, 100, 100]);
    let (header, message) = far.request();
    assert_eq!((header.room, message == sent), (216, true));
    let answered = answer(7, &[9; 150]);
    far.reply(header.id, &answered);
    assert_eq!(rig.wait_used(REQUESTS), [(head, 166)]);
    let seen: Vec<u8> = reply.iter().flat_map(|buffer| rig.bytes(*buffer)).collect();
    assert_eq!(seen[..166], answered);
    assert!(
        seen[166..].iter().all(|byte| *byte == 0xEE),
        "no more than was sent"
    );
}

#[test]
fn replies_come_in_any_order_and_forgets_have_none() {
    let (mut rig, mut far) = rig();
    let asked: Vec<(u16, Vec<Buf>)> = (0..20)
        .map(|n| ask(&mut rig, &message(Opcode::Getattr, n, &[0; 16]), &[16, 104]))
        .collect();
    let forget = rig.readable(&message(Opcode::Forget, 99, &[0; 8]));
    let forgotten = rig.submit(HIPRIO, &[forget]);
    rig.notify(HIPRIO);
    assert_eq!(rig.wait_used(HIPRIO), [(forgotten, 0)]);
    let mut ids = HashMap::new();
    for _ in 0..21 {
        let (header, message) = far.request();
        let unique = InHeader::from_slice(&message[..40]).unwrap().unique;
        match unique {
            99 => assert_eq!(header.room, 0),
            unique => drop(ids.insert(unique, header.id)),
        }
    }
    for unique in (0..20).rev() {
        far.reply(ids[&unique], &answer(unique, &unique.to_le_bytes()));
    }
    let answered = used(&mut rig, REQUESTS, 20);
    for (unique, (head, reply)) in asked.iter().enumerate() {
        assert!(answered.contains(&(*head, 24)));
        assert_eq!(rig.bytes(reply[1])[..8], (unique as u64).to_le_bytes());
    }
}

#[test]
fn file_without_capabilities_is_asked_for_them_once() {
    let (mut rig, mut far) = rig();
    let asked = |unique, name: &[u8]| message(Opcode::Getxattr, unique, &[&[0; 8][..], name].concat());
    let none = OutHeader {
        len: 16,
        error: -libc::ENODATA,
        unique: 5,
    };
    for name in [&b"user.of-same-length\0"[..], b"security.capability\0"] {
        let (head, _) = ask(&mut rig, &asked(5, name), &[16]);
        let (header, _) = far.request();
        far.reply(header.id, none.as_slice());
        assert_eq!(rig.wait_used(REQUESTS), [(head, 16)]);
    }
    // Nothing else is remembered.
    let other = asked(6, b"user.of-same-length\0");
    ask(&mut rig, &other, &[16]);
    assert!(far.request().1 == other);
    let (head, reply) = ask(&mut rig, &asked(7, b"security.capability\0"), &[16]);
    assert_eq!(rig.wait_used(REQUESTS), [(head, 16)]);
    assert_eq!(error_of(&rig, reply[0]), (-libc::ENODATA, 7));
}

#[test]
fn requests_over_the_bound_wait_for_room() {
    let (mut rig, mut far) = rig();
    // More than may be sent at once: each takes a descriptor.
    let all = OUTSTANDING + 100;
    let getattr = rig.readable(&message(Opcode::Getattr, 1, &[0; 16]));
    let room = rig.writable(16);
    for _ in 0..all {
        rig.submit_indirect(REQUESTS, &[getattr, room]);
    }
    rig.notify(REQUESTS);
    let first: Vec<u32> = (0..OUTSTANDING).map(|_| far.request().0.id).collect();
    far.0.set_nonblocking(true).unwrap();
    let more = far.0.read(&mut [0; 1]).unwrap_err();
    assert_eq!(more.kind(), io::ErrorKind::WouldBlock);
    far.0.set_nonblocking(false).unwrap();
    let distinct: std::collections::HashSet<u32> = first.iter().copied().collect();
    assert_eq!(distinct.len(), OUTSTANDING);
    for id in first {
        far.reply(id, &answer(1, &[]));
    }
    for _ in OUTSTANDING..all {
        let id = far.request().0.id;
        far.reply(id, &answer(1, &[]));
    }
    used(&mut rig, REQUESTS, all);
}

#[test]
fn more_than_the_socket_holds_goes_out_as_it_is_read() {
    let (mut rig, mut far) = rig();
    let sent = message(Opcode::Write, 1, &vec![5; 1 << 20]);
    let heads: Vec<u16> = (0..4).map(|_| ask(&mut rig, &sent, &[24]).0).collect();
    for _ in &heads {
        let (header, message) = far.request();
        assert!(message == sent);
        far.reply(header.id, &answer(1, &[0; 8]));
    }
    let answered = used(&mut rig, REQUESTS, 4);
    assert!(heads.iter().all(|head| answered.contains(&(*head, 24))));
}

#[test]
fn a_reply_that_cannot_be_ends_the_relay() {
    let whole = |header: ReplyHeader, body: &[u8]| [&header.encode()[..], body].concat();
    type Bad = Box<dyn Fn(u32) -> Vec<u8>>;
    let bad: [Bad; 5] = [
        Box::new(move |id| {
            whole(
                ReplyHeader {
                    id: id + 1,
                    length: 16,
                },
                &[0; 16],
            )
        }),
        Box::new(move |id| whole(ReplyHeader { id, length: 15 }, &[0; 15])),
        Box::new(move |id| whole(ReplyHeader { id, length: 121 }, &[0; 121])),
        Box::new(move |id| whole(ReplyHeader { id, length: u32::MAX }, &[])),
        // One reply too many.
        Box::new(move |id| whole(ReplyHeader { id, length: 16 }, &answer(1, &[])).repeat(2)),
    ];
    for (number, bytes) in bad.iter().enumerate() {
        let (mut rig, mut far) = rig();
        let (head, _) = ask(&mut rig, &message(Opcode::Getattr, 1, &[0; 16]), &[16, 104]);
        let id = far.request().0.id;
        far.0.write_all(&bytes(id)).unwrap();
        assert_eq!(rig.wait_used(REQUESTS)[0].0, head, "{number}");
        let hung_up = !matches!(far.0.read(&mut [0; 1]), Ok(1));
        assert!(hung_up, "{number}");
        let (_, reply) = ask(&mut rig, &message(Opcode::Getattr, 2, &[0; 16]), &[16, 104]);
        rig.wait_used(REQUESTS);
        assert_eq!(error_of(&rig, reply[0]), (-libc::EIO, 2), "{number}");
    }
}

#[test]
fn chains_no_server_should_see_are_answered_here() {
    let (mut rig, mut far) = rig();
    let getattr = message(Opcode::Getattr, 4, &[0; 16]);
    // No header; no room for a reply's header; buffers outside memory.
    let short = ask(&mut rig, &getattr[..39], &[16]).0;
    let no_room = ask(&mut rig, &getattr, &[15]).0;
    let nowhere = Buf {
        address: NOWHERE,
        length: 100,
        write: true,
    };
    let request = rig.readable(&getattr);
    let outside = rig.submit(REQUESTS, &[request, nowhere]);
    rig.notify(REQUESTS);
    let answered = used(&mut rig, REQUESTS, 3);
    for head in [short, no_room, outside] {
        assert!(answered.contains(&(head, 0)));
    }
    // Too long.
    let long = message(Opcode::Write, 5, &vec![0; *MESSAGE.end() as usize]);
    let (head, reply) = ask(&mut rig, &long, &[16]);
    assert_eq!(rig.wait_used(REQUESTS), [(head, 16)]);
    assert_eq!(error_of(&rig, reply[0]), (-libc::E2BIG, 5));
    // Room beyond the longest reply is not announced.
    let (_, _) = ask(&mut rig, &getattr, &[*REPLY.end(), 4096]);
    assert_eq!(far.request().0.room, *REPLY.end());
}

#[test]
fn without_a_share_requests_are_refused_and_other_backends_are() {
    let mut rig = Rig::new(Fs::shared(open_gate(), PATIENCE), 0);
    let (head, reply) = ask(&mut rig, &message(Opcode::Init, 3, &[0; 16]), &[16, 64]);
    assert_eq!(rig.wait_used(REQUESTS), [(head, 16)]);
    assert_eq!(error_of(&rig, reply[0]), (-libc::ENOTCONN, 3));
    assert!(matches!(
        rig.device.attach(Backend::Misses, vec![pair().1]),
        Err(AttachError::WrongKind(_))
    ));
    assert!(matches!(
        rig.device.attach(Backend::Share, vec![]),
        Err(AttachError::Descriptors { .. })
    ));
    let file = tempfile::tempfile().unwrap();
    assert!(rig.device.attach(Backend::Share, vec![file.into()]).is_err());
    assert!(!rig.device.is_backed());
}

#[test]
fn a_driver_that_resets_gets_no_reply_of_its_past() {
    let (mut rig, mut far) = rig();
    let (_, old) = ask(&mut rig, &message(Opcode::Getattr, 1, &[0; 16]), &[16, 104]);
    let (past, _) = far.request();
    rig.device.reset();
    // Its rings are unchanged, so it sends the same request again.
    rig.activate(0);
    rig.notify(REQUESTS);
    let (again, _) = far.request();
    assert_ne!(past.id, again.id);
    far.reply(again.id, &answer(1, &[2; 104]));
    far.reply(past.id, &answer(1, &[1; 104]));
    ask(&mut rig, &message(Opcode::Getattr, 2, &[0; 16]), &[16, 104]);
    let (last, _) = far.request();
    far.reply(last.id, &answer(2, &[3; 104]));
    used(&mut rig, REQUESTS, 2);
    assert_eq!(rig.bytes(old[1]), [2; 104]);
}

#[test]
fn a_descriptor_that_is_in_use_stops_the_device() {
    let (mut rig, mut far) = rig();
    let (head, _) = ask(&mut rig, &message(Opcode::Getattr, 1, &[0; 16]), &[16, 104]);
    far.request();
    rig.offer(REQUESTS, head);
    rig.notify(REQUESTS);
    while !rig.interrupt.failed() {
        rig.wait();
    }
}

#[test]
fn a_frozen_driver_goes_on_with_what_was_in_its_queues() {
    let gate = Arc::new(Gate::new());
    let mut rig = Rig::new(Fs::shared(gate, PATIENCE), 0);
    let (head, reply) = ask(&mut rig, &message(Opcode::Getattr, 1, &[0; 16]), &[16, 104]);
    // The gate was closed, so the request is still where the driver put it.
    let frozen = rig.freeze();
    let parked = Arc::new(Gate::new());
    let mut thawed = Rig::thaw(frozen, Fs::shared(parked.clone(), PATIENCE));
    let (mut far, near) = pair();
    thawed.device.attach(Backend::Share, vec![near]).unwrap();
    thawed.interrupt.release();
    parked.open();
    let (header, _) = far.request();
    far.reply(header.id, &answer(1, &[4; 104]));
    assert_eq!(thawed.wait_used(REQUESTS), [(head, 120)]);
    assert_eq!(thawed.bytes(reply[1]), [4; 104]);
}

#[test]
fn states_of_another_kind_or_with_something_waiting_are_refused() {
    let device = Fs::shared(open_gate(), PATIENCE);
    let state = |parked| {
        DeviceState::Fs(FsState {
            parked,
            mappings: Vec::new(),
        })
    };
    device.check(&state(vec![Vec::new(), Vec::new()]), None).unwrap();
    device.check(&state(vec![Vec::new(), vec![3]]), None).unwrap_err();
    device.check(&DeviceState::Plain, None).unwrap_err();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever a guest requests and thaw-share replies, each request is answered once, within its room.
    #[test]
    fn every_request_is_answered_once(
        requests in prop::collection::vec((0usize..200, prop::collection::vec(0u32..200, 0..4)), 1..20),
        said in prop::collection::vec(any::<u8>(), 0..200),
        answers in 0usize..20,
    ) {
        let (mut rig, mut far) = rig();
        let mut rooms = HashMap::new();
        let mut relayed = 0;
        for (length, room) in &requests {
            let (head, _) = ask(&mut rig, &vec![1; *length], room);
            let total: u32 = room.iter().sum();
            relayed += usize::from(*length >= 40 && (total == 0 || total >= 16));
            rooms.insert(head, total);
        }
        // Some are answered correctly; then arbitrary bytes follow, and the end.
        for _ in 0..answers.min(relayed) {
            let (header, _) = far.request();
            if header.room > 0 {
                far.reply(header.id, &answer(0, &vec![0; header.room as usize - 16]));
            }
        }
        // The device may have closed the stream before the end.
        let _ = far.0.write_all(&said);
        let _ = far.0.shutdown(Shutdown::Both);
        let mut seen = Vec::new();
        while seen.len() < requests.len() {
            seen.extend(rig.wait_used(REQUESTS));
        }
        prop_assert_eq!(seen.len(), requests.len());
        for (head, written) in seen {
            prop_assert!(written <= rooms.remove(&head).expect("once"));
        }
    }
}
