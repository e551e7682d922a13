//! Valid and invalid messages of a guest's kernel, over a directory of the test.

use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt};

use proptest::prelude::*;
use virtiofsd::passthrough::PassthroughFs;
use vm_memory::ByteValued;

use super::*;

struct Guest {
    buffer: MessageBuffer,
    server: Server<PassthroughFs>,
    directory: tempfile::TempDir,
    unique: u64,
}

/// `struct fuse_in_header`.
fn message(opcode: u32, unique: u64, node: u64, body: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend((40 + body.len() as u32).to_le_bytes());
    bytes.extend(opcode.to_le_bytes());
    bytes.extend(unique.to_le_bytes());
    bytes.extend(node.to_le_bytes());
    // uid, gid, pid, padding.
    bytes.extend([0; 16]);
    bytes.extend(body);
    bytes
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

impl Guest {
    fn new() -> Guest {
        let directory = tempfile::tempdir().unwrap();
        let descriptors = fs::File::open("/proc/self/fd").unwrap();
        let root = directory.path().to_str().unwrap();
        let mut guest = Guest {
            buffer: MessageBuffer::new().unwrap(),
            server: Server::new(crate::file_system(root, descriptors, 1024).unwrap()),
            directory,
            unique: 0,
        };
        let init = [words(&[7, 38, 1 << 20, !(1 << 30)]), vec![0; 48]].concat();
        assert_eq!(guest.call(Opcode::Init as u32, 0, &init, 4096).0, 0);
        guest
    }

    /// A message's reply: its error, and what follows its header.
    fn call(&mut self, opcode: u32, node: u64, body: &[u8], room: u32) -> (i32, Vec<u8>) {
        self.unique += 1;
        let bytes = message(opcode, self.unique, node, body);
        let reply = self.raw(&bytes, room);
        assert_eq!(reply[8..16], self.unique.to_le_bytes());
        (
            i32::from_le_bytes(reply[4..8].try_into().unwrap()),
            reply[16..].to_vec(),
        )
    }

    fn raw(&mut self, bytes: &[u8], room: u32) -> Vec<u8> {
        self.buffer.read(&mut &bytes[..], bytes.len() as u32).unwrap();
        let length = self.buffer.serve(&self.server, bytes.len() as u32, room).unwrap();
        assert!(length <= room);
        let mut reply = vec![0; length as usize];
        self.buffer
            .memory
            .read_slice(&mut reply, GuestAddress(OUT))
            .unwrap();
        if room > 0 {
            assert_eq!(reply[..4], length.to_le_bytes(), "the length it tells");
        }
        reply
    }

    fn lookup(&mut self, name: &str) -> u64 {
        let (error, entry) = self.call(Opcode::Lookup as u32, 1, format!("{name}\0").as_bytes(), 200);
        assert_eq!(error, 0);
        u64::from_le_bytes(entry[..8].try_into().unwrap())
    }

    fn open(&mut self, node: u64, flags: i32) -> u64 {
        let (error, opened) = self.call(Opcode::Open as u32, node, &words(&[flags as u32, 0]), 100);
        assert_eq!(error, 0);
        u64::from_le_bytes(opened[..8].try_into().unwrap())
    }
}

fn read_body(handle: u64, offset: u64, size: u32) -> Vec<u8> {
    ReadIn {
        fh: handle,
        offset,
        size,
        ..ReadIn::default()
    }
    .as_slice()
    .to_vec()
}

fn write_body(handle: u64, offset: u64, size: u32, data: &[u8]) -> Vec<u8> {
    let header = WriteIn {
        fh: handle,
        offset,
        size,
        ..WriteIn::default()
    };
    [header.as_slice(), data].concat()
}

#[test]
fn read_returns_no_more_than_requested() {
    let mut guest = Guest::new();
    fs::write(guest.directory.path().join("file"), vec![7; 10_000]).unwrap();
    let node = guest.lookup("file");
    let handle = guest.open(node, libc::O_RDONLY);
    for (size, room, expected) in [
        (10_000, 16 + 10_000, 10_000),
        // More room than was requested: without the guard, the answer is EIO.
        (5_000, 1 << 20, 5_000),
        // Less room.
        (5_000, 16 + 100, 100),
        (5_000, 16, 0),
        // The file ends.
        (20_000, 1 << 20, 10_000),
    ] {
        let (error, data) = guest.call(Opcode::Read as u32, node, &read_body(handle, 0, size), room);
        assert_eq!((error, data.len()), (0, expected), "{size} {room}");
        assert!(data.iter().all(|byte| *byte == 7));
    }
}

#[test]
fn write_writes_exactly_what_was_requested() {
    let mut guest = Guest::new();
    let path = guest.directory.path().join("file");
    fs::write(&path, b"").unwrap();
    let node = guest.lookup("file");
    let handle = guest.open(node, libc::O_RDWR);
    let (error, _) = guest.call(
        Opcode::Write as u32,
        node,
        &write_body(handle, 0, 3, b"abcdef"),
        100,
    );
    assert_eq!((error, fs::read(&path).unwrap()), (0, b"abc".to_vec()));
    let (error, _) = guest.call(Opcode::Write as u32, node, &write_body(handle, 0, 9, b"xyz"), 100);
    assert_eq!(
        (error, fs::read(&path).unwrap()),
        (-libc::EINVAL, b"abc".to_vec())
    );
    let huge = write_body(handle, 0, u32::MAX, b"x");
    assert_eq!(
        guest.call(Opcode::Write as u32, node, &huge, 100).0,
        -libc::EINVAL
    );
}

#[test]
fn only_waiting_senders_are_answered() {
    let mut guest = Guest::new();
    for (opcode, expected) in [
        (Opcode::Forget as u32, 0),
        (Opcode::Interrupt as u32, 0),
        (Opcode::Getlk as u32, -libc::ENOSYS),
        (Opcode::SetupMapping as u32, -libc::ENOSYS),
        (9999, -libc::ENOSYS),
        // Messages without their bodies.
        (Opcode::Read as u32, -libc::EINVAL),
        (Opcode::Getattr as u32, -libc::EINVAL),
        (Opcode::Mkdir as u32, -libc::EINVAL),
    ] {
        let body: &[u8] = match opcode == Opcode::Forget as u32 {
            true => &[0; 8],
            false => &[],
        };
        assert_eq!(guest.call(opcode, 1, body, 16).0, expected, "{opcode}");
        assert_eq!(guest.raw(&message(opcode, 1, 1, &[]), 0), [0; 0], "{opcode}");
    }
    assert_eq!(guest.call(Opcode::Destroy as u32, 0, &[], 16), (0, Vec::new()));
}

#[test]
fn wrong_message_length_is_corrected() {
    let mut guest = Guest::new();
    fs::write(guest.directory.path().join("file"), b"").unwrap();
    let mut lookup = message(Opcode::Lookup as u32, 3, 1, b"file\0");
    for length in [0u32, 39, 1 << 20, u32::MAX] {
        lookup[..4].copy_from_slice(&length.to_le_bytes());
        let reply = guest.raw(&lookup, 200);
        assert_eq!(reply[4..8], [0; 4], "{length}");
    }
}

#[test]
fn new_files_belong_to_the_guests_user() {
    if !rustix::process::geteuid().is_root() {
        return thaw_test_skip::skip("it takes root to make files for others");
    }
    let mut guest = Guest::new();
    fs::set_permissions(
        guest.directory.path(),
        std::os::unix::fs::PermissionsExt::from_mode(0o777),
    )
    .unwrap();
    // flags, mode, umask, open_flags; then the name.
    let body = [words(&[libc::O_RDWR as u32, 0o640, 0, 0]), b"made\0".to_vec()].concat();
    let mut create = message(Opcode::Create as u32, 5, 1, &body);
    create[24..28].copy_from_slice(&1234u32.to_le_bytes());
    create[28..32].copy_from_slice(&5678u32.to_le_bytes());
    let reply = guest.raw(&create, 400);
    assert_eq!(reply[4..8], [0; 4]);
    let made = fs::metadata(guest.directory.path().join("made")).unwrap();
    assert_eq!(
        (made.uid(), made.gid(), made.mode() & 0o7777),
        (1234, 5678, 0o640)
    );
    assert!(rustix::process::geteuid().is_root(), "and it is itself again");
}

#[test]
fn removed_file_is_usable_while_open() {
    let mut guest = Guest::new();
    let path = guest.directory.path().join("file");
    fs::write(&path, b"still here").unwrap();
    let node = guest.lookup("file");
    let handle = guest.open(node, libc::O_RDWR);
    assert_eq!(guest.call(Opcode::Unlink as u32, 1, b"file\0", 16).0, 0);
    assert!(!path.exists());
    let (error, data) = guest.call(Opcode::Read as u32, node, &read_body(handle, 0, 100), 116);
    assert_eq!((error, &data[..]), (0, &b"still here"[..]));
}

#[test]
fn host_changes_are_read() {
    let mut guest = Guest::new();
    let path = guest.directory.path().join("file");
    fs::write(&path, b"old").unwrap();
    let node = guest.lookup("file");
    let handle = guest.open(node, libc::O_RDONLY);
    fs::File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .write_all_at(b"new", 0)
        .unwrap();
    let (_, data) = guest.call(Opcode::Read as u32, node, &read_body(handle, 0, 100), 116);
    assert_eq!(data, b"new");
    let (error, entry) = guest.call(Opcode::Lookup as u32, 1, b"file\0", 200);
    // entry_valid and attr_valid, seconds.
    assert_eq!((error, &entry[16..24]), (0, &1u64.to_le_bytes()[..]));
    assert_eq!(entry[24..32], 1u64.to_le_bytes());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// For any message, a sender that waits gets a reply that fits, and the server continues.
    #[test]
    fn any_message_is_answered(
        opcode in 0u32..60, node in 0u64..5, length: Option<u32>, body in prop::collection::vec(any::<u8>(), 0..300),
        room in prop_oneof![Just(0u32), 16u32..400],
    ) {
        let mut guest = Guest::new();
        fs::write(guest.directory.path().join("file"), b"x").unwrap();
        guest.lookup("file");
        // There is no jail here, so it must name nothing outside its directory.
        let body: Vec<u8> = body.into_iter().map(|byte| if byte == b'/' { b'_' } else { byte }).collect();
        let mut bytes = message(opcode, 77, node, &body);
        if let Some(length) = length {
            bytes[..4].copy_from_slice(&length.to_le_bytes());
        }
        let reply = guest.raw(&bytes, room);
        prop_assert_eq!(reply.is_empty(), room == 0);
        if room > 0 {
            prop_assert_eq!(&reply[8..16], &77u64.to_le_bytes()[..]);
        }
    }
}
