//! Files that thaw-share hands over, which the device then reads and writes itself.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::sync::mpsc;
use std::thread;

use fuse_backend_rs::abi::fuse_abi::{EntryOut, OpenOut, ReadIn, ReleaseIn, WRITE_CACHE, WriteIn, WriteOut};

use rustix::fs::{MemfdFlags, SealFlags};

use super::*;

const HANDLE: u64 = 0x70001;

fn opened(handle: u64) -> Vec<u8> {
    let opened = OpenOut {
        fh: handle,
        ..OpenOut::default()
    };
    opened.as_slice().to_vec()
}

/// Opens `file` as the handle, of node 1.
fn open(rig: &mut Rig<Fs<Share>>, far: &mut Far, handle: u64, file: &File) {
    let (head, _) = ask(rig, &message(Opcode::Open, 2, &[0; 8]), &[16, 16]);
    let (asked, _) = far.request();
    far.reply_with(asked.id, &answer(2, &opened(handle)), file);
    assert_eq!(rig.wait_used(REQUESTS), [(head, 32)]);
}

fn with_open_file() -> (Rig<Fs<Share>>, Far, File) {
    let (mut rig, mut far) = rig();
    let file = tempfile::tempfile().unwrap();
    open(&mut rig, &mut far, HANDLE, &file);
    (rig, far, file)
}

fn write(handle: u64, offset: u64, flags: i32, data: &[u8]) -> Vec<u8> {
    let header = WriteIn {
        fh: handle,
        offset,
        size: data.len() as u32,
        flags: flags as u32,
        ..WriteIn::default()
    };
    message(Opcode::Write, 9, &[header.as_slice(), data].concat())
}

fn read(handle: u64, offset: u64, size: u32) -> Vec<u8> {
    let body = ReadIn {
        fh: handle,
        offset,
        size,
        ..ReadIn::default()
    };
    message(Opcode::Read, 9, body.as_slice())
}

/// Sends a write that thaw-share does not see. Returns its error, and how many bytes it wrote.
fn written(rig: &mut Rig<Fs<Share>>, far: &Far, message: &[u8]) -> (i32, u32) {
    let (head, reply) = ask(rig, message, &[16, 8]);
    let used = rig.wait_used(REQUESTS);
    assert!(far.has_nothing());
    let header = *OutHeader::from_slice(&rig.bytes(reply[0])).unwrap();
    assert_eq!((used, header.unique), (vec![(head, header.len)], 9));
    (
        header.error,
        WriteOut::from_slice(&rig.bytes(reply[1])).unwrap().size,
    )
}

/// Whether a message goes to thaw-share.
fn goes_on(rig: &mut Rig<Fs<Share>>, far: &mut Far, message: &[u8]) -> bool {
    let (head, _) = ask(rig, message, &[16, 128]);
    let (asked, sent) = far.request();
    far.reply(asked.id, &answer(9, &[]));
    assert_eq!(rig.wait_used(REQUESTS), [(head, 16)]);
    sent == message
}

#[test]
fn writes_go_to_the_file_at_their_offsets() {
    let (mut rig, far, file) = with_open_file();
    assert_eq!(written(&mut rig, &far, &write(HANDLE, 3, 0, b"abc")), (0, 3));
    assert_eq!(
        written(&mut rig, &far, &write(HANDLE, 0, 0, &[7; 70_000])),
        (0, 70_000)
    );
    assert_eq!(
        written(&mut rig, &far, &write(HANDLE, 1, libc::O_APPEND, b"end")),
        (0, 3)
    );
    // Pages that a kernel writes back belong where it says.
    let mut page = write(HANDLE, 1, libc::O_APPEND, b"page");
    let flags_at = 40 + std::mem::offset_of!(WriteIn, fuse_flags);
    page[flags_at..flags_at + 4].copy_from_slice(&WRITE_CACHE.to_le_bytes());
    assert_eq!(written(&mut rig, &far, &page), (0, 4));
    let mut whole = vec![0; 70_003];
    file.read_exact_at(&mut whole, 0).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 70_003);
    assert_eq!(
        (&whole[..6], &whole[70_000..]),
        (&b"\x07page\x07"[..], &b"end"[..])
    );
}

#[test]
fn reads_end_with_the_file() {
    let (mut rig, far, file) = with_open_file();
    file.write_all_at(b"0123456789", 0).unwrap();
    for (offset, size, expected) in [(0, 4, &b"0123"[..]), (8, 100, b"89"), (10, 5, b""), (99, 5, b"")] {
        let (head, reply) = ask(&mut rig, &read(HANDLE, offset, size), &[16, 3, 200]);
        let length = 16 + expected.len() as u32;
        assert_eq!(rig.wait_used(REQUESTS), [(head, length)]);
        let bytes: Vec<u8> = reply.iter().flat_map(|buffer| rig.bytes(*buffer)).collect();
        let header = *OutHeader::from_slice(&bytes[..16]).unwrap();
        assert_eq!((header.len, header.error, header.unique), (length, 0, 9));
        assert_eq!(&bytes[16..length as usize], expected);
    }
    assert!(far.has_nothing());
}

#[test]
fn created_files_are_used_too() {
    let (mut rig, mut far) = rig();
    let file = tempfile::tempfile().unwrap();
    let entry = EntryOut {
        nodeid: 5,
        ..EntryOut::default()
    };
    let (_, _) = ask(
        &mut rig,
        &message(Opcode::Create, 2, b"0123456789abcdefname\0"),
        &[16, 144],
    );
    let (asked, _) = far.request();
    far.reply_with(
        asked.id,
        &answer(2, &[entry.as_slice(), &opened(HANDLE)].concat()),
        &file,
    );
    rig.wait_used(REQUESTS);
    let mut sent = write(HANDLE, 0, 0, b"new");
    // The node, of the header.
    sent[16..24].copy_from_slice(&5u64.to_le_bytes());
    assert_eq!(written(&mut rig, &far, &sent), (0, 3));
    assert_eq!(file.metadata().unwrap().len(), 3);
}

/// thaw-share has other rights and limits, and its answer is the guest's.
#[test]
fn writes_that_fail_here_are_thaw_shares() {
    let (mut rig, mut far) = rig();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("file");
    std::fs::write(&path, "x").unwrap();
    open(&mut rig, &mut far, HANDLE, &File::open(&path).unwrap());
    assert!(
        goes_on(&mut rig, &mut far, &write(HANDLE, 0, 0, b"abc")),
        "it is read-only"
    );
    assert!(goes_on(
        &mut rig,
        &mut far,
        &write(HANDLE, u64::MAX - 1, 0, b"abc")
    ));
    let file = File::options().write(true).open(&path).unwrap();
    open(&mut rig, &mut far, HANDLE, &file);
    assert_eq!(written(&mut rig, &far, &write(HANDLE, 0, 0, b"abc")), (0, 3));
    // A write by this process would clear the bit.
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o4755)).unwrap();
    assert!(goes_on(&mut rig, &mut far, &write(HANDLE, 0, 0, b"def")));
    assert_eq!(std::fs::read(&path).unwrap(), b"abc");
    assert_eq!(file.metadata().unwrap().mode() & 0o7777, 0o4755);
}

/// A guest's kernel that writes pages back does not look at how many bytes were written.
#[test]
fn a_write_that_fails_half_way_is_made_again_whole() {
    let (mut rig, mut far) = rig();
    // May not grow: of a write over its end, the pages before it are written.
    let sealed = rustix::fs::memfd_create("sealed", MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&sealed, 4096).unwrap();
    rustix::fs::fcntl_add_seals(&sealed, SealFlags::GROW).unwrap();
    let sealed = File::from(sealed);
    open(&mut rig, &mut far, HANDLE, &sealed);
    assert!(goes_on(&mut rig, &mut far, &write(HANDLE, 0, 0, &[7; 8192])));
    let mut first = [0];
    sealed.read_exact_at(&mut first, 0).unwrap();
    assert_eq!(first, [7], "some was written");
}

#[test]
fn what_this_process_cannot_serve_goes_on() {
    let (mut rig, mut far, file) = with_open_file();
    let data = b"abc";
    assert!(
        goes_on(&mut rig, &mut far, &write(HANDLE + 1, 0, 0, data)),
        "another handle"
    );
    let mut other = write(HANDLE, 0, 0, data);
    other[16] = 2;
    assert!(goes_on(&mut rig, &mut far, &other), "another node");
    let mut longer = write(HANDLE, 0, 0, data);
    longer[40 + 16] = 4;
    assert!(goes_on(&mut rig, &mut far, &longer), "less data than it says");
    // A call for a pipe could take for ever.
    let (pipe, _writer) = std::io::pipe().unwrap();
    open(&mut rig, &mut far, HANDLE + 1, &File::from(OwnedFd::from(pipe)));
    assert!(goes_on(&mut rig, &mut far, &read(HANDLE + 1, 0, 10)));
    assert_eq!(file.metadata().unwrap().len(), 0);
}

#[test]
fn files_are_thaw_shares_again_after_their_end() {
    let ends: [fn() -> Vec<u8>; 3] = [
        || {
            let body = ReleaseIn {
                fh: HANDLE,
                ..ReleaseIn::default()
            };
            message(Opcode::Release, 9, body.as_slice())
        },
        || message(Opcode::Destroy, 9, &[]),
        || message(Opcode::Init, 9, &[0; 16]),
    ];
    for end in ends {
        let (mut rig, mut far, file) = with_open_file();
        assert_eq!(written(&mut rig, &far, &write(HANDLE, 0, 0, b"a")), (0, 1));
        assert!(goes_on(&mut rig, &mut far, &end()));
        assert!(goes_on(&mut rig, &mut far, &write(HANDLE, 0, 0, b"bc")));
        assert_eq!(file.metadata().unwrap().len(), 1);
    }
}

#[test]
fn a_write_too_large_for_this_process_is_thaw_shares() {
    let (mut rig, mut far, file) = with_open_file();
    // No file system has so large files.
    let last = i64::MAX as u64 - 1;
    assert!(
        goes_on(&mut rig, &mut far, &write(HANDLE, last, 0, b"a")),
        "was tried here"
    );
    assert!(
        goes_on(&mut rig, &mut far, &write(HANDLE, last, 0, b"a")),
        "was not"
    );
    assert_eq!(written(&mut rig, &far, &write(HANDLE, 0, 0, b"a")), (0, 1));
    assert_eq!(file.metadata().unwrap().len(), 1);
}

#[test]
fn a_handle_of_a_thaw_share_that_died_is_not_used() {
    let (mut rig, mut far) = patient(LONG);
    let file = tempfile::tempfile().unwrap();
    open(&mut rig, &mut far, HANDLE, &file);
    drop(far);
    let (mut far, near) = pair();
    rig.device.attach(Backend::Share, vec![near]).unwrap();
    assert!(goes_on(&mut rig, &mut far, &write(HANDLE, 0, 0, b"abc")));
    assert_eq!(file.metadata().unwrap().len(), 0);
}

#[test]
fn many_writes_at_once_are_each_answered_once() {
    let (mut rig, far, file) = with_open_file();
    let count = 100;
    let heads: Vec<u16> = (0..count)
        .map(|n| {
            let sent = write(HANDLE, n * 2, 0, &[n as u8; 2]);
            let buffers = [rig.readable(&sent), rig.writable(24)];
            rig.submit(REQUESTS, &buffers)
        })
        .collect();
    rig.notify(REQUESTS);
    let mut ended: Vec<u16> = used(&mut rig, REQUESTS, heads.len())
        .into_iter()
        .map(|(head, _)| head)
        .collect();
    ended.sort_unstable();
    let mut heads = heads;
    heads.sort_unstable();
    assert_eq!(ended, heads);
    let mut whole = vec![0; 2 * count as usize];
    file.read_exact_at(&mut whole, 0).unwrap();
    assert!(whole.iter().enumerate().all(|(at, byte)| *byte == (at / 2) as u8));
    assert!(far.has_nothing());
}

#[test]
fn a_reset_waits_for_the_write_that_is_made() {
    let (mut rig, _far, _file) = with_open_file();
    let flight = rig
        .device
        .worker
        .as_ref()
        .unwrap()
        .with(|share| share.flight.clone());
    let call = flight.seat().unwrap().begin(7, true);
    let (told, is_reset) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(|| {
            rig.device.reset();
            told.send(()).unwrap();
        });
        assert!(
            is_reset.recv_timeout(SHORT).is_err(),
            "the write still has guest memory"
        );
        call.end(24);
        is_reset.recv().unwrap();
    });
    assert!(flight.completions().is_empty());
}
