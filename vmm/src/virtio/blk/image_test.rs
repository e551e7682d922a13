//! A disk that is an image: its contents, and reads that wait.

use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use thaw_imagefs::blob::{BootId, CHUNK_SIZE, Digests, ReadyFile};
use thaw_protocol::access::Access;
use thaw_protocol::control::BlobRange;
use thaw_protocol::miss::{Filled, Miss};
use thaw_protocol::packet;
use vmm_sys_util::epoll::EventSet;

use super::*;

const DIGESTS: [[u8; 32]; 2] = [[7; 32], [8; 32]];
const LENGTH: u64 = 2 * CHUNK_SIZE;
/// The blobs' addresses. There is a gap of zeros before the second.
const ADDRESSES: [u64; 2] = [8192, 8192 + LENGTH + 4096];
const SECTORS_IN_ALL: u64 = (ADDRESSES[1] + LENGTH) / SECTOR;

/// The disk's byte at an address.
fn byte(at: u64) -> u8 {
    match at {
        // The metadata does not fill its last block.
        0..5000 => 1 + (at % 100) as u8,
        at if (ADDRESSES[0]..ADDRESSES[0] + LENGTH).contains(&at) => 100 + (at % 97) as u8,
        at if at >= ADDRESSES[1] => 100 + (at % 89) as u8,
        _ => 0,
    }
}

struct Image {
    metadata: File,
    blobs: Vec<(File, File, ReadyFile)>,
}

impl Image {
    fn new() -> Image {
        let mut metadata = tempfile::tempfile().unwrap();
        metadata
            .write_all(&(0..5000).map(byte).collect::<Vec<_>>())
            .unwrap();
        let blob = |index: usize| {
            let data = tempfile::tempfile().unwrap();
            let from = ADDRESSES[index];
            let bytes: Vec<u8> = (from..from + LENGTH).map(byte).collect();
            data.write_all_at(&bytes, 0).unwrap();
            let ready = tempfile::tempfile().unwrap();
            let bits = ReadyFile::create(
                ready.try_clone().unwrap(),
                DIGESTS[index],
                LENGTH,
                Digests::Sealed(&[[0; 32]; 2]),
                false,
                BootId([1; 16]),
            );
            (data, ready, bits.unwrap())
        };
        Image {
            metadata,
            blobs: vec![blob(0), blob(1)],
        }
    }

    fn backend() -> Backend {
        let blobs = [0, 1].map(|index| BlobRange {
            address: ADDRESSES[index],
            length: LENGTH,
            digest: DIGESTS[index],
        });
        Backend::Image { blobs: blobs.into() }
    }

    fn fds(&self, socket: OwnedFd) -> Vec<OwnedFd> {
        let files = self.blobs.iter().flat_map(|(data, ready, _)| [data, ready]);
        [&self.metadata]
            .into_iter()
            .chain(files)
            .map(|file| file.try_clone().unwrap().into())
            .chain([socket])
            .collect()
    }

    fn fill(&self) {
        for (_, _, bits) in &self.blobs {
            (0..bits.chunk_count()).for_each(|chunk| bits.set_ready(chunk));
        }
    }
}

fn pair() -> (OwnedFd, OwnedFd) {
    let kind = SocketType::SEQPACKET;
    let (ours, theirs) = socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
    let patience = Some(Duration::from_secs(20));
    rustix::net::sockopt::set_socket_timeout(&ours, rustix::net::sockopt::Timeout::Recv, patience).unwrap();
    (ours, theirs)
}

/// A device with an image, and the node's end of its miss socket.
fn guest() -> (Rig<Blk>, Image, OwnedFd) {
    let mut blk = blk(DeviceId::Blk3);
    let image = Image::new();
    let (ours, theirs) = pair();
    blk.attach(Image::backend(), image.fds(theirs)).unwrap();
    assert_eq!(blk.config().bytes()[..8], SECTORS_IN_ALL.to_le_bytes());
    (Rig::new(blk, 0), image, ours)
}

fn receive(socket: &OwnedFd) -> Miss {
    packet::receive::<Miss>(socket).unwrap().0
}

/// A read in progress: its head, data and status.
struct Asked(u16, Buf, Buf);

fn read(rig: &mut Rig<Blk>, sector: u64, length: u32) -> Asked {
    let parts = [
        rig.readable(&header(b::VIRTIO_BLK_T_IN, sector)),
        rig.writable(length),
        rig.writable(1),
    ];
    let head = rig.submit(0, &parts);
    rig.kick(0).unwrap();
    Asked(head, parts[1], parts[2])
}

fn answer(rig: &mut Rig<Blk>, socket: &OwnedFd, id: u64, result: Result<(), String>) {
    packet::send(socket, &Filled { id, result }, &[]).unwrap();
    rig.device.backend_ready(MISSES, EventSet::IN).unwrap();
}

fn expected(sector: u64, length: u64) -> Vec<u8> {
    (sector * SECTOR..sector * SECTOR + length).map(byte).collect()
}

#[test]
fn the_disk_is_metadata_zeros_and_blobs() {
    let (mut rig, image, _socket) = guest();
    image.fill();
    for (sector, length) in [
        (0, 8192),
        (9, 1024),
        (15, 4096),
        (16, 1 << 17),
        ((ADDRESSES[0] + LENGTH) / SECTOR - 1, 8192),
        (SECTORS_IN_ALL - 8, 4096),
    ] {
        let Asked(head, data, status) = read(&mut rig, sector, length);
        assert_eq!(rig.used(0), [(head, length + 1)]);
        assert_eq!(rig.bytes(status), [OK]);
        assert!(
            rig.bytes(data) == expected(sector, length.into()),
            "sector {sector}"
        );
    }
    let room = rig.writable(512);
    let past = ask(&mut rig, b::VIRTIO_BLK_T_IN, SECTORS_IN_ALL, &[], &[room]);
    assert_eq!(past.0, IOERR);
    for kind in [b::VIRTIO_BLK_T_OUT, b::VIRTIO_BLK_T_DISCARD] {
        assert_eq!(ask(&mut rig, kind, 0, &[0; 512], &[]).0, IOERR);
    }
    assert_eq!(ask(&mut rig, b::VIRTIO_BLK_T_FLUSH, 0, &[], &[]).0, OK);
}

#[test]
fn a_read_of_missing_bytes_waits_and_others_do_not() {
    let (mut rig, image, socket) = guest();
    let (listener, told) = pair();
    rig.device.attach(Backend::Accesses, vec![told]).unwrap();
    // Across the end of the first blob, into the second.
    let sector = (ADDRESSES[1] - 8192) / SECTOR;
    let waits = read(&mut rig, sector, 16384);
    let misses = [receive(&socket), receive(&socket)];
    assert_eq!(
        misses.each_ref().map(|miss| (miss.blob, miss.offset)),
        [(DIGESTS[0], CHUNK_SIZE), (DIGESTS[1], 0)]
    );
    let served = read(&mut rig, 0, 4096);
    assert_eq!(rig.used(0), [(served.0, 4097)]);
    image.fill();
    answer(&mut rig, &socket, misses[0].id, Ok(()));
    assert!(rig.used(0).is_empty());
    answer(&mut rig, &socket, misses[1].id, Ok(()));
    assert_eq!(rig.used(0), [(waits.0, 16385)]);
    assert!(rig.bytes(waits.1) == expected(sector, 16384));
    let told: Vec<_> = (0..2)
        .map(|_| packet::receive::<Access>(&listener).unwrap().0)
        .map(|access| (access.blob, access.offset, access.length))
        .collect();
    assert_eq!(
        told,
        [(DIGESTS[0], LENGTH - 4096, 4096), (DIGESTS[1], 0, 8192)],
        "each once, in order; zeros and metadata are not told"
    );
}

#[test]
fn bytes_the_node_cannot_get_are_an_error_and_it_may_return() {
    let (mut rig, image, socket) = guest();
    let refused = read(&mut rig, 16, 512);
    answer(&mut rig, &socket, receive(&socket).id, Err("gone".into()));
    assert_eq!(rig.used(0), [(refused.0, 1)]);
    assert_eq!(rig.bytes(refused.2), [IOERR]);
    // Promised again and again.
    let promised = read(&mut rig, 16, 512);
    for _ in 0..9 {
        let id = receive(&socket).id;
        answer(&mut rig, &socket, id, Ok(()));
    }
    assert_eq!(rig.used(0), [(promised.0, 1)]);
    assert_eq!(rig.bytes(promised.2), [IOERR]);
    // The node dies before it answers, and another takes over.
    let waits = read(&mut rig, 16, 512);
    let miss = receive(&socket);
    drop(socket);
    rig.device.backend_ready(MISSES, EventSet::IN).unwrap();
    assert!(rig.used(0).is_empty());
    let (ours, theirs) = pair();
    rig.device.attach(Backend::Misses, vec![theirs]).unwrap();
    assert_eq!(receive(&ours), miss);
    image.fill();
    answer(&mut rig, &ours, miss.id, Ok(()));
    assert_eq!(rig.used(0), [(waits.0, 513)]);
    assert!(rig.bytes(waits.1) == expected(16, 512));
}

#[test]
fn a_read_that_waited_at_the_freeze_is_answered_in_both() {
    let (mut rig, image, socket) = guest();
    let waits = read(&mut rig, 16, 512);
    let miss = receive(&socket);
    let mut thawed = Rig::thaw(rig.freeze(), blk(DeviceId::Blk3));
    let again = Image::new();
    let (ours, theirs) = pair();
    thawed.device.attach(Image::backend(), again.fds(theirs)).unwrap();
    thawed.start_work();
    assert!(thawed.used(0).is_empty());
    // Frozen once more while the read waits.
    let last = Rig::thaw(thawed.freeze(), blk(DeviceId::Blk3));
    let mut last = last;
    let third = Image::new();
    third.fill();
    last.device.attach(Image::backend(), third.fds(pair().1)).unwrap();
    last.start_work();
    assert_eq!(last.used(0), [(waits.0, 513)]);
    for (rig, image, socket) in [(&mut rig, &image, &socket), (&mut thawed, &again, &ours)] {
        image.fill();
        let id = match std::ptr::eq(socket, &ours) {
            true => receive(&ours).id,
            false => miss.id,
        };
        answer(rig, socket, id, Ok(()));
        assert_eq!(rig.used(0), [(waits.0, 513)]);
        assert!(rig.bytes(waits.1) == expected(16, 512));
    }
    // A reset drops waiting reads.
    let (mut rig, _image, socket) = guest();
    read(&mut rig, 16, 512);
    let miss = receive(&socket);
    rig.device.reset();
    answer(&mut rig, &socket, miss.id, Ok(()));
    assert!(rig.used(0).is_empty());
}

#[test]
fn file_cut_outside_the_store_is_an_error_or_fetched_again() {
    let (mut rig, image, socket) = guest();
    image.fill();
    image.blobs[0].0.set_len(4096).unwrap();
    image.metadata.set_len(100).unwrap();
    let Asked(head, _, status) = read(&mut rig, 0, 512);
    assert_eq!((rig.used(0), rig.bytes(status)), (vec![(head, 1)], vec![IOERR]));
    // In a truncated blob even the bytes before the cut are missing, because their chunk is incomplete.
    let Asked(head, data, _) = read(&mut rig, 16, 512);
    let miss = receive(&socket);
    assert_eq!(
        (miss.blob, miss.offset, miss.length),
        (DIGESTS[0], 0, CHUNK_SIZE as u32)
    );
    assert!(rig.used(0).is_empty());
    let bytes: Vec<u8> = (ADDRESSES[0]..ADDRESSES[0] + LENGTH).map(byte).collect();
    image.blobs[0].0.write_all_at(&bytes, 0).unwrap();
    answer(&mut rig, &socket, miss.id, Ok(()));
    assert_eq!(rig.used(0), [(head, 513)]);
    assert!(rig.bytes(data) == expected(16, 512));
}

#[test]
fn images_that_do_not_fit_are_refused() {
    let mut blk = blk(DeviceId::Blk3);
    let image = Image::new();
    let fds = || image.fds(pair().1);
    let few = blk.attach(Image::backend(), fds().into_iter().skip(1).collect());
    assert!(matches!(
        few,
        Err(AttachError::Descriptors { expected: 6, got: 5 })
    ));
    let Backend::Image { mut blobs } = Image::backend() else {
        unreachable!()
    };
    blobs[1].address = blobs[0].address + 4096;
    let overlap = blk.attach(Backend::Image { blobs }, fds());
    assert!(matches!(overlap, Err(AttachError::Invalid(_))));
    let mut swapped = fds();
    swapped.swap(1, 2);
    assert!(matches!(
        blk.attach(Image::backend(), swapped),
        Err(AttachError::Invalid(_))
    ));
    let no_socket = image.fds(image.metadata.try_clone().unwrap().into());
    assert!(blk.attach(Image::backend(), no_socket).is_err());
    assert!(matches!(
        blk.attach(Backend::Vsock, vec![]),
        Err(AttachError::WrongKind(_))
    ));
    assert!(!blk.is_backed());
}
