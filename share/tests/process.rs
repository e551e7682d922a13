//! The process: started as thawd starts it, asked as a VMM asks it.
#![allow(clippy::unwrap_used)]

use std::fs::{self, File};
use std::io::{Read, Seek, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use thaw_pools::share::{Serving, start};
use thaw_protocol::share::{MESSAGE, ReplyHeader, RequestHeader, Serve, Share};

const LOOKUP: u32 = 1;
const READLINK: u32 = 5;
const READ: u32 = 15;
const WRITE: u32 = 16;
const INIT: u32 = 26;
const MKDIR: u32 = 9;
const CREATE: u32 = 35;
const FORGET: u32 = 2;
const INIT_EXT: u32 = 1 << 30;
const SUBMOUNTS: u32 = 1 << 27;
/// CHOWN, DAC_OVERRIDE, FOWNER, FSETID, SETGID, SETUID.
const CAPABILITIES: &str = "CapEff:\t00000000000000db";

fn serve(shares: &[(&str, bool)]) -> Serve {
    Serve {
        shares: shares
            .iter()
            .map(|(name, read_only)| Share {
                name: (*name).into(),
                read_only: *read_only,
            })
            .collect(),
        devices: false,
    }
}

fn program() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_thaw-share"))
}

fn log() -> OwnedFd {
    rustix::fs::memfd_create("log", rustix::fs::MemfdFlags::CLOEXEC).unwrap()
}

fn read_log(log: OwnedFd) -> String {
    let mut file = File::from(log);
    file.rewind().unwrap();
    let mut text = String::new();
    file.read_to_string(&mut text).unwrap();
    text
}

/// A guest's kernel, at the VMM's end of the relay.
struct Guest {
    relay: UnixStream,
    serving: Option<Serving>,
    log: OwnedFd,
    unique: u64,
}

impl Guest {
    fn of(shares: &[(&str, bool)], paths: &[PathBuf]) -> Guest {
        let files: Vec<File> = paths.iter().map(|path| File::open(path).unwrap()).collect();
        let files: Vec<BorrowedFd<'_>> = files.iter().map(|file| file.as_fd()).collect();
        let log = log();
        let serving = start(program(), &log, &serve(shares), &files);
        let serving = serving.unwrap_or_else(|e| panic!("{e}: {}", read_log(log.try_clone().unwrap())));
        let relay = UnixStream::from(serving.relay.try_clone().unwrap());
        let mut guest = Guest {
            relay,
            serving: Some(serving),
            log,
            unique: 0,
        };
        let mut init = Vec::new();
        for word in [7u32, 38, 1 << 20, INIT_EXT | SUBMOUNTS, 0] {
            init.extend(word.to_le_bytes());
        }
        init.extend([0; 44]);
        assert_eq!(guest.call(INIT, 0, &init, 4096).0, 0);
        guest
    }

    fn send(&mut self, opcode: u32, node: u64, body: &[u8], room: u32) -> u32 {
        self.unique += 1;
        let id = self.unique as u32;
        let mut message = Vec::new();
        message.extend((40 + body.len() as u32).to_le_bytes());
        message.extend(opcode.to_le_bytes());
        message.extend(self.unique.to_le_bytes());
        message.extend(node.to_le_bytes());
        message.extend([0; 16]);
        message.extend(body);
        let header = RequestHeader {
            id,
            length: message.len() as u32,
            room,
        };
        self.relay.write_all(&header.encode()).unwrap();
        self.relay.write_all(&message).unwrap();
        id
    }

    fn reply(&mut self) -> (u32, i32, Vec<u8>) {
        let mut header = [0; ReplyHeader::BYTES];
        self.relay.read_exact(&mut header).unwrap();
        let header = ReplyHeader::decode(&header).unwrap();
        let mut reply = vec![0; header.length as usize];
        self.relay.read_exact(&mut reply).unwrap();
        let error = i32::from_le_bytes(reply[4..8].try_into().unwrap());
        (header.id, error, reply[16..].to_vec())
    }

    fn call(&mut self, opcode: u32, node: u64, body: &[u8], room: u32) -> (i32, Vec<u8>) {
        let id = self.send(opcode, node, body, room);
        let (replied, error, body) = self.reply();
        assert_eq!(replied, id);
        (error, body)
    }

    fn lookup(&mut self, parent: u64, name: &str) -> Result<(u64, Vec<u8>), i32> {
        match self.call(LOOKUP, parent, format!("{name}\0").as_bytes(), 200) {
            (0, entry) => Ok((u64::from_le_bytes(entry[..8].try_into().unwrap()), entry)),
            (error, _) => Err(error),
        }
    }

    /// Node and handle of a new file.
    fn create(&mut self, parent: u64, name: &str) -> Result<(u64, u64), i32> {
        let mut body = Vec::new();
        for word in [libc::O_RDWR as u32, 0o644, 0, 0] {
            body.extend(word.to_le_bytes());
        }
        body.extend(name.as_bytes());
        body.push(0);
        match self.call(CREATE, parent, &body, 400) {
            (0, made) => Ok((
                u64::from_le_bytes(made[..8].try_into().unwrap()),
                u64::from_le_bytes(made[128..136].try_into().unwrap()),
            )),
            (error, _) => Err(error),
        }
    }

    /// `fh`, `offset`, `size` and the rest of the two bodies that begin so.
    fn range(handle: u64, offset: u64, size: u32) -> Vec<u8> {
        let mut body = Vec::new();
        body.extend(handle.to_le_bytes());
        body.extend(offset.to_le_bytes());
        body.extend(size.to_le_bytes());
        body.extend([0; 20]);
        body
    }

    /// Hangs up: how the process ends, and what it wrote.
    fn end(mut self) -> (Option<i32>, String) {
        let Serving { mut process, relay } = self.serving.take().unwrap();
        drop((relay, self.relay));
        let patience = Timespec {
            tv_sec: 20,
            tv_nsec: 0,
        };
        let ended = poll(
            &mut [PollFd::from_borrowed_fd(process.pidfd(), PollFlags::IN)],
            Some(&patience),
        );
        assert_eq!(ended, Ok(1), "it outlives its VMM");
        let status = process.wait().unwrap();
        (status.and_then(|status| status.code()), read_log(self.log))
    }
}

fn status(guest: &Guest) -> String {
    let pid = guest.serving.as_ref().unwrap().process.record().pid;
    fs::read_to_string(format!("/proc/{pid}/status")).unwrap()
}

#[test]
fn files_are_shared_as_they_are_and_it_ends_with_its_vmm() {
    let place = tempfile::tempdir().unwrap();
    let [data, conf, outside] = ["data", "conf", "outside"].map(|name| place.path().join(name));
    for directory in [&data, &conf, &outside] {
        fs::create_dir(directory).unwrap();
    }
    fs::write(place.path().join("single"), b"one file").unwrap();
    fs::write(outside.join("secret"), b"").unwrap();
    symlink(&outside, data.join("link")).unwrap();
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let paths = [data.clone(), conf.clone(), place.path().join("single")];
    let mut guest = Guest::of(&[("0", false), ("1", true), ("2", false)], &paths);

    let said = status(&guest);
    for line in [
        CAPABILITIES,
        "NoNewPrivs:\t1",
        "Seccomp:\t2",
        "CapBnd:\t0000000000000000",
    ] {
        assert!(said.contains(line), "{line} in {said}");
    }

    let (node, entry) = guest.lookup(1, "0").unwrap();
    // `fuse_attr.flags`, the last word: it is a mount of its own.
    assert_eq!(entry[124..128], 1u32.to_le_bytes());
    let (file, handle) = guest.create(node, "made").unwrap();
    let mut write = Guest::range(handle, 0, 1 << 20);
    write.extend((0..1u32 << 20).map(|at| (at / 5) as u8));
    assert_eq!(
        guest.call(WRITE, file, &write, 24),
        (0, [0, 0, 16, 0, 0, 0, 0, 0].into())
    );
    let written = fs::read(data.join("made")).unwrap();
    assert_eq!(written[..], write[40..]);
    assert_eq!(
        fs::metadata(data.join("made")).unwrap().permissions().mode() & 0o777,
        0o644
    );
    let (error, read) = guest.call(READ, file, &Guest::range(handle, 0, 1 << 20), 16 + (1 << 20));
    assert_eq!((error, read == written), (0, true));

    // Reading is all one can do with what is read-only; of the root, not even that is left to change.
    let (read_only, _) = guest.lookup(1, "1").unwrap();
    assert_eq!(guest.create(read_only, "x"), Err(-libc::EROFS));
    let mkdir = [&[0xed, 1, 0, 0, 0, 0, 0, 0][..], b"new\0"].concat();
    assert_eq!(guest.call(MKDIR, 1, &mkdir, 200).0, -libc::EROFS);
    guest.lookup(1, "2").unwrap();

    // A link is only a text, and no name leads out.
    let (link, _) = guest.lookup(node, "link").unwrap();
    let (_, target) = guest.call(READLINK, link, &[], 4096);
    assert_eq!(target, outside.to_str().unwrap().as_bytes());
    for name in [
        "link/secret",
        "../outside/secret",
        "/proc/self/status",
        "/etc/passwd",
    ] {
        assert!(guest.lookup(node, name).is_err(), "{name}");
    }
    let (root, entry) = guest.lookup(node, "..").unwrap_or((node, entry));
    assert!(root == node || root == 1, "{entry:?}");
    assert_eq!(guest.lookup(1, "proc").unwrap_err(), -libc::ENOENT);

    // What the host does is there.
    fs::write(conf.join("new"), b"x").unwrap();
    guest.lookup(read_only, "new").unwrap();
    // Of a forget one hears nothing, and the next is answered.
    guest.send(FORGET, file, &1u64.to_le_bytes(), 0);
    guest.lookup(node, "made").unwrap();

    assert_eq!(fs::read_to_string("/proc/self/mountinfo").unwrap(), mounts);
    let (code, said) = guest.end();
    assert_eq!(code, Some(0), "{said}");
    assert!(!said.contains("ERROR") && !said.contains("forbidden"), "{said}");
}

#[test]
fn many_requests_at_once_are_each_answered() {
    let place = tempfile::tempdir().unwrap();
    let mut guest = Guest::of(&[("d", false)], &[place.path().into()]);
    let (node, _) = guest.lookup(1, "d").unwrap();
    let mut waiting: Vec<u32> = (0..200)
        .map(|n| {
            let body = [&[0xed, 1, 0, 0, 0, 0, 0, 0][..], format!("dir-{n}\0").as_bytes()].concat();
            guest.send(MKDIR, node, &body, 200)
        })
        .collect();
    while !waiting.is_empty() {
        let (id, error, _) = guest.reply();
        assert_eq!(error, 0);
        let at = waiting
            .iter()
            .position(|other| *other == id)
            .expect("asked, and once");
        waiting.swap_remove(at);
    }
    assert_eq!(fs::read_dir(place.path()).unwrap().count(), 200);
    let owner = fs::metadata(place.path().join("dir-7")).unwrap().uid();
    assert_eq!(owner, rustix::process::geteuid().as_raw());
    assert_eq!(guest.end().0, Some(0));
}

#[test]
fn a_frame_that_cannot_be_ends_it() {
    let place = tempfile::tempdir().unwrap();
    let mut guest = Guest::of(&[("d", false)], &[place.path().into()]);
    let too_long = RequestHeader {
        id: 1,
        length: *MESSAGE.end() + 1,
        room: 16,
    };
    guest.relay.write_all(&too_long.encode()).unwrap();
    let (code, said) = guest.end();
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("a message of"), "{said}");
}

#[test]
fn what_cannot_be_shared_is_refused_in_words() {
    let place = tempfile::tempdir().unwrap();
    let directory = File::open(place.path()).unwrap();
    let null = File::open("/dev/null").unwrap();
    for (shares, files, expected) in [
        (vec![("..", false)], vec![directory.as_fd()], "cannot be the name"),
        (
            vec![("a", false), ("a", true)],
            vec![directory.as_fd(); 2],
            "another's",
        ),
        (
            vec![("a", false)],
            vec![null.as_fd()],
            "only directories and regular files",
        ),
        (vec![("a", false)], vec![], "one each"),
        (vec![], vec![], "one each"),
    ] {
        let log = log();
        let error = start(program(), &log, &serve(&shares), &files).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}: {}", read_log(log));
    }
}
