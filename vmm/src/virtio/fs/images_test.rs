//! The device as its driver sees it: FUSE messages in real rings, and a socket where missing bytes are asked for.

#[path = "images_test/dax.rs"]
mod dax;
#[path = "images_test/freeze.rs"]
mod freeze;
#[path = "images_test/guest.rs"]
mod guest;
#[path = "images_test/image.rs"]
mod image;
#[path = "images_test/kernel.rs"]
mod kernel;

use fuse_backend_rs::abi::fuse_abi::{FsOptions, InHeader, Opcode};
use proptest::prelude::*;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use thaw_imagefs::blob::CHUNK_SIZE;
use thaw_imagefs::tree::BlobExtent;
use thaw_protocol::control::BlobRange;
use thaw_protocol::miss::Miss;
use thaw_protocol::packet;
use vm_memory::ByteValued;

use self::guest::*;
use self::image::*;
use super::*;
use crate::layout::Window;
use crate::virtio::VirtioDevice;
use crate::virtio::state::DeviceState;
use crate::virtio::testing::{Buf, NOWHERE, Rig, open_gate};

#[test]
fn the_configuration_names_the_device() {
    let device = root();
    let bytes = device.config().bytes();
    assert_eq!(bytes.len(), 40);
    assert_eq!((&bytes[..5], &bytes[36..]), (&b"thaw\0"[..], &[1, 0, 0, 0][..]));
    assert_eq!(device.shared_memory().len(), 1);
}

#[test]
fn init_promises_a_file_system_without_open_files() {
    let mut guest = Guest::new();
    let all = FsOptions::all().bits();
    let body = [7u32, 38, 1 << 20, all as u32, (all >> 32) as u32, 0]
        .map(u32::to_le_bytes)
        .concat();
    let (error, reply) = guest.call(Opcode::Init, 0, &[body, vec![0; 40]].concat());
    assert_eq!(error, 0);
    let flags = u64::from(u32::from_le_bytes(reply[12..16].try_into().unwrap()));
    let flags = FsOptions::from_bits_truncate(flags);
    assert!(flags.contains(FsOptions::POSIX_ACL | FsOptions::DO_READDIRPLUS | FsOptions::CACHE_SYMLINKS));
    assert!(flags.contains(FsOptions::MAP_ALIGNMENT) && !flags.contains(FsOptions::WRITEBACK_CACHE));
    let more = u64::from(u32::from_le_bytes(reply[32..36].try_into().unwrap())) << 32;
    assert!(FsOptions::from_bits_truncate(more).contains(FsOptions::PERFILE_DAX));
    for opcode in [Opcode::Open, Opcode::Opendir] {
        assert_eq!(guest.call(opcode, 1, &[0; 8]).0, -libc::ENOSYS);
    }
    // A client that needs open files gets no file system, instead of errors later.
    let old = [7u32, 23, 1 << 20, 0].map(u32::to_le_bytes).concat();
    assert_eq!(guest.call(Opcode::Init, 0, &old).0, -libc::EPROTO);
}

#[test]
fn a_file_is_read_across_chunks_and_holes() {
    let mut guest = Guest::new();
    guest.image.fill();
    let node = guest.file();
    for (offset, size) in [
        (0, 1 << 20),
        (0, 1),
        (1000, 300_000),
        (4 * CHUNK_SIZE - 10, 20),
        (4 * CHUNK_SIZE + HOLE - 10, 20),
        (SIZE - 3, 10),
        (SIZE, 10),
        (u64::MAX, 10),
    ] {
        let (error, bytes) = guest.call(Opcode::Read, node, &read_body(offset, size as u32));
        assert_eq!(error, 0);
        assert!(
            bytes == content(offset.min(SIZE), size),
            "{size} bytes at {offset}"
        );
    }
    // In pieces, as a driver gives pages; indirect.
    let request = guest
        .rig
        .readable(&message(Opcode::Read, 99, node, &read_body(5, 8192)));
    let mut buffers = vec![request, guest.rig.writable(16)];
    buffers.extend((0..3).map(|_| guest.rig.writable(3000)));
    let head = guest.rig.submit_indirect(REQUESTS, &buffers);
    guest.rig.notify(REQUESTS);
    assert_eq!(guest.wait_used(), [(head, 16 + 8192)]);
    let bytes: Vec<u8> = buffers[2..]
        .iter()
        .flat_map(|buffer| guest.rig.bytes(*buffer))
        .take(8192)
        .collect();
    assert!(bytes == content(5, 8192));
}

#[test]
fn a_read_of_missing_bytes_waits_and_nothing_else_does() {
    let mut guest = Guest::new();
    let socket = guest.misses();
    let node = guest.file();
    let asked = guest.ask(Opcode::Read, node, &read_body(CHUNK_SIZE + 5, 10), 4096);
    let miss = receive(&socket);
    assert_eq!(
        (miss.blob, miss.offset, u64::from(miss.length)),
        (DIGEST, CHUNK_SIZE, CHUNK_SIZE)
    );
    // Others are served meanwhile; the same bytes are not asked for again.
    assert_eq!(guest.file(), node);
    let (error, zeros) = guest.call(Opcode::Read, node, &read_body(4 * CHUNK_SIZE, 100));
    assert_eq!((error, zeros), (0, vec![0; 100]));
    let second = guest.ask(Opcode::Read, node, &read_body(CHUNK_SIZE, 1), 4096);
    guest.file();
    guest.image.ready.set_ready(1);
    reply(&socket, miss.id, Ok(()));
    let mut used = guest.wait_used();
    while used.len() < 2 {
        used.extend(guest.wait_used());
    }
    assert_eq!(guest.answer(&asked, used[0]), (0, content(CHUNK_SIZE + 5, 10)));
    assert_eq!(guest.answer(&second, used[1]), (0, content(CHUNK_SIZE, 1)));
    // Two answers without a question, then a read of bytes that are there.
    reply(&socket, miss.id, Ok(()));
    reply(&socket, 12345, Err("no such question".into()));
    assert_eq!(
        guest.call(Opcode::Read, node, &read_body(CHUNK_SIZE, 7)).1,
        content(CHUNK_SIZE, 7)
    );
}

#[test]
fn pending_misses_outlive_the_socket() {
    let mut guest = Guest::new();
    let node = guest.file();
    // Requested before there is any socket.
    let asked = guest.ask(Opcode::Read, node, &read_body(0, 10), 4096);
    guest.file();
    let first = guest.misses();
    let miss = receive(&first);
    drop(first);
    // Without a socket, other requests are still served.
    guest.file();
    let second = guest.misses();
    assert_eq!(receive(&second), miss);
    // Replaced while the question is open, which is then sent once more.
    let third = guest.misses();
    assert_eq!(receive(&third), miss);
    guest.image.fill();
    reply(&third, miss.id, Ok(()));
    let used = guest.wait_used();
    assert_eq!(guest.answer(&asked, used[0]), (0, content(0, 10)));
}

#[test]
fn bytes_promised_and_missing_are_an_error_after_some_rounds() {
    let mut guest = Guest::new();
    let socket = guest.misses();
    let node = guest.file();
    let asked = guest.ask(Opcode::Read, node, &read_body(0, 10), 4096);
    reply(&socket, receive(&socket).id, Err("the registry is gone".into()));
    let used = guest.wait_used();
    assert_eq!(guest.answer(&asked, used[0]).0, -libc::EIO);
    // Reported as present, but missing: the request asks again, and finally fails.
    let asked = guest.ask(Opcode::Read, node, &read_body(0, 10), 4096);
    for _ in 0..9 {
        reply(&socket, receive(&socket).id, Ok(()));
    }
    let used = guest.wait_used();
    assert_eq!(guest.answer(&asked, used[0]).0, -libc::EIO);
    // A peer that sends invalid answers is dropped, and its successor gets the questions.
    let asked = guest.ask(Opcode::Read, node, &read_body(0, 10), 4096);
    receive(&socket);
    rustix::net::send(&socket, &[0xff; 100], rustix::net::SendFlags::empty()).unwrap();
    let successor = guest.misses();
    let miss = receive(&successor);
    guest.image.fill();
    reply(&successor, miss.id, Ok(()));
    let used = guest.wait_used();
    assert_eq!(guest.answer(&asked, used[0]), (0, content(0, 10)));
}

#[test]
fn a_full_socket_is_waited_for() {
    let mut guest = Guest::new();
    let (socket, theirs) = pair();
    // The minimum: room for about six questions.
    rustix::net::sockopt::set_socket_send_buffer_size(&theirs, 1).unwrap();
    guest.rig.device.attach(Backend::Misses, vec![theirs]).unwrap();
    let node = guest.file();
    // Every run of chunks, so that no two reads ask the same question.
    let runs: Vec<(u64, u64)> = (0..4)
        .flat_map(|first| (first..4).map(move |last| (first, last)))
        .collect();
    let asked: Vec<Asked> = runs
        .iter()
        .map(|(first, last)| {
            let size = (last - first) * CHUNK_SIZE + 1;
            guest.ask(
                Opcode::Read,
                node,
                &read_body(first * CHUNK_SIZE, size as u32),
                1 << 20,
            )
        })
        .collect();
    guest.file();
    guest.image.fill();
    for _ in &runs {
        reply(&socket, receive(&socket).id, Ok(()));
    }
    let mut answered = Vec::new();
    while answered.len() < asked.len() {
        answered.extend(guest.wait_used());
    }
    for (asked, (first, last)) in asked.iter().zip(runs) {
        let used = answered.iter().find(|used| used.0 == asked.head).unwrap();
        let (error, bytes) = guest.answer(asked, *used);
        assert_eq!(error, 0);
        assert!(bytes == content(first * CHUNK_SIZE, (last - first) * CHUNK_SIZE + 1));
    }
}

#[test]
fn a_reset_forgets_what_waits() {
    let mut guest = Guest::new();
    let socket = guest.misses();
    let node = guest.file();
    guest.ask(Opcode::Read, node, &read_body(0, 10), 4096);
    let miss = receive(&socket);
    guest.rig.device.reset();
    guest.image.fill();
    reply(&socket, miss.id, Ok(()));
    assert!(guest.rig.used(REQUESTS).is_empty());
    // The images and the socket stay.
    let mut rig = Rig::new(guest.rig.device, 0);
    let request = rig.readable(&message(Opcode::Read, 5, node, &read_body(0, 10)));
    let buffers = [request, rig.writable(16), rig.writable(4096)];
    rig.submit(REQUESTS, &buffers);
    rig.notify(REQUESTS);
    assert_eq!(rig.wait_used(REQUESTS)[0].1, 26);
    assert_eq!(rig.bytes(buffers[2])[..10], content(0, 10));
}

#[test]
fn chains_without_room_for_a_header_never_reach_the_server() {
    let mut guest = Guest::new();
    let request = message(Opcode::Getattr, 1, 1, &[0; 16]);
    let rig = &mut guest.rig;
    let whole = rig.readable(&request);
    let short = rig.readable(&request[..39]);
    let (small, header) = (rig.writable(15), rig.writable(16));
    let nowhere = Buf {
        address: NOWHERE,
        length: 64,
        write: true,
    };
    let unreadable = Buf {
        address: NOWHERE,
        length: 64,
        write: false,
    };
    let big = rig.writable(4096);
    let chains: [&[Buf]; 8] = [
        &[whole],
        &[whole, small],
        &[whole, small, big],
        &[short, header, big],
        &[header, big],
        &[whole, nowhere],
        &[whole, header, nowhere],
        &[unreadable, header, big],
    ];
    for chain in chains {
        for queue in [0, REQUESTS] {
            let head = guest.rig.submit(queue, chain);
            guest.rig.notify(queue);
            guest.rig.wait();
            assert_eq!(guest.rig.used(queue), [(head, 0)]);
        }
    }
    assert_eq!(guest.rig.bytes(small), [0xEE; 15]);
    assert_eq!(guest.lookup(1, "absent"), Err(-libc::ENOENT));
}

#[test]
fn messages_are_bounded() {
    let mut guest = Guest::new();
    let node = guest.file();
    assert_eq!(
        guest.call(Opcode::Read, node, &read_body(0, u32::MAX)).0,
        -libc::EINVAL
    );
    assert_eq!(guest.call(Opcode::Read, node, &[0; 10]).0, -libc::EINVAL);
    assert_eq!(
        guest.call(Opcode::Setxattr, node, &vec![0; 200 << 10]).0,
        -libc::E2BIG
    );
    assert_eq!(guest.call(Opcode::Write, node, &vec![0; 1 << 20]).0, -libc::EROFS);
    assert_eq!(guest.call(Opcode::Unlink, 1, b"one\0").0, -libc::EROFS);
    assert_eq!(guest.call(Opcode::SetupMapping, node, &[0; 40]).0, -libc::EINVAL);
    // FORGET has no answer, even if there is room.
    let asked = guest.ask(Opcode::Forget, node, &[0; 8], 64);
    assert_eq!(guest.wait_used(), [(asked.head, 0)]);
}

#[test]
fn a_ring_that_lies_stops_the_device_until_it_is_reset() {
    let mut guest = Guest::new();
    guest.rig.submit_loop(REQUESTS);
    guest.rig.notify(REQUESTS);
    guest.wait_failed();
    // A head that already waits is made available again.
    let mut guest = Guest::new();
    let node = guest.file();
    let asked = guest.ask(Opcode::Read, node, &read_body(0, 10), 64);
    guest.file();
    guest.rig.offer(REQUESTS, asked.head);
    guest.rig.notify(REQUESTS);
    guest.wait_failed();
}

#[test]
fn images_that_do_not_fit_are_refused() {
    let mut device = root();
    let image = Image::new("one");
    let few = device.add_image(1, image.spec.clone(), image.fds().into_iter().take(2).collect());
    assert!(matches!(
        few,
        Err(AttachError::Descriptors { expected: 3, got: 2 })
    ));
    let mut other = image.spec.clone();
    other.blobs[0].digest = [8; 32];
    assert!(matches!(
        device.add_image(1, other, image.fds()),
        Err(AttachError::Invalid(_))
    ));
    let mut swapped = image.fds();
    swapped.swap(0, 1);
    assert!(matches!(
        device.add_image(1, image.spec.clone(), swapped),
        Err(AttachError::Invalid(_))
    ));
    assert!(matches!(
        device.add_image(0, image.spec.clone(), image.fds()),
        Err(AttachError::Invalid(_))
    ));
    device.add_image(1, image.spec.clone(), image.fds()).unwrap();
    assert!(matches!(
        device.add_image(1, image.spec.clone(), image.fds()),
        Err(AttachError::Invalid(_))
    ));
    assert!(matches!(
        device.add_image(2, image.spec.clone(), image.fds()),
        Err(AttachError::Invalid(_))
    ));
    assert!(matches!(device.remove_image(2), Err(AttachError::Invalid(_))));
    device.remove_image(1).unwrap();
    let stream = socketpair(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )
    .unwrap();
    assert!(matches!(
        device.attach(Backend::Misses, vec![stream.0]),
        Err(AttachError::Invalid(_))
    ));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever a message contains, it is answered or dropped, and the device continues.
    #[test]
    fn arbitrary_messages_are_answered(
        opcode in 0u32..60, node in 0u64..200, in_slot: bool, length: Option<u32>,
        body in prop::collection::vec(any::<u8>(), 0..200), room in 0u32..300,
    ) {
        let mut guest = Guest::new();
        guest.image.fill();
        let nodeid = if in_slot { 1 << 48 | node } else { node };
        let mut header = InHeader { opcode, unique: 1, nodeid, ..InHeader::default() };
        header.len = length.unwrap_or((size_of::<InHeader>() + body.len()) as u32);
        let request = guest.rig.readable(&[header.as_slice(), &body].concat());
        let buffers = [request, guest.rig.writable(16), guest.rig.writable(room)];
        let head = guest.rig.submit(REQUESTS, &buffers);
        guest.rig.notify(REQUESTS);
        let used = guest.wait_used();
        prop_assert_eq!(used[0].0, head);
        prop_assert!(used[0].1 <= 16 + room);
        guest.file();
    }
}
