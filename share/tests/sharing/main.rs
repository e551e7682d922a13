//! The process, started as thawd starts it and used as a VMM uses it.
#![allow(clippy::unwrap_used)]

mod guest;
mod placing;

use std::fs::{self, File};
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};

use guest::*;
use thaw_pools::share::start;
use thaw_protocol::share::{FRESH_MS, MESSAGE, RequestHeader};

/// CHOWN, DAC_OVERRIDE, FOWNER, FSETID, SETGID, SETUID.
const CAPABILITIES: &str = "CapEff:\t00000000000000db";

fn status(guest: &Guest) -> String {
    let pid = guest.share().record().pid;
    fs::read_to_string(format!("/proc/{pid}/status")).unwrap()
}

#[test]
fn files_are_shared_and_thaw_share_ends_with_its_vmm() {
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
    // `fuse_attr.flags`, the last word, says that it is a mount.
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

    // A read-only share can only be read, and the root cannot be changed.
    let (read_only, _) = guest.lookup(1, "1").unwrap();
    assert_eq!(guest.create(read_only, "x"), Err(-libc::EROFS));
    let mkdir = [&[0xed, 1, 0, 0, 0, 0, 0, 0][..], b"new\0"].concat();
    assert_eq!(guest.call(MKDIR, 1, &mkdir, 200).0, -libc::EROFS);
    guest.lookup(1, "2").unwrap();

    // A link is returned as text, and no name leads out.
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

    // Changes on the host are visible.
    fs::write(conf.join("new"), b"x").unwrap();
    guest.lookup(read_only, "new").unwrap();
    // A FORGET gets no reply; the next request gets one.
    guest.send(FORGET, file, &1u64.to_le_bytes(), 0);
    guest.lookup(node, "made").unwrap();

    assert_eq!(fs::read_to_string("/proc/self/mountinfo").unwrap(), mounts);
    let (code, said) = guest.end();
    assert_eq!(code, Some(0), "{said}");
    assert!(!said.contains("ERROR") && !said.contains("forbidden"), "{said}");
}

/// The VMM gets a file that the guest opens, as the guest opened it, and none otherwise.
#[test]
fn an_opened_file_comes_with_its_reply() {
    let place = tempfile::tempdir().unwrap();
    let [data, conf] = ["data", "conf"].map(|name| place.path().join(name));
    for directory in [&data, &conf] {
        fs::create_dir(directory).unwrap();
        fs::write(directory.join("file"), b"content").unwrap();
    }
    let mut guest = Guest::of(&[("0", false), ("1", true)], &[data.clone(), conf]);
    let (node, _) = guest.lookup(1, "0").unwrap();
    assert!(guest.opened.is_none());
    guest.create(node, "made").unwrap();
    let made = guest.opened.take().unwrap();
    made.write_all_at(b"by the VMM", 0).unwrap();
    assert_eq!(fs::read(data.join("made")).unwrap(), b"by the VMM");

    let (read_only, _) = guest.lookup(1, "1").unwrap();
    let (file, _) = guest.lookup(read_only, "file").unwrap();
    let flags = |flags: i32| [(flags as u32).to_le_bytes(), [0; 4]].concat();
    assert_eq!(guest.call(OPEN, file, &flags(libc::O_RDWR), 100).0, -libc::EROFS);
    assert!(guest.opened.is_none());
    assert_eq!(guest.call(OPEN, file, &flags(libc::O_RDONLY), 100).0, 0);
    let opened = guest.opened.take().unwrap();
    let mut content = [0; 7];
    opened.read_exact_at(&mut content, 0).unwrap();
    assert_eq!(&content, b"content");
    assert!(opened.write_all_at(b"x", 0).is_err());
    assert_eq!(guest.call(OPENDIR, read_only, &flags(0), 100).0, 0);
    assert!(guest.opened.is_none());
    let (code, said) = guest.end();
    assert!(code == Some(0) && !said.contains("forbidden"), "{said}");
}

/// How long a guest's kernel may cache something, in milliseconds. The reply has seconds at one offset and
/// nanoseconds at another.
fn believed(reply: &[u8], seconds: usize, nanoseconds: usize) -> u64 {
    let seconds = u64::from_le_bytes(reply[seconds..seconds + 8].try_into().unwrap());
    let nanoseconds = u32::from_le_bytes(reply[nanoseconds..nanoseconds + 4].try_into().unwrap());
    seconds * 1000 + u64::from(nanoseconds) / 1_000_000
}

/// The cache times of a `fuse_entry_out`: of its name and of its attributes.
fn entry_is_believed(entry: &[u8]) -> [u64; 2] {
    [believed(entry, 16, 32), believed(entry, 24, 36)]
}

/// A guest's kernel asks again when its cache time has passed, and gets the host's present state. It therefore
/// sees each change on the host within [`FRESH_MS`].
#[test]
fn host_changes_invalidate_caches_within_a_second() {
    assert_eq!(FRESH_MS, 1000, "docs/volumes.md");
    let place = tempfile::tempdir().unwrap();
    let data = place.path().join("data");
    fs::create_dir(&data).unwrap();
    fs::write(data.join("file"), b"one").unwrap();
    symlink("v1", data.join("..data")).unwrap();
    let mut guest = Guest::of(&[("0", false)], std::slice::from_ref(&data));
    assert_eq!(guest.agreed & (WRITEBACK_CACHE | CACHE_SYMLINKS), 0);
    assert_ne!(guest.agreed & AUTO_INVAL_DATA, 0);

    let (node, entry) = guest.lookup(1, "0").unwrap();
    assert!(entry_is_believed(&entry).iter().all(|ms| *ms <= FRESH_MS));
    let (file, entry) = guest.lookup(node, "file").unwrap();
    assert!(entry_is_believed(&entry).iter().all(|ms| *ms <= FRESH_MS));
    let (link, _) = guest.lookup(node, "..data").unwrap();
    assert_eq!(guest.call(READLINK, link, &[], 200), (0, b"v1".to_vec()));
    assert_eq!(guest.lookup(node, "late").map(drop), Err(-libc::ENOENT));

    fs::write(data.join("file"), b"another").unwrap();
    fs::write(data.join("late"), b"").unwrap();
    symlink("v2", data.join("new")).unwrap();
    fs::rename(data.join("new"), data.join("..data")).unwrap();
    let (error, attributes) = guest.call(GETATTR, file, &[0; 16], 200);
    assert_eq!((error, &attributes[24..32]), (0, &7u64.to_le_bytes()[..]));
    assert!(believed(&attributes, 0, 8) <= FRESH_MS);
    guest.lookup(node, "late").unwrap();
    let (link, _) = guest.lookup(node, "..data").unwrap();
    assert_eq!(guest.call(READLINK, link, &[], 200), (0, b"v2".to_vec()));

    // `fuse_open_out`: cached data of a file or directory is dropped when it is opened.
    for (open, node) in [(OPEN, file), (OPENDIR, node)] {
        let (error, opened) = guest.call(open, node, &[0; 8], 200);
        assert_eq!((error, &opened[8..12]), (0, &[0; 4][..]), "{open}");
        if open == OPEN {
            let handle = u64::from_le_bytes(opened[..8].try_into().unwrap());
            let read = guest.call(READ, node, &Guest::range(handle, 0, 4096), 4200);
            assert_eq!(read, (0, b"another".to_vec()));
        }
    }
    assert_eq!(guest.end().0, Some(0));
}

#[test]
fn takeover_keeps_nodes_but_not_handles() {
    let place = tempfile::tempdir().unwrap();
    let (data, file) = (place.path().join("data"), place.path().join("file"));
    fs::create_dir_all(data.join("deep/er")).unwrap();
    fs::write(&file, b"x").unwrap();
    let (shares, paths) = ([("0", false), ("1", true)], [data.clone(), file.clone()]);
    let mut guest = Guest::of(&shares, &paths);
    let (root, _) = guest.lookup(1, "0").unwrap();
    let (single, _) = guest.lookup(1, "1").unwrap();
    let (deep, _) = guest.lookup(root, "deep").unwrap();
    let (deeper, _) = guest.lookup(deep, "er").unwrap();
    let (made, handle) = guest.create(deeper, "made").unwrap();
    let write = |handle| [Guest::range(handle, 0, 4), b"text".to_vec()].concat();
    assert_eq!(guest.call(WRITE, made, &write(handle), 24).0, 0);
    for _ in 0..2 {
        guest.replace(&serve(&shares), Some(&paths));
        assert_eq!(guest.call(WRITE, made, &write(handle), 24).0, -libc::EIO);
        // Mapped and executed files can still be read.
        let (error, read) = guest.call(READ, made, &Guest::range(handle, 0, 4), 100);
        assert_eq!((error, &read[..]), (0, &b"text"[..]));
        // The guest's mounts, working directories and names are unchanged, in whatever order it asks.
        assert_eq!(guest.lookup(deeper, "made").unwrap().0, made);
        assert_eq!(guest.lookup(1, "1").unwrap().0, single);
        assert_eq!(guest.lookup(root, "deep").unwrap().0, deep);
        assert_eq!(guest.lookup(1, "0").unwrap().0, root);
        let (error, opened) = guest.call(OPEN, made, &[2, 0, 0, 0, 0, 0, 0, 0], 100);
        let opened = u64::from_le_bytes(opened[..8].try_into().unwrap());
        assert!(error == 0 && opened != handle);
        let (error, read) = guest.call(READ, made, &Guest::range(opened, 0, 4), 100);
        assert_eq!((error, &read[..]), (0, &b"text"[..]), "what was written is there");
        assert_eq!(guest.call(WRITE, made, &write(opened), 24).0, 0);
    }
    let (code, said) = guest.end();
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("took over from a process that ended"), "{said}");
    assert!(!said.contains("ERROR") && !said.contains("forbidden"), "{said}");
}

#[test]
fn concurrent_requests_are_each_answered() {
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
fn invalid_frame_ends_the_connection() {
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
fn unshareable_source_is_refused_with_a_reason() {
    let place = tempfile::tempdir().unwrap();
    let directory = File::open(place.path()).unwrap();
    let null = File::open("/dev/null").unwrap();
    for (shares, files, expected) in [
        (vec![("..", false)], vec![directory.as_fd()], "not a valid name"),
        (
            vec![("a", false), ("a", true)],
            vec![directory.as_fd(); 2],
            "used twice",
        ),
        (
            vec![("a", false)],
            vec![null.as_fd()],
            "only directories and regular files",
        ),
        (vec![("a", false)], vec![], "one each"),
        (vec![], vec![], "no share"),
    ] {
        let log = log();
        let error = start(program(), &log, &serve(&shares), &files, None).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}: {}", read_log(log));
    }
}
