use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use thaw_protocol::share::{ReplyHeader, RequestHeader};
use virtiofsd::fuse::{InHeader, OutHeader};
use vm_memory::ByteValued;

use super::*;
use crate::file_system;

/// FUSE has no operation of this number: the answer is ENOSYS.
const UNKNOWN: u32 = 9999;

/// Threads that serve a directory, and the VMM's end of their stream.
fn serving() -> (tempfile::TempDir, UnixStream, Receiver<End>) {
    let (vmm, relay) = UnixStream::pair().unwrap();
    let (root, ends) = serve(relay);
    (root, vmm, ends)
}

fn serve(relay: UnixStream) -> (tempfile::TempDir, Receiver<End>) {
    let root = tempfile::tempdir().unwrap();
    let proc_self_fd = File::open("/proc/self/fd").unwrap();
    let file_system = file_system(root.path().to_str().unwrap(), proc_self_fd, 1000).unwrap();
    let arrivals = Arrivals::of(&relay).unwrap();
    (root, start(relay, arrivals, file_system).unwrap())
}

fn request(id: u32) -> Vec<u8> {
    request_with(id, size_of::<OutHeader>() as u32)
}

/// A request whose reply may have so many bytes; none is wanted if 0.
fn request_with(id: u32, room: u32) -> Vec<u8> {
    let length = size_of::<InHeader>() as u32;
    let message = InHeader {
        len: length,
        opcode: UNKNOWN,
        unique: id.into(),
        ..InHeader::default()
    };
    let header = RequestHeader { id, length, room };
    [&header.encode()[..], message.as_slice()].concat()
}

/// The ID of the next reply.
fn answered(vmm: &mut UnixStream) -> u32 {
    let mut header = [0; ReplyHeader::BYTES];
    vmm.read_exact(&mut header).unwrap();
    let header = ReplyHeader::decode(&header).unwrap();
    vmm.read_exact(&mut vec![0; header.length as usize]).unwrap();
    header.id
}

#[test]
fn each_request_is_answered_however_many_come_together() {
    let (_root, mut vmm, ends) = serving();
    vmm.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    for round in 0..200 {
        let ids: Vec<u32> = (0..1 + round % 40).collect();
        let all: Vec<u8> = ids.iter().flat_map(|id| request(*id)).collect();
        // At once, then in parts that end within requests.
        for part in all.chunks(if round % 2 == 0 { all.len() } else { 37 }) {
            vmm.write_all(part).unwrap();
        }
        let mut seen: Vec<u32> = ids.iter().map(|_| answered(&mut vmm)).collect();
        seen.sort_unstable();
        assert_eq!(seen, ids);
    }
    drop(vmm);
    assert!(matches!(ends.recv(), Ok(End::Closed)));
    // Every thread ends, and with the last its sender.
    while let Ok(end) = ends.recv() {
        assert!(matches!(end, End::Closed), "{end:?}");
    }
}

#[test]
fn bad_header_is_the_reason_that_is_told() {
    let (_root, mut vmm, ends) = serving();
    vmm.write_all(&[0xFF; RequestHeader::BYTES]).unwrap();
    assert!(matches!(ends.recv(), Ok(End::Header(_))));
    assert_eq!(vmm.read(&mut [0]).unwrap(), 0);
}

#[test]
fn end_that_comes_with_the_last_request_is_seen() {
    let (mut vmm, relay) = UnixStream::pair().unwrap();
    vmm.write_all(&request_with(1, 0)).unwrap();
    drop(vmm);
    let (_root, ends) = serve(relay);
    let end = ends.recv_timeout(Duration::from_secs(60));
    assert!(matches!(end, Ok(End::Closed)), "{end:?}");
}
